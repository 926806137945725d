//go:build judges

package envoy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/envoy"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// exchange is a request at an engine of a transfer.
type exchange struct {
	engine, role, path string
	id                 string // field user of the body
	header             http.Header
	body               map[string]any
	begun, ended       int64 // places in the order of all events; ended is zero for a request without an answer
}

// exchanges records the requests at all engines.
type exchanges struct {
	clock atomic.Int64

	mu   sync.Mutex
	list []*exchange
}

func (x *exchanges) of(id, role string) (list []*exchange) {
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, e := range x.list {
		if e.id == id && e.role == role {
			list = append(list, e)
		}
	}
	return list
}

// transferEngine is an engine of vLLM with a connector of KV blocks, as its proxies see it.
type transferEngine struct {
	name, role string
	addr       string
	all        *exchanges
	fails      atomic.Pointer[string] // the kind of failure of all answers; nil: none
	failures   atomic.Int64
}

func startTransferEngine(t *testing.T, name, role string, all *exchanges) *transferEngine {
	t.Helper()
	e := &transferEngine{name: name, role: role, all: all}
	s := httptest.NewServer(e)
	t.Cleanup(s.Close)
	e.addr = strings.TrimPrefix(s.URL, "http://")
	return e
}

// description returns the description of a transfer, as of vLLM's NIXL connector. It depends only on the request.
func description(id string) map[string]any {
	return map[string]any{"do_remote_prefill": true, "do_remote_decode": false,
		"remote_block_ids": []any{[]any{1., 2., 3.}},
		"remote_engine_id": "engine of " + id, "remote_request_id": "at prefill " + id, "remote_host": "10.9.9.9",
		"remote_port": 5600., "tp_size": 1., "remote_num_tokens": 48.}
}

func (e *transferEngine) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	text, err := io.ReadAll(r.Body)
	if r.Method != http.MethodPost || err != nil {
		_, _ = io.WriteString(w, "{}")
		return
	}
	x := &exchange{engine: e.name, role: e.role, path: r.URL.Path, header: r.Header, begun: e.all.clock.Add(1)}
	_ = json.Unmarshal(text, &x.body) // a nil body fails the comparison
	x.id, _ = x.body["user"].(string)
	e.all.mu.Lock()
	e.all.list = append(e.all.list, x)
	e.all.mu.Unlock()
	time.Sleep(time.Millisecond) // the engine computes
	if kind := e.fails.Load(); kind != nil {
		e.failures.Add(1)
		e.fail(*kind, w, r)
		return
	}
	usage := map[string]any{"prompt_tokens": 64, "completion_tokens": 1, "prompt_tokens_details": map[string]int{
		"cached_tokens": 16}}
	defer func() {
		e.all.mu.Lock()
		x.ended = e.all.clock.Add(1)
		e.all.mu.Unlock()
	}()
	answer := map[string]any{"id": "cmpl-" + r.Header.Get("X-Request-Id"), "choices": []any{}, "usage": usage}
	if x.body["stream"] == true {
		w.Header().Set("Content-Type", "text/event-stream")
		for range 3 {
			_, _ = io.WriteString(w, "data: {\"choices\":[{\"text\":\"x\"}]}\n\n") // the client may have gone
			_ = http.NewResponseController(w).Flush()
			time.Sleep(time.Millisecond)
		}
		_, _ = io.WriteString(w, "data: [DONE]\n\n")
		return
	}
	if e.role == "prefill" {
		answer["kv_transfer_params"] = description(x.id)
	}
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answer)
}

// fail fails a request in a way that real engines fail.
func (e *transferEngine) fail(kind string, w http.ResponseWriter, r *http.Request) {
	switch kind {
	case "status":
		http.Error(w, "out of memory", http.StatusInternalServerError)
	case "timeout":
		<-r.Context().Done()
	case "broken":
		w.Header().Set("Content-Length", "1000")
		_, _ = io.WriteString(w, "{")
		panic(http.ErrAbortHandler)
	case "rejected":
		http.Error(w, `{"error":{"message":"the prompt is too long"}}`, http.StatusBadRequest)
	case "malformed":
		_, _ = io.WriteString(w, "<html>")
	}
}

// transferFleet is a gateway before engines that it sends prefill requests to.
type transferFleet struct {
	gateway
	exchanges
	prefill, decode []*transferEngine
}

// startTransfer starts two engines of each role, and a gateway with flags of the indexer.
func startTransfer(t *testing.T, settings string, flags []string, edits ...string) *transferFleet {
	t.Helper()
	file := t.TempDir() + "/routing.yaml"
	if err := os.WriteFile(file, []byte(settings), 0o600); err != nil {
		t.Fatal(err)
	}
	f := &transferFleet{gateway: gateway{t: t, indexer: harness.StartIndexer(t, t.TempDir(), "", append([]string{
		"--grpc-listen", "127.0.0.1:0", "--guess-ttl", "1h", "--routing-config", file, "--gateway-prefill", "vllm"},
		flags...)...)}}
	var addresses []string // Envoy's cluster has all workers, as an InferencePool has
	for _, role := range []string{"prefill", "decode"} {
		for i := range 2 {
			e := startTransferEngine(t, fmt.Sprintf("%s-%d", role, i), role, &f.exchanges)
			if addresses = append(addresses, e.addr); role == "prefill" {
				f.prefill = append(f.prefill, e)
			} else {
				f.decode = append(f.decode, e)
			}
			r := harness.Run(t, "indexer", "workers", "register", e.name, "--model", model, "--block-size",
				fmt.Sprint(blockSize), "--endpoint", "http://"+e.addr, "--role", role, "--nats", f.indexer.NATS)
			if r.Code != 0 {
				t.Fatal(r)
			}
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	// A busy machine needs more time than the waits of deploy/envoy.
	e, err := envoy.Start(ctx, envoy.Config{Python: pyenv.PythonWith(t, "envoy.txt"),
		File: root + "/deploy/envoy/envoy.yaml", Dir: t.TempDir(),
		Indexer: f.indexer.WaitFor(`gRPC is served" listen=(\S+)`)[1], Engines: addresses,
		Edits: append([]string{"message_timeout: 5s", "message_timeout: 120s"}, edits...), Log: os.Stderr})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(e.Stop)
	f.url = e.URL
	harness.Eventually(t, "Envoy passes requests on", func() (bool, string) {
		a := f.do("GET", "/v1/models", "")
		return a.status == 200, fmt.Sprint(a)
	})
	return f
}

// secret is the token of the clients.
const secret = "Bearer token-of-a-client"

// post sends a request to a URL. patience bounds the answer; 0: not.
func post(ctx context.Context, url string, body any, patience time.Duration) (status int, answer string, err error) {
	if patience > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, patience)
		defer cancel()
	}
	text, err := json.Marshal(body)
	if err != nil {
		return 0, "", err
	}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(text))
	if err != nil {
		return 0, "", err
	}
	r.Header.Set("Content-Type", "application/json")
	r.Header.Set("Authorization", secret)
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, "", err
	}
	defer reply.Body.Close()
	all, err := io.ReadAll(reply.Body)
	return reply.StatusCode, string(all), err
}

// randomTransfer returns a random request that vLLM's proxy understands, and its path.
func randomTransfer(rng *rand.Rand, id string) (path string, body map[string]any) {
	words := func() string { return strings.Repeat("wörd \"quoted\" ", 1+rng.IntN(50)) }
	body = map[string]any{"model": model, "user": id}
	if path = "/v1/completions"; rng.IntN(2) == 0 {
		path = "/v1/chat/completions"
		body["messages"] = []any{map[string]any{"role": "system", "content": words()}, map[string]any{"role": "user",
			"content": []any{map[string]any{"type": "text", "text": words()}}}}
	} else if body["prompt"] = words(); rng.IntN(2) == 0 {
		body["prompt"] = harness.Tokens(rng.IntN(20)*10_000, 16+rng.IntN(400))
	}
	further := map[string]any{"stream": true, "temperature": 0.5, "max_tokens": 1 + rng.IntN(100),
		"max_completion_tokens": 1 + rng.IntN(100), "min_tokens": 1, "min_completion_tokens": 1, "n": 1,
		"stop": []string{"\n", "}"}, "logprobs": true, "seed": rng.IntN(1000), "ignore_eos": nil,
		"kv_transfer_params": map[string]any{"remote_host": "169.254.169.254"},
		"vllm_xargs":         map[string]any{"stream": 1, "max_tokens": []any{}}}
	for _, name := range slices.Sorted(maps.Keys(further)) {
		if rng.IntN(2) == 0 {
			body[name] = further[name]
		}
	}
	if body["stream"] != nil && rng.IntN(2) == 0 {
		body["stream_options"] = map[string]any{"include_usage": true}
	}
	return path, body
}

// startToyProxy starts vLLM's own proxy before engines of its own, and returns its URL and the requests at the engines.
func startToyProxy(t *testing.T) (url string, all *exchanges) {
	t.Helper()
	all = &exchanges{}
	p, d := startTransferEngine(t, "prefill", "prefill", all), startTransferEngine(t, "decode", "decode", all)
	at := loopback.Reserve(t)
	host := func(addr string) string { return addr[:strings.LastIndexByte(addr, ':')] }
	port := func(addr string) string { return addr[strings.LastIndexByte(addr, ':')+1:] }
	c := exec.Command(pyenv.PythonWith(t, "python-adapters.txt"), pyenv.Source(t, "toy_proxy_server.py"), "--port",
		port(at), "--prefiller-hosts", host(p.addr), "--prefiller-ports", port(p.addr), "--decoder-hosts", host(d.addr),
		"--decoder-ports", port(d.addr))
	c.Env = append(os.Environ(), "OPENAI_API_KEY="+strings.TrimPrefix(secret, "Bearer "))
	c.SysProcAttr = child.DiesWithUs()
	var out bytes.Buffer
	c.Stdout, c.Stderr = &out, &out
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = c.Process.Kill() // it may have ended
		_ = c.Wait()
		if t.Failed() {
			t.Logf("%s", &out)
		}
	})
	url = "http://" + at
	harness.Eventually(t, "vLLM's proxy answers", func() (bool, string) {
		r, err := http.Get(url + "/healthcheck")
		if err != nil {
			return false, err.Error()
		}
		r.Body.Close()
		return r.StatusCode == 200, r.Status
	})
	return url, all
}

// TestTransferAsVLLMsProxy sends random requests, streamed and not, through vLLM's toy_proxy_server.py and through the
// gateway in both body modes. The engines must get the same requests in the same order, field by field.
func TestTransferAsVLLMsProxy(t *testing.T) {
	const requests, clients = 200, 8
	toy, reference := startToyProxy(t)
	ids := make([]string, requests)
	send := func(t *testing.T, url string) {
		t.Helper()
		var all sync.WaitGroup
		for c := range clients {
			all.Go(func() {
				for n := c; n < requests; n += clients {
					ids[n] = fmt.Sprint("request ", n)
					path, body := randomTransfer(rand.New(rand.NewPCG(*seed, uint64(n))), ids[n])
					status, answer, err := post(t.Context(), url+path, body, 0)
					if err != nil || status != 200 || body["stream"] != nil && !strings.HasSuffix(answer, "data: [DONE]\n\n") {
						t.Errorf("request %d: %d, %v, %.200s", n, status, err, answer)
					}
				}
			})
		}
		all.Wait()
	}
	send(t, toy)
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			f := startTransfer(t, "{}", nil, edits...)
			send(t, f.url)
			used := map[string]int{}
			for _, id := range ids {
				f.compare(t, reference, id, used)
			}
			for _, e := range append(slices.Clone(f.prefill), f.decode...) {
				if used[e.name] < requests/5 {
					t.Errorf("%s has %d of %d requests", e.name, used[e.name], requests)
				}
			}
			f.idle()
			if n := f.prefills("transfer"); n != requests {
				t.Errorf("%v transfers are counted", n)
			}
			if n := f.metric("kvatlas_route_reused_tokens_total"); n != 16*requests {
				t.Errorf("%v reused tokens are counted", n)
			}
			if said := f.indexer.Said(); strings.Contains(said, strings.TrimPrefix(secret, "Bearer ")) {
				t.Error("the log has the token of a client")
			}
		})
	}
}

// prefills returns a count of prefill requests.
func (f *transferFleet) prefills(outcome string) float64 {
	return f.metric(`kvatlas_gateway_prefills_total{model="sim",outcome="` + outcome + `"}`)
}

// compare compares the messages of a request with the messages of vLLM's proxy.
func (f *transferFleet) compare(t *testing.T, reference *exchanges, id string, used map[string]int) {
	t.Helper()
	for _, role := range []string{"prefill", "decode"} {
		got, want := f.of(id, role), reference.of(id, role)
		if len(got) != 1 || len(want) != 1 {
			t.Fatalf("%s has %d requests at %s workers, and %d by vLLM's proxy", id, len(got), role, len(want))
		}
		used[got[0].engine]++
		if got[0].path != want[0].path || !reflect.DeepEqual(got[0].body, want[0].body) {
			t.Errorf("%s: the %s worker gets %s %v\nand by vLLM's proxy %s %v", id, role, got[0].path, got[0].body,
				want[0].path, want[0].body)
		}
		for _, name := range []string{"Authorization", "Content-Type"} {
			if g, w := got[0].header.Values(name), want[0].header.Values(name); !slices.Equal(g, w) {
				t.Errorf("%s: %s at the %s worker is %q, by vLLM's proxy %q", id, name, role, g, w)
			}
		}
	}
	for _, x := range []*exchanges{&f.exchanges, reference} {
		p, d := x.of(id, "prefill")[0], x.of(id, "decode")[0]
		if p.ended == 0 || p.ended > d.begun {
			t.Errorf("%s: the prefill worker answers at %d, the decode worker is asked at %d", id, p.ended, d.begun)
		}
		if at := p.header.Get("X-Request-Id"); at == "" || at != d.header.Get("X-Request-Id") {
			t.Errorf("%s has the ids %q and %q", id, at, d.header.Get("X-Request-Id"))
		}
	}
}

// TestTransferFailures: prefill workers fail in several ways, and clients disconnect. Every other client gets an
// answer, of a decode worker that computes the prompt. A worker that fails gets few requests while the other one
// serves. No load remains.
func TestTransferFailures(t *testing.T) {
	kinds := []string{"status", "broken", "timeout", "rejected", "malformed"}
	for name, edits := range bothModes {
		t.Run(name, func(t *testing.T) {
			f := startTransfer(t, "{}", []string{"--gateway-prefill-timeout", "5s"}, edits...)
			const clients = 8
			round := func(label string, requests int, cancels bool) (answered []string) {
				t.Helper()
				var all sync.WaitGroup
				var mu sync.Mutex
				for c := range clients {
					all.Go(func() {
						rng := rand.New(rand.NewPCG(*seed, uint64(c)))
						for n := c; n < requests; n += clients {
							id := fmt.Sprint(label, n)
							path, body := randomTransfer(rng, id)
							patience := time.Duration(0)
							if cancels && n%3 == 2 {
								patience = time.Duration(1+rng.IntN(12_000)) * time.Microsecond
							}
							status, answer, err := post(t.Context(), f.url+path, body, patience)
							if err == nil && status == 200 {
								mu.Lock()
								answered = append(answered, id)
								mu.Unlock()
							} else if patience == 0 || !errors.Is(err, context.DeadlineExceeded) && err != nil {
								t.Errorf("%s: %d, %v, %.200s", id, status, err, answer)
							}
						}
					})
				}
				all.Wait()
				return answered
			}
			alone := func(list []string) (n int) {
				t.Helper()
				for _, id := range list {
					d := f.of(id, "decode")
					if len(d) != 1 {
						t.Fatalf("%s reaches %d decode workers", id, len(d))
					}
					switch params, _ := d[0].body["kv_transfer_params"].(map[string]any); {
					case params == nil:
						n++
					case !reflect.DeepEqual(params, description(id)):
						t.Errorf("%s has the description %v", id, params)
					}
				}
				return n
			}
			for _, kind := range kinds { // both workers fail
				for _, e := range f.prefill {
					e.fails.Store(&kind)
				}
				list := round(kind, 16, false)
				if n := alone(list); n != 16 || f.prefills(kind) != 16 {
					t.Errorf("%s: %d requests have no transfer, %v are counted", kind, n, f.prefills(kind))
				}
				f.idle()
			}
			for _, e := range f.prefill {
				e.fails.Store(nil)
			}
			if list := round("canceled", 200, true); alone(list) > 0 || len(list) < 100 {
				t.Errorf("%d of %d answered requests have no transfer", alone(list), len(list))
			}
			f.idle()
			sick := "status"
			f.prefill[0].fails.Store(&sick)
			before := f.prefill[0].failures.Load()
			list := round("one fails", 200, false)
			failures := int(f.prefill[0].failures.Load() - before)
			t.Logf("%d of %d requests were sent to the failing prefill worker; %v were canceled during the prefill", failures,
				len(list), f.prefills("canceled"))
			if n := alone(list); n != failures || failures == 0 || failures > len(list)/2 {
				t.Errorf("%d requests failed at the prefill worker, %d have no transfer", failures, n)
			}
			f.idle()
			if n := f.metric("kvatlas_request_failures_total"); n == 0 {
				t.Error("no failure of a worker is counted")
			}
		})
	}
}

// TestTransferBypass: short prompts, requests that vLLM cannot transfer, and requests without a prefill worker go to
// the decode worker alone, without the description of a client. Responses and Messages are transferred too.
func TestTransferBypass(t *testing.T) {
	f := startTransfer(t, "disaggregation: {bypass: isl_bounding, isl_tokens: 100, isl_ratio: 2}", nil)
	evil := map[string]any{"remote_host": "169.254.169.254"}
	long := strings.Repeat("word ", 300)
	for id, c := range map[string]struct {
		path     string
		body     map[string]any
		transfer bool
	}{
		"short":     {"/v1/completions", map[string]any{"prompt": "a"}, false},
		"long":      {"/v1/completions", map[string]any{"prompt": long}, true},
		"two":       {"/v1/completions", map[string]any{"prompt": []string{long, long}}, false},
		"n":         {"/v1/completions", map[string]any{"prompt": long, "n": 2}, false},
		"embedding": {"/v1/embeddings", map[string]any{"input": long}, false},
		"response":  {"/v1/responses", map[string]any{"input": long, "max_output_tokens": 50, "store": true}, true},
		"continued": {"/v1/responses", map[string]any{"input": long, "previous_response_id": "resp_1"}, false},
		"message": {"/v1/messages", map[string]any{"max_tokens": 50, "messages": []any{map[string]string{"role": "user",
			"content": long}}}, true},
	} {
		c.body["user"], c.body["model"] = id, model
		sent := map[string]any{"kv_transfer_params": evil}
		for name, value := range c.body {
			sent[name] = value
		}
		if c.path == "/v1/embeddings" {
			delete(sent, "kv_transfer_params")
		}
		if status, answer, err := post(t.Context(), f.url+c.path, sent, 0); err != nil || status != 200 {
			t.Fatalf("%s: %d, %v, %s", id, status, err, answer)
		}
		p, d := f.of(id, "prefill"), f.of(id, "decode")
		if len(d) != 1 || (len(p) == 1) != c.transfer {
			t.Fatalf("%s reaches %d prefill workers and %d decode workers", id, len(p), len(d))
		}
		var want map[string]any
		text, _ := json.Marshal(c.body) // the value can be encoded
		_ = json.Unmarshal(text, &want)
		if c.transfer {
			want["kv_transfer_params"] = description(id)
		}
		if !reflect.DeepEqual(d[0].body, want) {
			t.Errorf("%s: the decode worker gets %v, want %v", id, d[0].body, want)
		}
		if c.transfer && (p[0].path != c.path || p[0].body["stream"] != false) {
			t.Errorf("%s: the prefill worker gets %s %v", id, p[0].path, p[0].body)
		}
	}
	if n := f.prefills("unsupported"); n != 3 {
		t.Errorf("%v unsupported requests are counted", n)
	}
	for _, e := range f.prefill {
		if r := harness.Run(t, "indexer", "workers", "drain", e.name, "--nats", f.indexer.NATS); r.Code != 0 {
			t.Fatal(r)
		}
	}
	tries := 0
	harness.Eventually(t, "no prefill worker is chosen", func() (bool, string) {
		tries++
		id := fmt.Sprint("alone ", tries)
		body := map[string]any{"model": model, "user": id, "prompt": strings.Repeat("other ", 300+tries)}
		status, answer, err := post(t.Context(), f.url+"/v1/completions", body, 0)
		return err == nil && status == 200 && len(f.of(id, "prefill")) == 0, fmt.Sprint(status, answer, err)
	})
	f.idle()
}

// TestTransferDial: the indexer connects only to prefill workers that --dial-allow permits.
func TestTransferDial(t *testing.T) {
	f := startTransfer(t, "{}", []string{"--dial-allow", "10.0.0.0/8"})
	status, answer, err := post(t.Context(), f.url+"/v1/completions", map[string]any{"model": model, "user": "x",
		"prompt": harness.Tokens(1, 64)}, 0)
	if err != nil || status != 200 || len(f.of("x", "prefill")) > 0 || len(f.of("x", "decode")) != 1 {
		t.Errorf("%d, %s, %v: %d requests at prefill workers", status, answer, err, len(f.of("x", "prefill")))
	}
	if n := f.prefills("denied"); n != 1 {
		t.Errorf("%v denied requests are counted", n)
	}
	f.idle()
}
