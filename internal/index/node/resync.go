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

// If the log has lost events of ranks, only the engines have the present state. A partition needs a resync
//
//   - as a whole, if the log's beginning is gone without a snapshot, if its stream was recreated, or if the log has
//     lost its end. Requests go to all shims of the partition, in rounds. The resync ends after minRounds, once the
//     log has the incarnations named by the shims in the last round. It does not wait for stopped shims: a shim that
//     starts continues from its cursor in the log, or begins a new incarnation.
//   - for single ranks, if an incarnation was first seen in its middle or with missing events. A rank of this kind is
//     never
//     credited with absent blocks, but may hold further ones. Requests go to its shim until the rank begins a new
//     incarnation; snapshots keep this need across restarts.
//
// Meanwhile the partition is resync_needed and answers from its present state. The pause between rounds grows.
const (
	resyncTick    = 500 * time.Millisecond
	resyncPause   = 2 * time.Second // after the first round; doubled up to resyncSlowest
	resyncSlowest = 5 * time.Minute
	minRounds     = 3 // a shim may be disconnected for a moment
	ranksAsked    = 8 // concurrent requests
)

// need is the reason for a partition's resync, with the state of the requests.
type need struct {
	cause    string // for the whole partition; empty: only single ranks
	id       string // the same in all rounds, so shims recognize a repeated request
	rounds   int
	answered map[events.RankKey]events.Incarnation // in the last round: the incarnation begun by each shim
	partial  []partialRank                         // in the latest update
	pause    time.Duration
	next     time.Time
}

// round describes one round of requests to shims.
type round struct {
	cause   string // empty: only the partial ranks
	id      string
	partial []partialRank
	why     string
}

// partialRank is a rank with unseen events in its incarnation.
type partialRank struct {
	key         events.RankKey
	incarnation events.Incarnation
}

// resyncCounts only grow.
type resyncCounts struct{ asked, answered, ended atomic.Uint64 }

func (d *need) String() string { return "resync needed: " + d.why() }

// why describes the missing events and the requests so far.
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
	return fmt.Sprintf("%s; rounds of requests: %d, responses in the last: %d", why, d.rounds, len(d.answered))
}

// partials lists the ranks of a partition with missing events.
func (m *Machine) partials(p events.Partition) (list []partialRank) {
	for key, r := range m.parts[p].ranks {
		if r.Partial {
			list = append(list, partialRank{key, r.Incarnation})
		}
	}
	slices.SortFunc(list, func(a, b partialRank) int { return a.key.Compare(b.key) })
	return list
}

// begun reports whether the log has the answered incarnations, or later incarnations.
func (m *Machine) begun(p events.Partition, answered map[events.RankKey]events.Incarnation) bool {
	for key, incarnation := range answered {
		if r := m.parts[p].ranks[key]; r == nil || r.Incarnation < incarnation {
			return false
		}
	}
	return true
}

// resyncWhenNeeded sends requests to shims for partitions that need a resync, until ctx ends.
func (n *Node) resyncWhenNeeded(ctx context.Context) {
	loop.Every(ctx, min(resyncTick, n.cfg.ResyncPause), func(now time.Time) {
		var all sync.WaitGroup
		for p := range events.Partition(len(n.parts)) {
			if r := n.resyncDue(ctx, p, now); r != nil {
				all.Go(func() { n.requestResync(ctx, p, r) })
			}
		}
		all.Wait()
	})
}

// resyncDue updates the missing ranks of a partition, and returns the due round of requests; nil if no round is due.
func (n *Node) resyncDue(ctx context.Context, p events.Partition, now time.Time) (r *round) {
	part := n.parts[p]
	part.mu.Lock()
	serves, answered := part.serves(), map[events.RankKey]events.Incarnation(nil)
	if d := part.need(); d != nil {
		answered = d.answered
	}
	part.mu.Unlock()
	var partial []partialRank
	begun := false
	if !serves || n.do(ctx, p, func(m *Machine) { partial, begun = m.partials(p), m.begun(p, answered) }) != nil {
		return nil
	}
	n.step(p, func(pt *partition) effects {
		e := pt.ranksSeen(now, partial, begun)
		r = e.request
		return e
	})
	return r
}

// requestResync sends a round of requests to the shims of a partition, and records the responses.
func (n *Node) requestResync(ctx context.Context, p events.Partition, r *round) {
	answered := map[events.RankKey]events.Incarnation{}
	var mu sync.Mutex
	record := func(shims ...control.Shim) {
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
		record(shims...)
	}
	var all errgroup.Group
	all.SetLimit(ranksAsked)
	for _, rank := range r.partial {
		all.Go(func() error {
			n.resyncs.asked.Add(1)
			// All nodes send the same id for the same need.
			request := control.ResyncRequest{ID: fmt.Sprintf("events-missing-in-%d", rank.incarnation), Of: rank.incarnation}
			shim, err := control.Resync(ctx, n.cfg.Namespace, rank.key, request)
			if err == nil && shim != nil {
				record(*shim)
			}
			return nil // the next round repeats the request
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
