package host

import (
	"cmp"
	"fmt"
	"sync"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Figures count the events of all ranks of this process. Figures are safe for concurrent use.
type Figures struct {
	QueueMost  int  // bytes of a single rank
	MayBeEmpty bool // the process is ready without a rank
	Tracer     *tracing.Tracer

	mu    sync.Mutex
	ranks map[*watcher]*rankFigures
	past  rankFigures // of earlier shims
}

type rankFigures struct {
	counts  shim.Counts
	queued  int
	skipped events.SkipCounts
	state   shim.State
	refused bool
	crowded uint64 // batches refused by the log
}

// update calls change with the figures of a rank.
func (f *Figures) update(w *watcher, change func(*rankFigures)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ranks == nil {
		f.ranks = map[*watcher]*rankFigures{}
	}
	if f.ranks[w] == nil {
		f.ranks[w] = &rankFigures{state: shim.State{CatchingUp: true}}
	}
	change(f.ranks[w])
}

// Foreign counts a message of an engine without a shim.
func (f *Figures) Foreign() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.past.counts.Foreign++
}

// end removes a rank. The counts of the rank stay in the sum.
func (f *Figures) end(w *watcher) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if r := f.ranks[w]; r != nil {
		f.past.add(r)
		delete(f.ranks, w)
	}
}

// add adds the growing figures.
func (r *rankFigures) add(o *rankFigures) {
	a, b := &r.counts, &o.counts
	a.Taken, a.Events, a.Blocks, a.Messages = a.Taken+b.Taken, a.Events+b.Events, a.Blocks+b.Blocks, a.Messages+b.Messages
	a.Undecodable, a.Overtaken, a.Gaps = a.Undecodable+b.Undecodable, a.Overtaken+b.Overtaken, a.Gaps+b.Gaps
	a.Restarts, a.Departures, a.Resyncs = a.Restarts+b.Restarts, a.Departures+b.Departures, a.Resyncs+b.Resyncs
	a.Snapshots, a.JoinedLate = a.Snapshots+b.Snapshots, a.JoinedLate+b.JoinedLate
	a.Corrections, a.Unreadable = a.Corrections+b.Corrections, a.Unreadable+b.Unreadable
	a.Foreign += b.Foreign
	r.crowded += o.crowded
	for i, n := range o.skipped {
		r.skipped[i] += n
	}
}

// Sum is the sum of the figures of all ranks.
type Sum struct {
	Ranks                 map[string]uint64 // by the engines' state: connected, silent, gone, asleep, unknown
	CatchingUp, Refused   int               // ranks
	QueueBytes, QueueMost int               // of events in the queue to the log

	Messages, Events, Blocks, Published uint64

	Incidents map[string]uint64 // by kind
	Skipped   map[string]uint64 // skipped events, by reason

	Spans map[string]uint64 // of traces, by outcome
}

// Sum returns the sum of the figures of all ranks.
func (f *Figures) Sum() *Sum {
	f.mu.Lock()
	defer f.mu.Unlock()
	sum := f.past
	out := &Sum{Spans: f.Tracer.Counts(), Skipped: map[string]uint64{}, QueueMost: f.QueueMost * len(f.ranks),
		Ranks: map[string]uint64{"connected": 0, "silent": 0, "gone": 0, "asleep": 0, "unknown": 0}}
	for _, r := range f.ranks {
		sum.add(r)
		out.Ranks[cmp.Or(string(r.state.Engine), "unknown")]++
		out.QueueBytes += r.queued
		if r.state.CatchingUp {
			out.CatchingUp++
		}
		if r.refused {
			out.Refused++
		}
	}
	c := &sum.counts
	out.Messages, out.Events, out.Blocks, out.Published = c.Taken, c.Events, c.Blocks, c.Messages
	out.Incidents = map[string]uint64{"undecodable": c.Undecodable, "overtaken": c.Overtaken, "gap": c.Gaps,
		"restart": c.Restarts, "departure": c.Departures, "resync": c.Resyncs, "snapshot": c.Snapshots,
		"joined_late": c.JoinedLate, "correction": c.Corrections, "log_unreadable": c.Unreadable,
		"batch_refused": sum.crowded, "foreign": c.Foreign}
	for reason, n := range sum.skipped {
		out.Skipped[events.Skip(reason).String()] = n
	}
	return out
}

// NotReady returns the reason why this process does not work. An empty reason means that the process works.
func (f *Figures) NotReady() string {
	sum := f.Sum()
	n := uint64(0)
	for _, of := range sum.Ranks {
		n += of
	}
	switch {
	case n == 0 && !f.MayBeEmpty:
		return "no rank is shimmed yet"
	case sum.Refused > 0:
		return fmt.Sprintf("the log does not accept the events of %d of %d ranks; the events wait", sum.Refused, n)
	case sum.CatchingUp > 0:
		return fmt.Sprintf("%d of %d ranks are catching up", sum.CatchingUp, n)
	}
	return ""
}
