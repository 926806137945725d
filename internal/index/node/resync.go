package node

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// When the log no longer says what its ranks hold, only the engines can. A partition needs a resync
//
//   - as a whole, if the log's beginning is gone and no snapshot stands for it, if its stream was recreated, or if it
//     has lost its end. All shims of the partition are asked, in rounds. It is over after minRounds, once the log has
//     the incarnation that each shim named in the last round. A shim that does not run is not waited for: when it
//     starts it goes on from what the log has of it, or begins a new incarnation.
//   - for single ranks, if an incarnation was first seen in its middle or with events missing. Such a rank is never
//     credited with what it does not hold, but may hold more. Its shim is asked until it begins a new incarnation;
//     snapshots keep this across restarts.
//
// Meanwhile the partition is resync_needed: it answers from what is known. Asking is slowed down round by round.

const (
	resyncTick    = 500 * time.Millisecond
	resyncPause   = 2 * time.Second // after the first round; doubled up to resyncSlowest
	resyncSlowest = 5 * time.Minute
	minRounds     = 3 // a shim's connection may be down for a moment
	ranksAsked    = 8 // at once
)

// need is why a partition needs a resync, and what was done about it.
type need struct {
	cause    string // of the whole partition; empty if only ranks are asked
	id       string // by which a shim knows that it was asked before
	rounds   int
	answered map[events.RankKey]events.Incarnation // in the last round: the incarnation that each shim has begun
	partial  []partialRank                         // as last seen
	pause    time.Duration
	next     time.Time
}

// round is one round of asking shims, as it is to be made.
type round struct {
	cause   string // empty: only partial ranks are asked
	id      string
	partial []partialRank
	why     string
}

// partialRank is a rank of which some of its incarnation was not seen.
type partialRank struct {
	key         events.RankKey
	incarnation events.Incarnation
}

// resyncCounts only grow.
type resyncCounts struct{ asked, answered, ended atomic.Uint64 }

func (d *need) String() string { return "resync needed: " + d.why() }

// why says what is missing, and what became of it so far.
func (d *need) why() string {
	why := d.cause
	if n := len(d.partial); n > 0 {
		names := ""
		for i, r := range d.partial[:min(n, 3)] {
			if i > 0 {
				names += ", "
			}
			names += r.key.String()
		}
		if n > 3 {
			names += ", ..."
		}
		if why != "" {
			why += "; "
		}
		why += fmt.Sprintf("events of %d ranks are missing (%s)", n, names)
	}
	return fmt.Sprintf("%s; the shims were asked %d times, %d answered last", why, d.rounds, len(d.answered))
}

// partials lists the ranks of a partition of which something was not seen.
func (m *Machine) partials(p events.Partition) (list []partialRank) {
	for key, r := range m.parts[p].ranks {
		if r.Partial {
			list = append(list, partialRank{key, r.Incarnation})
		}
	}
	slices.SortFunc(list, func(a, b partialRank) int { return a.key.Compare(b.key) })
	return list
}

// begun reports whether the incarnations are all there, or later ones.
func (m *Machine) begun(p events.Partition, answered map[events.RankKey]events.Incarnation) bool {
	for key, incarnation := range answered {
		if r := m.parts[p].ranks[key]; r == nil || r.Incarnation < incarnation {
			return false
		}
	}
	return true
}

// resyncWhenNeeded asks shims for as long as partitions need it, until ctx ends.
func (n *Node) resyncWhenNeeded(ctx context.Context) {
	loop.Every(ctx, min(resyncTick, n.cfg.ResyncPause), func(now time.Time) {
		var all sync.WaitGroup
		for p := range events.Partition(len(n.parts)) {
			if r := n.resyncDue(ctx, p, now); r != nil {
				all.Go(func() { n.askShims(ctx, p, r) })
			}
		}
		all.Wait()
	})
}

// resyncDue updates what a partition's ranks lack, and returns the round of requests that is due; nil if none is.
func (n *Node) resyncDue(ctx context.Context, p events.Partition, now time.Time) (r *round) {
	o := n.parts[p]
	o.mu.Lock()
	serves, answered := o.serves(), map[events.RankKey]events.Incarnation(nil)
	if d := o.need(); d != nil {
		answered = d.answered
	}
	o.mu.Unlock()
	var partial []partialRank
	begun := false
	if !serves || n.do(ctx, p, func(m *Machine) { partial, begun = m.partials(p), m.begun(p, answered) }) != nil {
		return nil
	}
	n.step(p, func(pt *partition) effects {
		e := pt.ranksSeen(now, partial, begun)
		r = e.ask
		return e
	})
	return r
}

func (n *Node) askShims(ctx context.Context, p events.Partition, r *round) {
	answered := map[events.RankKey]events.Incarnation{}
	var mu sync.Mutex
	heard := func(shims ...control.Shim) {
		mu.Lock()
		defer mu.Unlock()
		for i := range shims {
			answered[shims[i].Key()] = shims[i].Incarnation
		}
	}
	var failed error
	if r.cause != "" {
		n.resyncs.asked.Add(1)
		shims, err := control.ResyncAll(ctx, n.cfg.Namespace, p, "", control.ResyncRequest{ID: r.id, Lost: true})
		failed = err
		heard(shims...)
	}
	var all errgroup.Group
	all.SetLimit(ranksAsked)
	for _, rank := range r.partial {
		all.Go(func() error {
			n.resyncs.asked.Add(1)
			// Another node that sees the same asks with the same id.
			ask := control.ResyncRequest{ID: fmt.Sprintf("events-missing-in-%d", rank.incarnation), Of: rank.incarnation}
			shim, err := control.Resync(ctx, n.cfg.Namespace, rank.key, ask)
			if err == nil && shim != nil {
				heard(*shim)
			}
			return nil // who does not answer is asked again in the next round
		})
	}
	_ = all.Wait()
	if ctx.Err() != nil {
		return
	}
	n.resyncs.answered.Add(uint64(len(answered)))
	n.step(p, func(pt *partition) effects { return pt.answered(r.id, answered, failed == nil) })
	n.reportResync(p, r.why, len(answered), failed)
}
