package api

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// overlapsOf returns an unordered list of ranks, with many equal depths.
func overlapsOf(random *rand.Rand, n int) []Overlap {
	list := make([]Overlap, n)
	for i, at := range random.Perm(n) {
		list[i] = Overlap{
			Instance: events.WorkerID(fmt.Sprint("worker-", at/2)), Rank: events.Rank(at % 2),
			Device: random.Uint32N(30), Host: random.Uint32N(2) * (1<<32 - 1),
		}
	}
	return list
}

func TestSortOverlaps(t *testing.T) {
	random := rand.New(rand.NewPCG(7, 7))
	for range testkit.Rounds(3000) {
		list := overlapsOf(random, random.IntN(200))
		other := random.IntN(4) == 0
		for i := range list {
			o := &list[i]
			if other {
				o.Disk, o.External, o.L3, o.Guessed =
					random.Uint32N(2), random.Uint32N(2), random.Uint32N(2), random.Uint32N(2)
			}
			switch random.IntN(16) {
			case 0:
				o.Instance += "\x00"
			case 1:
				o.Instance += "-of-a-long-name"
			case 2:
				o.Instance = o.Instance[random.IntN(len(o.Instance)):]
			}
		}
		want := slices.Clone(list)
		slices.SortFunc(want, func(a, b Overlap) int { return a.compare(&b) })
		for range 2 { // unsorted, and sorted
			if SortOverlaps(list); !reflect.DeepEqual(list, want) {
				t.Fatalf("%v\nnot %v", list, want)
			}
		}
	}
}

func BenchmarkSortOverlaps(b *testing.B) {
	for _, n := range []int{8, 64, 256, 4000} {
		list := overlapsOf(rand.New(rand.NewPCG(1, 2)), n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			again := make([]Overlap, n)
			b.ReportAllocs()
			for b.Loop() {
				copy(again, list)
				SortOverlaps(again)
			}
		})
	}
}
