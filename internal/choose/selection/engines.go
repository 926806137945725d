package selection

import (
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Engines calls read with a function that returns the reported memory of a rank. It does not call read without reports.
// The function is valid only during the call.
type Engines func(read func(use func(events.RankKey) load.EngineUse))

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
