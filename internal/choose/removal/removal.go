// Package removal ranks workers by the reuse lost with a removal.
//
//	order := removal.Rank(workers, unique, sample) // remove the workers in this order
//
// A removed worker loses the blocks without a second holder. The loss depends on the demand: a request with the longest
// prefix on the removed worker computes the difference to the second longest prefix again. [Rank] sums the differences
// over a sample of recent requests. After every removal, Rank compares only the remaining workers, because the last
// copy of a block becomes unique with the removal of the second copy.
//
// The package has no state and does no I/O.
package removal

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Depth is the number of a request's blocks, from the start, that a worker holds.
type Depth struct {
	Worker events.WorkerID
	Blocks uint32
}

// Cost is the loss by the removal of a worker after the workers before it in the order.
type Cost struct {
	Worker   events.WorkerID
	Requests int    // requests of the sample that lose blocks
	Blocks   uint64 // lost blocks of these requests
}

// Rank returns the workers in the order of removal, the smallest loss first. Of equal losses, the worker
// with the smaller number in unique comes first, then the smaller name. sample has the depths of a request, once for a
// worker, in any order. Rank sorts and shortens the lists in sample.
func Rank(workers []events.WorkerID, unique map[events.WorkerID]uint64, sample [][]Depth) []Cost {
	for _, depths := range sample {
		slices.SortStableFunc(depths, func(a, b Depth) int { return cmp.Compare(b.Blocks, a.Blocks) })
	}
	left := slices.Clone(workers)
	slices.Sort(left)
	order := make([]Cost, 0, len(left))
	gone := map[events.WorkerID]bool{}
	for len(left) > 0 {
		costs := losses(sample, gone)
		at := 0
		for i, w := range left {
			a, b := costs[w], costs[left[at]]
			if c := cmp.Or(cmp.Compare(a.Blocks, b.Blocks), cmp.Compare(unique[w], unique[left[at]])); c < 0 {
				at = i
			}
		}
		next := costs[left[at]]
		next.Worker = left[at]
		order, gone[next.Worker] = append(order, next), true
		left = slices.Delete(left, at, at+1)
	}
	return order
}

// losses returns the loss by the removal of a worker, for all workers. gone are the removed workers.
func losses(sample [][]Depth, gone map[events.WorkerID]bool) map[events.WorkerID]Cost {
	costs := map[events.WorkerID]Cost{}
	for i := range sample {
		sample[i] = slices.DeleteFunc(sample[i], func(d Depth) bool { return gone[d.Worker] })
		lost := uint32(0)
		switch depths := sample[i]; {
		case len(depths) == 0:
			continue
		case len(depths) == 1:
			lost = depths[0].Blocks
		default:
			lost = depths[0].Blocks - depths[1].Blocks
		}
		if lost > 0 {
			c := costs[sample[i][0].Worker]
			c.Requests++
			c.Blocks += uint64(lost)
			costs[sample[i][0].Worker] = c
		}
	}
	return costs
}
