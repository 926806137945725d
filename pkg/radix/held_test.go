package radix

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestEachHeld stores and removes random blocks of prompts with common prefixes and holes, and compares the holdings by
// first block with a set of all holdings.
func TestEachHeld(t *testing.T) {
	type holding struct {
		rank  RankID
		tier  events.Tier
		block events.BlockHash
	}
	for seed := range uint64(testkit.Rounds(6)) {
		r := rand.New(rand.NewPCG(seed, 11))
		x := New(Config{})
		var ranks []RankID
		for i := range 70 { // more than one word of a mask
			ranks = append(ranks, x.AddRank(1+uint32(i)%2, 16))
		}
		naive := map[holding]events.LocalHash{} // the first block of the prompt
		copies := map[holding]int{}
		for range 300 {
			i := r.IntN(len(ranks))
			tier := events.Device + events.Tier(r.IntN(2))
			e := events.Event{Kind: events.Stored, Tier: tier}
			name, first := "", events.LocalHash(1+r.IntN(5))
			for depth := range 1 + r.IntN(100) {
				local := first
				if depth > 0 {
					local = events.LocalHash(10 + r.IntN(1+depth%20/19))
				}
				name += fmt.Sprint(local, ".")
				block := events.BlockHash(len(name)<<32) | events.BlockHash(checksum(name))
				e.Locals, e.Blocks = append(e.Locals, local), append(e.Blocks, block)
				naive[holding{ranks[i], tier, block}] = first
				copies[holding{ranks[i], tier, block}]++
			}
			x.Apply(ranks[i], 0, []events.Event{e})
			for h := range naive {
				if r.IntN(100) == 0 {
					x.Apply(h.rank, 0, []events.Event{{Kind: events.Removed, Tier: h.tier, Blocks: []events.BlockHash{h.block}}})
					if copies[h]--; copies[h] == 0 {
						delete(naive, h)
					}
				}
			}
		}
		some := &RankSet{}
		for i, id := range ranks {
			if i%3 > 0 {
				some.Add(id)
			}
		}
		for space := range uint32(3) {
			want, got := map[events.LocalHash]uint64{}, map[events.LocalHash]uint64{}
			for h, first := range naive {
				for i, id := range ranks {
					if id == h.rank && i%3 > 0 && 1+uint32(i)%2 == space {
						want[first]++
					}
				}
			}
			x.EachHeld(space, some, func(first events.LocalHash, n uint64) { got[first] += n })
			if !maps.Equal(got, want) {
				t.Fatalf("seed %d, space %d: %v, want %v", seed, space, got, want)
			}
		}
	}
}

// checksum returns a hash of a name.
func checksum(name string) (sum uint32) {
	for _, c := range []byte(name) {
		sum = sum*31 + uint32(c)
	}
	return sum
}
