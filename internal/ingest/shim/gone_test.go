package shim

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// fly publishes all waiting events and returns the batches.
func fly(t *testing.T, m *Machine) (told []events.Batch) {
	t.Helper()
	for {
		flight, err := m.fly()
		if err != nil {
			t.Fatal(err)
		}
		if flight == nil {
			return told
		}
		for _, data := range flight {
			var b events.Batch
			if err := events.DecodeBatch(data, &b); err != nil {
				t.Fatal(err)
			}
			told = append(told, b)
		}
		m.Flushed()
	}
}

// TestGone checks that a gone engine's device and host memory are cleared in the same incarnation, so that blocks on
// disks stay. The machine sends no requests to the engine. The next connection begins an incarnation with a full
// replay, for the same or another engine.
func TestGone(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	m.Recovered(Published{}, 100)
	m.Connected()
	wantsReplay(m)
	m.Replayed(Frame{Seq: 0, Payload: []byte("life1 +1")}, 100)
	m.ReplayEnded(100)
	m.Live(Frame{Seq: 1, Payload: []byte("life1 +2")}, 100)
	fly(t, m)
	m.Gone()
	m.Gone() // the second time does nothing
	told := fly(t, m)
	if len(told) != 1 || told[0].Incarnation != 100 || told[0].FirstID != 4 || len(told[0].Events) != 2 ||
		told[0].Cursor.Known {
		t.Fatalf("told %+v", told)
	}
	for i, tier := range []events.Tier{events.Device, events.Host} {
		if e := told[0].Events[i]; e.Kind != events.Cleared || e.Tier != tier || e.Reason != events.ReasonEngineGone {
			t.Errorf("event %d: %+v", i, e)
		}
	}
	m.Verify()
	m.RetryReplay()
	if _, ok := wantsReplay(m); ok {
		t.Error("a request to a gone engine")
	}

	// A shim that restarts in between begins without a cursor.
	next := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	next.Recovered(m.Acked(), 200)
	next.Gone()
	if told := fly(t, next); len(told) != 1 || told[0].Incarnation != 200 || len(told[0].Events) != 1 ||
		told[0].Events[0].Tier != events.AllTiers {
		t.Fatalf("the next shim published %+v", told)
	}

	// After a network failure, the same engine repeats all messages.
	m.Connected()
	if from, ok := wantsReplay(m); !ok || from != 0 {
		t.Fatalf("replay from %d, %v", from, ok)
	}
	for seq := range 3 {
		m.Replayed(Frame{Seq: events.EngineSeq(seq), Payload: fmt.Appendf(nil, "life1 +%d", seq+1)}, 300)
	}
	m.ReplayEnded(300)
	told = fly(t, m)
	if len(told) != 1 || told[0].Incarnation != 101 || len(told[0].Events) != 4 ||
		told[0].Events[0].Reason != events.ReasonRestart {
		t.Fatalf("told %+v", told)
	}
	if c := m.Counts(); c.Departures != 1 || c.Restarts != 1 || c.Gaps != 0 || c.JoinedLate != 0 {
		t.Errorf("counted %+v", c)
	}

	// A silent engine that returns begins no new incarnation.
	next.Connected()
	if told := fly(t, next); len(told) != 0 || next.Incarnation() != 200 {
		t.Errorf("published %+v in incarnation %d", told, next.Incarnation())
	}
}

// memory is the log of a rank with the held blocks. It is safe for concurrent reads during a write.
type memory struct {
	mu   sync.Mutex
	last Published
	held map[events.BlockHash]events.Tier
	news chan struct{} // closed at the next change
}

func newMemory() *memory {
	return &memory{held: map[events.BlockHash]events.Tier{}, news: make(chan struct{})}
}

func (l *memory) Last(context.Context) (Published, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.last, nil
}

func (l *memory) Publish(_ context.Context, msgs [][]byte) (events.StreamSeq, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, data := range msgs {
		var b events.Batch
		if err := events.DecodeBatch(data, &b); err != nil {
			return 0, err
		}
		if b.Incarnation != l.last.Incarnation {
			clear(l.held)
		}
		for _, e := range b.Events {
			switch e.Kind {
			case events.Stored:
				for _, h := range e.Blocks {
					l.held[h] = e.Tier
				}
			case events.Removed:
				for _, h := range e.Blocks {
					delete(l.held, h)
				}
			case events.Cleared:
				maps.DeleteFunc(l.held, func(_ events.BlockHash,
					in events.Tier) bool {
					return e.Tier == events.AllTiers || in == e.Tier
				})
			}
		}
		seq := l.last.Seq + 1
		l.last = Published{Found: true, Reached: Reached{b.Incarnation, b.LastID(), b.Cursor}, Seq: seq}
	}
	close(l.news)
	l.news = make(chan struct{})
	return l.last.Seq, nil
}

// await waits until the rank holds exactly the given blocks.
func (l *memory) await(ctx context.Context, want []events.BlockHash) error {
	slices.Sort(want)
	for {
		l.mu.Lock()
		held, news := slices.Sorted(maps.Keys(l.held)), l.news
		l.mu.Unlock()
		if slices.Equal(held, want) {
			return nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return fmt.Errorf("the log has %d blocks, want %d: %w", len(held), len(want), ctx.Err())
		}
	}
}

// TestEnginesDieAndComeBack kills and restarts engines, and measures the time for which the log is wrong: until the
// clear of a dead engine, and from the first connection to a new engine until its blocks are in the log. The test logs
// the times. At the end the log must be right, and the state must be reported.
func TestEnginesDieAndComeBack(t *testing.T) {
	t.Parallel()
	const engines, restarts = 5, 4
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	var (
		mu              sync.Mutex
		cleared, caught []time.Duration
		all             sync.WaitGroup
	)
	for i := range engines {
		engine, err := enginesim.Start(ctx, enginesim.Config{
			BlockSize: 4, Capacity: 100, SeedPerLife: true, NoReplay: i == 0,
			Endpoint: "tcp://" + loopback.Reserve(t), Replay: "tcp://" + loopback.Reserve(t),
		})
		if err != nil {
			t.Fatal(err)
		}
		defer engine.Stop()
		decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
		if err != nil {
			t.Fatal(err)
		}
		log, states := newMemory(), make(chan api.EngineState, 100)
		shim, stop := context.WithCancel(ctx)
		ended := make(chan error, 1)
		go func() {
			ended <- Run(shim, Config{
				Engine: engine.Endpoint(), Replay: engine.Replay(), Identity: Identity{Model: "m",
					BlockSize: 4}, Decoder: decoder, Log: log,
				SilentAfter: time.Minute, // a machine under load is not silent
				Observer:    observing{state: func(s State) { states <- s.Engine }},
			})
		}()
		rng := rand.New(rand.NewPCG(*seedFlag, uint64(i)))
		all.Go(func() {
			defer func() {
				stop()
				if err := <-ended; err != nil {
					t.Errorf("engine %d: the shim: %v", i, err)
				}
			}()
			await := func(want api.EngineState) {
				for {
					select {
					case s := <-states:
						if s == want {
							return
						}
					case <-ctx.Done():
						t.Errorf("engine %d: never %s", i, want)
						return
					}
				}
			}
			serve := func() {
				if i == 0 { // without a replay socket, earlier messages are lost
					if err := engine.WaitSubscribers(ctx, 1); err != nil {
						t.Errorf("engine %d: %v", i, err)
					}
				}
				if _, err := engine.Serve([]uint32{1, 2, 3, 4, 5, 6, 7, 8, rng.Uint32(), 10, 11, 12}, nil); err != nil {
					t.Errorf("engine %d: %v", i, err)
				}
			}
			hold := func(what string) time.Duration {
				begun := time.Now()
				if err := log.await(ctx, engine.State().Blocks); err != nil {
					t.Errorf("engine %d, %s: %v", i, what, err)
				}
				return time.Since(begun)
			}
			await(api.EngineConnected)
			serve()
			hold("at first")
			for life := range restarts {
				engine.Crash()
				gone := hold("dead")
				await(api.EngineGone)
				// the restart happens at a random moment of the shim's pauses
				time.Sleep(time.Duration(rng.IntN(300)) * time.Millisecond)
				if err := engine.Restart(); err != nil {
					t.Errorf("engine %d: %v", i, err)
					return
				}
				begun := time.Now()
				serve()
				hold(fmt.Sprint("life ", life+2))
				back := time.Since(begun)
				await(api.EngineConnected)
				mu.Lock()
				cleared, caught = append(cleared, gone), append(caught, back)
				mu.Unlock()
			}
		})
	}
	all.Wait()
	slices.Sort(cleared)
	slices.Sort(caught)
	t.Logf("%d restarts: cleared after %v, caught up after %v", len(caught), cleared, caught)
}

// TestReplaySocketThatComesLate connects a shim to an engine with a refusing replay socket, until the shim gives up.
// When the socket listens, the shim sends the refused request at once.
func TestReplaySocketThatComesLate(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	replay := "tcp://" + loopback.Reserve(t)
	engine, err := enginesim.Start(ctx, enginesim.Config{BlockSize: 4, Capacity: 100, NoReplay: true})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Stop()
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	log, failures, states := newMemory(), make(chan error, 1000), make(chan State, 100)
	ended := make(chan error, 1)
	running, stop := context.WithCancel(ctx)
	go func() {
		ended <- Run(running, Config{
			Engine: engine.Endpoint(), Replay: replay, Identity: Identity{Model: "m", BlockSize: 4}, Decoder: decoder,
			Log:         log,
			SilentAfter: time.Hour, IdleCheck: time.Hour, RetryMax: time.Hour, RetryMin: time.Millisecond,
			RetryReachable: 10 * time.Millisecond,
			Limits:         Limits{ReplayPatience: 1}, // it is given up at the second failure
			Observer: observing{replayFailed: func(err error) { failures <- err },
				state: func(s State) { states <- s }},
		})
	}()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	}()
	for given := false; !given; { // then nothing is awaited any more
		select {
		case s := <-states:
			given = s.Engine == api.EngineConnected && !s.CatchingUp
		case <-ctx.Done():
			t.Fatal("the replay socket is never given up")
		}
	}
	if len(failures) == 0 {
		t.Fatal("no replay has failed")
	}
	router, err := zmtpserver.ListenRouter(ctx, replay, zmtp.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer router.Stop()
	begun := time.Now()
	_, question, err := router.Recv(ctx)
	if err != nil || len(question) != 2 || len(question[1]) != 8 {
		t.Fatalf("asked %q, %v", question, err)
	}
	t.Logf("request %v after the start of the socket", time.Since(begun))
}
