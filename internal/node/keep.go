package node

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// A node keeps all partitions, or, where it shares the namespace with others, those that it is told to keep. A
// partition that it does not keep is absent: nothing is held of it and nothing is said of it. Each partition that it
// keeps has a goroutine, which restores it, follows its log, and empties it when it is kept no more:
//
//	absent ──Keep──▶ restoring ──▶ catching_up ──▶ serving
//	  ▲                                               │
//	  └────── emptied, a few ranks at a time ◀──Keep──┘
//
// It is absent to queries from the moment on at which Keep leaves it out; only when it is empty can it be taken again.

// Keep says which partitions the node keeps from now on: what is new is restored and served beside the others, what is
// no longer in the set is forgotten. It returns at once. It makes a [cluster.Keeper] of a node whose Config says
// Shared.
func (n *Node) Keep(set cluster.Set) {
	n.keeping.Lock()
	defer n.keeping.Unlock()
	for p := range n.parts {
		p := events.Partition(p)
		wanted := set.Has(p)
		n.set(p, func(s *standing) {
			if s.wanted && !wanted {
				s.taken = false
				if s.leave != nil {
					s.leave()
				}
			}
			s.wanted = wanted
		})
		n.tend(p)
	}
	n.assigned.Store(true)
	n.settle()
}

// tend starts the goroutine of a partition that is wanted and has none. Called with n.keeping held.
func (n *Node) tend(p events.Partition) {
	if n.running == nil || n.running.Err() != nil {
		return
	}
	start, ctx := false, n.running
	n.set(p, func(s *standing) {
		start = s.wanted && !s.tended
		s.tended = s.tended || start
	})
	if start {
		n.tending.Go(func() { n.tendWhileWanted(ctx, p) })
	}
}

// startTending begins with what is wanted, and returns what ends it once ctx has ended.
func (n *Node) startTending(ctx context.Context) (end func()) {
	n.keeping.Lock()
	defer n.keeping.Unlock()
	n.running = ctx
	for p := range n.parts {
		n.tend(events.Partition(p))
	}
	return func() {
		n.keeping.Lock()
		n.running = nil
		n.keeping.Unlock()
		n.tending.Wait()
	}
}

// tendWhileWanted keeps a partition for as long as it is wanted, and until ctx ends: what it has then stays for the
// last snapshot.
func (n *Node) tendWhileWanted(ctx context.Context, p events.Partition) {
	for {
		following, leave := context.WithCancel(ctx)
		wanted := false
		n.set(p, func(s *standing) {
			if wanted = s.wanted; wanted {
				s.begin(leave)
			} else {
				s.tended = false
			}
		})
		if wanted {
			n.follow(following, p)
		}
		leave()
		if !wanted || ctx.Err() != nil {
			return
		}
		_ = n.empty(ctx, p) // fails only with ctx
	}
}

// begin makes the standing that of a partition that is taken now.
func (s *standing) begin(leave func()) {
	s.taken, s.leave, s.state = true, leave, stateRestoring
	s.epoch, s.last, s.err, s.at = time.Time{}, 0, nil, Restored{}
	s.lost, s.doubted, s.need, s.save, s.lag, s.behind = "", 0, nil, saveState{}, lag{}, false
	s.fresh, s.missed, s.mending = freshness{}, nil, false
}

// emptyBudget is how many holdings the writer forgets at a time, between other work, unless a single rank has more.
const emptyBudget = 16384

// empty forgets what a partition holds, a few ranks at a time. If it holds anything, it waits for a snapshot under way.
func (n *Node) empty(ctx context.Context, p events.Partition) error {
	empty := false
	if err := n.do(ctx, func(m *Machine) { empty = m.Empty(p) }); err != nil || empty {
		return err
	}
	n.saving.Lock()
	defer n.saving.Unlock()
	if err := n.do(ctx, func(m *Machine) { m.Forget(p) }); err != nil {
		return err
	}
	for more := true; more; {
		if err := n.do(ctx, func(m *Machine) { more = m.Drop(p, emptyBudget) }); err != nil {
			return err
		}
	}
	return nil
}

// Forget makes a partition one that nothing is known of: its log was lost, or begins anew, or it is kept no more. Its
// ranks are in no answer any more; they still take room in the index until Drop has dropped them all, before which the
// partition must not be restored.
func (m *Machine) Forget(p events.Partition) {
	part := m.parts[p]
	for key, r := range part.ranks {
		part.forgotten = append(part.forgotten, r.id)
		delete(part.ranks, key)
	}
	part.applied.Store(0)
	part.marks = nil
	m.stale = true
	m.publishView()
}

// Empty reports whether nothing of a partition is known, or in the index.
func (m *Machine) Empty(p events.Partition) bool {
	part := m.parts[p]
	return len(part.ranks)+len(part.forgotten) == 0 && part.applied.Load() == 0
}

// Drop drops forgotten ranks from the index, at least one and no more after so many holdings, and reports whether there
// are more.
func (m *Machine) Drop(p events.Partition, holdings int64) (more bool) {
	part := m.parts[p]
	for last := len(part.forgotten) - 1; last >= 0 && holdings > 0; last-- {
		id := part.forgotten[last]
		for _, held := range m.index.RankStats(id).Holdings {
			holdings -= held
		}
		m.index.DropRank(id)
		part.forgotten[last] = radix.RankID(0)
		part.forgotten = part.forgotten[:last]
	}
	return len(part.forgotten) > 0
}

// keeps reports whether the node has taken a partition.
func (n *Node) keeps(p events.Partition) bool {
	s := n.parts[p]
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.taken
}

// kept lists the partitions that the node has taken.
func (n *Node) kept() (list []events.Partition) {
	for p := range n.parts {
		if p := events.Partition(p); n.keeps(p) {
			list = append(list, p)
		}
	}
	return list
}

// writes reports whether this node is the one to write a partition's snapshots, as far as is known. Two may think so;
// the bucket takes one's.
func (n *Node) writes(p events.Partition) bool {
	return n.cfg.View == nil || n.cfg.View().Writes(p)
}

// writer is who writes a partition's snapshots, as far as is known; empty: nobody that is.
func (n *Node) writer(p events.Partition) string {
	if n.cfg.View == nil {
		return n.cfg.ID
	}
	return n.cfg.View().Writer[p]
}

// Ready is nil if every partition that the node keeps has been restored and caught up, once. A node that is alone
// ceases to be ready while it serves none of them; one of several passes queries on to the others. What answers lack
// otherwise is in [Node.Notes].
func (n *Node) Ready() error {
	switch unready := n.unready.Load(); {
	case n.ready.Load() && !n.cfg.Shared && int(unready) == len(n.parts):
		return errors.New("none of the partitions can be answered from now; they are being restored anew")
	case n.ready.Load():
		return nil
	case !n.assigned.Load():
		return errors.New("it is not known yet which partitions this node is to keep")
	default:
		return notReady(unready, len(n.kept()))
	}
}

// settle makes the node ready if all that it keeps serves. A node that was ready once stays so; what it cannot answer
// from is missing in answers.
func (n *Node) settle() {
	if n.assigned.Load() && n.unready.Load() == 0 && n.ready.CompareAndSwap(false, true) {
		n.cfg.Hooks.Ready()
	}
}

// Standing is what the node serves now, for others to know.
func (n *Node) Standing() (st cluster.Standing) {
	now := time.Now()
	for p, s := range n.parts {
		p := events.Partition(p)
		s.mu.Lock()
		if serves(s.state) {
			s.behind = s.lag.look(now, n.machine.Applied(p), s.last, s.err != nil) > n.cfg.BehindAfter
			if s.behind {
				st.Behind.Add(p)
			} else {
				st.Ready.Add(p)
			}
			if s.save.left(now) {
				st.Failing.Add(p)
			}
		}
		s.mu.Unlock()
	}
	models := map[string]cluster.Set{}
	for model, list := range n.machine.View().Models {
		var of cluster.Set
		for _, served := range list {
			for _, p := range served.Partitions {
				if st.Ready.Has(p) || st.Behind.Has(p) {
					of.Add(p)
				}
			}
		}
		models[model] = of
	}
	st.SetModels(models)
	return st
}

// Stirred is where something comes when messages of a log have brought other ranks than before. What a partition is
// restored with is told with the next beat, as that it is served is.
func (n *Node) Stirred() <-chan struct{} { return n.stirred }

// MayServe reports whether the node knows of workers of a model in a partition, now.
func (n *Node) MayServe(p events.Partition, model string) bool {
	return slices.ContainsFunc(n.machine.View().Models[model], func(s *Served) bool {
		_, has := slices.BinarySearch(s.Partitions, p)
		return has
	})
}

// lag tells for how long what a log had is not applied, by this process's clock alone.
type lag struct {
	mark  events.StreamSeq // the log's end at since; 0: all of it was applied
	since time.Time
	took  time.Duration // how long it was until the mark before was reached
}

// unreachable is a mark beyond every log.
const unreachable = ^events.StreamSeq(0)

// look brings it up to date, and returns it. A log that cannot be read may have anything.
func (l *lag) look(now time.Time, applied, last events.StreamSeq, unreadable bool) time.Duration {
	if unreadable {
		last = unreachable
	}
	switch {
	case applied >= last:
		*l = lag{}
		return 0
	case l.mark == 0:
		l.mark, l.since = last, now
	case applied >= l.mark:
		l.took = now.Sub(l.since)
		l.mark, l.since = last, now
	}
	return max(l.took, now.Sub(l.since))
}
