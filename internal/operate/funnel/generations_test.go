package funnel

import (
	"math/rand/v2"
	"testing"
)

// TestGenerations compares the table with two Go maps, over keys with many neighbours, as in engines that number their
// blocks, and over all sizes of a generation.
func TestGenerations(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 5))
	for most := 1; most < 200; most++ {
		g := generations[int]{most: most}
		young, old, lost := map[uint64]int{}, map[uint64]int{}, uint64(0)
		for range 10 * most {
			k := rng.Uint64N(uint64(4 * most)) // includes 0
			if rng.IntN(8) == 0 {
				k = rng.Uint64()
			}
			want, known := young[k]
			if !known {
				want, known = old[k]
			}
			if got, ok := g.get(k); got != want || ok != known {
				t.Fatalf("%d of %d is %d, %v; want %d, %v", k, most, got, ok, want, known)
			}
			if rng.IntN(2) == 0 {
				continue
			}
			wantTurned := false
			if _, there := young[k]; !there && len(young) == most {
				delete(old, k)
				lost += uint64(len(old))
				wantTurned = len(old) > 0 || known
				old, young = young, map[uint64]int{}
			}
			delete(old, k)
			v, turned := g.put(k)
			if *v != want || turned != wantTurned || g.lost != lost {
				t.Fatalf("%d of %d is %d, turned %v, lost %d; want %d, %v, %d", k, most, *v, turned, g.lost, want,
					wantTurned, lost)
			}
			*v++
			young[k] = want + 1
		}
	}
}

// TestBoundChanges: a growing bound keeps all entries, and a shrinking bound frees memory.
func TestBoundChanges(t *testing.T) {
	g := generations[int]{most: 1 << 10}
	fill := func(from, n int) {
		for k := from; k < from+n; k++ {
			v, _ := g.put(uint64(k))
			*v = k
		}
	}
	fill(1, 1<<10)
	g.most = 1 << 14
	fill(2000, 1<<14)
	if v, ok := g.get(2000); !ok || v != 2000 {
		t.Fatalf("2000 is %d, %v after the bound has grown", v, ok)
	}
	g.most = 1 << 10
	fill(50_000, 3<<10)
	if n := len(g.young.slots) + len(g.old.slots); n > 2*slotsFor(1<<10) {
		t.Errorf("%d slots for twice %d keys", n, 1<<10)
	}
	if v, ok := g.get(50_000 + 3<<10 - 1); !ok || v != 50_000+3<<10-1 {
		t.Errorf("the last key is %d, %v", v, ok)
	}
	for indexed, want := range map[uint64]int{0: 1 << 16, 100_000: 400_000, 1 << 30: 1 << 19} {
		if got := usualBlocks(indexed); got != want {
			t.Errorf("the bound is %d blocks for %d in the index, not %d", got, indexed, want)
		}
	}
}
