package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestFleet runs a large cluster through what happens to clusters, one thing after the other, while workers come and go
// and queries are asked. A partition is without a ready owner only if all its owners died at once; no more of them move
// than rendezvous hashing asks for; each lease that expires is cleared once, and none that is renewed expires; a query
// finds all that anybody serves.
func TestFleet(t *testing.T) {
	s := size{nodes: 64, copies: 2, workers: 10_000, partitions: 512}
	if testing.Short() || testkit.Race { // the detector takes eight times as long, and there is one goroutine
		s = size{nodes: 12, copies: 2, workers: 1000, partitions: 64}
	}
	w := newWorld(t, 1, s)
	for i := range s.nodes {
		w.start(fmt.Sprintf("indexer-%d", i))
	}
	took := w.untilSettled()
	t.Logf("%d nodes started at once have settled after %v: %d partitions restored for %d to be kept", s.nodes, took,
		w.counts.restores, s.copies*int(s.partitions))
	if kept := s.copies * int(s.partitions); w.counts.restores > kept*21/20 {
		t.Errorf("%d nodes that start at once restore %d partitions; %d are to be kept", s.nodes, w.counts.restores,
			kept)
	}
	w.settling = false
	var dead cluster.Set // all nodes that had these died at once
	w.allowed = func(p events.Partition) bool { return dead.Has(p) }
	for p, n := range w.ready {
		if n != s.copies {
			t.Fatalf("partition %d is ready on %d nodes", p, n)
		}
	}
	for range s.workers {
		w.after(w.between(0, renewal), w.hire)
	}
	w.run(renewal)
	w.after(0, func() { w.churn(s.workers / 1000) })
	var ask func()
	ask = func() {
		w.query()
		w.after(time.Second, ask)
	}
	ask()

	any := func() *node { names := w.names(); return w.nodes[names[w.rng.IntN(len(names))]] }
	var late *node
	again := 0 // partitions that a phase has one take that had them
	phases := []struct {
		name string
		do   func() // one thing
		also time.Duration
		more func() // and when that time is over
	}{
		{"a node joins", func() { w.start("indexer-new") }, 0, nil},
		{"a node is killed", func() { any().end() }, deadAfter, nil},
		{"a node drains", func() { any().leaves = true }, 0, nil},
		{"a node is held for three seconds", func() { late = any(); late.held = true }, 3 * time.Second,
			func() { late.resume() }},
		{"NATS is away for 40 s", func() { w.down = true }, 40 * time.Second, w.back},
		{"a node is killed, and its name comes back at once", func() {
			n := any()
			held := n.machine.Held()
			again = held.Len()
			n.end()
			w.start(n.name)
		}, 0, nil},
		{"two nodes die at once", func() {
			a, b := any(), any()
			for a == b {
				b = any()
			}
			for p := range events.Partition(s.partitions) {
				if a.serves.Has(p) && b.serves.Has(p) {
					dead.Add(p)
				}
			}
			a.end()
			b.end()
		}, deadAfter, nil},
		{"two nodes join", func() { w.start("indexer-new-2"); w.start("indexer-new-3") }, 0, nil},
	}
	for _, phase := range phases {
		before, taken := w.names(), w.counts.takes
		w.longest, again = 0, 0
		phase.do()
		w.run(phase.also)
		if phase.more != nil {
			phase.more()
		}
		w.run(2 * time.Second) // until it can have been seen
		took := w.untilSettled()
		for p, n := range w.ready {
			if n != s.copies {
				t.Fatalf("%s: partition %d is ready on %d nodes", phase.name, p, n)
			}
		}
		moved := w.counts.takes - taken
		least, most := w.mustMove(before, w.names())
		least, most = least+again, most+again
		t.Logf("%s: %d partitions moved, settled after %v; longest with one replica %v", phase.name, moved,
			(phase.also + 2*time.Second + took).Round(100*ms), w.longest.Round(100*ms))
		if moved < least || moved > most {
			t.Errorf("%s: %d partitions moved; rendezvous hashing asks for %d to %d", phase.name, moved, least, most)
		}
		if got, want := w.without.String(), dead.String(); got != want {
			t.Errorf("%s: nobody served %q for a time; all owners died of %q", phase.name, got, want)
		}
		dead, w.without = cluster.Set{}, cluster.Set{}
	}
	w.calm = true
	w.run(2 * lease) // what has expired is cleared
	gone := 0
	for _, k := range w.workers {
		if k.clears > k.expect || k.clears < k.expect-k.back {
			t.Errorf("%s expired %d times, took that back %d times, and was cleared %d times", k.record.Instance,
				k.expect, k.back, k.clears)
		}
		if k.state == registry.Expired {
			t.Errorf("%s has expired and is not cleared", k.record.Instance)
		}
		if !k.alive && k.seq > 0 && w.now-k.died > 3*lease { // and had a word in the log before it died
			if !k.closed || k.state != "" {
				t.Errorf("%s has been gone for %v and is not cleared: closed %v, record %q", k.record.Instance,
					w.now-k.died, k.closed, k.state)
			}
			gone++
		}
		if k.alive && k.closed && w.now-k.renewed > lease {
			t.Errorf("%s lives and its incarnation is closed", k.record.Instance)
		}
	}
	c := &w.counts
	t.Logf(
		"%v of virtual time: %d workers, %d renewals, %d expiries, %d clears (%d fenced), %d came back; of %d that are long gone all are cleared",
		w.now, len(w.workers), c.renewals, c.expiries, c.clears, c.fenced, c.returns, gone)
	t.Logf("%d queries, each to %.1f other nodes; %d asked of a second one", c.queries,
		float64(c.requests)/float64(c.queries), c.nextAsks)
	t.Logf("%d beats of %d bytes, at most %d", c.beats, c.beatBytes/c.beats, c.beatMost)
	if c.clears == 0 || c.returns == 0 || gone == 0 || c.nextAsks == 0 {
		t.Error("something that was to be tried did not happen")
	}
}
