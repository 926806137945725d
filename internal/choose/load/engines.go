package load

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	// EngineLife is the time for which a report counts. Working engines report many times a second.
	EngineLife = 30 * time.Second

	// maxEngines limits the number of ranks with reports.
	maxEngines = 1 << 17
)

// Engines holds the last fresh report of each rank about the usage of its engine. The usage is not part of a load or a
// cost; it excludes ranks from a choice. Each number has its own age, since engines and routers report different
// numbers. Reports may arrive late, twice or out of order; the newest counts.
//
// Engines is safe for concurrent use. All times count from the same moment.
type Engines struct {
	mu    sync.RWMutex
	rows  map[events.RankKey]*engineRow
	swept time.Duration // the time of the last sweep

	counts EngineCounts
}

// EngineCounts counts reports by result.
type EngineCounts struct {
	Taken, Late, Refused uint64 // Late: older than EngineLife; Refused: of too many ranks
}

// engineRow has the last reported numbers of a rank, each with its time.
type engineRow struct{ used, total, decode, prefill reported }

type reported struct {
	value uint64
	at    time.Duration
	known bool
}

func (s *reported) update(value *uint64, at time.Duration) {
	if value != nil && (!s.known || at >= s.at) {
		*s = reported{*value, at, true}
	}
}

func (s *reported) fresh(now time.Duration) bool { return s.known && now-s.at < EngineLife }

// EngineUse is the fresh part of a rank's reports. The zero value means no reports.
type EngineUse struct {
	HasUsed       bool   // UsedBlocks is known, from the engine or else from a router
	UsedBlocks    uint64 // in device memory
	TotalBlocks   uint64 // the capacity; 0: unknown
	PrefillTokens uint64 // under way, as reported by a router; 0: none, or unknown
}

// NewEngines returns a table without reports.
func NewEngines() *Engines { return &Engines{rows: map[events.RankKey]*engineRow{}} }

// Take adds reports, each with its own age.
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
		row.used.update(l.UsedBlocks, at)
		row.total.update(l.TotalBlocks, at)
		row.decode.update(l.DecodeBlocks, at)
		row.prefill.update(l.PrefillTokens, at)
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

// Read calls read with a function that returns the use of a rank; the function is invalid afterwards.
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

// List returns the fresh numbers, by worker and rank. Numbers of different ages are separate reports, so a table that
// takes the list equals this one.
func (e *Engines) List(now time.Duration) []events.EngineLoad {
	e.mu.RLock()
	defer e.mu.RUnlock()
	list := make([]events.EngineLoad, 0, len(e.rows))
	for key, row := range e.rows {
		first := len(list)
		add := func(s *reported, to func(l *events.EngineLoad) **uint64) {
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

// Counts returns the counts for metrics.
func (e *Engines) Counts() EngineCounts {
	e.mu.RLock()
	defer e.mu.RUnlock()
	return e.counts
}
