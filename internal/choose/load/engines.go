package load

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	// EngineLife is how long a report counts. Engines report while they work, many times a second.
	EngineLife = 30 * time.Second

	// maxEngines is of how many ranks reports are kept.
	maxEngines = 1 << 17
)

// Engines is how full engines are, as they say themselves: the last report of each rank, while it is fresh. It is no
// load of ours and enters no cost; it decides who may be chosen. Each number has an age of its own, since engines and
// routers say different ones. Reports may come late, twice and out of order; the newest counts.
//
// Any number of goroutines may use it. Times are since the same moment.
type Engines struct {
	mu    sync.RWMutex
	rows  map[events.RankKey]*engineRow
	swept time.Duration // when what had expired was dropped last

	counts EngineCounts
}

// EngineCounts count reports by what became of them.
type EngineCounts struct {
	Taken, Late, Refused uint64 // Late: older than EngineLife; Refused: of too many ranks
}

// engineRow is what was said last of a rank, each with its time.
type engineRow struct{ used, total, decode, prefill said }

type said struct {
	value uint64
	at    time.Duration
	known bool
}

func (s *said) take(value *uint64, at time.Duration) {
	if value != nil && (!s.known || at >= s.at) {
		*s = said{*value, at, true}
	}
}

func (s *said) fresh(now time.Duration) bool { return s.known && now-s.at < EngineLife }

// EngineUse is what counts of a rank's reports. The zero value is that nobody has said anything.
type EngineUse struct {
	HasUsed       bool   // UsedBlocks is known: of the engine, or else of a router
	UsedBlocks    uint64 // in device memory
	TotalBlocks   uint64 // the capacity; 0: not said
	PrefillTokens uint64 // under way, as a router says; 0: none, or not said
}

// NewEngines returns a table without reports.
func NewEngines() *Engines { return &Engines{rows: map[events.RankKey]*engineRow{}} }

// Take enters reports, each as old as it says.
func (e *Engines) Take(now time.Duration, loads []events.EngineLoad) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if now-e.swept >= EngineLife {
		e.sweep(now)
	}
	for i := range loads {
		l := &loads[i]
		if l.AgeMS >= uint64(EngineLife/time.Millisecond) {
			e.counts.Late++
			continue
		}
		key := events.RankKey{Instance: l.Worker, Rank: l.Rank}
		row := e.rows[key]
		if row == nil {
			if len(e.rows) >= maxEngines {
				e.counts.Refused++
				continue
			}
			row = &engineRow{}
			e.rows[key] = row
		}
		at := now - time.Duration(l.AgeMS)*time.Millisecond
		row.used.take(l.UsedBlocks, at)
		row.total.take(l.TotalBlocks, at)
		row.decode.take(l.DecodeBlocks, at)
		row.prefill.take(l.PrefillTokens, at)
		e.counts.Taken++
	}
}

func (e *Engines) sweep(now time.Duration) {
	e.swept = now
	for key, row := range e.rows {
		if !row.used.fresh(now) && !row.total.fresh(now) && !row.decode.fresh(now) && !row.prefill.fresh(now) {
			delete(e.rows, key)
		}
	}
}

// Read calls read with what tells of ranks how full they are; it must not be used afterwards.
func (e *Engines) Read(now time.Duration, read func(use func(events.RankKey) EngineUse)) {
	e.mu.RLock()
	defer e.mu.RUnlock()
	if len(e.rows) == 0 {
		return
	}
	read(func(key events.RankKey) (u EngineUse) {
		row := e.rows[key]
		if row == nil {
			return u
		}
		switch {
		case row.used.fresh(now):
			u.HasUsed, u.UsedBlocks = true, row.used.value
		case row.decode.fresh(now):
			u.HasUsed, u.UsedBlocks = true, row.decode.value
		}
		if row.total.fresh(now) {
			u.TotalBlocks = row.total.value
		}
		if row.prefill.fresh(now) {
			u.PrefillTokens = row.prefill.value
		}
		return u
	})
}

// List returns what is fresh, by worker and rank. Numbers of different ages are reports of their own, so that another
// table that takes the list is as this one.
func (e *Engines) List(now time.Duration) []events.EngineLoad {
	e.mu.RLock()
	defer e.mu.RUnlock()
	list := make([]events.EngineLoad, 0, len(e.rows))
	for key, row := range e.rows {
		first := len(list)
		add := func(s *said, to func(l *events.EngineLoad) **uint64) {
			if !s.fresh(now) {
				return
			}
			age := uint64((now - s.at) / time.Millisecond)
			at := slices.IndexFunc(list[first:], func(l events.EngineLoad) bool { return l.AgeMS == age })
			if at < 0 {
				at = len(list) - first
				list = append(list, events.EngineLoad{Worker: key.Instance, Rank: key.Rank, AgeMS: age})
			}
			value := s.value
			*to(&list[first+at]) = &value
		}
		add(&row.used, func(l *events.EngineLoad) **uint64 { return &l.UsedBlocks })
		add(&row.total, func(l *events.EngineLoad) **uint64 { return &l.TotalBlocks })
		add(&row.decode, func(l *events.EngineLoad) **uint64 { return &l.DecodeBlocks })
		add(&row.prefill, func(l *events.EngineLoad) **uint64 { return &l.PrefillTokens })
	}
	slices.SortFunc(list, func(a, b events.EngineLoad) int {
		return cmp.Or(cmp.Compare(a.Worker, b.Worker), cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.AgeMS, b.AgeMS))
	})
	return list
}

// Counts are for metrics.
func (e *Engines) Counts() EngineCounts {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.counts
}
