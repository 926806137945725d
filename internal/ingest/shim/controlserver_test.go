package shim

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// patience is how long a test waits for anything.
const patience = 4 * time.Minute

// namespace returns a namespace on a separate server.
func namespace(t *testing.T) (context.Context, *jetstream.Namespace) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testkit.Patience)
	t.Cleanup(cancel)
	return ctx, natskit.Namespace(t, 1)
}

// said reads the log of a rank: the kind and reason of every event, by incarnation.
func said(t *testing.T, ctx context.Context, ns *jetstream.Namespace) map[events.Incarnation][]events.Event {
	t.Helper()
	out := make(chan jetstream.Update, 1)
	r, err := ns.StartReader(jetstream.ReaderConfig{Deliver: func(ctx context.Context, u jetstream.Update) {
		select {
		case out <- u:
		case <-ctx.Done():
		}
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Stop()
	got := map[events.Incarnation][]events.Event{}
	for {
		select {
		case u := <-out:
			for _, m := range u.Messages {
				var b events.Batch
				if err := events.DecodeBatch(m.Data, &b); err != nil {
					t.Fatal(err)
				}
				got[b.Incarnation] = append(got[b.Incarnation], b.Events...)
			}
			if _, ok := u.Notice.(jetstream.CaughtUp); ok {
				return got
			}
		case <-ctx.Done():
			t.Fatal("the log cannot be read")
		}
	}
}

// TestResyncOnRequest sends resync requests to a running shim. The shim publishes a clear with the reason and the
// engine's events in a new incarnation, once for every id, for any number of requests.
func TestResyncOnRequest(t *testing.T) {
	t.Parallel()
	ctx, ns := namespace(t)
	engine, err := enginesim.Start(ctx, enginesim.Config{BlockSize: 4, Capacity: 100})
	if err != nil {
		t.Fatal(err)
	}
	defer engine.Crash()
	key := events.RankKey{Instance: "w1"}
	if found, err := control.ShimOf(ctx, ns, key); found != nil || err != nil {
		t.Fatalf("without a shim: %v, %v", found, err)
	}
	server, err := Claim(ctx, ns, key, true)
	if err != nil {
		t.Fatal(err)
	}
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	published := make(chan events.Cursor, 1000)
	running, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(running, Config{
			Engine: engine.Endpoint(), Replay: engine.Replay(), Identity: Identity{Model: "m",
				BlockSize: 4}, Decoder: decoder,
			Log: NewStreamLog(ns, key, func(error) {}), Control: server,
			Observer: observing{published: func(c events.Cursor) { published <- c }},
		})
	}()
	for _, prompt := range [][]uint32{{1, 2, 3, 4, 5, 6, 7, 8}, {1, 2, 3, 4, 9, 9, 9, 9}} {
		if _, err := engine.Serve(prompt, nil); err != nil {
			t.Fatal(err)
		}
	}
	await := func(seq events.EngineSeq) {
		t.Helper()
		for {
			select {
			case c := <-published:
				if c.Known && c.Seq == seq {
					return
				}
			case <-ctx.Done():
				t.Fatalf("message %d is not published", seq)
			}
		}
	}
	await(1)
	_, err = Claim(ctx, ns, key, true)
	if !errors.Is(err, ErrFenced) {
		t.Fatalf("a second claim: %v", err)
	}
	if other, err := Claim(ctx, ns, events.RankKey{Instance: "w1", Rank: 1}, true); err != nil {
		t.Fatalf("another rank's claim: %v", err)
	} else {
		other.Close()
	}
	before, err := control.ShimOf(ctx, ns, key)
	if err != nil || before == nil || before.Incarnation == 0 || before.Key() != key || !before.Replay {
		t.Fatalf("found: %+v, %v", before, err)
	}
	if shims, err := control.ResyncAll(ctx, ns, 0, "w2", control.ResyncRequest{ID: "x"}); err != nil || len(shims) != 0 {
		t.Fatalf("request to another instance: %v, %v", shims, err)
	}
	first, err := control.Resync(ctx, ns, key, control.ResyncRequest{ID: "a"})
	if err != nil || first == nil || first.Incarnation <= before.Incarnation {
		t.Fatalf("resync: %+v, %v; before %+v", first, err, before)
	}
	await(1)
	// until an answer comes in time: the same id does no more
	all := func(instance events.WorkerID, id string) ([]control.Shim, error) {
		for {
			shims, err := control.ResyncAll(ctx, ns, 0, instance, control.ResyncRequest{ID: id})
			if err != nil || len(shims) > 0 || ctx.Err() != nil {
				return shims, err
			}
		}
	}
	again, err := all("", "a")
	if err != nil || len(again) != 1 || again[0].Incarnation != first.Incarnation {
		t.Fatalf("repeated request: %+v, %v; before %+v", again, err, first)
	}
	second, err := all("w1", "b")
	if err != nil || len(second) != 1 || second[0].Incarnation <= first.Incarnation {
		t.Fatalf("another resync: %+v, %v", second, err)
	}
	await(1)
	stop()
	if err := <-ended; err != nil {
		t.Fatal(err)
	}
	server.Close()
	if found, err := control.ShimOf(ctx, ns, key); found != nil || err != nil {
		t.Fatalf("after the shim: %v, %v", found, err)
	}

	log := said(t, ctx, ns)
	if len(log) != 3 {
		t.Fatalf("%d incarnations", len(log))
	}
	want := log[before.Incarnation]
	for i, incarnation := range []events.Incarnation{first.Incarnation, second[0].Incarnation} {
		got := log[incarnation]
		if len(got) != len(want) || got[0].Kind != events.Cleared || got[0].Reason != events.ReasonOperator {
			t.Fatalf("resync %d: %+v, want a clear and %+v", i+1, got, want[1:])
		}
		for j := 1; j < len(want); j++ {
			if got[j].Kind != want[j].Kind || !slices.Equal(got[j].Blocks, want[j].Blocks) ||
				!slices.Equal(got[j].Locals, want[j].Locals) {
				t.Fatalf("resync %d: event %d is %+v, want %+v", i+1, j+1, got[j], want[j])
			}
		}
	}
}

// TestResyncLeavesTheFlightInTheAir completes a flight after a resync that made the waiting events unnecessary.
func TestResyncLeavesTheFlightInTheAir(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	m.Recovered(Published{}, 100)
	m.Connected()
	wantsReplay(m)
	m.ReplayEnded(100)
	m.Live(Frame{Seq: 0, Payload: []byte("life1 +1")}, 100)
	log := &logbook{t: t, held: map[events.BlockHash]bool{}}
	land := func() {
		t.Helper()
		flight, err := m.fly()
		if err != nil || flight == nil {
			t.Fatalf("flight %v, %v", flight, err)
		}
		for _, data := range flight {
			log.append(data)
		}
	}
	land()
	m.Live(Frame{Seq: 1, Payload: []byte("life1 +2")}, 100)
	m.Resync(200)
	m.Flushed()
	if entries, bytes := m.Queued(); entries != 1 || bytes != m.queue[0].memory() {
		t.Fatalf("%d events of %d bytes wait; one clear should", entries, bytes)
	}
	if from, ok := wantsReplay(m); !ok || from != 0 {
		t.Fatalf("replay from %d, %v", from, ok)
	}
	m.Replayed(Frame{Seq: 0, Payload: []byte("life1 +1")}, 200)
	m.Replayed(Frame{Seq: 1, Payload: []byte("life1 +2")}, 200)
	m.ReplayEnded(200)
	land()
	m.Flushed()
	if len(log.held) != 2 || log.last.Incarnation != 200 || log.last.LastID != 3 || m.Counts().Resyncs != 1 {
		t.Fatalf("the log holds %v, %+v; counted %+v", log.held, log.last, m.Counts())
	}
}

// TestSecondResyncDoesNotWait checks that a second request during a resync gets an immediate reply without a new
// incarnation.
func TestSecondResyncDoesNotWait(t *testing.T) {
	s := &ControlServer{requests: make(chan request)}
	first := make(chan control.Shim, 1)
	go func() {
		found, err := s.Resync(context.Background(), control.ResyncRequest{ID: "a"})
		if err != nil {
			t.Errorf("the first: %v", err)
		}
		first <- found
	}()
	underWay := <-s.requests
	second := make(chan error, 1)
	go func() {
		_, err := s.Resync(context.Background(), control.ResyncRequest{ID: "b"})
		second <- err
	}()
	select {
	case err := <-second:
		if !errors.Is(err, errNotStarted) {
			t.Errorf("the second: %v", err)
		}
	case <-time.After(patience):
		t.Fatal("the second waits behind the first")
	}
	underWay.begun <- 7
	if found := <-first; found.Incarnation != 7 {
		t.Errorf("the first begins %d", found.Incarnation)
	}
}

// TestResyncComparesTheMachine sends requests before the shim reports its step. They are compared with the machine's
// incarnation, not with the last reported incarnation. A repeated id has no second effect, even if the first reply came
// too late for the client.
func TestResyncComparesTheMachine(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	m.Recovered(Published{}, 100)
	r := &runner{machine: m}
	s := &ControlServer{requests: make(chan request)}
	go func() {
		for a := range s.requests {
			r.requested(a)
		}
	}()
	defer close(s.requests)
	resync := func(ctx context.Context, a control.ResyncRequest) (events.Incarnation, error) {
		found, err := s.Resync(ctx, a)
		return found.Incarnation, err
	}
	first, err := resync(t.Context(), control.ResyncRequest{ID: "a"})
	if err != nil || first <= 100 {
		t.Fatalf("incarnation %d, %v", first, err)
	}
	for _, a := range []control.ResyncRequest{{ID: "a"}, {ID: "late", Of: first - 1}, {ID: "a", Lost: true}} {
		if got, err := resync(t.Context(), a); err != nil || got != first {
			t.Errorf("%+v: incarnation %d, %v; want %d", a, got, err, first)
		}
	}
	second, err := resync(t.Context(), control.ResyncRequest{ID: "missing", Of: first})
	if err != nil || second <= first {
		t.Errorf("incarnation %d follows %d, %v", second, first, err)
	}
	if m.Counts().Resyncs != 2 {
		t.Errorf("%d resyncs", m.Counts().Resyncs)
	}
}
