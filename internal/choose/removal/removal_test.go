package removal

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	"github.com/kvatlas/kvatlas/internal/index/sole"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seed = flag.Uint64("seed", 1, "of random tests")

// TestAgainstTwin compares the loss and the unique blocks with sets of blocks. A request is a path of blocks, and a
// worker holds some prefixes of the paths.
func TestAgainstTwin(t *testing.T) {
	for round := range uint64(300) {
		rng := rand.New(rand.NewPCG(*seed, round))
		var workers []events.WorkerID
		held := map[events.WorkerID]map[uint64]bool{}
		for w := range 1 + rng.IntN(6) {
			id := events.WorkerID(fmt.Sprint("w", w))
			workers = append(workers, id)
			held[id] = map[uint64]bool{}
		}
		block := func(path, depth int) uint64 { return uint64(path*100 + depth) }
		for path := range 8 {
			for _, w := range workers {
				for d := range rng.IntN(6) {
					held[w][block(path, d)] = true
				}
			}
		}
		// The blocks are first joined on two nodes, then from node to node.
		unique := map[events.WorkerID]uint64{}
		var nodes [2]sole.Blocks
		for i, w := range workers {
			for b := range held[w] {
				nodes[i%2].Add(b, w)
			}
		}
		var all sole.Blocks
		for i := range nodes {
			for w, blocks := range nodes[i].Holders() {
				for _, b := range blocks {
					all.Add(b, w)
				}
			}
		}
		for w, blocks := range all.Holders() {
			if w != "" {
				unique[w] = uint64(len(blocks))
			}
		}
		want := map[events.WorkerID]uint64{}
		for _, w := range workers {
			for b := range held[w] {
				only := true
				for _, o := range workers {
					only = only && (o == w || !held[o][b])
				}
				if only {
					want[w]++
				}
			}
		}
		if !reflect.DeepEqual(unique, want) {
			t.Fatalf("seed %d, round %d: unique %v, want %v", *seed, round, unique, want)
		}

		var paths []int
		var sample [][]Depth
		depth := func(w events.WorkerID, path int) (n uint32) {
			for held[w][block(path, int(n))] {
				n++
			}
			return n
		}
		for range 1 + rng.IntN(20) {
			path := rng.IntN(8)
			paths = append(paths, path)
			var depths []Depth
			for _, w := range workers {
				if n := depth(w, path); n > 0 {
					depths = append(depths, Depth{w, n})
				}
			}
			sample = append(sample, depths)
		}
		loss := func(w events.WorkerID, gone map[events.WorkerID]bool) (blocks uint64) {
			for _, path := range paths {
				with, without := uint32(0), uint32(0)
				for _, o := range workers {
					if !gone[o] {
						if with = max(with, depth(o, path)); o != w {
							without = max(without, depth(o, path))
						}
					}
				}
				blocks += uint64(with - without)
			}
			return blocks
		}
		gone := map[events.WorkerID]bool{}
		for _, c := range Rank(workers, unique, sample) {
			if got := loss(c.Worker, gone); got != c.Blocks || gone[c.Worker] {
				t.Fatalf("seed %d, round %d: %+v after %v, want %d blocks", *seed, round, c, gone, got)
			}
			for _, w := range workers {
				if !gone[w] && loss(w, gone) < c.Blocks {
					t.Fatalf("seed %d, round %d: %+v before %s, which loses %d", *seed, round, c, w, loss(w, gone))
				}
			}
			gone[c.Worker] = true
		}
		if len(gone) != len(workers) {
			t.Fatalf("seed %d, round %d: %d of %d workers", *seed, round, len(gone), len(workers))
		}
	}
}
