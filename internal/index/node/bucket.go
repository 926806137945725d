package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// Generations lists the snapshots in a namespace's bucket, the newest first within each partition. Generations reads
// NATS directly and needs no running indexer. With verify, Generations reads, checks and decodes every chunk, as a
// restore does.
func Generations(ctx context.Context, ns *jetstream.Namespace, verify bool) (*api.GenerationList, error) {
	list := &api.GenerationList{Generations: []api.GenerationInfo{}}
	bucket, err := ns.OpenSnapshots(ctx)
	if errors.Is(err, jetstream.ErrNotFound) {
		return list, nil
	} else if err != nil {
		return nil, err
	}
	for p := range events.Partition(ns.Partitions()) {
		info, err := ns.StreamInfo(ctx, p)
		if err != nil && !errors.Is(err, jetstream.ErrNotFound) {
			return nil, err
		}
		seen, err := readBucket(ctx, bucket, p)
		if err != nil {
			return nil, fmt.Errorf("partition %d: %w", p, err)
		}
		// The list of keys, which shows missing chunks, is needed only if the chunks are read.
		if !verify {
			seen.seen.Keys = nil
		}
		of, err := generationsOf(ctx, bucket, seen.seen, describeLog(ns, info), verify)
		if err != nil {
			return nil, fmt.Errorf("partition %d: %w", p, err)
		}
		list.Generations = append(list.Generations, of...)
	}
	return list, nil
}

// ReadSnapshot reads the newest usable snapshot of a partition into the sink returned by open. The manifest is nil if
// there is none. If a snapshot proves unusable, ReadSnapshot reads the next older snapshot into a new sink.
func ReadSnapshot(ctx context.Context, ns *jetstream.Namespace, p events.Partition,
	open func(*snapshot.Manifest, []snapshot.RankState) (snapshot.Sink, error)) (*snapshot.Manifest, error) {
	bucket, err := ns.OpenSnapshots(ctx)
	if errors.Is(err, jetstream.ErrNotFound) {
		return nil, nil
	} else if err != nil {
		return nil, err
	}
	info, err := ns.StreamInfo(ctx, p)
	if err != nil {
		return nil, err
	}
	seen, err := readBucket(ctx, bucket, p)
	if err != nil {
		return nil, err
	}
	var bad error
	for _, m := range snapshot.Choose(seen.seen, describeLog(ns, info)).Usable {
		_, err := snapshot.Read(m, fetchFrom(ctx, bucket), func(ranks []snapshot.RankState) (snapshot.Sink, error) {
			return open(m, ranks)
		})
		switch snapshot.ReasonOf(err) {
		case snapshot.Future, snapshot.MissingChunk, snapshot.CorruptChunk:
			bad = errors.Join(bad, fmt.Errorf("generation %d: %w", m.Generation, err))
			continue
		}
		return m, err
	}
	return nil, bad
}

func generationsOf(ctx context.Context, bucket *jetstream.Bucket, seen snapshot.Bucket, log snapshot.Log,
	verify bool) (list []api.GenerationInfo, err error) {
	choice := snapshot.Choose(seen, log)
	for _, m := range choice.Usable {
		list = append(list, describe(m))
	}
	for _, r := range choice.Rejected {
		g := api.GenerationInfo{Partition: seen.Partition, Key: r.Key, Generation: uint64(r.Generation)}
		if m, err := snapshot.ParseManifest(seen.Manifests[r.Key]); err == nil {
			g = describe(m)
		}
		g.Key, g.Unusable, g.Why = r.Key, r.Reason.String(), r.Err.Error()
		// The three reasons concern the log; the snapshot itself is intact.
		g.Bad = !slices.Contains([]snapshot.Reason{snapshot.OtherEpoch, snapshot.AheadOfLog, snapshot.LogTruncated},
			r.Reason)
		list = append(list, g)
	}
	newestFirst := func(a, b api.GenerationInfo) int {
		// An unreadable current manifest has the number 0. The subtraction wraps 0 around to the greatest number, so the
		// manifest sorts first.
		return cmp.Compare(b.Generation-1, a.Generation-1)
	}
	slices.SortStableFunc(list, newestFirst)
	if !verify {
		return list, nil
	}
	for i := range list {
		m, err := snapshot.ParseManifest(manifestOf(seen, list[i]))
		if err != nil {
			continue // reported already
		}
		bad, err := verifyGeneration(ctx, bucket, m)
		if err != nil {
			return nil, err
		}
		if list[i].Verified = true; len(bad) > 0 {
			list[i].Bad, list[i].BadChunks = true, bad
		}
	}
	return list, nil
}

func manifestOf(seen snapshot.Bucket, g api.GenerationInfo) []byte {
	if g.Key != "" {
		return seen.Manifests[g.Key]
	}
	for _, data := range seen.Manifests {
		if m, err := snapshot.ParseManifest(data); err == nil && uint64(m.Generation) == g.Generation {
			return data
		}
	}
	return nil
}

func describe(m *snapshot.Manifest) api.GenerationInfo {
	return api.GenerationInfo{
		Partition: m.Partition, Generation: uint64(m.Generation), Epoch: m.Epoch, Seq: m.Seq, Created: m.Created,
		Writer: m.Writer,
		Ranks:  m.Counts.Ranks, Holdings: m.Counts.Holdings, Chunks: len(m.Chunks), Bytes: m.Counts.Bytes,
		New: m.Counts.New,
	}
}

// verifyGeneration reads all chunks of a generation and returns every chunk that differs from the manifest. If no chunk
// differs, all are decoded together. An error means that NATS did not respond.
func verifyGeneration(ctx context.Context, bucket *jetstream.Bucket, m *snapshot.Manifest) (bad []api.BadChunk,
	err error) {
	fetch := fetchFrom(ctx, bucket)
	for _, ref := range m.Chunks {
		data, err := fetch(ref.Key)
		if err == nil {
			err = ref.Verify(data)
		}
		switch {
		case errors.Is(err, snapshot.ErrMissing), errors.Is(err, snapshot.ErrCorrupt):
			bad = append(bad, api.BadChunk{Key: ref.Key, Kind: ref.Kind.String(),
				Reason: snapshot.ReasonOf(err).String(), Why: err.Error()})
		case err != nil:
			return nil, err
		}
	}
	if len(bad) > 0 {
		return bad, nil
	}
	_, err = snapshot.Read(m, fetch, func([]snapshot.RankState) (snapshot.Sink, error) { return discard{}, nil })
	switch {
	case errors.Is(err, snapshot.ErrMissing), errors.Is(err, snapshot.ErrCorrupt), errors.Is(err, snapshot.ErrVersion):
		return []api.BadChunk{{Reason: snapshot.ReasonOf(err).String(), Why: err.Error()}}, nil
	}
	return nil, err
}

type discard struct{}

func (discard) Run(*events.Run) error             { return nil }
func (discard) Rank(int, *events.RankImage) error { return nil }
