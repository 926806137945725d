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

// fly publishes all that waits, and returns what the log is told.
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

// TestGone: what is told of an engine that is gone is that its device and host memory are empty, in the same
// incarnation, so that what it has on disks stays. Nothing is asked of it. Whoever connects next begins an incarnation,
// and is asked for all, whether it is the same or not.
func TestGone(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, words{})
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
		t.Error("an engine that is gone is asked")
	}

	// A shim that starts again meanwhile begins from nothing.
	next := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, words{})
	next.Recovered(m.Acked(), 200)
	next.Gone()
	if told := fly(t, next); len(told) != 1 || told[0].Incarnation != 200 || len(told[0].Events) != 1 ||
		told[0].Events[0].Tier != events.AllTiers {
		t.Fatalf("the next shim told %+v", told)
	}

	// It was only the network: the same engine says all of it again.
	m.Connected()
	if from, ok := wantsReplay(m); !ok || from != 0 {
		t.Fatalf("asked from %d, %v", from, ok)
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

	// One that says nothing before it is gone makes no new incarnation when it is back.
	next.Connected()
	if told := fly(t, next); len(told) != 0 || next.Incarnation() != 200 {
		t.Errorf("told %+v in incarnation %d", told, next.Incarnation())
	}
}

// memory is the log of one rank, and what it says that the rank holds. It may be read while a shim writes.
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

// await waits until the rank holds these blocks and no others.
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
			return fmt.Errorf("the log says %d blocks, want %d: %w", len(held), len(want), ctx.Err())
		}
	}
}

// TestEnginesDieAndComeBack kills engines, starts them again after a while, and looks at how long the log is wrong:
// until it says that the dead one holds nothing, and, from when the new one can be heard, until it says what that one
// holds. The measured times are logged; what must be is that all of it is right in the end, and that standing is told.
func TestEnginesDieAndComeBack(t *testing.T) {
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
				if i == 0 { // without a replay socket what is said before is lost
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
				// it comes back at any moment of the shim's pauses
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

// TestReplaySocketThatComesLate connects a shim to an engine whose replay socket refuses until the shim has given it
// up. When somebody listens there it is asked at once, from where it was refused.
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
	t.Logf("asked %v after it began to listen", time.Since(begun))
}
