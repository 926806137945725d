package load

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// othersLife is the time for which an estimated load without a booking counts.
const othersLife = 10 * time.Second

// Others is the load of requests without a booking. An engine reports all requests. The excess over the booked and
// foreign requests is the load without a booking.
type Others struct {
	Requests      uint64 // running and waiting
	Waiting       uint64 // of Requests
	Blocks        uint64 // of device memory
	PrefillTokens uint64 // of waiting requests; 0: unknown, or none
}

// least returns the smaller of each value.
func (o Others) least(p Others) Others {
	return Others{min(o.Requests, p.Requests), min(o.Waiting, p.Waiting), min(o.Blocks, p.Blocks),
		min(o.PrefillTokens, p.PrefillTokens)}
}

// othersOf returns the load without a booking in a report. own has the booked and foreign requests at the arrival of
// the report.
func othersOf(l *events.EngineLoad, own Load) (o Others) {
	excess := func(all *uint64, own int64) uint64 {
		if all == nil {
			return 0
		}
		return *all - min(*all, uint64(max(own, 0)))
	}
	requests := *l.Running
	if l.Waiting != nil {
		requests += *l.Waiting
	}
	o.Requests = excess(&requests, int64(own.Requests))
	o.Waiting = min(excess(l.Waiting, int64(own.Prefilling)), o.Requests)
	o.PrefillTokens = excess(l.WaitingTokens, own.PrefillTokens)
	if o.Requests > 0 {
		o.Blocks = excess(l.UsedBlocks, own.Blocks)
	}
	return o
}

// others has the estimates of the two latest reports of a rank. The smaller estimate counts, because the beginning
// and the end of a booked request reach the engine and the service at different moments.
type others struct {
	last, before Others
	at, atBefore time.Duration
	known        bool
}

func (o *others) update(now time.Duration, of Others) {
	if !o.known || now-o.at >= othersLife {
		*o = others{last: of, before: of, at: now, atBefore: now, known: true}
		return
	}
	o.before, o.atBefore = o.last, o.at
	o.last, o.at = of, now
}

// now returns the present estimate.
func (o *others) now(now time.Duration) Others {
	if !o.known || now-o.at >= othersLife {
		return Others{}
	}
	if now-o.atBefore >= othersLife {
		return o.last
	}
	return o.last.least(o.before)
}

// Booked returns the load of a rank by the booked and foreign requests of all models.
func (s *Service) Booked(key events.RankKey) (sum Load) {
	add := func(t *Table) {
		if row := t.byRank[key]; row != nil {
			l := &t.loads[row.index]
			sum.PrefillTokens += l.PrefillTokens
			sum.Blocks += l.Blocks
			sum.Requests += l.Requests
			sum.Prefilling += l.Prefilling
		}
	}
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	for _, m := range s.Machine.models {
		add(m.table)
	}
	s.foreign.mu.RLock()
	defer s.foreign.mu.RUnlock()
	for _, t := range s.foreign.tables {
		add(t)
	}
	return sum
}
