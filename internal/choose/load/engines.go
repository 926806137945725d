package load

import (
	"cmp"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

const (
	// EngineLife is the time for which a report counts. Working engines report many times a second.
	EngineLife = 30 * time.Second

	// maxEngines limits the number of ranks with reports.
	maxEngines = 1 << 17
)

// Engines holds the last fresh report of each rank about the engine's usage. The used memory excludes ranks from a
// choice. Requests without a booking count as load: see [Others]. Each number has a separate age, because engines and
// routers report different numbers. Reports may arrive late, twice or out of order; the newest counts.
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
type engineRow struct {
	used, total, decode, prefill    reported
	running, waiting, waitingTokens reported
	others                          others
	source                          string // of the last report
}

// fields pairs the numbers of a row with the fields of a report.
func (r *engineRow) fields(l *events.EngineLoad) [7]engineField {
	return [...]engineField{{&r.used, &l.UsedBlocks}, {&r.total, &l.TotalBlocks}, {&r.decode, &l.DecodeBlocks},
		{&r.prefill, &l.PrefillTokens}, {&r.running, &l.Running}, {&r.waiting, &l.Waiting},
		{&r.waitingTokens, &l.WaitingTokens}}
}

type engineField struct {
	is *reported
	of **uint64
}

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
	HasUsed       bool   // the engine, or else a router, has reported UsedBlocks
	UsedBlocks    uint64 // in device memory
	TotalBlocks   uint64 // the capacity; 0: unknown
	PrefillTokens uint64 // under way, as reported by a router; 0: none, or unknown

	HasRequests      bool // the engine has reported its requests
	Running, Waiting uint64
	Others           Others // estimated load without a booking

	Source string        // of the last report
	Age    time.Duration // of the latest number
	known  bool          // some number is fresh
}

// Report returns the report for people; nil without a fresh number.
func (u *EngineUse) Report() *routing.EngineReport {
	if !u.known {
		return nil
	}
	r := &routing.EngineReport{Source: u.Source, AgeS: u.Age.Seconds()}
	if o := &u.Others; u.HasRequests {
		r.Requests = &routing.EngineRequests{Running: u.Running, Waiting: u.Waiting, Others: o.Requests,
			OthersWaiting: o.Waiting, OthersBlocks: o.Blocks, OthersPrefillTokens: o.PrefillTokens}
	}
	return r
}

// NewEngines returns a table without reports.
func NewEngines() *Engines { return &Engines{rows: map[events.RankKey]*engineRow{}} }

// Add adds reports, each with its own age. booked returns the load of a rank by bookings. If booked is nil, Add does
// not estimate the load without a booking from the reports.
func (e *Engines) Add(now time.Duration, loads []events.EngineLoad, booked func(events.RankKey) Load) {
	own := make([]Load, len(loads)) // booked must not be called under the lock
	for i := range loads {
		if l := &loads[i]; booked != nil && l.Running != nil {
			own[i] = booked(events.RankKey{Instance: l.Worker, Rank: l.Rank})
		}
	}
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
		if booked != nil && l.Running != nil && (!row.running.known || at > row.running.at) {
			row.others.update(at, othersOf(l, own[i]))
		}
		for _, f := range row.fields(l) {
			f.is.update(*f.of, at)
		}
		row.source = l.Source
		e.counts.Taken++
	}
}

func (e *Engines) sweep(now time.Duration) {
	e.swept = now
	for key, row := range e.rows {
		fresh := false
		for _, f := range row.fields(&events.EngineLoad{}) {
			fresh = fresh || f.is.fresh(now)
		}
		if !fresh {
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
		if row.running.fresh(now) {
			u.HasRequests, u.Running, u.Others = true, row.running.value, row.others.now(now)
			if row.waiting.fresh(now) {
				u.Waiting = row.waiting.value
			}
		}
		u.Source, u.Age = row.source, EngineLife
		for _, f := range row.fields(&events.EngineLoad{}) {
			if f.is.fresh(now) {
				u.Age, u.known = min(u.Age, now-f.is.at), true
			}
		}
		return u
	})
}

// List returns the fresh numbers, by worker and rank. Numbers of different ages are separate reports, so Take rebuilds
// an equal table from the list.
func (e *Engines) List(now time.Duration) []events.EngineLoad {
	e.mu.RLock()
	defer e.mu.RUnlock()
	list := make([]events.EngineLoad, 0, len(e.rows))
	for key, row := range e.rows {
		first := len(list)
		for k, f := range row.fields(&events.EngineLoad{}) {
			s := f.is
			if !s.fresh(now) {
				continue
			}
			age := uint64((now - s.at) / time.Millisecond)
			at := slices.IndexFunc(list[first:], func(l events.EngineLoad) bool { return l.AgeMS == age })
			if at < 0 {
				at = len(list) - first
				list = append(list, events.EngineLoad{Worker: key.Instance, Rank: key.Rank, AgeMS: age, Source: row.source})
			}
			value := s.value
			*row.fields(&list[first+at])[k].of = &value
		}
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
