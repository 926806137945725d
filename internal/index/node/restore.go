package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// restore imports the best usable snapshot into an empty partition, and returns the result. restore rejects unusable
// snapshots with a reason, and all snapshots at divergedAt or later, if divergedAt is not 0. An error means that NATS
// did not respond; the caller tries again.
func (n *Node) restore(ctx context.Context, p events.Partition, divergedAt events.StreamSeq) (*restoration, error) {
	begun := time.Now()
	info, err := n.cfg.Namespace.StreamInfo(ctx, p)
	if err != nil {
		return nil, fmt.Errorf("look at the log: %w", err)
	}
	bucket, err := readBucket(ctx, n.cfg.Snapshots, p)
	if err != nil {
		return nil, err
	}
	log := describeLog(n.cfg.Namespace, info)
	choice := snapshot.Choose(bucket.seen, log)
	for _, r := range choice.Rejected {
		n.rejected(p, r.Reason, r.Err)
	}
	r := &restoration{epoch: info.Epoch, seq: info.First - 1, last: info.Last, rejected: choice.Rejected}
	for _, m := range choice.Usable {
		if divergedAt != 0 && m.Seq >= divergedAt {
			n.rejected(p, snapshot.AheadOfLog, fmt.Errorf(
				"snapshot at sequence %d of a log with a different message at %d", m.Seq, divergedAt))
			continue
		}
		runIndex, err := n.load(ctx, p, m)
		if err == nil {
			r.seq, r.used, r.runIndex = m.Seq, m, runIndex
			break
		}
		if forget := n.empty(ctx, p); forget != nil || errors.Is(err, jetstream.ErrUnavailable) {
			return nil, errors.Join(err, forget)
		}
		n.rejected(p, snapshot.ReasonOf(err), err)
	}
	if r.used == nil {
		if err := n.do(ctx, p, func(m *Machine) { m.Begin(p, r.seq, 0) }); err != nil {
			return nil, err
		}
	}
	r.took = time.Since(begun)
	return r, nil
}

// lost describes the part of the partition's events that is neither in the log nor in a snapshot; empty if no loss is
// known. seen is the reader's report that caused the restore.
func lost(seen string, rejected []snapshot.Rejection, restored bool, seq events.StreamSeq) string {
	if seen != "" {
		return seen
	}
	for _, r := range rejected {
		switch {
		case r.Reason == snapshot.AheadOfLog:
			return "the end of the log is lost: " + r.Err.Error()
		case r.Reason == snapshot.OtherEpoch && !restored:
			return "the log was recreated: " + r.Err.Error()
		}
	}
	if !restored && seq > 0 {
		return fmt.Sprintf("the messages of the log before %d are gone, and no snapshot replaces them", seq+1)
	}
	return ""
}

// rejected counts and logs an unusable snapshot.
func (n *Node) rejected(p events.Partition, why snapshot.Reason, err error) {
	n.rejections[min(int(why), len(n.rejections)-1)].Add(1)
	n.cfg.Log.Warn("snapshot skipped", "partition", p, "reason", why.String(), "error", err)
}

func describeLog(ns *jetstream.Namespace, info jetstream.StreamInfo) snapshot.Log {
	return snapshot.Log{
		Namespace: ns.Name(), Stream: info.Name, Epoch: info.Epoch.Time(), First: info.First, Last: info.Last,
	}
}

type bucketContents struct {
	seen     snapshot.Bucket
	revision uint64 // of the current manifest; 0: there is none
}

// readBucket reads a partition's manifests, then the list of keys.
func readBucket(ctx context.Context, bucket *jetstream.Bucket, p events.Partition) (bucketContents, error) {
	b := bucketContents{seen: snapshot.Bucket{Partition: p, Manifests: map[string][]byte{}}}
	current, err := bucket.Latest(ctx, snapshot.ManifestKey(p))
	switch {
	case err == nil:
		b.seen.Manifests[current.Key] = current.Value
		b.revision = current.Revision
	case !errors.Is(err, jetstream.ErrNotFound):
		return b, fmt.Errorf("read the manifest: %w", err)
	}
	keys, err := bucket.Keys(ctx, snapshot.KeyPrefix(p))
	if err != nil {
		return b, fmt.Errorf("list the snapshots: %w", err)
	}
	b.seen.Keys = keys
	if keys == nil {
		b.seen.Keys = []string{}
	}
	for _, name := range keys {
		if key, ok := snapshot.ParseKey(name); ok && key.Type == snapshot.EarlierKey {
			value, err := bucket.Get(ctx, name)
			if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
				return b, fmt.Errorf("read an earlier manifest: %w", err)
			}
			if err == nil {
				b.seen.Manifests[name] = value
			}
		}
	}
	return b, nil
}

func fetchFrom(ctx context.Context, bucket *jetstream.Bucket) snapshot.Fetch {
	return func(key string) ([]byte, error) {
		data, err := bucket.Get(ctx, key)
		if errors.Is(err, jetstream.ErrNotFound) {
			return nil, fmt.Errorf("%w: %w", snapshot.ErrMissing, err)
		}
		return data, err
	}
}

// load imports a snapshot into the index. After an error the caller must empty the partition. Chunks are fetched in
// advance here; the writer decodes them.
func (n *Node) load(ctx context.Context, p events.Partition, m *snapshot.Manifest) (runIndex *snapshot.RunIndex,
	err error) {
	fetch := fetchFrom(ctx, n.cfg.Snapshots)
	ranks, err := snapshot.Ranks(m, fetch)
	if err != nil {
		return nil, err
	}
	var reader *snapshot.Reader
	var restored *imageSink
	if err := n.do(ctx, p, func(machine *Machine) {
		restored = machine.restore(p, m, ranks)
		reader = snapshot.NewReader(m, ranks, restored)
	}); err != nil {
		return nil, err
	}
	finished := false
	defer func() {
		if !finished { // the imported part occupies the index until finish
			err = errors.Join(err, n.do(context.WithoutCancel(ctx), p, func(*Machine) { _ = restored.finish() }))
		}
	}()
	ahead, stop := n.fetchAhead(ctx, m.Restore(), fetch)
	defer stop()
	for chunk := range ahead {
		if chunk.err != nil {
			return nil, fmt.Errorf("chunk %s: %w", chunk.key, chunk.err)
		}
		var bad error
		if err := n.do(ctx, p, func(*Machine) { bad = reader.Chunk(chunk.key, chunk.data) }); err != nil || bad != nil {
			return nil, errors.Join(err, bad)
		}
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var bad error
	err = n.do(ctx, p, func(machine *Machine) {
		if runIndex, bad = reader.Close(); bad != nil {
			return
		}
		finished = true
		if bad = restored.finish(); bad == nil {
			machine.dropOtherRanks(p)
			machine.Begin(p, m.Seq, events.Millis(m.SeqTime))
		}
	})
	return runIndex, errors.Join(err, bad)
}

type fetched struct {
	key  string
	data []byte
	err  error
}

// chunksAhead is the number of fetched chunks that wait for the writer.
const chunksAhead = 4

// fetchAhead fetches chunks in order, several at once, until stop is called. stop waits for the end of all fetches.
func (n *Node) fetchAhead(ctx context.Context, refs []snapshot.ChunkRef, fetch snapshot.Fetch) (<-chan fetched,
	func()) {
	ctx, cancel := context.WithCancel(ctx)
	order := make(chan chan fetched, chunksAhead)
	out := make(chan fetched)
	go func() {
		defer close(order)
		for _, ref := range refs {
			slot := make(chan fetched, 1)
			select {
			case order <- slot:
			case <-ctx.Done():
				return
			}
			go func() {
				data, err := fetch(ref.Key)
				slot <- fetched{ref.Key, data, err}
			}()
		}
	}()
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer close(out)
		for slot := range order {
			f := <-slot
			select {
			case out <- f:
			case <-ctx.Done():
			}
		}
	}()
	return out, func() {
		cancel()
		<-done
	}
}

// imageSink imports a snapshot's image into the index, with this process's numbers of spaces.
type imageSink struct {
	machine  *Machine
	ids      []radix.RankID // of the snapshot's ranks, in order
	states   []snapshot.RankState
	imported *radix.Import
	spaces   map[uint32]uint32 // the snapshot's number for (model, block size) → the process's
	run      events.Run
}

// restore adds a snapshot's ranks without blocks, and returns the sink for their image.
func (m *Machine) restore(p events.Partition, manifest *snapshot.Manifest, states []snapshot.RankState) *imageSink {
	part := m.parts[p]
	to := &imageSink{machine: m, ids: make([]radix.RankID, len(states)), states: states, spaces: map[uint32]uint32{}}
	for _, s := range manifest.Spaces { // keep the snapshot's number if free, so the next snapshot has the same
		to.spaces[s.Space] = m.spaces.number(spaceKey{string(s.Model), s.BlockSize}, s.Space)
	}
	for i := range states {
		r := &rank{RankState: states[i], cursor: states[i].Cursor.Cursor(), restored: true, memory: new(deviceMemory)}
		r.Cursor, r.Refused, r.Checksum, r.Sessions, r.SessionsCut = nil, "", 0, nil, false
		r.space, r.tally = m.spaces.number(spaceKey{string(r.Model), r.BlockSize}, 0), m.tallyOf(r.Key())
		r.id = m.addRank(r.space, r.BlockSize)
		to.ids[i] = r.id
		part.ranks[r.Key()] = r
	}
	m.stale = true
	to.imported = m.index.StartImport(to.ids)
	to.imported.Expect(int(min(manifest.Counts.Blocks, manifest.Counts.Bytes/8))) // a block's local hash is never packed
	return to
}

func (r *imageSink) Run(run *events.Run) error {
	space, ok := r.spaces[run.Space]
	if !ok {
		return fmt.Errorf("%w: run %d has space %d, which is missing in the manifest", snapshot.ErrCorrupt, run.ID,
			run.Space)
	}
	r.run = *run
	r.run.Space = space
	return r.imported.Run(&r.run)
}

func (r *imageSink) Rank(i int, img *events.RankImage) error { return r.imported.Rank(i, img) }

// dropOtherRanks drops the restored ranks beyond [events.MaxRanks]: the log skips events of such ranks, so no event
// could end the ranks.
func (m *Machine) dropOtherRanks(p events.Partition) {
	for key, r := range m.parts[p].ranks {
		if key.Rank >= events.MaxRanks {
			m.dropRank(r.id)
			delete(m.parts[p].ranks, key)
			m.stale = true
		}
	}
}

// finish ends the import. The chains of sessions need the whole image.
func (r *imageSink) finish() error {
	if err := r.imported.Finish(); err != nil {
		return err
	}
	for i, id := range r.ids {
		r.machine.sessions.restore(r.machine.index, id, &r.states[i])
	}
	return nil
}
