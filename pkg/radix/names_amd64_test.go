package radix

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestNamesByVectors enters the same names into two tables, with vectors and one by one. The tables are equal, slot by
// slot. In some rounds hashes are dense, so names are far from their homes and many move. Some hashes are equal, and
// some are the first and the last possible.
func TestNamesByVectors(t *testing.T) {
	if !vectors {
		t.Skip("this processor has no AVX2")
	}
	defer func() { vectors = true }()
	for seed := range uint64(testkit.Rounds(60)) {
		rng := rand.New(rand.NewPCG(seed, 7))
		const blocks = 3000
		engines, slabs := array[uint64]{s: make([]uint64, blocks)}, array[slab]{s: make([]slab, blocks/slabBlocks+1)}
		hashes := make([]uint64, blocks)
		var from uint64
		width := uint64(1) << (8 + rng.IntN(25)) // width of the hashes
		if edge := rng.IntN(3); edge == 1 {
			from = 1<<32 - width
		} else if edge == 2 {
			from = rng.Uint64N(1<<32 - width + 1)
		}
		for b := range engines.s {
			engines.s[b], hashes[b] = rng.Uint64(), from+rng.Uint64N(width)
		}
		var tables [2]names // without and with vectors
		m := &memory{limits: usualLimits}
		for i := range tables {
			tables[i] = names{engines: &engines, slabs: &slabs}
			tables[i].room(m, 1+int(seed%2)*blocks/3)
		}
		both := func(f func(tab *names)) {
			for i := range tables {
				vectors = i == 1
				f(&tables[i])
			}
			if a, b := &tables[0], &tables[1]; a.n != b.n || !slices.Equal(a.slots.s, b.slots.s) {
				t.Fatalf("seed %d: the tables differ", seed)
			}
		}
		in, out := []uint32{}, []uint32{}
		for b := range uint32(blocks - 1) {
			out = append(out, b+1)
		}
		move := func(from, to *[]uint32) (h, n []uint64, refs []uint32) { // some names
			rng.Shuffle(len(*from), func(i, j int) { (*from)[i], (*from)[j] = (*from)[j], (*from)[i] })
			k := len(*from) - rng.IntN(min(len(*from), 300)+1)
			refs = slices.Clone((*from)[k:])
			if from != to {
				*from, *to = (*from)[:k], append(*to, refs...)
			}
			for _, ref := range refs {
				h, n = append(h, hashes[ref]), append(n, engines.s[ref])
			}
			return h, n, refs
		}
		for range 60 {
			h, n, refs := move(&out, &in)
			both(func(tab *names) {
				tab.room(m, len(h))
				if k, at, there := tab.enterAll(m, n, h, 0, refs); k != len(h) || there {
					t.Fatalf("seed %d: name %d exists, at %d", seed, k, at)
				}
			})
			asked := []uint64{from, from + width - 1}
			for range 100 {
				asked = append(asked, hashes[rng.IntN(blocks)], from+rng.Uint64N(width))
			}
			var found [2][]uint32
			i := 0
			both(func(tab *names) {
				found[i] = make([]uint32, len(asked))
				tab.likely(asked, found[i])
				i++
			})
			if !slices.Equal(found[0], found[1]) {
				t.Fatalf("seed %d: found %v, in vectors %v", seed, found[0], found[1])
			}
			if h, n, refs = move(&in, &in); len(h) > 0 {
				both(func(tab *names) {
					if k, at, there := tab.enterAll(m, n, h, 0, refs); k != 0 || !there || at != refs[0] {
						t.Fatalf("seed %d: %d entered before an existing name at %d: %v at %d", seed, k, refs[0],
							there, at)
					}
				})
			}
			h, _, refs = move(&in, &out)
			both(func(tab *names) { tab.removeAll(h, refs) })
		}
	}
}
