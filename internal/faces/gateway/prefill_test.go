package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// prefillEngine is a prefill worker of vLLM that records its requests.
type prefillEngine struct {
	*httptest.Server
	answer http.HandlerFunc

	mu   sync.Mutex
	seen []*http.Request
	body []string
}

// newPrefillEngine starts an engine with an answer.
func newPrefillEngine(t *testing.T, answer http.HandlerFunc) *prefillEngine {
	t.Helper()
	e := &prefillEngine{answer: answer}
	e.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		text, _ := io.ReadAll(r.Body) // an incomplete body has no answer
		e.mu.Lock()
		e.seen, e.body = append(e.seen, r), append(e.body, string(text))
		e.mu.Unlock()
		e.answer(w, r)
	}))
	t.Cleanup(e.Close)
	return e
}

// says returns an answer with a status and a body.
func says(status int, body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body) // the gateway may have gone
	}
}

// newOwnPair returns a pair with the prefill workers at an address.
func newOwnPair(at string, rank events.Rank) *pair {
	p := newPair(rank, 0)
	for i := range p.pool.Ranks {
		if r := p.pool.Ranks[i].Record; r.Role == api.RolePrefill {
			r.Endpoint = at
		}
	}
	return p
}

// transferTo returns a configuration in which the gateway itself sends requests to prefill workers.
func (p *pair) transferTo(with Transfer) Config {
	c := p.config()
	c.Select, c.Transfer = p.Select, &with
	return c
}

const transferAnswer = `{"choices":[],"usage":{"prompt_tokens":7,"prompt_tokens_details":{"cached_tokens":4}},` +
	`"kv_transfer_params":{"do_remote_prefill":true,"remote_block_ids":[[1,2]],"remote_host":"10.0.0.9"}}`

// TestOwnPrefill: the prefill worker gets the request first, and the decode worker gets the description of the
// transfer. The prefill booking ends before the decode worker has the request.
func TestOwnPrefill(t *testing.T) {
	const body = `{"model":"m","prompt":[1,2],"stream":true,"kv_transfer_params":{"remote_host":"evil"}}`
	for _, mode := range []string{"headers buffered /v1/completions", "headers duplex /x/v1/completions?y"} {
		e := newPrefillEngine(t, says(200, transferAnswer))
		p := newOwnPair(e.URL, 1)
		set, removed, got := mutation(p.serveWith(t, p.transferTo(Transfer{}), mode, "body "+body+" end", "response",
			`response-body "cached_tokens":9} end`))
		want := []string{"disaggregated true optional true", "prefill: transfer", "the result is ok", "free r1", "reused 4",
			"prefill complete r2", "free r2"}
		if !slices.Equal(p.log, want) {
			t.Errorf("%s: %q\nwant %q", mode, p.log, want)
		}
		if string(got) != `{"model":"m","prompt":[1,2],"stream":true,"kv_transfer_params":{"do_remote_prefill":true,`+
			`"remote_block_ids":[[1,2]],"remote_host":"10.0.0.9"}}` {
			t.Errorf("%s: the decode worker gets %s", mode, got)
		}
		if set[prefiller] != "" || set[requestIDHeader] == "" || set[dataParallelRank] != "0" ||
			set[destination] != "[fd00::1]:8000" || !slices.Contains(removed, prefiller) {
			t.Errorf("%s: the headers are %q", mode, set)
		}
		if len(e.seen) != 1 {
			t.Fatalf("%s: %d requests at the prefill worker", mode, len(e.seen))
		}
		r := e.seen[0]
		if r.URL.String() != "/v1/completions" || r.Header.Get("X-Request-Id") != set[requestIDHeader] ||
			r.Header.Get("X-Data-Parallel-Rank") != "1" || r.Header.Get("Content-Type") != api.JSON ||
			r.Header["X-Idempotency-Key"] != nil {
			t.Errorf("%s: the prefill worker gets %s with %v", mode, r.URL, r.Header)
		}
		if e.body[0] != `{"model":"m","prompt":[1,2],"stream":false,"kv_transfer_params":{"do_remote_decode":true,`+
			`"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"remote_host":null,`+
			`"remote_port":null},"max_tokens":1}` {
			t.Errorf("%s: the prefill worker gets %s", mode, e.body[0])
		}
	}
}

// TestFailedPrefill: without an answer of the prefill worker, the decode worker computes the prompt, and its booking
// has the tokens. The worker is penalised only for its own failures.
func TestFailedPrefill(t *testing.T) {
	closed := "http://" + loopback.Reserve(t)
	for name, c := range map[string]struct {
		answer  http.HandlerFunc
		at      string // in place of a server
		with    Transfer
		outcome string
		result  string
	}{
		"an error":            {answer: says(500, "{}"), outcome: "status", result: "status"},
		"no such path":        {answer: says(501, "{}"), outcome: "rejected"},
		"a bad request":       {answer: says(400, "{}"), outcome: "rejected"},
		"a redirect":          {answer: says(307, "{}"), outcome: "rejected"},
		"no JSON":             {answer: says(200, "x"), outcome: "malformed"},
		"a list":              {answer: says(200, "[]"), outcome: "malformed"},
		"a very large answer": {answer: says(200, `"`+strings.Repeat("x", maxPrefillAnswer)+`"`), outcome: "too_large"},
		"nobody listens":      {at: closed, outcome: "refused", result: "refused"},
		"a cut answer": {answer: func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Length", "100")
			_, _ = io.WriteString(w, "{")
		}, outcome: "broken", result: "broken"},
		"no answer": {answer: func(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() },
			with:    Transfer{Timeout: 50 * time.Millisecond},
			outcome: "timeout", result: "timeout"},
		"a forbidden address": {answer: says(200, transferAnswer), with: Transfer{Rule: mustRule("10.0.0.0/8")},
			outcome: "denied"},
	} {
		at := c.at
		if at == "" {
			at = newPrefillEngine(t, c.answer).URL
		}
		p := newOwnPair(at, 0)
		set, _, got := mutation(p.serveWith(t, p.transferTo(c.with), "headers buffered /v1/completions",
			`body {"model":"m","prompt":[1],"kv_transfer_params":{"remote_host":"evil"}}`, "response",
			`response-body "cached_tokens":2} end`))
		want := []string{"disaggregated true optional true", "prefill: " + c.outcome}
		if c.result != "" {
			want = append(want, "the result is "+c.result)
		}
		want = append(want, "free r1", "free r2", "book r3 at decode/0 prefill 5 of 7", "prefill complete r3",
			"reused 2 without the prefill worker", "free r3")
		if !slices.Equal(p.log, want) {
			t.Errorf("%s: %q\nwant %q", name, p.log, want)
		}
		if string(got) != `{"model":"m","prompt":[1]}` || set[prefiller] != "" {
			t.Errorf("%s: the decode worker gets %s with %q", name, got, set)
		}
	}
}

func mustRule(cidr string) *dial.Rule {
	r, err := dial.NewRule([]string{cidr})
	if err != nil {
		panic(err)
	}
	return r
}

// TestPrefillWithoutTransfer: engines with a common store need no description of a transfer.
func TestPrefillWithoutTransfer(t *testing.T) {
	for _, answer := range []string{`{}`, `{"kv_transfer_params":null}`, `{"kv_transfer_params":{}}`} {
		e := newPrefillEngine(t, says(200, answer))
		p := newOwnPair(e.URL, 0)
		set, _, got := mutation(p.serveWith(t, p.transferTo(Transfer{}), "headers buffered /v1/completions",
			`body {"model":"m","prompt":[1]}`, "response", "response-body x end"))
		want := []string{"disaggregated true optional true", "prefill: no_transfer", "the result is ok", "free r1",
			"prefill complete r2", "free r2"}
		if !slices.Equal(p.log, want) || got != nil || set["content-length"] != "" {
			t.Errorf("%s: %q, body %q, headers %q", answer, p.log, got, set)
		}
	}
}

// TestUntransferable: the gateway sends no request to a prefill worker if vLLM cannot transfer the blocks, or if the
// fleet is SGLang's.
func TestUntransferable(t *testing.T) {
	e := newPrefillEngine(t, says(200, transferAnswer))
	p := newOwnPair(e.URL, 0)
	_, _, got := mutation(p.serveWith(t, p.transferTo(Transfer{}), "headers buffered /v1/completions",
		`body {"model":"m","prompt":["a","b"],"kv_transfer_params":{"a":1}}`, "response", "response-body x end"))
	if want := []string{"disaggregated false optional false", "prefill: unsupported", "prefill complete r1",
		"free r1"}; !slices.Equal(p.log, want) || string(got) != `{"model":"m","prompt":["a","b"]}` {
		t.Errorf("%q, body %s", p.log, got)
	}
	p = newOwnPair(e.URL, 0)
	p.alone = true
	p.serveWith(t, p.transferTo(Transfer{}), "headers buffered /v1/completions", `body {"model":"m","prompt":[1]}`,
		"response", "response-body x end")
	if want := []string{"disaggregated true optional true", "prefill complete r1", "free r1"}; !slices.Equal(p.log, want) {
		t.Errorf("a bypass: %q", p.log)
	}
	p = newPair(0, 8998)
	set, _, _ := mutation(p.serveWith(t, p.transferTo(Transfer{}), "headers buffered /v1/completions",
		`body {"model":"m","prompt":[1]}`, "response", "response-body x end"))
	if set[prefiller] != "[fd00::3]:8000" {
		t.Errorf("SGLang: %q", set)
	}
	if len(e.seen) > 0 {
		t.Errorf("the prefill worker gets %q", e.body)
	}
}

// TestPrefillHeaders: the prefill worker gets the client's token, trace and id, and no other header. Both workers get
// the same id.
func TestPrefillHeaders(t *testing.T) {
	h := passed(httpHeaders(false, "Authorization", "Bearer x", "X-Request-Id", "id", "Traceparent", "00-1", "Cookie", "y",
		"X-Data-Parallel-Rank", "7", "Host", "evil", "Content-Encoding", "gzip"))
	c := &Choice{prefillRank: "1", Source: "10.0.0.1:80"}
	got := prefillHeader(&Ask{Header: h}, c)
	want := http.Header{"Authorization": {"Bearer x"}, "X-Request-Id": {"id"}, "Traceparent": {"00-1"},
		"Content-Type": {api.JSON}, "X-Data-Parallel-Rank": {"1"}, "X-Kv-Cache-Source-Host-Port": {"10.0.0.1:80"}}
	if fmt.Sprint(got) != fmt.Sprint(want) || c.RequestID != "" {
		t.Errorf("%v, want %v, new id %q", got, want, c.RequestID)
	}
}

// TestCanceledPrefill: a client that disconnects cancels the request at the prefill worker. Both bookings end, without
// a failure of the worker.
func TestCanceledPrefill(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	gone := make(chan struct{})
	e := newPrefillEngine(t, func(_ http.ResponseWriter, r *http.Request) {
		cancel()
		<-r.Context().Done()
		close(gone)
	})
	p := newOwnPair(e.URL, 0)
	s := New(p.transferTo(Transfer{}))
	_, b, err := s.choose(ctx, &Ask{API: "completions", Body: []byte(`{"model":"m","prompt":[1]}`), Header: http.Header{}})
	if err == nil || b.ref.RequestID != "" {
		t.Errorf("%v, booking %v", err, b.ref)
	}
	<-gone
	want := []string{"disaggregated true optional true", "prefill: canceled", "free r1", "free r2"}
	if !slices.Equal(p.log, want) {
		t.Errorf("%q", p.log)
	}
	if n := len(s.transfer.places); n > 0 || s.bodies.Held() > 0 {
		t.Errorf("%d places and %d bytes are taken", n, s.bodies.Held())
	}
}

// TestPrefillPlaces: a bounded number of requests run and wait. The decode worker computes further prompts.
func TestPrefillPlaces(t *testing.T) {
	release := make(chan struct{})
	e := newPrefillEngine(t, func(w http.ResponseWriter, r *http.Request) {
		<-release
		says(200, transferAnswer)(w, r)
	})
	s := New(newOwnPair(e.URL, 0).transferTo(Transfer{Most: 2, Waiting: 3}))
	got := make(chan PrefillOutcome, 6)
	send := func() { got <- s.transfer.send(t.Context(), e.URL, http.Header{}, []byte(`{}`)).outcome }
	for range 5 {
		go send()
	}
	testkit.Eventually(t, "two requests run and three wait", func() (bool, string) {
		n, waiting := len(s.transfer.places), s.transfer.waiting.Load()
		return n == 2 && waiting == 3, fmt.Sprint(n, waiting)
	})
	if send(); <-got != PrefillBusy {
		t.Error("a sixth request is not refused")
	}
	e.mu.Lock()
	if len(e.seen) > 2 {
		t.Errorf("%d requests are at the worker", len(e.seen))
	}
	e.mu.Unlock()
	close(release)
	for range 5 {
		if outcome := <-got; outcome != PrefillTransfer {
			t.Error(outcome)
		}
	}
	if n, waiting := len(s.transfer.places), s.transfer.waiting.Load(); n > 0 || waiting > 0 {
		t.Errorf("%d run, %d wait", n, waiting)
	}
	// A wait that ends with the time is no failure of the worker.
	s = New(newOwnPair(e.URL, 0).transferTo(Transfer{Most: 1, Timeout: time.Millisecond}))
	s.transfer.places <- struct{}{}
	if send(); <-got != PrefillBusy {
		t.Error("the wait has no end")
	}
}

// TestPrefillMemory: the bodies of requests to prefill workers count in the bound of all bodies.
func TestPrefillMemory(t *testing.T) {
	e := newPrefillEngine(t, says(200, transferAnswer))
	c := newOwnPair(e.URL, 0).transferTo(Transfer{})
	c.MaxBodies = 100 << 10
	s := New(c)
	held := s.bodies.Begin(func() {})
	if err := held.Add(90 << 10); err != nil {
		t.Fatal(err)
	}
	if err := held.Complete(); err != nil {
		t.Fatal(err)
	}
	send := func(n int) PrefillOutcome {
		return s.transfer.send(t.Context(), e.URL, http.Header{}, []byte(`"`+strings.Repeat("x", n)+`"`)).outcome
	}
	if got := send(20 << 10); got != PrefillBusy {
		t.Error(got)
	}
	if got := send(1 << 10); got != PrefillBusy && got != PrefillTransfer {
		t.Error(got)
	}
	held.End()
	if got := send(20 << 10); got != PrefillTransfer || s.bodies.Held() > 0 {
		t.Error(got, s.bodies.Held())
	}
}

// TestPrefillIdleConnection: a worker that closes an idle connection gets the request over another one.
func TestPrefillIdleConnection(t *testing.T) {
	e := newPrefillEngine(t, says(200, transferAnswer))
	s := New(newOwnPair(e.URL, 0).transferTo(Transfer{}))
	for i := range 20 {
		if got := s.transfer.send(t.Context(), e.URL, http.Header{}, []byte(`{}`)); got.outcome != PrefillTransfer ||
			!json.Valid(got.transfer) || got.cached != 4 {
			t.Fatalf("request %d: %+v", i, got)
		}
		e.CloseClientConnections()
	}
}
