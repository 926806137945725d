package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

const (
	exportBudget = 4096 // blocks exported by the writer in one step, between other work

	// After each step of an export the writer pauses for this multiple of the step's duration. Publishing passes through
	// several goroutines, here and in the server, and all may wait for a goroutine that does not yield.
	exportRest     = 2
	exportRestMost = 10 * time.Millisecond

	saveTick  = time.Second      // the interval of the checks for due snapshots
	saveRetry = 10 * time.Second // after a failure

	// After saveAttempts successive failures, a node leaves a partition's snapshots to a second node for saveLeave.
	saveAttempts = 3
	saveLeave    = 10 * time.Minute

	// The limit for storing a snapshot is storePatience plus the time for the bytes at storeRate. A longer write means
	// that the bucket rejects writes, as on a full disk, and further work waits for the present snapshot.
	storePatience = time.Minute
	storeRate     = 2 << 20 // bytes a second, pauses included
)

var errOtherLog = errors.New("the log differs from the applied log")

type saveState struct {
	runIndex *snapshot.RunIndex
	grown    growth    // of the partition at the write
	lost     bool      // the earlier snapshots were deleted
	at       time.Time // the time of the write; before the first write of this process, the time of the restore
	failed   time.Time // the time of the last failure; zero after a success
	fails    int       // successive failures
	err      error     // of the last failure
	seq      events.StreamSeq
	written  time.Time // by the writer's clock; zero: unknown
	size     int64
}

// left reports whether the partition's snapshots are left to a second node, if any.
func (s *saveState) left(now time.Time) bool {
	return s.fails >= saveAttempts && now.Sub(s.failed) < saveLeave
}

// begin sets the state after a restore; m is nil if no snapshot was usable.
func (s *saveState) begin(runIndex *snapshot.RunIndex, m *snapshot.Manifest, now time.Time) {
	*s = saveState{runIndex: runIndex, at: now}
	if m != nil {
		s.seq, s.written, s.size = m.Seq, m.Created, int64(m.Counts.Bytes)
	}
}

// capture is the state of a partition at one moment, without the image, and the export of the image.
type capture struct {
	seq    events.StreamSeq
	time   events.Millis
	grown  growth
	ranks  []snapshot.RankState
	spaces []snapshot.Space
	export *radix.Export
}

// capture begins a snapshot of a partition in its present state.
func (m *Machine) capture(p events.Partition) *capture {
	part := m.parts[p]
	c := &capture{seq: m.Applied(p), time: part.time, grown: part.grown}
	list := make([]*rank, 0, len(part.ranks))
	for _, r := range part.ranks {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b *rank) int { return a.Key().Compare(b.Key()) })
	ids := make([]radix.RankID, len(list))
	seen := map[uint32]bool{}
	for i, r := range list {
		ids[i] = r.id
		state := r.RankState
		state.Cursor = snapshot.CursorOf(r.cursor)
		c.ranks = append(c.ranks, state)
		if !seen[r.space] {
			seen[r.space] = true
			c.spaces = append(c.spaces, snapshot.Space{Space: r.space, Model: r.Model, BlockSize: r.BlockSize})
		}
	}
	m.sessions.save(m.index, ids, c.ranks)
	slices.SortFunc(c.spaces, func(a, b snapshot.Space) int { return cmp.Compare(a.Space, b.Space) })
	c.export = m.index.StartExport(ids)
	return c
}

// saveWhenDue writes the due snapshots in turn, until ctx ends.
func (n *Node) saveWhenDue(ctx context.Context) {
	loop.Every(ctx, saveTick, func(now time.Time) {
		for _, p := range n.due(ctx, now) {
			if ctx.Err() == nil {
				n.saveAndReport(ctx, p)
			}
		}
	})
}

func (n *Node) due(ctx context.Context, now time.Time) (due []events.Partition) {
	for p, grown := range n.grown(ctx) {
		part := n.parts[p]
		part.mu.Lock()
		if n.writes(events.Partition(p)) && part.snapshotDue(now, grown) {
			due = append(due, events.Partition(p))
		}
		part.mu.Unlock()
	}
	return due
}

// grown returns the growth of all partitions since the start of the process, from the writers.
func (n *Node) grown(ctx context.Context) []growth {
	grown := make([]growth, len(n.parts))
	err := n.onShards(ctx, func(s *shard, m *Machine) {
		for _, p := range n.partitions(s) {
			grown[p] = m.parts[p].grown
		}
	})
	if err != nil { // ctx has ended, so no snapshot is due
		return nil
	}
	return grown
}

// saveChanged writes a snapshot of every partition with changes since the last snapshot, for a faster next start.
func (n *Node) saveChanged(ctx context.Context) {
	for p, grown := range n.grown(ctx) {
		part := n.parts[p]
		part.mu.Lock()
		worth := part.worthSaving(grown) && n.writes(events.Partition(p))
		part.mu.Unlock()
		if worth && ctx.Err() == nil {
			n.saveAndReport(ctx, events.Partition(p))
		}
	}
}

// Snapshot writes a snapshot now, even without changes, of every kept partition that no other node writes.
func (n *Node) Snapshot(ctx context.Context) (*api.SnapshotList, error) {
	if err := n.Ready(); err != nil {
		return nil, api.Errorf(api.CodeNotReady, "%v", err)
	}
	list := &api.SnapshotList{Snapshots: []api.SnapshotInfo{}}
	for _, p := range n.kept() {
		if !n.writes(p) {
			continue
		}
		info, err := n.saveAndReport(ctx, p)
		if err != nil {
			return nil, api.Errorf(api.CodeUnavailable, "the snapshot of partition %d could not be written: %v", p, err)
		}
		list.Snapshots = append(list.Snapshots, info)
	}
	return list, nil
}

func (n *Node) saveAndReport(ctx context.Context, p events.Partition) (api.SnapshotInfo, error) {
	begun := time.Now()
	info, err := n.save(ctx, p)
	if err != nil {
		now := time.Now()
		n.saves.failed.Add(1)
		n.step(p, func(pt *partition) effects { return pt.saveFailed(now, err, ctx.Err() == nil) })
	}
	n.reportSave(p, &info, time.Since(begun), err)
	return info, err
}

// save writes a snapshot of a partition: plan, chunks and manifest, then removes unneeded data. If a step fails, the
// earlier snapshots stay intact. A later snapshot of a second node makes the snapshot unnecessary.
func (n *Node) save(ctx context.Context, p events.Partition) (info api.SnapshotInfo, err error) {
	n.saving.Lock()
	defer n.saving.Unlock()
	bucket, err := readBucket(ctx, n.cfg.Snapshots, p)
	if err != nil {
		return info, err
	}
	stream, err := n.cfg.Namespace.StreamInfo(ctx, p)
	if err != nil {
		return info, fmt.Errorf("look at the log: %w", err)
	}
	log := describeLog(n.cfg.Namespace, stream)
	runIndex, err := n.parts[p].savedRuns(stream.Epoch)
	if err != nil {
		return info, err
	}
	var c *capture
	if err := n.do(ctx, p, func(m *Machine) { c = m.capture(p) }); err != nil {
		return info, err
	}
	defer c.export.Close() // the writer no longer owns the rest of the export
	if err := n.reaches(ctx, p, &log, c.seq); err != nil {
		return info, err
	}
	plan, err := snapshot.PlanWrite(bucket.seen, log, c.seq)
	if err != nil {
		return info, fmt.Errorf("plan: %w", err)
	}
	var values []jetstream.Value
	w, err := snapshot.NewWriter(snapshot.Config{
		Namespace: log.Namespace, Stream: log.Stream, Epoch: log.Epoch, Seq: c.seq, SeqTime: c.time,
		Created: time.Now().UTC(), Writer: n.cfg.ID, Spaces: c.spaces, Ranks: c.ranks,
	}, plan, runIndex, func(key string, data []byte) error {
		values = append(values, jetstream.Value{Key: key, Data: data})
		return nil
	})
	if err != nil {
		return info, err
	}
	if err := n.export(ctx, p, c, w); err != nil {
		return info, err
	}
	manifest, runIndex, err := w.Close()
	if err != nil {
		return info, err
	}
	text, err := manifest.Encode()
	if err != nil {
		return info, err
	}
	written := int64(len(text))
	for _, v := range values {
		written += int64(len(v.Data))
	}
	if plan.CopyKey != "" {
		values = append(values, jetstream.Value{Key: plan.CopyKey, Data: plan.Copy})
	}
	revision, err := n.store(ctx, written, values, jetstream.Value{Key: snapshot.ManifestKey(p), Data: text},
		bucket.revision)
	if err != nil {
		return info, err
	}
	now := time.Now()
	info = api.SnapshotInfo{
		Partition: p, Generation: uint64(manifest.Generation), Seq: c.seq, Bytes: int64(manifest.Counts.Bytes),
		Written: written,
	}
	n.saves.written.Add(1) // before the partition's status shows the snapshot
	n.step(p, func(pt *partition) effects {
		return pt.saved(saveState{
			runIndex: runIndex, grown: c.grown, at: now, seq: c.seq, written: manifest.Created, size: info.Bytes,
		})
	})
	return info, n.cleanUp(ctx, p, plan.After(manifest, bucket.seen.Keys), stream.Epoch, revision)
}

// savedRuns returns the run index of the last snapshot of a serving partition. The log must have the epoch.
func (p *runner) savedRuns(epoch jetstream.Epoch) (*snapshot.RunIndex, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	s, ok := p.phase.(*serving)
	switch {
	case !ok:
		return nil, errors.New("the partition is not restored and caught up")
	case s.epoch != epoch:
		return nil, errOtherLog
	}
	return s.saved.runIndex, nil
}

// reaches checks that the log still has the last applied message, and records the log's growth in log. If the end of
// the log is lost, the snapshot must not replace a usable snapshot.
func (n *Node) reaches(ctx context.Context, p events.Partition, log *snapshot.Log, applied events.StreamSeq) error {
	if applied <= log.Last {
		return nil
	}
	stream, err := n.cfg.Namespace.StreamInfo(ctx, p)
	if err != nil {
		return fmt.Errorf("look at the log: %w", err)
	}
	if now := describeLog(n.cfg.Namespace, stream); !now.Epoch.Equal(log.Epoch) || now.Last < applied {
		return fmt.Errorf("%w: the log ends at %d, and %d is applied", errOtherLog, now.Last, applied)
	}
	log.Last = applied
	return nil
}

// store stores the values and the manifest of a snapshot. size is the sum of their bytes, and revision the revision of
// the previous manifest.
func (n *Node) store(ctx context.Context, size int64, values []jetstream.Value, manifest jetstream.Value,
	revision uint64) (uint64, error) {
	ctx, cancel := context.WithTimeout(ctx, storePatience+time.Duration(size/storeRate)*time.Second)
	defer cancel()
	revision, err := n.cfg.Snapshots.Commit(ctx, values, manifest, revision)
	if err != nil {
		return 0, fmt.Errorf("store: %w", err)
	}
	return revision, nil
}

// export writes a captured partition in small steps between events.
func (n *Node) export(ctx context.Context, p events.Partition, c *capture, w *snapshot.Writer) error {
	for done := false; !done; {
		var bad error
		var took time.Duration
		if err := n.do(ctx, p, func(*Machine) {
			begun := time.Now()
			done, bad = c.export.Step(exportBudget, w)
			took = time.Since(begun)
		}); err != nil || bad != nil {
			return errors.Join(err, bad)
		}
		loop.Wait(ctx, min(exportRest*took, exportRestMost))
	}
	return nil
}

// cleanUp removes data that no remaining snapshot needs, from the bucket and then from the log.
func (n *Node) cleanUp(ctx context.Context, p events.Partition, c snapshot.Cleanup, epoch jetstream.Epoch,
	revision uint64) error {
	if len(c.Delete) > 0 {
		_, err := n.cfg.Snapshots.Sweep(ctx, snapshot.KeyPrefix(p),
			func(key string) bool { return !slices.Contains(c.Delete, key) }, revision)
		if err != nil {
			return fmt.Errorf("remove old chunks: %w", err)
		}
	}
	if c.PurgeTo > 1 {
		if err := n.cfg.Namespace.Purge(ctx, p, epoch, c.PurgeTo); err != nil {
			return fmt.Errorf("trim the log: %w", err)
		}
		n.cfg.Log.Debug("log trimmed", "partition", p, "keeps", c.PurgeTo)
	}
	return nil
}
