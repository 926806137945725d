package selection

import (
	"time"

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

// engineEvery is the interval in which choices read the reports again, if neither a threshold nor an explanation needs
// the present ones.
const engineEvery = 50 * time.Millisecond

// engineStates has the reports of candidates at a moment.
type engineStates struct {
	at   time.Duration
	list []engineState // of candidates.list; nil: there are no reports
}

// engineState is the report of a rank.
type engineState struct {
	load.EngineUse
	report *routing.EngineReport // nil: no report
}

// engines returns the reports of candidates.
func (of *candidates) engines(s *Service, present bool) []engineState {
	now := s.cfg.Loads.Now()
	if known := of.reports.Load(); known != nil && !present && now-known.at < engineEvery {
		return known.list
	}
	states := &engineStates{at: now}
	s.cfg.Engines(func(use func(events.RankKey) load.EngineUse) {
		states.list = make([]engineState, len(of.ranks))
		for i := range of.ranks {
			u := use(of.ranks[i].RankKey)
			states.list[i].EngineUse = u
			if o := &states.list[i].Others; o.PrefillTokens == 0 && u.Running > 0 {
				// an engine that counts no tokens: waiting requests are as long as running ones
				o.PrefillTokens = u.Others.Waiting * (u.UsedBlocks * uint64(of.ranks[i].BlockSize) / u.Running)
			}
			states.list[i].report = states.list[i].Report()
		}
	})
	of.reports.Store(states)
	return states.list
}

// reported writes the engines' reports into the candidates. Requests of others count as load, like bookings.
func (s *Service) reported(x *scratch, of *candidates) {
	if s.cfg.Engines == nil {
		return
	}
	c := &s.cfg.Routing
	judged := c.ActiveDecodeBlocksThreshold != nil || c.ActivePrefillTokensThreshold != nil ||
		c.ActivePrefillTokensThresholdFrac != nil
	for i, e := range of.engines(s, judged || x.request.Explain) {
		if e.report == nil {
			continue
		}
		c, o := &x.list[i], &e.Others
		c.HasUsed, c.UsedBlocks, c.UsedOf, c.UsedPrefillTokens = e.HasUsed, e.UsedBlocks, e.TotalBlocks, e.PrefillTokens
		c.Engine = e.report
		c.ActiveRequests += o.Requests
		c.PrefillRequests += o.Waiting
		c.ActiveBlocks += o.Blocks
		c.ActivePrefillTokens += o.PrefillTokens
	}
}
