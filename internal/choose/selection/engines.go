package selection

import (
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Engines calls read with what tells of ranks how full their engines have said that they are, or not at all if none has
// said anything. What it is called with must not be used afterwards.
type Engines func(read func(use func(events.RankKey) load.EngineUse))

// reported writes into the candidates how full their engines have said that they are. That enters no cost, so it is
// left out where nobody reads it.
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
