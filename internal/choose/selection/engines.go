package selection

import (
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Engines calls read with a function that returns the reported memory of a rank. It does not call read without reports.
// The function is valid only during the call.
type Engines func(read func(use func(events.RankKey) load.EngineUse))

// Penalties calls read with a function that returns the penalty of a worker, or nil. It does not call read without
// failures. The function is valid only during the call.
type Penalties func(read func(of func(events.WorkerID) *routing.Penalty))

// penalise writes the penalties of workers into the candidates.
func (s *Service) penalise(x *scratch, of *candidates) {
	if s.cfg.Penalties == nil {
		return
	}
	s.cfg.Penalties(func(penalty func(events.WorkerID) *routing.Penalty) {
		for i := range x.list {
			if i > 0 && of.ranks[i].Instance == of.ranks[i-1].Instance {
				x.list[i].Penalty = x.list[i-1].Penalty
			} else {
				x.list[i].Penalty = penalty(of.ranks[i].Instance)
			}
		}
	})
}

// reported writes the engines' reported memory into the candidates. No cost depends on it, so it is omitted without a
// reader.
func (s *Service) reported(x *scratch, of *candidates) {
	c := &s.cfg.Routing
	judged := c.ActiveDecodeBlocksThreshold != nil || c.ActivePrefillTokensThreshold != nil ||
		c.ActivePrefillTokensThresholdFrac != nil
	if s.cfg.Engines == nil || !judged && !x.request.Explain {
		return
	}
	s.cfg.Engines(func(use func(events.RankKey) load.EngineUse) {
		for i := range x.list {
			u, c := use(of.ranks[i].RankKey), &x.list[i]
			c.HasUsed, c.UsedBlocks, c.UsedOf, c.UsedPrefillTokens = u.HasUsed, u.UsedBlocks, u.TotalBlocks, u.PrefillTokens
		}
	})
}
