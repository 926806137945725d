package client

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/bits"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// patience is the time limit for an expected event. A busy machine may stall for minutes.
const patience = testkit.Patience

// TestRetrySteps steps through random requests. An attempt is always pending or due. Retries happen when required, and
// not too often.
func TestRetrySteps(t *testing.T) {
	usual := newClient(nil, Options{}).o
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 5))
		r := newRetry(time.Duration(1+rng.IntN(10_000))*time.Millisecond, &usual, false)
		failures, slow := 0, 0
		trouble := []string{AgainLost, AgainAbsent, AgainRefused}[rng.IntN(3)]
		for now := time.Duration(0); now < r.left && !r.over(now); {
			if r.due < now {
				t.Fatalf("seed %d: at %v the next attempt is due at %v: %+v", seed, now, r.due, r)
			}
			if r.pending < 0 || r.pending > 1+slow {
				t.Fatalf("seed %d: %+v", seed, r)
			}
			if r.pending == 0 && r.due > now+longPause {
				t.Fatalf("seed %d: no attempt between %v and %v", seed, now, r.due)
			}
			now = min(r.due, r.left)
			if now == r.left {
				break
			}
			if r.pending > 0 {
				if r.late(now, rng.IntN(4) > 0); r.due > now {
					continue
				}
				slow++
			}
			r.started(now)
			for r.pending > 0 && rng.IntN(3) == 0 {
				now += time.Duration(rng.IntN(5)) * time.Millisecond
				if failures++; rng.IntN(4) == 0 {
					trouble = []string{AgainLost, AgainAbsent, AgainRefused}[rng.IntN(3)]
				}
				r.failed(now, trouble)
				if r.pending == 0 && r.why != trouble {
					t.Fatalf("seed %d: the attempt failed with %s, reported %s", seed, trouble, r.why)
				}
			}
		}
		if r.sent < 1 || r.sent > 1+slow+failures || slow > bits.Len64(uint64(max(4, r.left/usual.HedgeAfter))) {
			t.Fatalf("seed %d: %d attempts after %d failures and %d late answers",
				seed, r.sent, failures, slow)
		}
	}
	// A request without a serving node is retried for 2 s, or for half of the deadline.
	for _, c := range []struct{ left, limit time.Duration }{
		{10 * time.Second, 2 * time.Second}, {time.Second, 500 * time.Millisecond},
	} {
		r := newRetry(c.left, &usual, false)
		now := time.Duration(0)
		for ; !r.over(now); now = r.due {
			r.started(now)
			r.failed(now, AgainAbsent)
		}
		if now < c.limit || now > c.limit+longPause {
			t.Errorf("deadline %v: retried for %v without a serving node", c.left, now)
		}
	}
	for _, c := range []struct{ left, after, due time.Duration }{
		{time.Minute, 250 * time.Millisecond, 250 * time.Millisecond}, {time.Minute, 3 * time.Second, 3 * time.Second},
		{time.Second, time.Hour, 250 * time.Millisecond}, {time.Second, time.Nanosecond, time.Nanosecond},
	} {
		r := newRetry(c.left, &Options{HedgeAfter: c.after}, false)
		if r.started(0); r.due != c.due {
			t.Errorf("%v: the first hedged request is due after %v", c, r.due)
		}
	}
	once := newRetry(time.Second, &usual, true)
	once.started(0)
	if once.late(once.due, false); once.due >= once.left || once.over(once.due) {
		t.Errorf("request without retries: %+v", once)
	}
	once.failed(time.Millisecond, AgainAbsent)
	if once.over(time.Millisecond) {
		t.Errorf("request without retries that no node received: %+v", once)
	}
	once.started(time.Millisecond)
	if once.failed(time.Millisecond, AgainLost); !once.over(time.Millisecond) {
		t.Errorf("request without retries that failed: %+v", once)
	}
}

// refusing simulates a NATS server that denies every request without a reply. Only a call of refused shows the denial.
type refusing struct{ sent, looked int }

func (t *refusing) send(context.Context, *request, time.Duration) (outcome, error) {
	t.sent++
	return outcome{}, nil
}
func (t *refusing) refused(*request) error {
	t.looked++
	return api.Errorf(api.CodeForbidden, "not for you")
}
func (t *refusing) end(*request)          {}
func (t *refusing) lost() <-chan struct{} { return nil }
func (t *refusing) budget() *rpc.Budget   { return new(rpc.Budget) }
func (t *refusing) close()                {}

// TestRefusalEndsEveryRequest denies requests without a reply, also requests without retries. No request waits for the
// deadline.
func TestRefusalEndsEveryRequest(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for name, ask := range map[string]func(*Client) error{
		"find":     func(c *Client) error { _, err := c.Find(ctx, &api.Query{}); return err },
		"snapshot": func(c *Client) error { _, err := c.Snapshot(ctx); return err },
		"verify":   func(c *Client) error { _, err := c.Verify(ctx, nil); return err },
	} {
		to := &refusing{}
		if err := ask(newClient(to, Options{})); CodeOf(err) != api.CodeForbidden || to.sent != 1 {
			t.Errorf("%s: %d attempts, %d calls of refused: %v", name, to.sent, to.looked, err)
		}
	}
}

// silent simulates a node that never answers. The second attempt of a request calls hedged.
type silent struct {
	refusing
	hedges rpc.Budget
	hedged func()
}

func (t *silent) send(context.Context, *request, time.Duration) (outcome, error) {
	if t.sent++; t.sent == 2 {
		t.hedged()
	}
	return outcome{}, nil
}
func (t *silent) refused(*request) error { return nil }
func (t *silent) budget() *rpc.Budget    { return &t.hedges }

// TestSelectIsNotHedged: a late answer to find causes a hedged request. A select may wait for a worker, so a second
// select would wait too.
func TestSelectIsNotHedged(t *testing.T) {
	ask := func(patience time.Duration, ask func(context.Context, *Client) error) int {
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		to := &silent{hedged: cancel}
		if ask(ctx, newClient(to, Options{})) == nil {
			t.Error("an answer without a node")
		}
		return to.sent
	}
	if n := ask(patience, func(ctx context.Context, c *Client) error {
		_, err := c.Find(ctx, &api.Query{})
		return err
	}); n != 2 {
		t.Errorf("find: sent %d times", n)
	}
	if n := ask(100*time.Millisecond, func(ctx context.Context, c *Client) error {
		_, err := c.Select(ctx, &api.SelectRequest{})
		return err
	}); n != 1 {
		t.Errorf("select: sent %d times", n)
	}
}

// TestLostRepliesDoNotLastToTheDeadline: after an outage that used up the budget of hedged requests, a request with a
// lost reply is repeated within a fraction of a second, although no other request follows.
func TestLostRepliesDoNotLastToTheDeadline(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	to := &silent{hedged: cancel}
	for to.hedges.Spend() {
	}
	if _, err := newClient(to, Options{}).Find(ctx, &api.Query{}); !errors.Is(err, context.Canceled) || to.sent != 2 {
		t.Errorf("sent %d times: %v", to.sent, err)
	}
}

// again counts the reasons of retries.
type again struct {
	mu     sync.Mutex
	counts map[string]int
}

func (a *again) add(why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counts == nil {
		a.counts = map[string]int{}
	}
	a.counts[why]++
}

func (a *again) count(why string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.counts[why]
}

func within(t testing.TB, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func startServer(t testing.TB, dir, listen string) *natsserver.Server {
	t.Helper()
	var s *natsserver.Server
	testkit.Eventually(t, "the port is free", func() bool { // a process after fork may still hold the port
		var err error
		o := natsserver.Options{Dir: dir, Listen: listen, SyncInterval: time.Minute}
		s, err = natsserver.Start(within(t, patience), o)
		if err != nil && !errors.Is(err, natsserver.ErrInUse) {
			t.Fatal(err)
		}
		return err == nil
	})
	t.Cleanup(s.Stop)
	return s
}

func connect(t testing.TB, s *natsserver.Server) *jetstream.Conn {
	t.Helper()
	c, err := jetstream.Connect(within(t, patience), jetstream.ConnOptions{URLs: []string{s.URL()}, Core: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// overNATS returns a client on a separate connection. The client retries as long as the test waits.
func overNATS(t testing.TB, s *natsserver.Server, why *again) *Client {
	t.Helper()
	c, err := NATS(connect(t, s).NATS(), "test", Options{Absent: patience, AskedAgain: why.add})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// serve replies to queries of the namespace "test".
func serve(t testing.TB, c *jetstream.Conn, find func(*api.Query) (*api.Answer, *api.Error)) {
	t.Helper()
	s, err := jetstream.Serve(c, jetstream.ServiceConfig{
		Name: "test", Version: "1.0.0", Workers: 8, Queue: 1000,
		Endpoints: []jetstream.Endpoint{{
			Name: "find", Subject: jetstream.Names("test").Query(ops.Find), QueueGroup: "q",
			Handler: func(_ context.Context, r jetstream.Request) jetstream.Response {
				var q api.Query
				if err := api.Unmarshal(r.ContentType, r.Body, &q); err != nil {
					t.Error(err)
				}
				answer, failure := find(&q)
				if failure != nil {
					return jetstream.Response{Code: failure.Code.HTTPStatus(), Body: failure.Body(r.ContentType)}
				}
				body, err := api.Marshal(r.ContentType, answer)
				if err != nil {
					t.Error(err)
				}
				return jetstream.Response{Body: body}
			},
		}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.NATS().Flush(); err != nil { // the server has the subscription before the first request
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Stop(within(t, patience)) })
}

// echo returns an answer with the model of the query.
func echo(q *api.Query) (*api.Answer, *api.Error) {
	return &api.Answer{Model: q.Model, Complete: true}, nil
}

// TestFindDuringServerRestarts sends queries while the NATS server stops and starts again. Every query gets the right
// answer.
func TestFindDuringServerRestarts(t *testing.T) {
	t.Parallel()
	dir, addr := t.TempDir(), loopback.Reserve(t)
	s := startServer(t, dir, addr)
	var why again
	c := overNATS(t, s, &why)
	serve(t, connect(t, s), echo)
	var stop atomic.Bool
	var asked atomic.Int64
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for !stop.Load() {
				n := fmt.Sprint(asked.Add(1))
				a, err := c.Find(within(t, patience), &api.Query{Model: n, Hashes: api.Hashes{1}})
				if err != nil || a.Model != n {
					t.Errorf("query %s: %+v %v", n, a, err)
					return
				}
			}
		})
	}
	more := func() {
		enough := asked.Load() + 100
		testkit.Eventually(t, "100 more queries", func() bool { return asked.Load() >= enough || t.Failed() })
	}
	for range 3 {
		more()
		s.Stop()
		s = startServer(t, dir, addr)
	}
	more()
	stop.Store(true)
	clients.Wait()
	if why.count(AgainLost) == 0 {
		t.Error("no query was retried")
	}
	t.Logf("%d queries, retries %v", asked.Load(), why.counts)
}

// TestFindAfterNodeIsKilled kills the node that has the query. Another node answers.
func TestFindAfterNodeIsKilled(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	var why again
	c := overNATS(t, s, &why)
	held, never := make(chan struct{}), make(chan struct{})
	doomed := connect(t, s)
	hold := sync.OnceFunc(func() { close(held) })
	serve(t, doomed, func(q *api.Query) (*api.Answer, *api.Error) {
		hold() // a hedged request may arrive before the node is killed
		<-never
		return echo(q)
	})
	t.Cleanup(func() { close(never) }) // before the stop of the service, which waits for the handler
	ended := make(chan error, 1)
	ctx := within(t, patience)
	go func() {
		a, err := c.Find(ctx, &api.Query{Model: "m", Hashes: api.Hashes{1}})
		if err == nil && a.Blocks != 7 {
			err = fmt.Errorf("the answer is %+v", a)
		}
		ended <- err
	}()
	<-held
	doomed.Close()
	serve(t, connect(t, s), func(*api.Query) (*api.Answer, *api.Error) { return &api.Answer{Blocks: 7}, nil })
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	if why.count(AgainSlow) == 0 {
		t.Errorf("retries: %v", why.counts)
	}
}

// TestFindUntilNodeIsReady starts without a node, then with a node that is not ready. Each failure has a code.
func TestFindUntilNodeIsReady(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	var why again
	c := overNATS(t, s, &why)
	q := &api.Query{Model: "m", Hashes: api.Hashes{1}}
	_, err := c.Find(within(t, 200*time.Millisecond), q)
	if code := CodeOf(err); code != api.CodeNotReady && code != api.CodeUnavailable {
		t.Fatalf("no node serves the query: %v", err)
	}
	ended := make(chan error, 1)
	go func() {
		_, err := c.Find(within(t, patience), q)
		ended <- err
	}()
	before := why.count(AgainAbsent)
	testkit.Eventually(t, "the query is repeated", func() bool { return why.count(AgainAbsent) >= before+2 })
	serve(t, connect(t, s), func(q *api.Query) (*api.Answer, *api.Error) {
		if q.Model == "never" || why.count(AgainRefused) == 0 {
			return nil, api.Errorf(api.CodeNotReady, "1 of 3 partitions is not restored")
		}
		return echo(q)
	})
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	hasty, err := NATS(connect(t, s).NATS(), "test", Options{Absent: 100 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer hasty.Close()
	var failure *api.Error
	// the error comes from the node that is not ready
	_, err = hasty.Find(within(t, patience), &api.Query{Model: "never"})
	if !errors.As(err, &failure) || failure.Code != api.CodeNotReady ||
		failure.Message != "1 of 3 partitions is not restored" {
		t.Error(err)
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := c.Find(gone, q); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	huge := &api.Query{Model: "m", Hashes: make(api.Hashes, 1<<18)}
	if _, err := c.Find(within(t, patience), huge); CodeOf(err) != api.CodeTooLarge {
		t.Errorf("too large: %v", err)
	}
	if _, err := NATS(nil, "no such namespace", Options{}); CodeOf(err) != api.CodeMalformed {
		t.Errorf("invalid namespace: %v", err)
	}
}

// TestSelectIsRetried retries a Select without a serving node. Bookings are retried too, since no node received them.
func TestSelectIsRetried(t *testing.T) {
	t.Parallel()
	var why again
	c, err := NATS(connect(t, startServer(t, t.TempDir(), "127.0.0.1:0")).NATS(), "test", Options{
		Absent: 100 * time.Millisecond, AskedAgain: why.add})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r := &api.SelectRequest{Query: api.Query{Model: "m", Hashes: api.Hashes{1}}, RequestID: "r", Book: true}
	for _, r.Book = range []bool{true, false} {
		before := why.count(AgainAbsent)
		_, err := c.Select(within(t, patience), r)
		if n := why.count(AgainAbsent) - before; CodeOf(err) != api.CodeNotReady || n == 0 {
			t.Errorf("booking: %v: %v, %d retries", r.Book, err, n)
		}
	}
}

// TestFindWithoutConnection: a request on a closed connection fails at once, with a code.
func TestFindWithoutConnection(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	conn := connect(t, s)
	c, err := NATS(conn.NATS(), "test", Options{})
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	_, err = c.Find(within(t, patience), &api.Query{})
	if CodeOf(err) != api.CodeUnavailable || !errors.Is(err, rpc.ErrDisconnected) {
		t.Error(err)
	}
}

// TestHedgedRequestsKeepToTheirBudget: without answers, the budget limits the hedged requests of many queries.
func TestHedgedRequestsKeepToTheirBudget(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	var why again
	c := overNATS(t, s, &why)
	silent := connect(t, s)
	stop, err := silent.Subscribe(jetstream.Names("test").Query(ops.Find), func(jetstream.Request) {})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if err := silent.NATS().FlushWithContext(within(t, patience)); err != nil {
		t.Fatal(err)
	}
	const queries = 500
	asking, enough := context.WithCancel(within(t, patience))
	begun := time.Now()
	var clients sync.WaitGroup
	for range queries {
		clients.Go(func() {
			if _, err := c.Find(asking, &api.Query{Model: "m"}); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	testkit.Eventually(t, "a query is repeated", func() bool { return why.count(AgainSlow) > 0 })
	time.Sleep(2 * time.Second) // enough for three retries of each query without a budget
	enough()
	clients.Wait()
	most := rpc.HedgeBurst + queries/rpc.HedgeRatio + int(rpc.HedgeRate*time.Since(begun).Seconds()) + 1
	if n := why.count(AgainSlow); n < 1 || n > most {
		t.Errorf("%d of %d queries were retried, limit %d", n, queries, most)
	}
	if n := c.to.(*natsTransport).pool.InFlight(); n != 0 {
		t.Errorf("%d requests are still in flight, want none", n)
	}
}

// TestURLErrorHidesSecrets: the error of an invalid URL repeats only a URL without a secret.
func TestURLErrorHidesSecrets(t *testing.T) {
	for _, text := range []string{"http://me:secret@host:port", "http//me:secret@host", "me:secret@host:8090",
		"http://me:%secret@host", "http://host/?key=secret", "http://a:1,http://me:secret@b:bad"} {
		_, err := HTTP([]string{"http://127.0.0.1:8090", text}, Options{})
		if err == nil || strings.Contains(err.Error(), "secret") || !strings.Contains(err.Error(), "URL 2 of 2") {
			t.Errorf("%s: %v", text, err)
		}
	}
	if _, err := HTTP([]string{"host:8090"}, Options{}); err == nil || !strings.Contains(err.Error(), `"host:8090"`) {
		t.Error(err)
	}
}

// TestHTTP retries at the next URL if a node is gone, not ready or slow.
func TestHTTP(t *testing.T) {
	t.Parallel()
	node := func(do http.HandlerFunc) string {
		s := httptest.NewServer(do)
		t.Cleanup(s.Close)
		return s.URL
	}
	reply := func(w http.ResponseWriter, status int, v any) {
		body, err := api.Marshal(api.MsgPack, v)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", api.MsgPack)
		w.WriteHeader(status)
		_, _ = w.Write(body)
	}
	refuse := func(code api.Code) string {
		return node(func(w http.ResponseWriter, _ *http.Request) {
			reply(w, code.HTTPStatus(), api.ErrorBody{Error: api.Errorf(code, "so it is")})
		})
	}
	good := node(func(w http.ResponseWriter, r *http.Request) {
		if h := r.Header; h.Get("Authorization") != "Bearer secret" || h.Get(rpc.HeaderDeadline) == "" ||
			r.URL.Path != "/v1/find" {
			t.Errorf("%s %v", r.URL, r.Header)
		}
		reply(w, 200, &api.Answer{Model: "good"})
	})
	dead := "http://" + loopback.Reserve(t)
	held := make(chan struct{})
	slow := node(func(http.ResponseWriter, *http.Request) { <-held })
	t.Cleanup(func() { close(held) })
	broken := node(func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		conn.Close()
	})
	stranger := node(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "welcome to nginx") })
	for _, c := range []struct {
		name string
		urls []string
		code api.Code
		why  string
	}{
		{"good", []string{good}, "", ""},
		{"one is dead", []string{dead, good}, "", AgainAbsent},
		{"a node is not ready", []string{refuse(api.CodeNotReady), good}, "", AgainRefused},
		{"one is slow", []string{slow, good}, "", AgainSlow},
		{"one breaks off", []string{broken, good}, "", AgainLost},
		{"all are dead", []string{dead}, api.CodeUnavailable, AgainAbsent},
		{"none is ready", []string{refuse(api.CodeNotReady)}, api.CodeNotReady, AgainRefused},
		{"no worker is available", []string{refuse(api.CodeNoWorkers)}, api.CodeNoWorkers, ""},
		{"busy", []string{refuse(api.CodeBusy)}, api.CodeBusy, ""},
		{"unknown model", []string{refuse(api.CodeUnknownModel)}, api.CodeUnknownModel, ""},
		{"no indexer", []string{stranger}, api.CodeInternal, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			var why again
			o := Options{Absent: patience, Token: "secret", AskedAgain: why.add}
			if c.code != "" {
				o.Absent = 100 * time.Millisecond
			}
			if c.why != AgainSlow {
				o.HedgeAfter = patience // a pause of the machine is no slow node
			}
			client, err := HTTP(c.urls, o)
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			for range 2 * len(c.urls) { // the first attempt goes to each URL in turn
				a, err := client.Find(within(t, patience), &api.Query{Model: "m"})
				if CodeOf(err) != c.code || err == nil && a.Model != "good" || err != nil && c.code == "" {
					t.Errorf("%+v %v", a, err)
				}
			}
			if (c.why != "") != (len(why.counts) > 0) || c.why != "" && why.count(c.why) == 0 {
				t.Errorf("retries: %v", why.counts)
			}
		})
	}
	for _, url := range []string{"", "127.0.0.1:8090", "ftp://127.0.0.1", "http://127.0.0.1?x=y"} {
		if _, err := HTTP([]string{url}, Options{}); CodeOf(err) != api.CodeMalformed {
			t.Errorf("%q: %v", url, err)
		}
	}
}

// BenchmarkFind measures a query over NATS with an immediate answer.
func BenchmarkFind(b *testing.B) {
	s := startServer(b, b.TempDir(), "127.0.0.1:0")
	serve(b, connect(b, s), echo)
	c := overNATS(b, s, &again{})
	q := &api.Query{Model: "m", Hashes: make(api.Hashes, 64)}
	ctx := within(b, patience)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := c.Find(ctx, q); err != nil {
			b.Fatal(err)
		}
	}
}

// TestOlderNodes: the client repeats a query without the field diagnostic if a node rejects the field.
func TestOlderNodes(t *testing.T) {
	asked := 0
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked++
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		w.Header().Set("Content-Type", "application/json")
		if bytes.Contains(body, []byte("diagnostic")) {
			w.WriteHeader(http.StatusBadRequest)
			fmt.Fprint(w, `{"error":{"code":"malformed","message":"there is no field \"diagnostic\"; there are model, tokens"}}`)
			return
		}
		w.Header().Set("Content-Type", "application/msgpack")
		fmt.Fprint(w, "\x82\xa5model\xa1m\xa6worker\xa2w1")
	}))
	defer node.Close()
	c, err := HTTP([]string{node.URL}, Options{HedgeAfter: patience})
	if err != nil {
		t.Fatal(err)
	}
	q := api.Query{Model: "m", Tokens: api.Tokens{1}, Diagnostic: true}
	ctx := within(t, patience)
	if a, err := c.Find(ctx, &q); err != nil || a.Model != "m" || asked != 2 {
		t.Errorf("%+v, %v after %d requests", a, err, asked)
	}
	if s, err := c.Select(ctx, &api.SelectRequest{Query: q}); err != nil || s.Worker != "w1" || asked != 4 {
		t.Errorf("%+v, %v after %d requests", s, err, asked)
	}
}
