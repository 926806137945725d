package shim

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// largestMessage is what one message of the log may take at the most: Limits.MessageBytes, or one event of
// events.MaxBlocksPerEvent blocks, and what surrounds it.
const largestMessage = 256 << 10

// StreamLog is the Log of one rank in a namespace's partition stream.
type StreamLog struct {
	ns    *jetstream.Namespace
	key   events.RankKey
	hooks jetstream.PublisherHooks
	pub   *jetstream.Publisher
}

// NewStreamLog returns the log of a rank. failed, if not nil, is told of attempts that will be made again.
func NewStreamLog(ns *jetstream.Namespace, key events.RankKey, failed func(error)) *StreamLog {
	return &StreamLog{ns: ns, key: key, hooks: jetstream.PublisherHooks{Retry: failed}}
}

// Last reads the last message of the rank's subject.
func (l *StreamLog) Last(ctx context.Context) (Published, error) {
	pub, err := l.ns.OpenPublisher(ctx, l.key, l.hooks)
	if err != nil {
		return Published{}, err
	}
	if pub.MaxMessage() < largestMessage {
		return Published{}, fmt.Errorf("%w: the NATS server takes messages of %d bytes only; kvatlas needs max_payload of at least %d",
			ErrUnusable, pub.MaxMessage(), largestMessage)
	}
	l.pub = pub
	last, found := pub.Found()
	if !found {
		return Published{}, nil
	}
	h, err := events.DecodeBatchHeader(last.Data)
	if err != nil {
		return Published{}, fmt.Errorf("%w: the last message on %s: %w", ErrUnusable, pub.Subject(), err)
	}
	return Published{
		Found: true, Incarnation: h.Incarnation, LastID: h.LastID(), Cursor: h.Cursor, Shutdown: h.Shutdown, Seq: last.Seq,
	}, nil
}

// Publish appends messages to the rank's subject, all acknowledged.
func (l *StreamLog) Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error) {
	seq, err := l.pub.Publish(ctx, msgs)
	switch {
	case errors.Is(err, jetstream.ErrConflict):
		return 0, fmt.Errorf("%w: %w", ErrFenced, err)
	case errors.Is(err, jetstream.ErrLost):
		return 0, fmt.Errorf("%w: %w", ErrLogLost, err)
	}
	return seq, err
}
