package shim

import (
	"context"
	"errors"
	"fmt"

	"go.opentelemetry.io/otel/attribute"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// largestMessage is what one message of the log may take at the most: Limits.MessageBytes, and what surrounds it. NATS
// servers take 1 MiB unless told otherwise, and snapshots need as much.
const largestMessage = 900 << 10

// StreamLog is the Log of one rank in a namespace's partition stream.
type StreamLog struct {
	ns  *jetstream.Namespace
	key events.RankKey
	o   jetstream.PublisherOptions
	pub *jetstream.Publisher
}

// NewStreamLog returns the log of a rank. failed, if not nil, is told of attempts that will be made again; then Publish
// waits for a server that refuses to write, too.
func NewStreamLog(ns *jetstream.Namespace, key events.RankKey, failed func(error)) *StreamLog {
	return &StreamLog{ns: ns, key: key, o: jetstream.PublisherOptions{Retry: failed, Persist: failed != nil}}
}

// OnCrowded has f called when the NATS server refuses batches; see [jetstream.PublisherOptions]. It is to be called
// before Last. It returns l.
func (l *StreamLog) OnCrowded(f func(error)) *StreamLog {
	l.o.Crowded = f
	return l
}

// Last reads the last message of the rank's subject. If the log was trimmed past it, the snapshot that allowed the
// trimming knows as much, and a node reads it for us ([ServeRecall]).
func (l *StreamLog) Last(ctx context.Context) (Published, error) {
	pub, err := l.ns.OpenPublisher(ctx, l.key, l.o)
	if err != nil {
		return Published{}, err
	}
	if pub.MaxMessage() < largestMessage {
		return Published{},
			fmt.Errorf("%w: the NATS server takes messages of %d bytes only; kvatlas needs max_payload of at least %d",
				ErrUnusable, pub.MaxMessage(), largestMessage)
	}
	l.pub = pub
	last, found := pub.Found()
	if !found {
		return l.recall(ctx, pub.Partition())
	}
	var b events.Batch // whole, as nodes read it
	if err := events.DecodeBatch(last.Data, &b); err != nil {
		return l.unreadable(ctx, pub, fmt.Errorf("message %d on %s: %w", last.Seq, pub.Subject(), err)), nil
	}
	return Published{
		Found: true, Identity: Identity{b.Model, b.BlockSize}, Reached: Reached{b.Incarnation, b.LastID(), b.Cursor},
		Shutdown: b.Shutdown, Seq: last.Seq, LogFirst: pub.LogFirst(),
	}, nil
}

// unreadable is what the log holds of a rank whose last message cannot be read. A snapshot may have an incarnation that
// is later than the clock; if none can be read, the clock alone numbers the next incarnation.
func (l *StreamLog) unreadable(ctx context.Context, pub *jetstream.Publisher, why error) Published {
	p, err := l.recall(ctx, pub.Partition())
	if err != nil {
		p = Published{}
	}
	last, _ := pub.Found()
	p.Found, p.Shutdown, p.Unreadable, p.Seq, p.LogFirst = true, false, why, last.Seq, pub.LogFirst()
	return p
}

// lastInSnapshot finds the rank in its partition's snapshot. It counts only if the log goes on where the snapshot ends:
// else what the rank said after it may have been in the log and is gone, with the ids that it used. A message that the
// log still has where the snapshot ends must be the one that the snapshot has seen, by its time: a log that was rolled
// back grows again with others. A snapshot that cannot be relied on is as good as none: a new incarnation begins, and
// what was known is cleared.
func (l *StreamLog) lastInSnapshot(ctx context.Context, p events.Partition) (Published, error) {
	bucket, err := l.ns.OpenSnapshots(ctx)
	if errors.Is(err, jetstream.ErrNotFound) {
		return Published{}, nil
	} else if err != nil {
		return Published{}, err
	}
	for before := uint64(0); ; {
		entry, err := bucket.Latest(ctx, snapshot.ManifestKey(p))
		if errors.Is(err, jetstream.ErrNotFound) {
			return Published{}, nil
		} else if err != nil {
			return Published{}, err
		}
		if entry.Revision == before {
			return Published{}, nil
		}
		found, ok, err := l.findRank(ctx, p, bucket, entry.Value)
		if ok || err != nil {
			return found, err
		}
		before = entry.Revision // a later snapshot may have removed what this one needs: then there is another manifest
	}
}

// findRank looks for the rank in one snapshot, and reports false if that cannot be relied on. An error is NATS's.
func (l *StreamLog) findRank(ctx context.Context, p events.Partition, bucket *jetstream.Bucket,
	text []byte) (found Published, ok bool, err error) {
	info, err := l.ns.StreamInfo(ctx, p)
	if err != nil {
		return Published{}, false, err
	}
	usable := snapshot.Choose(
		snapshot.Bucket{Partition: p, Manifests: map[string][]byte{snapshot.ManifestKey(p): text}},
		snapshot.Log{
			Namespace: l.ns.Name(), Stream: info.Name, Epoch: info.Epoch.Time(), First: info.First,
			Last: info.Last,
		}).Usable
	if len(usable) == 0 {
		return Published{}, false, nil
	}
	if at := usable[0]; at.SeqTime != 0 && at.Seq >= info.First {
		took, err := l.ns.TimeOf(ctx, p, at.Seq)
		if err == nil && took != events.Millis(at.SeqTime) {
			return Published{}, false, nil
		}
		if err != nil && !errors.Is(err, jetstream.ErrNotFound) { // it may have been trimmed since
			return Published{}, false, err
		}
	}
	var failed error // of NATS, not of what was read
	rank, known, err := snapshot.FindRank(usable[0], l.key, func(key string) ([]byte, error) {
		data, err := bucket.Get(ctx, key)
		if errors.Is(err, jetstream.ErrNotFound) {
			return nil, snapshot.ErrMissing
		}
		failed = err
		return data, err
	})
	if failed != nil || err != nil {
		return Published{}, false, failed
	}
	return Published{
		Found: known, Identity: Identity{string(rank.Model), rank.BlockSize},
		Reached:  Reached{rank.Incarnation, rank.LastID, rank.Cursor.Cursor()},
		Shutdown: rank.Closed, Seq: usable[0].Seq,
	}, true, nil
}

// Publish appends messages to the rank's subject, all acknowledged.
func (l *StreamLog) Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error) {
	if span := tracing.Of(ctx); span.On() {
		span.Set(attribute.String("messaging.destination.name", l.pub.Subject()))
	}
	seq, err := l.pub.Publish(ctx, msgs)
	switch {
	case errors.Is(err, jetstream.ErrConflict):
		return 0, fmt.Errorf("%w: %w", ErrFenced, err)
	case errors.Is(err, jetstream.ErrLost):
		return 0, fmt.Errorf("%w: %w", ErrLogLost, err)
	}
	return seq, err
}
