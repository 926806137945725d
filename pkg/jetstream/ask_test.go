package jetstream

import (
	"context"
	"errors"
	"fmt"
	"math/bits"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// TestQuestionSteps plays random questions. One is always waited for or about to be asked; it is asked again when it
// must be, and not too often.
func TestQuestionSteps(t *testing.T) {
	for seed := range uint64(3000) {
		rng := rand.New(rand.NewPCG(seed, 5))
		q := newQuestion(time.Duration(1+rng.IntN(10_000))*time.Millisecond, 2*time.Second)
		failures, slow := 0, 0
		trouble := []string{AgainLost, AgainAbsent, AgainRefused}[rng.IntN(3)]
		for now := time.Duration(0); now < q.left && !q.nobody(now); {
			if q.at < now {
				t.Fatalf("seed %d: at %v it is to be sent at %v: %+v", seed, now, q.at, q)
			}
			if q.out < 0 || q.out > 1+slow {
				t.Fatalf("seed %d: %+v", seed, q)
			}
			if q.out == 0 && q.at > now+askRest {
				t.Fatalf("seed %d: nobody is asked from %v to %v", seed, now, q.at)
			}
			now = min(q.at, q.left)
			if now == q.left {
				break
			}
			if q.out > 0 {
				if q.late(now, rng.IntN(4) > 0); q.at > now {
					continue
				}
				slow++
			}
			q.sends(now)
			for q.out > 0 && rng.IntN(3) == 0 {
				now += time.Duration(rng.IntN(5)) * time.Millisecond
				if failures++; rng.IntN(4) == 0 {
					trouble = []string{AgainLost, AgainAbsent, AgainRefused}[rng.IntN(3)]
				}
				q.failed(now, trouble)
				if q.out == 0 && q.why != trouble {
					t.Fatalf("seed %d: it failed as %s, and says %s", seed, trouble, q.why)
				}
			}
		}
		if q.sent < 1 || q.sent > 1+slow+failures || slow > bits.Len64(uint64(max(4, q.left/askSlow))) {
			t.Fatalf("seed %d: sent %d times after %d failures, %d times because it was late", seed, q.sent, failures,
				slow)
		}
	}
	// What nobody serves is asked for so long, or half of the time.
	for _, c := range []struct{ left, nobody time.Duration }{{10 * time.Second, 2 * time.Second},
		{time.Second, 500 * time.Millisecond}} {
		q := newQuestion(c.left, 2*time.Second)
		now := time.Duration(0)
		for ; !q.nobody(now); now = q.at {
			q.sends(now)
			q.failed(now, AgainAbsent)
		}
		if now < c.nobody || now > c.nobody+askRest {
			t.Errorf("of %v it was asked for %v that nobody serves", c.left, now)
		}
	}
}

// again counts why questions were asked again.
type again struct {
	mu     sync.Mutex
	counts map[string]int
}

func (a *again) told(why string) {
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

func askingFor(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// TestAskWhileTheServerRestarts: questions are asked all the time while the NATS server is stopped and started again,
// and every one is answered.
func TestAskWhileTheServerRestarts(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	var why again
	client := connect(t, ConnOptions{URLs: []string{w.srv.URL()}, Absent: patience,
		Hooks: ConnHooks{AskedAgain: why.told}})
	serve(t, w.c, ServiceConfig{Endpoints: []Endpoint{{Name: "echo", Subject: "t.echo", QueueGroup: "q",
		Handler: func(_ context.Context, r Request) Response {
			return Response{Body: r.Body}
		}}}})
	var stop atomic.Bool
	var asked atomic.Int64
	var clients sync.WaitGroup
	for range 4 {
		clients.Go(func() {
			for !stop.Load() {
				n := fmt.Sprint(asked.Add(1))
				reply, err := client.Ask(askingFor(t, patience), "t.echo", "", []byte(n))
				if err != nil || string(reply.Body) != n {
					t.Errorf("question %s: %q %v", n, reply.Body, err)
					return
				}
			}
		})
	}
	for range 3 {
		for before := asked.Load(); asked.Load() < before+100 && !t.Failed(); {
			time.Sleep(time.Millisecond)
		}
		w.restart()
	}
	for before := asked.Load(); asked.Load() < before+100 && !t.Failed(); {
		time.Sleep(time.Millisecond)
	}
	stop.Store(true)
	clients.Wait()
	if why.count(AgainLost) == 0 {
		t.Error("nobody had to ask again")
	}
	t.Logf("%d asked, again %v", asked.Load(), why.counts)
}

// TestAskOfOneThatIsKilled: whoever had the question is gone without a word. Another answers it.
func TestAskOfOneThatIsKilled(t *testing.T) {
	t.Parallel()
	s := startServer(t, t.TempDir(), "127.0.0.1:0")
	var why again
	client := connect(t, ConnOptions{URLs: []string{s.URL()}, Absent: patience, Hooks: ConnHooks{AskedAgain: why.told}})
	held := make(chan struct{})
	doomed := connect(t, ConnOptions{URLs: []string{s.URL()}})
	endpoint := func(h Handler) ServiceConfig {
		return ServiceConfig{Endpoints: []Endpoint{{Name: "find", Subject: "t.find", QueueGroup: "q", Handler: h}}}
	}
	never := make(chan struct{})
	hold := sync.OnceFunc(func() { close(held) })
	serve(t, doomed, endpoint(func(context.Context, Request) Response {
		hold() // it may be asked again before it is gone
		<-never
		return Response{}
	}))
	t.Cleanup(func() { close(never) }) // before the service is stopped, which waits for it
	answer := make(chan error, 1)
	ctx := askingFor(t, patience)
	go func() {
		reply, err := client.Ask(ctx, "t.find", "", []byte("x"))
		if err == nil && string(reply.Body) != "other" {
			err = fmt.Errorf("the answer is %q", reply.Body)
		}
		answer <- err
	}()
	<-held
	doomed.Close()
	serve(t, connect(t, ConnOptions{URLs: []string{s.URL()}}),
		endpoint(func(context.Context, Request) Response { return Response{Body: []byte("other")} }))
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	if why.count(AgainSlow) == 0 {
		t.Errorf("asked again for %v", why.counts)
	}
}

// TestAskUntilSomebodyServes: nobody does at first, and then one who cannot answer yet.
func TestAskUntilSomebodyServes(t *testing.T) {
	t.Parallel()
	server, _ := pair(t)
	var why again
	client := connect(t, ConnOptions{URLs: []string{server.Server().URL}, Absent: patience,
		Hooks: ConnHooks{AskedAgain: why.told}})
	if _, err := client.Ask(askingFor(t, 200*time.Millisecond), "t.find", "", nil); !errors.Is(err, ErrNoResponder) &&
		!errors.Is(err, ErrTimeout) {
		t.Fatalf("nobody serves it: %v", err)
	}
	answer := make(chan error, 1)
	go func() {
		_, err := client.Ask(askingFor(t, patience), "t.find", "", nil)
		answer <- err
	}()
	for before := why.count(AgainAbsent); why.count(AgainAbsent) < before+2; {
		time.Sleep(time.Millisecond)
	}
	serve(t, server, ServiceConfig{Endpoints: []Endpoint{{Name: "find", Subject: "t.find", QueueGroup: "q",
		Handler: func(context.Context, Request) Response {
			if why.count(AgainRefused) == 0 {
				return Response{Code: CodeStopping, Description: "this instance is being stopped"}
			}
			return Response{}
		}}, {Name: "fail", Subject: "t.fail", Handler: func(context.Context, Request) Response {
		return Response{Code: CodeStopping, Description: "not ready", Body: []byte("not ready: of 3 partitions")}
	}}}})
	if err := <-answer; err != nil {
		t.Fatal(err)
	}
	hasty := connect(t, ConnOptions{URLs: []string{server.Server().URL}, Absent: 100 * time.Millisecond})
	reply, err := hasty.Ask(askingFor(t, patience), "t.fail", "", nil) // who cannot for long says why
	if wantCode(t, err, CodeStopping); string(reply.Body) != "not ready: of 3 partitions" {
		t.Errorf("%q %v", reply.Body, err)
	}
	gone, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := client.Ask(gone, "t.fail", "", nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := client.Ask(askingFor(t, patience), "t.fail", "", make([]byte, 2<<20)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	client.Close()
	if _, err := client.Ask(askingFor(t, patience), "t.fail", "", nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("closed: %v", err)
	}
}

// TestAskBudget: where no answer comes, many questions are not asked many times over.
func TestAskBudget(t *testing.T) {
	t.Parallel()
	server, _ := pair(t)
	var why again
	client := connect(t, ConnOptions{URLs: []string{server.Server().URL}, Absent: patience,
		Hooks: ConnHooks{AskedAgain: why.told}})
	stop, err := server.Subscribe("t.silent", func(Request) {})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if err := server.flush(ctxFor(t)); err != nil {
		t.Fatal(err)
	}
	const questions = 500
	asking, enough := context.WithCancel(ctxFor(t))
	var clients sync.WaitGroup
	for range questions {
		clients.Go(func() {
			if _, err := client.Ask(asking, "t.silent", "", nil); !errors.Is(err, context.Canceled) {
				t.Error(err)
			}
		})
	}
	for why.count(AgainSlow) == 0 && asking.Err() == nil {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(2 * time.Second) // in which each would be asked again three times
	enough()
	clients.Wait()
	if n := why.count(AgainSlow); n < 1 || n > askBurst+questions/askBudget {
		t.Errorf("%d of %d were asked again, of which %d may be", n, questions, askBurst+questions/askBudget)
	}
	client.mu.Lock()
	defer client.mu.Unlock()
	if len(client.asking) != 0 || len(client.waiting) != 0 {
		t.Errorf("%d questions are still there, %d waiters", len(client.asking), len(client.waiting))
	}
}

// BenchmarkAsk is [BenchmarkRequest] with Ask.
func BenchmarkAsk(b *testing.B) {
	server, client := pair(b)
	serve(b, server, ServiceConfig{Endpoints: []Endpoint{{Name: "echo", Subject: "t.echo",
		Handler: func(_ context.Context, r Request) Response {
			return Response{ContentType: ContentMsgpack, Body: r.Body}
		}}}})
	body := payloads(1, 1024)[0]
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Minute)
	defer cancel()
	b.ReportAllocs()
	b.ResetTimer()
	for range b.N {
		if _, err := client.Ask(ctx, "t.echo", ContentMsgpack, body); err != nil {
			b.Fatal(err)
		}
	}
}
