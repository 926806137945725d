package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Recording is the stream of recorded requests of a namespace. Its methods may be called from any goroutine.
type Recording struct {
	c    *Conn
	ns   Names
	name string // of the stream
	cfg  RecordingConfig
}

// RecordingConfig has the limits of the stream. A zero field keeps the limit of an existing stream, and means the
// default for a new stream.
type RecordingConfig struct {
	MaxBytes int64         // beyond it, the oldest batches are dropped
	Usual    int64         // MaxBytes of a new stream if MaxBytes is 0; default 1 GiB
	MaxAge   time.Duration // of a batch; default 24 h
	Replicas int           // 1, 3 or 5; default: the replicas of the namespace's record
}

// RecordingInfo is the state of the stream, from its leader.
type RecordingInfo struct {
	First, Last events.StreamSeq // the stored batches; Last+1 and Last if there are none
	Batches     uint64
	Bytes       uint64
	MaxBytes    int64
	MaxAge      time.Duration
	Replicas    int
	Odd         []string  // settings with which records could be lost
	Oldest      time.Time // when the first batch was stored; zero: there is none
}

// RecordedBatch is a message of the stream.
type RecordedBatch struct {
	Seq  events.StreamSeq
	Time time.Time // when the stream stored it
	Node string
	Data []byte
}

// EnsureRecording creates the stream of recorded requests, or applies the limits of the configuration. The user needs
// the permissions of a node.
func (n *Namespace) EnsureRecording(ctx context.Context, cfg RecordingConfig) (*Recording, error) {
	cfg.Replicas = cmp.Or(cfg.Replicas, n.replicas)
	r := OpenRecording(n.c, n.Name())
	r.cfg = cfg
	return r, r.Ensure(ctx)
}

// OpenRecording returns the stream of recorded requests for reading. It needs no other object of the namespace. Until a
// node has created the stream, the methods return [ErrNotFound].
func OpenRecording(c *Conn, ns string) *Recording {
	return &Recording{c: c, ns: Names(ns), name: Names(ns).RecordingStream()}
}

// Ensure creates the stream if it is missing.
func (r *Recording) Ensure(ctx context.Context) error {
	want := jetstream.StreamConfig{
		Name:              r.name,
		Description:       "kvatlas recorded requests",
		Subjects:          []string{r.ns.records()},
		Retention:         jetstream.LimitsPolicy,
		Storage:           jetstream.FileStorage,
		Discard:           jetstream.DiscardOld,
		MaxConsumers:      -1,
		MaxMsgs:           -1,
		MaxMsgSize:        -1,
		MaxMsgsPerSubject: -1,
		MaxBytes:          cmp.Or(r.cfg.MaxBytes, r.cfg.Usual, 1<<30),
		MaxAge:            cmp.Or(r.cfg.MaxAge, 24*time.Hour),
		Duplicates:        min(cmp.Or(r.cfg.MaxAge, 24*time.Hour), 2*time.Minute),
		Replicas:          cmp.Or(r.cfg.Replicas, 1),
		AllowDirect:       true,
		DenyDelete:        true,
	}
	return r.c.ensure(ctx, want, func(there *jetstream.StreamConfig) error {
		if odd := oddLog(there, want.Subjects[0]); len(odd) > 0 {
			return fmt.Errorf("stream %s: %w: it has %q; delete the stream and start again", r.name, ErrMismatch, odd)
		}
		there.MaxBytes = cmp.Or(r.cfg.MaxBytes, there.MaxBytes)
		there.MaxAge = cmp.Or(r.cfg.MaxAge, there.MaxAge)
		there.Duplicates = min(there.MaxAge, 2*time.Minute)
		there.Replicas = cmp.Or(r.cfg.Replicas, there.Replicas)
		return nil
	})
}

// Secret returns the secret of the namespace for names in recordings. It stores fresh if there is none: all nodes have
// the secret of the first one. The secret is in a separate bucket, which readers of the stream may not read.
func (n *Namespace) Secret(ctx context.Context, fresh []byte) ([]byte, error) {
	b, err := ensureBucket(ctx, n.c, n.name.SecretBucket(), BucketConfig{once: true}, n.replicas)
	if err != nil {
		return nil, err
	}
	if err = b.create(ctx, secretKey, fresh); err != nil && !errors.Is(err, ErrConflict) {
		return nil, err
	}
	entry, err := b.Latest(ctx, secretKey)
	return entry.Value, err
}

// Store stores a batch of a node once, within a few seconds. A batch with the id of an earlier batch is not stored
// again within two minutes.
func (r *Recording) Store(ctx context.Context, node, id string, data []byte) error {
	subject, err := r.ns.record(node)
	if err != nil {
		return err
	}
	if limit := r.c.maxMessage(0); len(data) > limit {
		return fmt.Errorf("store recorded requests: %w: %d bytes, the limit is %d", ErrTooLarge, len(data), limit)
	}
	m := &nats.Msg{Subject: subject, Data: data, Header: nats.Header{headerMessageID: {id}}}
	_, err = r.c.store(ctx, r.name, m)
	return failed("store recorded requests", err)
}

// Info returns the state of the stream.
func (r *Recording) Info(ctx context.Context) (RecordingInfo, error) {
	a, err := r.c.streamInfo(ctx, r.name)
	if err != nil {
		return RecordingInfo{}, err
	}
	i := a.info(0)
	return RecordingInfo{First: i.First, Last: i.Last, Batches: i.Messages, Bytes: i.Bytes, MaxBytes: i.MaxBytes,
		MaxAge: i.MaxAge, Replicas: i.Replicas, Oldest: a.State.FirstTime,
		Odd: oddLog(&a.Config, r.ns.records())}, nil
}

// Next returns the first stored batch at or after a sequence. The error wraps [ErrNotFound] beyond the end.
func (r *Recording) Next(ctx context.Context, from events.StreamSeq) (b RecordedBatch, err error) {
	var m storedMessage
	err = r.c.retry(ctx, func() (err error) {
		m, err = r.c.getMessage(ctx, r.name, map[string]any{"seq": max(from, 1), "next_by_subj": ">"})
		return err
	})
	if err != nil {
		return b, failed(fmt.Sprintf("read recorded requests from %d", from), err)
	}
	node, _ := r.ns.parseRecord(m.Subject)
	return RecordedBatch{Seq: events.StreamSeq(m.Seq), Time: m.Time, Node: node, Data: m.Data}, nil
}
