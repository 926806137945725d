package routesim

import (
	"strconv"

	"github.com/kvatlas/kvatlas/internal/choose/hot"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// warmUp copies hot prefixes as an indexer with --warm-up does.
type warmUp struct {
	tracker *hot.Tracker
	planner hot.Planner
	next    micros // of the next decision
	numbers map[events.BlockHash]block
	copies  int
}

const (
	warmEvery  = 1_000_000 // µs between decisions
	warmListed = 16        // prefixes in a decision
)

// newWarmUp returns nil for an arm without shared state, which has no place to count the demand.
func newWarmUp(cfg Config, way way) *warmUp {
	if cfg.WarmUp == 0 || !way.shares || way.knows != knowsIndex || way.policy == "" {
		return nil
	}
	w := &warmUp{tracker: hot.New(hot.Config{Seed: cfg.Seed}), planner: hot.Planner{PerMinute: cfg.WarmUp},
		numbers: map[events.BlockHash]block{}}
	for b, name := range cfg.Workload.names {
		w.numbers[name] = block(b)
	}
	return w
}

// copyHot starts copies, at most once a second.
func (s *sim) copyHot() {
	w := s.fleet.warm
	if w == nil || s.now < w.next {
		return
	}
	w.next = s.now + warmEvery
	list := hot.Merge(warmListed, w.tracker.Prefixes(duration(s.now), hot.Listed))
	for i := range list {
		p := &list[i]
		if p.Locals == nil {
			continue
		}
		r := &request{prompt: w.prompt(p, s.Workload.Engine.BlockSize), output: 1, number: -1, sent: s.now, copies: true}
		ranks := s.fleet.list(s.fleet.routers[0], r, s.now)
		best, cost, _ := hot.Target(&routing.Request{ISL: uint64(r.prompt.Tokens),
			BlockSize: uint32(s.Workload.Engine.BlockSize), Blocks: uint64(p.Depth)}, ranks)
		if best < 0 {
			continue
		}
		r.worker = s.fleet.live[best]
		c := &hot.Candidate{Hash: p.Hash, Worker: events.WorkerID(strconv.Itoa(r.worker)), Helped: p.Helped,
			SavesMSPerS: p.Saves, CostMS: cost}
		if !w.planner.Take(duration(s.now), c) {
			continue
		}
		r.before = ranks[best].Device
		s.fleet.book(s.fleet.routers[0], r, r.prompt.Tokens-int(r.before)*s.Workload.Engine.BlockSize, s.now)
		s.toEngine(r)
	}
}

// prompt returns a prefix as a prompt.
func (w *warmUp) prompt(p *hot.Prefix, size int) *Prompt {
	prompt := &Prompt{Tokens: int(p.Depth) * size}
	for _, name := range p.Locals {
		prompt.Names = append(prompt.Names, events.BlockHash(name))
		prompt.blocks = append(prompt.blocks, w.numbers[events.BlockHash(name)])
	}
	return prompt
}

// copied records a completed copy.
func (s *sim) copied(r *request) {
	w := s.fleet.warm
	names := r.prompt.Names
	w.copies++
	w.planner.Done(events.SeqHash(names[len(names)-1]))
	w.tracker.Copied(duration(s.now), hot.Copy{Hash: events.SeqHash(names[len(names)-1]), Depth: uint32(len(names)),
		Rank: events.RankKey{Instance: s.fleet.workers[r.worker].ID}, Before: r.before})
}
