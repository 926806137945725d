package radix

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestMatchNames: ranks with equal names share them, also after a rank has dropped its blocks. A rank with different
// names matches only by its own names. Names at a wrong place match nothing.
func TestMatchNames(t *testing.T) {
	x := New(Config{})
	locals, names := chain(1, 100)
	_, others := chain(2, 100)
	ids := []RankID{x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(1, 16)}
	x.Apply(ids[0], 0, []events.Event{stored(locals, names)})
	x.Apply(ids[1], 0, []events.Event{stored(locals[:60], names[:60])})
	x.Apply(ids[2], 0, []events.Event{stored(locals[:80], others[:80])}) // contradicts the shared names
	two := stored(locals[:10], names[:10])
	two.Group = 1
	x.Apply(ids[3], 0, []events.Event{stored(locals[:50], names[:50]), two}) // with two main groups
	x.Apply(ids[4], 0, []events.Event{stored(locals[:5], names[:5])})        // in another space
	expect := func(what string, space uint32, names []events.BlockHash, want map[RankID]uint32) {
		t.Helper()
		var a Named
		x.MatchNames(space, names, nil, &a)
		got := map[RankID]uint32{}
		for _, o := range a.Ranks {
			got[o.Rank] = o.Depth[0]
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	expect("all", 0, names, map[RankID]uint32{ids[0]: 100, ids[1]: 60, ids[3]: 10})
	expect("another's names", 0, others, map[RankID]uint32{ids[2]: 80})
	expect("names of both", 0, append(append([]events.BlockHash{}, others[:20]...), names[20:]...),
		map[RankID]uint32{ids[2]: 20})
	expect("another space", 1, names, map[RankID]uint32{ids[4]: 5})
	expect("a missing space", 9, names, nil)
	expect("not from the first block", 0, names[1:], nil)
	expect("a name is left out", 0, append(append([]events.BlockHash{}, names[:7]...), names[8:]...),
		map[RankID]uint32{ids[0]: 7, ids[1]: 7, ids[3]: 7})
	expect("none", 0, nil, nil)
	x.Apply(ids[0], 0, []events.Event{removed(names[30:40]...)})
	expect("a hole", 0, names, map[RankID]uint32{ids[0]: 30, ids[1]: 60, ids[3]: 10})
	x.Apply(ids[0], 0, []events.Event{{Kind: events.Cleared}})
	expect("one is cleared", 0, names, map[RankID]uint32{ids[1]: 60, ids[3]: 10})
	x.Apply(ids[1], 0, []events.Event{removed(names[50:60]...)})
	expect("an eviction", 0, names, map[RankID]uint32{ids[1]: 50, ids[3]: 10})
}

// TestNames compares the names of ranks with a map of sets, over random stores and removals of ranks that share names,
// contradict the shared names, and have several main groups.
func TestNames(t *testing.T) {
	type place struct {
		rank, family, block int
	}
	for seed := range uint64(testkit.Rounds(30)) {
		rng := rand.New(rand.NewPCG(seed, 5))
		x := New(Config{})
		var ids []RankID
		for range 4 {
			ids = append(ids, x.AddRank(0, 16))
		}
		held := map[place]int{}                              // copies in each group
		name := func(rank, family, i int) events.BlockHash { // rank 2 has names of its own for every other block
			if _, names := chain(uint64(family), 40); rank != 2 || i%2 == 0 {
				return names[i]
			}
			_, names := chain(uint64(family)+100, 40)
			return names[i]
		}
		for range 200 {
			rank, family := rng.IntN(len(ids)), 1+rng.IntN(3)
			if rng.IntN(3) > 0 {
				locals, _ := chain(uint64(family), 40)
				n := 1 + rng.IntN(40)
				var names []events.BlockHash
				for i := range n {
					names = append(names, name(rank, family, i))
					held[place{rank, family, i}]++
				}
				for group := range groups(rank) {
					e := stored(locals[:n], names)
					e.Group = group
					x.Apply(ids[rank], 0, []events.Event{e})
				}
				continue
			}
			i := rng.IntN(40)
			for at := (place{rank, family, i}); held[at] > 0; held[at]-- {
				for group := range groups(rank) {
					e := removed(name(rank, family, i))
					e.Group = group
					x.Apply(ids[rank], 0, []events.Event{e})
				}
			}
		}
		for rank, id := range ids {
			for family := 1; family <= 3; family++ {
				var want []events.BlockHash
				for i := 0; i < 40 && held[place{rank, family, i}] > 0; i++ {
					want = append(want, name(rank, family, i))
				}
				locals, _ := chain(uint64(family), 40)
				if got := x.Names(id, locals); !slices.Equal(got, want) {
					t.Fatalf("seed %d, rank %d, family %d: %x, want %x", seed, rank, family, got, want)
				}
				last := 40
				for last > 0 && held[place{rank, family, last - 1}] == 0 {
					last--
				}
				most := rng.IntN(41)
				got, n, ok := x.LastHeld(id)(locals, most)
				switch fits := last == 0 && most == 40 || last > 0 && most >= 40-last; {
				case ok != fits:
					t.Fatalf("seed %d, rank %d, family %d: %d of 40 blocks end with a held one, at most %d may follow: %t", seed,
						rank, family, last, most, ok)
				case ok && n != last, ok && n > 0 && got != name(rank, family, n-1):
					t.Fatalf("seed %d, rank %d, family %d: %x after %d blocks, want %d blocks", seed, rank, family, got, n, last)
				case ok && n > 0:
					if path, known := x.Path(id, got, nil); !known || !slices.Equal(path, locals[:n]) || !x.Knows(id, got) {
						t.Fatalf("seed %d, rank %d, family %d: the path to %x is %x, want %x", seed, rank, family, got, path, locals[:n])
					}
				}
			}
		}
	}
}

// groups returns the number of main groups of a rank in TestNames.
func groups(rank int) events.GroupIndex {
	if rank == 3 {
		return 2
	}
	return 1
}
