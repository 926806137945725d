package demo

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// underWay is how many requests a worker has under way at a time, in the mean: a request ends when so many for each
// engine have come after it.
const underWay = 4

// tally is what became of the requests of a fleet.
type tally struct {
	work []int // by worker: blocks computed, prompts and answers
	hit  int   // blocks of prompts that their worker held
}

func newTally(workers int) tally { return tally{work: make([]int, workers)} }

// add counts a request of which a worker held so many blocks.
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

// shadow is a fleet that serves the same requests, each by the worker that a rule of its own chooses.
type shadow struct {
	tally
	choose func(busy []int) int // by the blocks that each worker has under way
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

// serve has a worker serve a request, whose blocks have these names, the prompt's first.
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
