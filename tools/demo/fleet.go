package demo

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// underWay is the mean number of concurrent requests of a worker. A request ends after underWay later requests for
// every engine.
const underWay = 4

// tally is the sum of a fleet's work.
type tally struct {
	work []int // by worker: blocks computed, prompts and answers
	hit  int   // prompt blocks that the worker held
}

func newTally(workers int) tally { return tally{work: make([]int, workers)} }

// add counts a request. held blocks of the request were in the worker's cache.
func (t *tally) add(worker, blocks, held, output int) {
	t.work[worker] += blocks - held + output
	t.hit += held
}

// imbalance is the work of the busiest worker over the mean.
func (t *tally) imbalance() float64 {
	sum := 0
	for _, w := range t.work {
		sum += w
	}
	if sum == 0 {
		return 0
	}
	return float64(slices.Max(t.work)*len(t.work)) / float64(sum)
}

// shadow is a fleet that serves the same requests with another routing rule.
type shadow struct {
	tally
	choose func(busy []int) int // gets the running blocks of every worker
	caches []*enginesim.Cache
	busy   []int
	open   []opened // requests under way, oldest first
}

type opened struct{ worker, blocks int }

func newShadow(workers, capacity int, choose func(busy []int) int) *shadow {
	s := &shadow{tally: newTally(workers), choose: choose, busy: make([]int, workers)}
	for range workers {
		s.caches = append(s.caches, enginesim.NewCache(capacity))
	}
	return s
}

// serve serves a request on a worker. names are the names of the blocks, the prompt's first.
func (s *shadow) serve(names []events.BlockHash, prompt int) {
	w := s.choose(s.busy)
	held := s.caches[w].Hit(names[:prompt])
	s.caches[w].Use(names, nil)
	s.add(w, prompt, held, len(names)-prompt)
	s.busy[w] += len(names)
	s.open = append(s.open, opened{w, len(names)})
	if len(s.open) > underWay*len(s.caches) {
		s.busy[s.open[0].worker] -= s.open[0].blocks
		s.open = s.open[1:]
	}
}

// leastBusy is the worker with the fewest blocks under way.
func leastBusy(busy []int) int { return slices.Index(busy, slices.Min(busy)) }
