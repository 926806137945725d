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

// TestFleet runs a cluster, of 64 nodes if KVATLAS_TEST_WHOLE is set, through a series of failures and changes, during
// churn of workers and queries. A partition may be without a ready owner only if all owners died at the same time. The
// number of moves must not exceed the number that rendezvous hashing needs. Every expired lease is cleared once, and no
// renewed lease expires. A query finds all partitions that any node serves.
func TestFleet(t *testing.T) {
	t.Parallel()
	s := size{nodes: 12, copies: 2, workers: 1000, partitions: 64}
	if testkit.Whole { // .ci/daily
		s = size{nodes: 64, copies: 2, workers: 10_000, partitions: 512}
	}
	w := newWorld(t, 1, s)
	for i := range s.nodes {
		w.start(fmt.Sprintf("indexer-%d", i))
	}
	took := w.untilSettled()
	t.Logf("%d nodes started at once have settled after %v: %d partitions restored for %d to be kept", s.nodes, took,
		w.counts.restores, s.copies*int(s.partitions))
	if kept := s.copies * int(s.partitions); w.counts.restores > kept*21/20 {
		t.Errorf("%d nodes started at once restore %d partitions; want %d", s.nodes, w.counts.restores,
			kept)
	}
	w.settling = false
	var dead cluster.Set // partitions with a simultaneous death of all owners
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
	again := 0 // partitions restored by a former owner in a phase
	phases := []struct {
		name string
		do   func() // the change of the phase
		also time.Duration
		more func() // a second change after the duration
	}{
		{"a node joins", func() { w.start("indexer-new") }, 0, nil},
		{"a node is killed", func() { any().end() }, deadAfter, nil},
		{"a node drains", func() { any().leaves = true }, 0, nil},
		{"a node is held for three seconds", func() { late = any(); late.held = true }, 3 * time.Second,
			func() { late.resume() }},
		{"NATS is away for 40 s", func() { w.down = true }, 40 * time.Second, w.back},
		{"a node is killed and restarts at once with the same name", func() {
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
		w.run(2 * time.Second) // until other nodes can have seen the change
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
			t.Errorf("%s: %d partitions moved; rendezvous hashing needs %d to %d", phase.name, moved, least, most)
		}
		if got, want := w.without.String(), dead.String(); got != want {
			t.Errorf("%s: no node served %q for a time; all owners died of %q", phase.name, got, want)
		}
		dead, w.without = cluster.Set{}, cluster.Set{}
	}
	w.calm = true
	w.run(2 * lease) // until expired leases are cleared
	gone := 0
	for _, k := range w.workers {
		if k.clears > k.expect || k.clears < k.expect-k.back {
			t.Errorf("%s expired %d times, revoked the expiry %d times, and was cleared %d times", k.record.Instance,
				k.expect, k.back, k.clears)
		}
		if k.state == registry.Expired {
			t.Errorf("%s has expired and is not cleared", k.record.Instance)
		}
		if !k.alive && k.seq > 0 && w.now-k.died > 3*lease { // with a message in the log before the death
			if !k.closed || k.state != "" {
				t.Errorf("%s has been gone for %v and is not cleared: closed %v, record %q", k.record.Instance,
					w.now-k.died, k.closed, k.state)
			}
			gone++
		}
		if k.alive && k.closed && w.now-k.renewed > lease {
			t.Errorf("%s is alive with a closed incarnation", k.record.Instance)
		}
	}
	c := &w.counts
	t.Logf(
		"%v of virtual time: %d workers, %d renewals, %d expiries, %d clears (%d fenced), "+
			"%d came back; all %d dead workers are cleared",
		w.now, len(w.workers), c.renewals, c.expiries, c.clears, c.fenced, c.returns, gone)
	t.Logf("%d queries to %.1f other nodes on average; %d hedged", c.queries,
		float64(c.requests)/float64(c.queries), c.nextAsks)
	t.Logf("%d beats of %d bytes, at most %d", c.beats, c.beatBytes/c.beats, c.beatMost)
	if c.clears == 0 || c.returns == 0 || gone == 0 || c.nextAsks == 0 {
		t.Error("a planned fault did not happen")
	}
}
