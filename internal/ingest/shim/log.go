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

// largestMessage is the maximum size of a message in the log: Limits.MessageBytes with the overhead. The default limit
// of NATS servers is 1 MiB, and snapshots need the same size.
const largestMessage = 900 << 10

// StreamLog is the Log of a rank in the partition stream of a namespace.
type StreamLog struct {
	ns  *jetstream.Namespace
	key events.RankKey
	o   jetstream.PublisherOptions
	pub *jetstream.Publisher
}

// NewStreamLog returns the log of a rank. If failed is not nil, failed is called before retries, and Publish also waits
// for a server that refuses writes.
func NewStreamLog(ns *jetstream.Namespace, key events.RankKey, failed func(error)) *StreamLog {
	return &StreamLog{ns: ns, key: key, o: jetstream.PublisherOptions{Retry: failed, Persist: failed != nil}}
}

// OnCrowded sets the callback for refused batches; see [jetstream.PublisherOptions]. Call it before Last. It returns l.
func (l *StreamLog) OnCrowded(f func(error)) *StreamLog {
	l.o.Crowded = f
	return l
}

// Last reads the last message of the rank's subject. If the log was trimmed beyond the message, the snapshot behind the
// trim has the same state, and a node reads the snapshot ([ServeRecall]).
func (l *StreamLog) Last(ctx context.Context) (Published, error) {
	pub, err := l.ns.OpenPublisher(ctx, l.key, l.o)
	if err != nil {
		return Published{}, err
	}
	if pub.MaxMessage() < largestMessage {
		return Published{},
			fmt.Errorf("%w: the NATS server accepts messages of only %d bytes; kvatlas needs max_payload of at least %d",
				ErrUnusable, pub.MaxMessage(), largestMessage)
	}
	l.pub = pub
	last, found := pub.Found()
	if !found {
		return l.recall(ctx, pub.Partition())
	}
	var b events.Batch // the whole batch, as nodes decode it
	if err := events.DecodeBatch(last.Data, &b); err != nil {
		return l.unreadable(ctx, pub, fmt.Errorf("message %d on %s: %w", last.Seq, pub.Subject(), err)), nil
	}
	return Published{
		Found: true, Identity: Identity{b.Model, b.BlockSize}, Reached: Reached{b.Incarnation, b.LastID(), b.Cursor},
		Shutdown: b.Shutdown, Seq: last.Seq, LogFirst: pub.LogFirst(),
	}, nil
}

// unreadable returns the state of a rank with an unreadable last message. A snapshot may have an incarnation later than
// the clock. Without a readable snapshot, the clock determines the next incarnation.
func (l *StreamLog) unreadable(ctx context.Context, pub *jetstream.Publisher, why error) Published {
	p, err := l.recall(ctx, pub.Partition())
	if err != nil {
		p = Published{}
	}
	last, _ := pub.Found()
	p.Found, p.Shutdown, p.Unreadable, p.Seq, p.LogFirst = true, false, why, last.Seq, pub.LogFirst()
	return p
}

// lastInSnapshot finds the rank in the partition's snapshot. The snapshot counts only if the log continues at the
// snapshot's end. Otherwise later messages of the rank may be lost, with their event ids. A message at the snapshot's
// end must be the message in the snapshot, by its time, because a rolled-back log grows again with other messages. An
// unreliable snapshot counts as missing: a new incarnation begins, and the rank is cleared.
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
		before = entry.Revision // a later snapshot may have removed parts of this snapshot: then another manifest exists
	}
}

// findRank looks for the rank in a snapshot. ok is false for an unreliable snapshot. The error is an error of NATS.
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
		if err != nil && !errors.Is(err, jetstream.ErrNotFound) { // the message may have been trimmed since
			return Published{}, false, err
		}
	}
	var failed error // of NATS, not of the content
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
