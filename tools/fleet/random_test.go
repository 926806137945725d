package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// fault applies a random fault or change to the cluster.
func (w *world) fault(most int) {
	names := w.names()
	if len(names) == 0 {
		w.start(fmt.Sprint("n", w.lives))
		return
	}
	any := w.nodes[names[w.rng.IntN(len(names))]]
	switch w.rng.IntN(6) {
	case 0, 1:
		if len(names) < most {
			w.start(fmt.Sprint("n", w.lives))
		}
	case 2:
		if len(names) > 1 {
			any.end()
			if w.rng.IntN(2) == 0 { // restarts under the same name while the old record exists
				w.after(w.between(0, 3*deadAfter), func() { w.start(any.name) })
			}
		}
	case 3:
		any.leaves = len(names) > 1
	case 4:
		any.held = true
		w.after(w.between(0, 7*deadAfter), any.resume)
	case 5:
		w.down = true
		w.after(w.between(0, 4*deadAfter), w.back)
	}
}

// mayLack allows a partition without a ready owner for a while after the death of an owner.
func (w *world) mayLack() {
	w.settling = false
	w.allowed = func(p events.Partition) bool { return w.died[p] >= 0 && w.now-w.died[p] <= 4*deadAfter }
}

// rest waits without further faults until all partitions are at their places.
func (w *world) rest() {
	w.run(8 * deadAfter) // until held nodes and NATS are back
	w.untilSettled()
	w.run(2 * beat)
	if err := w.writers(); err != nil {
		w.Fatalf("at %v: %v", w.now, err)
	}
}

// TestRandomly applies random faults to clusters. A released partition must have another owner at every moment. Without
// further faults, all partitions must reach their places, with a single writer. Half of the clusters have zones, and
// some of these have nodes of a version without zones.
func TestRandomly(t *testing.T) {
	t.Parallel()
	seeds := 40
	if testing.Short() || testkit.Race {
		seeds = 20
	}
	takes, releases := 0, 0
	for seed := range uint64(seeds) {
		s := size{copies: int(seed % 4), partitions: 32, slowest: time.Second, stale: true}
		if seed%8 >= 4 {
			s.zones, s.old = 1+int(seed/8%4), int(seed/8%3*4)
		}
		w := newWorld(t, seed, s)
		w.mayLack()
		for i := range 1 + int(seed%5) {
			w.start(fmt.Sprint("first-", i))
		}
		for range 4 {
			for range 1 + w.rng.IntN(12) {
				w.run(w.between(0, 12*beat))
				w.fault(8)
			}
			w.rest()
		}
		takes, releases = takes+w.counts.takes, releases+w.counts.releases
	}
	t.Logf("%d seeds: %d partitions acquired, %d released", seeds, takes, releases)
	if takes == 0 || releases == 0 {
		t.Error("nothing moved")
	}
}

// TestLarge runs 64 nodes with 512 partitions through faults.
func TestLarge(t *testing.T) {
	t.Parallel()
	const nodes = 64
	w := newWorld(t, 7, size{copies: 2, partitions: 512, stale: true})
	w.mayLack()
	for i := range nodes {
		w.start(fmt.Sprint("first-", i))
	}
	w.untilSettled()
	for range testkit.Rounds(6) {
		w.run(w.between(0, 12*beat))
		w.fault(nodes)
	}
	w.rest()
	t.Logf("%v of virtual time: %d acquired, %d released", w.now, w.counts.takes, w.counts.releases)
}
