package radix

import (
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestTombstonesTwin compares rings that share a spare with plain lists, over growth, shrinking and names that return.
func TestTombstonesTwin(t *testing.T) {
	for seed := range uint64(60) {
		rng := rand.New(rand.NewPCG(seed, 1))
		var spare []tombstone
		var rings [3]tombstones
		var lists [3][]tombstone
		const bound, large = 32, 1000
		wraps := seed%2 == 0 // rings are never replaced, and their numbers wrap around
		if wraps {
			for i := range rings {
				rings[i] = tombstones{ring: make([]tombstone, 4*bound), first: 1<<32 - 200, next: 1<<32 - 200}
			}
		}
		spared := false
		for step := range 400 {
			i := rng.IntN(len(rings))
			m, list := &rings[i], &lists[i]
			switch rng.IntN(4) {
			case 0, 1:
				n := rng.IntN(20)
				if wraps {
					n = min(n, 4*bound-m.len())
				} else if rng.IntN(8) == 0 {
					n = rng.IntN(large)
				}
				if rng.IntN(4) > 0 {
					m.reserve(&spare, n)
				}
				for range n {
					e := tombstone{name: events.BlockHash(rng.IntN(500)), block: rng.Uint32()}
					m.push(e)
					*list = append(*list, e)
				}
			case 2: // the end of a message
				for m.len() > bound {
					if got := m.shift(); got.name != (*list)[0].name || got.block != (*list)[0].block {
						t.Fatalf("seed %d, step %d: shift returned %v, want %v", seed, step, got, (*list)[0])
					}
					*list = (*list)[1:]
				}
				m.shrink(&spare, bound)
				spared = spared || spare != nil
				if len(m.ring) > 4*bound {
					t.Fatalf("seed %d, step %d: memory for %d entries remains", seed, step, len(m.ring))
				}
			}
			for range rng.IntN(30) {
				name := events.BlockHash(rng.IntN(500))
				want, known := uint32(0), false
				for _, e := range *list {
					if e.name == name {
						want, known = e.block, true
					}
				}
				if got, ok := m.find(name); got != want || ok != known {
					t.Fatalf("seed %d, step %d: name %d has block %d, %v, want %d, %v", seed, step, name, got, ok, want,
						known)
				}
			}
		}
		if spared == wraps {
			t.Fatalf("seed %d: a ring became the spare: %v", seed, spared)
		}
	}
}
