package node

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// TestAgesSurviveARestart adds pending and removed blocks, and restarts one node of two from a snapshot while the
// blocks age. Ages count in the times of the log, so both nodes, and a twin that reads the log, drop the same blocks at
// the same message.
func TestAgesSurviveARestart(t *testing.T) {
	w := newSite(t)
	const age = 2000
	w.index = radix.Config{PendingFor: age, TombstoneFor: age, MaxPending: 100, MaxTombstones: 100}
	w.start()
	ready := make(chan struct{})
	steady := New(Config{
		ID: "steady", Namespace: w.ns, Snapshots: w.bucket, SnapshotInterval: time.Hour, Index: w.index,
		Ready: func() { close(ready) },
	})
	ctx, cancel := context.WithCancel(w.ctx)
	var running sync.WaitGroup
	running.Go(func() { steady.Run(ctx) })
	defer func() { cancel(); running.Wait() }()
	select {
	case <-ready:
	case <-w.ctx.Done():
		t.Fatal("not ready")
	}

	key := events.RankKey{Instance: "w1"}
	pub, err := w.ns.OpenPublisher(w.ctx, key, jetstream.PublisherOptions{})
	w.must(err)
	truth := twin.New(twin.Config{MaxPending: 100, PendingFor: age, MaxTombstones: 100, TombstoneFor: age}, 4)
	var next events.EventID = 1
	var expired uint64 // blocks, for the twin
	say := func(evs ...events.Event) {
		t.Helper()
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: next, Model: "m", BlockSize: 4,
			Events: evs})
		w.must(err)
		next += events.EventID(len(evs))
		seq, err := pub.Publish(w.ctx, [][]byte{data})
		w.must(err)
		p, err := w.ns.PartitionOf(key.Instance)
		w.must(err)
		at, err := w.ns.TimeOf(w.ctx, p, seq)
		w.must(err)
		expired += truth.Apply(at, evs).Expired
	}
	store := func(parent events.BlockHash, names ...events.BlockHash) events.Event {
		e := events.Event{Kind: events.Stored, Tier: events.Device, HasParent: parent != 0, Parent: parent,
			Blocks: names}
		for _, n := range names {
			e.Locals = append(e.Locals, events.LocalHash(1000+n))
		}
		return e
	}
	remove := func(names ...events.BlockHash) events.Event {
		return events.Event{Kind: events.Removed, Tier: events.Device, Blocks: names}
	}
	type state struct {
		checksum uint64
		ranks    int
		parked   int64
		places   int64 // with a place in the index
		holdings [events.NumTiers]int64
	}
	look := func(n *Node) (s state) {
		t.Helper()
		info, err := w.ns.StreamInfo(w.ctx, 0)
		w.must(err)
		w.must(n.notifier.wait(w.ctx, func() bool { return n.applied(0) >= info.Last }))
		w.must(n.do(w.ctx, 0, func(m *Machine) {
			st := m.index.Stats()
			s = state{m.checksum(0), len(m.parts[0].ranks), st.Pending, st.Tombstones, st.Holdings}
		}))
		return s
	}
	both := func() state {
		t.Helper()
		one, other := look(w.node), look(steady)
		dropped := uint64(0)
		w.must(steady.do(w.ctx, 0, func(m *Machine) { dropped = m.counts.Index.Expired }))
		if one != other || int(one.holdings[0]) != truth.Holdings() || dropped != expired {
			t.Fatalf("restarted %+v; steady %+v, with %d blocks expired; the twin holds %d, and %d have expired", one,
				other, dropped, truth.Holdings(), expired)
		}
		return one
	}
	is := func(got state, parked, places, holdings int64) {
		t.Helper()
		if got.parked != parked || got.places != places || got.holdings[0] != holdings {
			t.Fatalf("%+v: want %d parked, %d places, %d held", got, parked, places, holdings)
		}
	}

	say(store(0, 1, 2, 3), store(50, 51, 52), remove(3))
	begun := time.Now()
	is(both(), 2, 1, 2)
	w.snapshot()
	w.restart()
	is(both(), 2, 1, 2)
	time.Sleep(age / 4 * time.Millisecond)
	say(store(60, 61), remove(2))
	both()
	w.snapshot()
	w.restart()
	both()

	// The first blocks are too old now, despite the restart. The second blocks are not, unless the machine is very slow.
	time.Sleep(time.Until(begun.Add((age + 100) * time.Millisecond)))
	say(store(0, 50), store(3, 4)) // the parent comes too late; a child of a forgotten block
	if both(); expired < 2 {
		t.Fatalf("%d blocks have expired", expired)
	}
	w.snapshot()
	w.restart()
	time.Sleep((age + 100) * time.Millisecond)
	say(store(0, 60), store(2, 5)) // all are too old
	is(both(), 1, 0, 3)
}
