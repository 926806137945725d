package node

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

func timeOf(ms events.Millis) time.Time {
	if ms == 0 {
		return time.Time{}
	}
	return time.UnixMilli(int64(ms)).UTC()
}

// Workers lists every rank in the partitions of this node. Workers is safe for concurrent use.
func (n *Node) Workers(ctx context.Context, asked api.WorkersRequest) (*api.WorkerList, error) {
	list := &api.WorkerList{Workers: []api.WorkerInfo{}}
	before := n.progress(nil)
	err := n.onShards(ctx, func(_ *shard, m *Machine) {
		for _, part := range m.parts {
			for _, r := range part.ranks {
				if r.hidden {
					continue
				}
				list.Workers = append(list.Workers, api.WorkerInfo{
					Instance: events.WorkerID(r.Instance), Rank: r.Rank, Model: string(r.Model), BlockSize: r.BlockSize,
					Partition: part.id, Incarnation: r.Incarnation, LastEvent: r.LastID, LastSeen: timeOf(r.LastSeen),
					Stored: r.Stored, Removed: r.Removed, Cleared: r.cleared, Lookahead: r.Lookahead,
				})
			}
		}
	})
	if err != nil {
		return nil, err
	}
	list.Cut(asked)
	err = n.onShards(ctx, func(s *shard, m *Machine) {
		for i := range list.Workers {
			w := &list.Workers[i]
			r := m.parts[w.Partition].ranks[events.RankKey{Instance: w.Instance, Rank: w.Rank}]
			if n.shard(w.Partition) != s || r == nil { // the rank is gone since
				continue
			}
			of := m.index.RankStats(r.id)
			w.Blocks, w.Copies, w.Pending = tiers(of.Holdings), uint64(of.Copies), int(of.Pending)
			w.Parked = w.Pending
		}
	})
	for p, now := range n.progress(nil) {
		if !before[p].whole || !now.whole || now.lapses != before[p].lapses {
			list.Missing = append(list.Missing, events.Partition(p))
		}
	}
	list.Complete = len(list.Missing) == 0
	return list, err
}

// holdsWithin limits how long [Node.Holds] waits for a writer.
const holdsWithin = time.Second

// Holds reports whether the index holds blocks of a worker. Holds fails if the worker's partition is not restored, or
// if the writer is busy for a second. Holds is safe for concurrent use.
func (n *Node) Holds(ctx context.Context, instance events.WorkerID) (holds bool, err error) {
	p, err := n.cfg.Namespace.PartitionOf(instance)
	if err != nil {
		return false, err
	}
	if !n.progress(nil)[p].whole {
		return false, fmt.Errorf("partition %d is not restored", p)
	}
	ctx, cancel := context.WithTimeout(ctx, holdsWithin)
	defer cancel()
	err = n.do(ctx, p, func(m *Machine) {
		for key, r := range m.parts[p].ranks {
			holds = holds || key.Instance == instance && m.index.RankStats(r.id).Holdings != [events.NumTiers]int64{}
		}
	})
	return holds, err
}

func tiers(h [events.NumTiers]int64) api.TierCounts {
	return api.TierCounts{Device: uint64(h[0]), Host: uint64(h[1]), Disk: uint64(h[2]), External: uint64(h[3])}
}

// Status returns the state of the node. The writers count the index for Status. Status is safe for concurrent use.
func (n *Node) Status(ctx context.Context) (*api.Status, error) { return n.statusNow(ctx, nil) }

// Recent returns the state of the node with the writers' last periodic counts, some seconds old, or older for a large
// index. Recent is safe for concurrent use.
func (n *Node) Recent() (*api.Status, *Applied) {
	f, at := new(figures), n.progress(nil)
	for _, s := range n.shards {
		f.add(s.figures.Load(), n.partitions(s))
	}
	s, _ := n.status(f, at, nil) // only a checksum can fail
	return s, &f.applied
}

// DistinctBlocks returns the number of distinct blocks in the index, from the writers' last periodic counts.
// DistinctBlocks is safe for concurrent use.
func (n *Node) DistinctBlocks() (blocks uint64) {
	for _, s := range n.shards {
		if f := s.figures.Load(); f != nil {
			blocks += f.index.Distinct
		}
	}
	return blocks
}

// statusNow returns the state of the node with fresh counts from the writers.
func (n *Node) statusNow(ctx context.Context, checksum func(events.Partition, *events.StreamSeq) (string,
	error)) (*api.Status, error) {
	f, at := new(figures), n.progress(nil)
	err := n.onShards(ctx, func(s *shard, m *Machine) { f.add(m.figures(m.index.Stats()), n.partitions(s)) })
	if err != nil {
		return nil, err
	}
	return n.status(f, at, checksum)
}

// status returns the state of the node with the counts of f. reflected is the progress before the counts, by partition,
// so the counts include it. checksum, if not nil, returns a partition's checksum and sets the log position of the
// checksum.
func (n *Node) status(f *figures, reflected []progress, checksum func(events.Partition, *events.StreamSeq) (string,
	error)) (*api.Status, error) {
	s := &api.Status{
		Node: n.cfg.ID, Version: n.cfg.Version, Namespace: n.cfg.Namespace.Name(), Ready: n.ready.Load(),
		Since:  n.started.UTC(),
		Now:    time.Now().UTC(),
		Models: []api.ModelStatus{}, Problems: []string{}, L3: n.l3.status(),
	}
	n.addModels(s)
	s.Index, s.Events = f.index, f.events
	s.Problems = append(s.Problems, f.problems...)
	if n.cfg.View != nil {
		view := n.cfg.View()
		s.Cluster = clusterStatus(view, n.cfg.ID)
		s.Problems = append(s.Problems, clusterProblems(view, s.Cluster)...)
	}
	s.Problems = append(s.Problems, n.capacityProblems()...)
	n.capacity.mu.Lock()
	s.SnapshotBucket, s.Store = n.capacity.bucket.api(), n.capacity.store.api()
	n.capacity.mu.Unlock()
	var found problems
	for p, at := range reflected {
		p := events.Partition(p)
		if !n.keeps(p) {
			continue
		}
		sum := ""
		if checksum != nil {
			var err error
			if sum, err = checksum(p, &at.seq); err != nil {
				return nil, err
			}
		}
		if d, kept := n.partitionStatus(p, at, &found); kept {
			d.Ranks, d.Checksum = f.ranks[p], sum
			s.Partitions = append(s.Partitions, d)
		}
	}
	s.Problems = append(s.Problems, found.lines()...)
	// after the partitions, so the counts include their changes
	s.Rereads = n.rereads.Load()
	s.Resyncs = api.ResyncCounts{Asked: n.resyncs.asked.Load(), Answered: n.resyncs.answered.Load(),
		Ended: n.resyncs.ended.Load()}
	s.Snapshots = api.SnapshotCounts{Written: n.saves.written.Load(), Failed: n.saves.failed.Load(),
		Rejected: map[string]uint64{}}
	for why := range n.rejections {
		if count := n.rejections[why].Load(); count > 0 {
			s.Snapshots.Rejected[snapshot.Reason(why).String()] = count
		}
	}
	return s, nil
}

// addModels adds the models with their block sizes, the ranks without a claim, and the problems of both.
func (n *Node) addModels(s *api.Status) {
	view := n.view()
	s.Claims = &api.ClaimStatus{Ranks: len(view.Hidden)}
	for _, h := range view.Hidden {
		if n.writes(h.Partition) {
			s.Claims.Unclaimed = append(s.Claims.Unclaimed,
				api.UnclaimedRank{Instance: h.Key.Instance, Rank: h.Key.Rank, Model: h.Model, Events: true})
		}
	}
	for model := range view.Models {
		registered := n.registered(model)
		list := view.sizesOf(model, registered)
		for _, served := range list {
			s.Models = append(s.Models, api.ModelStatus{Model: model, BlockSize: served.BlockSize,
				Ranks: len(served.Ranks)})
		}
		if len(list) > 1 {
			s.Problems = append(s.Problems, fmt.Sprintf("workers of model %q have different block sizes: queries must "+
				"name a size; what to do: start all engines and shims of the model with one --block-size, or give every size a "+
				"model "+"name with --model", model))
		}
		if p := view.otherSizes(model, registered); p != "" {
			s.Problems = append(s.Problems, p)
		}
	}
	slices.SortFunc(s.Models, func(a, b api.ModelStatus) int {
		return cmp.Or(cmp.Compare(a.Model, b.Model), cmp.Compare(a.BlockSize, b.BlockSize))
	})
}

// partitionStatus returns the status of a partition, without the ranks, and adds its problems to found. It returns
// false if the node no longer keeps the partition.
func (n *Node) partitionStatus(p events.Partition, at progress, found *problems) (d api.PartitionDetail, kept bool) {
	part := n.parts[p]
	part.mu.Lock()
	defer part.mu.Unlock()
	k := part.phase.data()
	if k == nil {
		return d, false
	}
	d = api.PartitionDetail{
		PartitionStatus: at.status(p), State: part.phase.state(), LogLast: max(k.last, at.seq),
		SnapshotSeq: k.saved.seq, SnapshotTime: k.saved.written, SnapshotSize: k.saved.size,
		RestoredFrom: k.restored.Seq, RestoreMS: float64(k.restored.Took.Microseconds()) / 1000,
		Log: k.usage.api(), Behind: part.behind(), Writer: n.writer(p),
	}
	d.Lag = uint64(d.LogLast - at.seq)
	if k.err != nil {
		d.State = api.PartitionUnavailable
	}
	n.addLogProblems(part, &d, at, found)
	if need := part.need(); need != nil {
		found.add(p, "resync needed", need.why(), seeResync)
	}
	switch err := k.saved.problem(); {
	case err == nil, k.err != nil, k.usage.refused != nil: // the failure of NATS is a problem already
	case n.writes(p):
		found.add(p, snapshotFailed, err.Error(), seeNATS)
	case k.saved.left(time.Now()): // otherwise another node writes the snapshot
		found.add(p, snapshotLeft+d.Writer, fmt.Sprintf("%d times: %v", k.saved.fails, err), seeNATS)
	}
	return d, true
}

// addLogProblems adds the problems of a partition with its log. The caller holds part.mu.
func (n *Node) addLogProblems(part *runner, d *api.PartitionDetail, at progress, found *problems) {
	k, p, old := part.phase.data(), d.Partition, ""
	if at.stale > 0 && at.whole {
		old = fmt.Sprintf("the state is %s old; answers contain the age (stale_ms)", inWords(at.stale))
	}
	switch {
	case d.Behind && k.err != nil:
		found.add(p, LogUnreadable, sentences(k.err.Error(), old), seeNATS)
	case d.Behind:
		found.add(p, "far behind the log; queries go to current nodes first",
			fmt.Sprintf("%d messages are not applied", d.LogLast-at.seq), seeBehind)
	case k.err != nil:
		found.add(p, logFailed, sentences(k.err.Error(), old), seeNATS)
	case old != "" && k.usage.refused == nil: // a refused write is the reason otherwise, and is reported already
		found.add(p, logUnheard, old, seeNATS)
	}
	if r := part.reading(); r != nil && r.rereading {
		found.add(p, "messages were lost between the log and the index; the log is read again from the first missing "+
			"message", "", seeWait)
	}
}

// sentences joins all nonempty texts.
func sentences(texts ...string) string {
	return strings.Join(slices.DeleteFunc(texts, func(s string) bool { return s == "" }), "; ")
}

// otherSizes returns a problem with the ranks whose events differ from the model's registered block size; empty if
// there are none.
func (v *View) otherSizes(model string, registered uint32) string {
	var others []string
	for _, s := range v.Models[model] {
		for _, r := range s.Ranks {
			if registered != 0 && s.BlockSize != registered {
				others = append(others, fmt.Sprintf("%v (%d)", r.Key, s.BlockSize))
			}
		}
	}
	if len(others) == 0 {
		return ""
	}
	const named = 5
	slices.Sort(others)
	more := ""
	if n := len(others) - named; n > 0 {
		others, more = others[:named], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Sprintf("events of ranks for model %q differ from the registered block size %d and are not used: "+
		"%s%s; what to do: restart the shims with --block-size %d, or revoke the keys of the shims; if the registered "+
		"size is wrong: indexer models remove MODEL", model, registered, strings.Join(others, ", "), more, registered)
}

func clusterStatus(v *cluster.View, self string) *api.ClusterStatus {
	c := &api.ClusterStatus{Copies: v.Copies, Nodes: []api.NodeStatus{}, Gone: v.Dead}
	for i := -1; i < len(v.Peers); i++ {
		r := &v.Self
		if i >= 0 {
			r = &v.Peers[i]
		}
		if r.Node == "" {
			continue // not announced yet
		}
		c.Nodes = append(c.Nodes, api.NodeStatus{
			Node: r.Node, Build: r.Build, Zone: r.Zone, Answers: r.Node == self, Leaving: r.Leaving,
			Ready: list(r.Ready), Behind: list(r.Behind), Releasing: list(r.Releasing),
		})
	}
	slices.SortFunc(c.Nodes, func(a, b api.NodeStatus) int { return cmp.Compare(a.Node, b.Node) })
	for p := range v.Writer {
		p := events.Partition(p)
		ready := 0
		for _, n := range c.Nodes {
			if slices.Contains(n.Ready, p) {
				ready++
			}
		}
		if len(v.Serving(p)) == 0 {
			c.Unserved = append(c.Unserved, p)
		}
		if ready < v.Copies {
			c.Short = append(c.Short, p)
		}
	}
	return c
}

func list(s cluster.Set) []events.Partition {
	if out := s.List(); out != nil {
		return out
	}
	return []events.Partition{}
}

func clusterProblems(v *cluster.View, c *api.ClusterStatus) (list []string) {
	if !v.GraceOver {
		list = append(list, "this node is not a member of the cluster yet, or waits for further starting nodes; "+
			"what to do: "+seeWait)
	}
	if len(c.Unserved) > 0 {
		list = append(list, fmt.Sprintf("%s: %s; what to do: %s", cluster.SetOf(c.Unserved...).Phrase(),
			NobodyServes, seeNodes))
	}
	return append(list, v.Problems...)
}

func (m *Machine) rankProblems(r *rank) (problems []string) {
	s := m.index.RankStats(r.id)
	held := int64(0)
	for _, n := range s.Holdings {
		held += n
	}
	for _, p := range []string{copiesProblem(r, s, held), waitingProblem(r, s, held)} {
		if p != "" {
			problems = append(problems, p)
		}
	}
	return problems
}

// waitingProblem returns a problem if no announced block of an engine has a place in the index because all follow
// unseen blocks. The cause is an engine that published blocks before the start of the shim and cannot repeat the
// blocks. The problem ends with the first block with a place, and when the engine no longer holds any of the blocks.
func waitingProblem(r *rank, s radix.RankStats, held int64) string {
	placed := held > 0 || s.SetBlocks > 0 || r.placed || r.restored && s.Pending == 0
	since := change{r.Stored - r.before.stored, r.Removed - r.before.removed}
	gone := s.Pending == 0 && since.removed >= since.stored
	if placed || since.stored == 0 || gone || r.Partial { // missing events are a separate problem
		return ""
	}
	return fmt.Sprintf(
		"%s: none of the engine's %d announced blocks is usable: all follow unseen blocks, and %d wait for unseen blocks; "+
			"what to do: give the shim the engine's replay endpoint (--replay, replay_endpoint in --kv-events-config), or "+
			"reset the engine's prefix cache",
		r.Key(), since.stored, s.Pending)
}

// copiesProblem returns a problem if a rank counts far more copies than blocks. An engine has a further copy if two
// requests computed a block at the same time, or if a request computed the last block of the prompt again. An engine
// that announces reused blocks again has the same counts: vLLM does so for requests with kv_cache_report_mode=full.
func copiesProblem(r *rank, s radix.RankStats, held int64) string {
	if s.Copies < 1000 || s.Copies < 4*held {
		return ""
	}
	return fmt.Sprintf(
		"%s holds %d blocks and, by the engine's events, %d further copies of the blocks, so a removal may stay unseen; "+
			"what to do: leave kv_cache_report_mode=full out of requests, then run indexer resync", r.Key(), held, s.Copies)
}

// byName returns the counts under the names in metrics and in the status.
func (c *Counts) byName() map[string]uint64 {
	ix := &c.Index
	return map[string]uint64{
		"messages": c.Messages, "poison": c.Poison, "rank_beyond_limit": c.OtherRank,
		"block_size_not_registered": c.OtherSize, "stale": c.Stale, "repeated_events": c.Repeated, "gaps": c.Gaps,
		"incarnations": c.Incarnations, "ended": c.Ended,
		"blocks_stored": ix.Stored, "blocks_duplicate": ix.Duplicates, "blocks_removed": ix.Removed,
		"removals_unknown":   ix.UnknownRemovals,
		"blocks_conflicting": ix.Conflicts, "kind_conflicts": ix.KindConflicts, "blocks_pending": ix.Pending,
		"blocks_attached":   ix.Attached,
		"pending_cancelled": ix.Cancelled, "pending_expired": ix.Expired, "pending_overflowed": ix.Overflowed,
		"pending_cleared": ix.ClearedWaiting,
		// Deprecated names of the same counts, kept for one release.
		"blocks_parked": ix.Pending, "parked_cancelled": ix.Cancelled, "parked_expired": ix.Expired,
		"parked_overflowed": ix.Overflowed, "parked_cleared": ix.ClearedWaiting,
		"blocks_cleared": ix.Cleared, "other_groups_stored": ix.OtherStored, "other_groups_removed": ix.OtherRemoved,
		"malformed_events": ix.Malformed, "sessions_forgotten": c.SessionsForgotten,
	}
}
