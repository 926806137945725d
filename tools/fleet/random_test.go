package fleet

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// fault does one thing to the cluster.
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
			if w.rng.IntN(2) == 0 { // and comes back under its name, with its old record still there
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

// mayLack lets a partition be without a ready owner for a while after one of its owners died.
func (w *world) mayLack() {
	w.settling = false
	w.allowed = func(p events.Partition) bool { return w.died[p] >= 0 && w.now-w.died[p] <= 4*deadAfter }
}

// rest lets nothing happen until everything is where it belongs.
func (w *world) rest() {
	w.run(8 * deadAfter) // until who is held and what is down is back
	w.untilSettled()
	w.run(2 * beat)
	if err := w.writers(); err != nil {
		w.Fatalf("at %v: %v", w.now, err)
	}
}

// TestRandomly does things to clusters: what is let go has another owner at every moment, and when nothing happens any
// more, everything is where it belongs, and written by one. Half of them have zones, and some of those nodes of a
// version that knows none.
func TestRandomly(t *testing.T) {
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
	t.Logf("%d seeds: %d partitions taken, %d let go", seeds, takes, releases)
	if takes == 0 || releases == 0 {
		t.Error("nothing moved")
	}
}

// TestLarge runs 64 nodes with 512 partitions through faults.
func TestLarge(t *testing.T) {
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
	t.Logf("%v of virtual time: %d taken, %d let go", w.now, w.counts.takes, w.counts.releases)
}
