package hicache

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// TestMapAgainstController compares Map and Rule with a controller that walks batch by batch.
func TestMapAgainstController(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range testkit.Rounds(3000) {
		n := rng.IntN(400)
		present, known, pages := NewBitmap(n), NewBitmap(n).fill(n), make([]bool, n)
		density := []float64{rng.Float64(), 0.99, 1}[rng.IntN(3)]
		for i := range n {
			if rng.Float64() < density {
				pages[i] = true
				present.Set(i)
			}
		}
		s := &SGLang{PageSize: 1 + rng.IntN(100), PrefetchThreshold: rng.IntN(2) * rng.IntN(1000),
			PrefetchCapacity: rng.IntN(2) * rng.IntN(5000)}
		m := NewMap(n, present, known)
		total := 0
		var ranges [][2]uint32
		for i := range pages {
			if !pages[i] {
				continue
			}
			total++
			if i == 0 || !pages[i-1] {
				ranges = append(ranges, [2]uint32{uint32(i)})
			}
			ranges[len(ranges)-1][1] = uint32(i + 1)
		}
		if int(m.Total()) != total || !slices.Equal(m.Ranges(), ranges) {
			t.Fatalf("%v: total %d, ranges %v", pages, m.Total(), m.Ranges())
		}
		for have := range n + 2 {
			got, why := m.Load(uint32(have), s.Rule())
			there, would := wouldLoad(s, pages, have)
			if int(got) != would || (would < there) != (why == beyondThreshold || why == beyondCapacity) {
				t.Fatalf("%+v %v from %d: %d (%s), want %d of %d", s, pages, have, got, why, would, there)
			}
		}
	}
}

// BenchmarkMerge256 merges for 256 workers.
func BenchmarkMerge256(b *testing.B) {
	const blocks = 767
	present, known := NewBitmap(blocks).fill(blocks), NewBitmap(blocks).fill(blocks)
	rule := (&SGLang{PageSize: 16}).Rule()
	b.ReportAllocs()
	for b.Loop() {
		m := NewMap(blocks, present, known)
		for w := range uint32(256) {
			m.Load(w*3, rule)
		}
	}
}

// fill sets bits 0 to n-1.
func (b Bitmap) fill(n int) Bitmap {
	for i := range b {
		b[i] = 1<<64 - 1
	}
	if n&63 != 0 {
		b[n>>6] &= 1<<(n&63) - 1
	}
	return b
}
