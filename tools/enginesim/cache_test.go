package enginesim

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// naiveCache keeps a list, least recently used first.
type naiveCache struct {
	capacity int
	order    []events.BlockHash
}

func (c *naiveCache) hit(names []events.BlockHash) int {
	for i, n := range names {
		if !slices.Contains(c.order, n) {
			return i
		}
	}
	return len(names)
}

func (c *naiveCache) use(names []events.BlockHash) (gone []events.BlockHash) {
	for i := len(names) - 1; i >= 0; i-- {
		c.order = slices.DeleteFunc(c.order, func(n events.BlockHash) bool { return n == names[i] })
		c.order = append(c.order, names[i])
	}
	for len(c.order) > c.capacity {
		gone, c.order = append(gone, c.order[0]), c.order[1:]
	}
	return gone
}

// randomPrompt returns prompts with shared prefixes.
func randomPrompt(rng *rand.Rand, most int) []uint32 {
	tokens := make([]uint32, rng.IntN(most+1))
	family := rng.Uint32N(4)
	branch := rng.IntN(most)
	for i := range tokens {
		tokens[i] = family<<20 + uint32(i)
		if i >= branch {
			tokens[i] += uint32(branch) << 8
		}
	}
	return tokens
}

func TestCacheAgainstNaive(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 1))
		capacity := 1 + rng.IntN(60)
		c, twin := NewCache(capacity), &naiveCache{capacity: capacity}
		for step := range 400 {
			if rng.IntN(100) == 0 {
				c.Clear()
				twin.order = nil
			}
			names := AppendNames(nil, 7, 4, randomPrompt(rng, 100))
			if got, want := c.Hit(names), twin.hit(names); got != want {
				t.Fatalf("seed %d step %d: hit %d, want %d", seed, step, got, want)
			}
			if got, want := c.Use(names, nil), twin.use(names); !slices.Equal(got, want) {
				t.Fatalf("seed %d step %d: gone %v, want %v", seed, step, got, want)
			}
			if got := slices.Collect(c.All()); !slices.Equal(got, twin.order) || c.Len() != len(got) {
				t.Fatalf("seed %d step %d: holds %v (%d), want %v", seed, step, got, c.Len(), twin.order)
			}
		}
	}
}

func TestNames(t *testing.T) {
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}
	a := AppendNames(nil, 1, 4, tokens)
	if len(a) != 2 {
		t.Fatalf("%d names for two full blocks", len(a))
	}
	if b := AppendNames(nil, 1, 4, append([]uint32{1, 2, 3, 4}, 9, 9, 9, 9)); b[0] != a[0] || b[1] == a[1] {
		t.Errorf("a name must depend on all tokens up to the end of the block, and on no later token: %x %x", a, b)
	}
	if b := AppendNames(nil, 1, 4, append([]uint32{0, 2, 3, 4}, tokens[4:]...)); b[1] == a[1] {
		t.Error("equal blocks after different ones have the same name")
	}
	if b := AppendNames(nil, 2, 4, tokens); b[0] == a[0] {
		t.Error("the seed has no part in the name")
	}
}

func BenchmarkCacheUse(b *testing.B) {
	c := NewCache(60_000)
	names := AppendNames(nil, 1, 16, make([]uint32, 16*512))
	var gone []events.BlockHash
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		names[len(names)-1] = events.BlockHash(i)
		gone = c.Use(names, gone[:0])
	}
	b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(names)), "ns/block")
}
