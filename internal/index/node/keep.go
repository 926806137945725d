package node

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// A single node keeps all partitions. A node of a cluster keeps the partitions that the cluster assigns to the node.
// All remaining partitions are absent from the index and from answers. Every kept partition has a goroutine, the
// runner, for the action of the partition's phase (partition.go). A partition is absent to queries as soon as Keep
// excludes it, and can be restored again only when empty.

// Keep sets the partitions that the node keeps from now on. Keep starts the restore of new partitions, removes
// partitions outside the set, and returns immediately. A node with Shared in its Config implements [cluster.Keeper].
func (n *Node) Keep(set cluster.Set) {
	n.keeping.Lock()
	defer n.keeping.Unlock()
	for p := range n.parts {
		p := events.Partition(p)
		n.step(p, func(pt *partition) effects { return pt.keep(set.Has(p)) })
		n.startRunner(p)
	}
	n.assigned.Store(true)
	n.checkReady()
}

// startRunner starts the runner of a kept partition without one. Called with n.keeping held.
func (n *Node) startRunner(p events.Partition) {
	part := n.parts[p]
	part.mu.Lock()
	defer part.mu.Unlock()
	_, nothing := part.phase.(*absent)
	if nothing || part.running || n.running == nil || n.running.Err() != nil {
		return
	}
	part.running = true
	ctx := n.running
	n.runners.Go(func() { n.runPartition(ctx, p) })
}

// startRunners starts the runners of kept partitions. wait returns after the end of all runners, once ctx has ended.
func (n *Node) startRunners(ctx context.Context) (wait func()) {
	n.keeping.Lock()
	defer n.keeping.Unlock()
	n.running = ctx
	for p := range n.parts {
		n.startRunner(events.Partition(p))
	}
	return func() {
		n.keeping.Lock()
		n.running = nil
		n.keeping.Unlock()
		n.runners.Wait()
	}
}

// runPartition performs the actions of a partition's phases until the partition is absent or ctx ends. After the end of
// ctx the index keeps the partition for the last snapshot.
func (n *Node) runPartition(ctx context.Context, p events.Partition) {
	part := n.parts[p]
	for ctx.Err() == nil {
		doing, cancel := context.WithCancel(ctx)
		part.mu.Lock()
		ph, wait := part.phase, time.Until(part.notBefore)
		_, nothing := ph.(*absent)
		part.running, part.cancel = !nothing, cancel
		part.mu.Unlock()
		if wait > 0 {
			loop.Wait(doing, wait)
		}
		if doing.Err() == nil && !nothing {
			n.carryOut(doing, p, ph)
		}
		cancel()
		if nothing {
			return
		}
	}
}

// carryOut performs the action of a partition's phase, until the action is complete or ctx ends.
func (n *Node) carryOut(ctx context.Context, p events.Partition, ph phase) {
	if r := readingOf(ph); r != nil {
		n.read(ctx, p, r.epoch)
		return
	}
	err := n.empty(ctx, p) // also before a second restore
	switch ph := ph.(type) {
	case *emptying:
		if err == nil { // otherwise ctx has ended
			n.step(p, (*partition).emptied)
		}
	case *restoring:
		var r *restoration
		if err == nil {
			r, err = n.restore(ctx, p, ph.divergedAt)
		}
		if ctx.Err() != nil {
			return
		}
		now := time.Now()
		n.step(p, func(pt *partition) effects {
			if err != nil {
				return pt.failed(now, err)
			}
			return pt.restored(now, r)
		})
	}
}

// emptyBudget is the number of holdings that the writer drops in one step, between other work, unless a single rank has
// more.
const emptyBudget = 16384

// empty removes a partition's ranks in small steps. A partition with ranks waits for a snapshot under way.
func (n *Node) empty(ctx context.Context, p events.Partition) error {
	empty := false
	if err := n.do(ctx, p, func(m *Machine) { empty = m.Empty(p) }); err != nil || empty {
		return err
	}
	n.saving.Lock()
	defer n.saving.Unlock()
	if err := n.do(ctx, p, func(m *Machine) { m.Forget(p) }); err != nil {
		return err
	}
	for more := true; more; {
		if err := n.do(ctx, p, func(m *Machine) { more = m.Drop(p, emptyBudget) }); err != nil {
			return err
		}
	}
	return nil
}

// Forget resets a partition that lost the log, got a new log, or is no longer kept. The ranks are in no answer from
// then on, but use memory in the index until Drop has dropped all ranks. The partition must not be restored earlier.
func (m *Machine) Forget(p events.Partition) {
	part := m.parts[p]
	for key, r := range part.ranks {
		part.forgotten = append(part.forgotten, r.id)
		delete(part.ranks, key)
	}
	part.applied.Store(0)
	part.grown = growth{}
	part.checksums = nil
	m.stale = true
	m.publishView()
}

// Empty reports whether a partition has no ranks, in the index or elsewhere, and no applied messages.
func (m *Machine) Empty(p events.Partition) bool {
	part := m.parts[p]
	return len(part.ranks)+len(part.forgotten) == 0 && part.applied.Load() == 0
}

// Drop drops forgotten ranks from the index: at least one rank, and none after this number of holdings. more reports
// whether forgotten ranks remain.
func (m *Machine) Drop(p events.Partition, holdings int64) (more bool) {
	part := m.parts[p]
	for last := len(part.forgotten) - 1; last >= 0 && holdings > 0; last-- {
		id := part.forgotten[last]
		for _, held := range m.index.RankStats(id).Holdings {
			holdings -= held
		}
		m.dropRank(id)
		part.forgotten[last] = radix.RankID(0)
		part.forgotten = part.forgotten[:last]
	}
	return len(part.forgotten) > 0
}

func (n *Node) keeps(p events.Partition) bool {
	part := n.parts[p]
	part.mu.Lock()
	defer part.mu.Unlock()
	return part.phase.data() != nil
}

func (n *Node) kept() (list []events.Partition) {
	for p := range n.parts {
		if p := events.Partition(p); n.keeps(p) {
			list = append(list, p)
		}
	}
	return list
}

// writes reports whether this node writes a partition's snapshots, in the present view of the cluster. If two nodes do,
// compare-and-set in the bucket lets a single node succeed.
func (n *Node) writes(p events.Partition) bool { return n.cfg.View == nil || n.cfg.View().Writes(p) }

// writer returns the node that writes a partition's snapshots, in the present view of the cluster; empty: none.
func (n *Node) writer(p events.Partition) string {
	if n.cfg.View == nil {
		return n.cfg.ID
	}
	return n.cfg.View().Writer[p]
}

// Ready is nil once every partition of the node has been restored and caught up. A single node is not ready while no
// partition serves. A node of a cluster passes queries on to further nodes. [Node.Warnings] has further gaps in
// answers.
func (n *Node) Ready() error {
	switch unready := n.unready.Load(); {
	case n.ready.Load() && !n.cfg.Shared && int(unready) == len(n.parts):
		return errors.New("none of the partitions serves queries now; all are being restored again")
	case n.ready.Load():
		return nil
	case !n.assigned.Load():
		return errors.New("the partitions of this node are not assigned yet")
	default:
		return fmt.Errorf("%d of %d partitions are not restored and caught up yet", unready,
			max(int(unready), len(n.kept())))
	}
}

// checkReady makes the node ready if all partitions of the node serve. The node then stays ready; answers list missing
// partitions.
func (n *Node) checkReady() {
	if n.assigned.Load() && n.unready.Load() == 0 && n.ready.CompareAndSwap(false, true) &&
		n.cfg.Ready != nil {
		n.cfg.Ready()
	}
}

// Advertisement returns the partitions and models that the node serves now, for the cluster.
func (n *Node) Advertisement() (st cluster.Advertisement) {
	now := time.Now()
	for p, part := range n.parts {
		p := events.Partition(p)
		n.tick(now, p)
		part.mu.Lock()
		if part.serves() {
			if part.behind() {
				st.Behind.Add(p)
			} else {
				st.Ready.Add(p)
			}
			if part.phase.data().saved.left(now) {
				st.Failing.Add(p)
			}
		}
		part.mu.Unlock()
	}
	models := map[string]cluster.Set{}
	for model, list := range n.view().Models {
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

// ModelsChanged receives a value when messages of a log have changed the set of ranks. A restore sends no value: the
// next heartbeat announces the restored ranks and the partition.
func (n *Node) ModelsChanged() <-chan struct{} { return n.modelsChanged }

// MayServe reports whether the node has workers of a model in a partition now.
func (n *Node) MayServe(p events.Partition, model string) bool {
	return slices.ContainsFunc(n.view().Models[model], func(s *Served) bool {
		_, has := slices.BinarySearch(s.Partitions, p)
		return has
	})
}
