package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Epoch is the creation time of a stream, in nanoseconds since 1970 UTC. A stream that was deleted and recreated has a
// different epoch. Zero: no epoch yet.
type Epoch int64

// Time returns the epoch as a time in UTC.
func (e Epoch) Time() time.Time { return time.Unix(0, int64(e)).UTC() }

// String returns the time in RFC 3339, with nanoseconds.
func (e Epoch) String() string { return e.Time().Format(time.RFC3339Nano) }

// LogConfig has the limits of the log. A zero field keeps the limit of an existing stream, and means the default for a
// new stream.
type LogConfig struct {
	MaxBytes int64         // of each partition's stream; beyond it, the oldest messages are dropped
	Usual    int64         // MaxBytes of a new stream if MaxBytes is 0; default 1 GiB
	MaxAge   time.Duration // of a message; default 24 h
	Replicas int           // 1, 3 or 5; default: the replicas of the namespace's record
}

// StreamInfo is the state of a partition's stream, from its leader.
type StreamInfo struct {
	Partition events.Partition
	Name      string
	Epoch     Epoch
	First     events.StreamSeq // first kept sequence; Last+1 if nothing is kept
	Last      events.StreamSeq // last assigned sequence
	Messages  uint64           // stored; less than Last-First+1 if there are holes
	Bytes     uint64
	MaxBytes  int64
	MaxAge    time.Duration
	Replicas  int
	maxMsg    int  // bytes of a message with headers; 0: only the server's limit
	atomic    bool // accepts atomic batches
	direct    bool // allows direct gets from any replica, which publishers need
}

// streamAnswer is the answer to STREAM.INFO, CREATE and UPDATE.
type streamAnswer struct {
	Config  jetstream.StreamConfig `json:"config"`
	Created time.Time              `json:"created"`
	State   struct {
		Messages  uint64            `json:"messages"`
		Bytes     uint64            `json:"bytes"`
		FirstSeq  uint64            `json:"first_seq"`
		LastSeq   uint64            `json:"last_seq"`
		FirstTime time.Time         `json:"first_ts"`
		Subjects  map[string]uint64 `json:"subjects"`
	} `json:"state"`
	Total     int                    `json:"total"`
	Cluster   *jetstream.ClusterInfo `json:"cluster"`
	TimeStamp time.Time              `json:"ts"` // time of the answer, by the server's clock
}

func (a *streamAnswer) epoch() Epoch { return Epoch(a.Created.UnixNano()) }

func (a *streamAnswer) info(p events.Partition) StreamInfo {
	return StreamInfo{
		Partition: p,
		Name:      a.Config.Name,
		Epoch:     a.epoch(),
		First:     events.StreamSeq(max(a.State.FirstSeq, 1)),
		Last:      events.StreamSeq(a.State.LastSeq),
		Messages:  a.State.Messages,
		Bytes:     a.State.Bytes,
		MaxBytes:  a.Config.MaxBytes,
		MaxAge:    a.Config.MaxAge,
		Replicas:  a.Config.Replicas,
		maxMsg:    int(max(a.Config.MaxMsgSize, 0)),
		atomic:    a.Config.AllowAtomicPublish,
		direct:    a.Config.AllowDirect,
	}
}

// EnsureStreams creates missing streams of the log and applies the limits of the configuration. Existing streams must
// have the settings that correctness needs: file storage, limits retention, and no removal of messages from the middle.
// Otherwise the error wraps [ErrMismatch].
func (n *Namespace) EnsureStreams(ctx context.Context, cfg LogConfig) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for p := range events.Partition(n.partitions) {
		g.Go(func() error { return n.ensureStream(ctx, p, cfg) })
	}
	return g.Wait()
}

func (n *Namespace) ensureStream(ctx context.Context, p events.Partition, cfg LogConfig) error {
	name := n.name.Stream(p)
	want := jetstream.StreamConfig{
		Name:               name,
		Description:        "kvatlas events of partition " + decimal(uint64(p)),
		Subjects:           []string{n.name.streamSubjects(p)},
		Retention:          jetstream.LimitsPolicy,
		Storage:            jetstream.FileStorage,
		Discard:            jetstream.DiscardOld,
		MaxConsumers:       -1,
		MaxMsgs:            -1,
		MaxMsgSize:         -1,
		MaxMsgsPerSubject:  -1,
		MaxBytes:           cmp.Or(cfg.MaxBytes, cfg.Usual, 1<<30),
		MaxAge:             cmp.Or(cfg.MaxAge, 24*time.Hour),
		Replicas:           cmp.Or(cfg.Replicas, n.replicas),
		AllowDirect:        true,
		DenyDelete:         true,
		AllowAtomicPublish: n.c.atomicBatches(),
	}
	return n.c.ensure(ctx, want, func(there *jetstream.StreamConfig) error {
		odd := oddLog(there, want.Subjects[0])
		if len(odd) > 0 {
			return fmt.Errorf("stream %s: %w: it has %q, which could cause unnoticed losses of events", name, ErrMismatch,
				odd)
		}
		there.MaxBytes = cmp.Or(cfg.MaxBytes, there.MaxBytes)
		there.MaxAge = cmp.Or(cfg.MaxAge, there.MaxAge)
		there.Replicas = cmp.Or(cfg.Replicas, there.Replicas)
		there.AllowAtomicPublish = there.AllowAtomicPublish || want.AllowAtomicPublish
		there.AllowDirect = true
		there.AllowBatchPublish, there.RePublish = false, nil
		return nil
	})
}

// ensure creates a stream, and returns when the servers have it. If the stream exists, amend may change its
// configuration, and ensure updates it after a change.
func (c *Conn) ensure(ctx context.Context, want jetstream.StreamConfig,
	amend func(there *jetstream.StreamConfig) error) error {
	var waiting time.Time // since the first attempt that may be repeated
	for created := false; ; {
		there, err := c.streamInfo(ctx, want.Name)
		switch {
		case err == nil:
			cfg := there.Config
			before := cfg
			if err := amend(&cfg); err != nil || reflect.DeepEqual(cfg, before) {
				return err
			}
			err = c.call(ctx, "update stream "+want.Name, "STREAM.UPDATE."+want.Name, cfg, nil)
		case errors.Is(err, ErrNotFound) && !created:
			if err = c.call(ctx, "create stream "+want.Name, "STREAM.CREATE."+want.Name, want, nil); err == nil {
				created = true
				continue // nats-server confirms a stream that it is still creating for another client
			}
		}
		switch {
		case codeOf(err) == codeStreamNameInUse:
			continue // another client has created it with other limits
		case codeOf(err) != codeNoPeers && !(created && errors.Is(err, ErrNotFound)):
			return err
		}
		if waiting.IsZero() {
			waiting = time.Now()
		}
		if time.Since(waiting) >= formingCluster || !loop.Wait(ctx, 100*time.Millisecond) {
			return err
		}
	}
}

// formingCluster is the longest time to repeat the creation of a stream without a place, and to wait for a created
// stream: servers that have just started count as offline until the other servers have contacted them.
const formingCluster = 30 * time.Second

func (c *Conn) streamInfo(ctx context.Context, stream string) (*streamAnswer, error) {
	var a streamAnswer
	err := c.call(ctx, "info of stream "+stream, "STREAM.INFO."+stream, nil, &a)
	return &a, err
}

// infoOnce is a single attempt of streamInfo. The error is from the server or the connection, without an action.
func (c *Conn) infoOnce(ctx context.Context, stream string) (a streamAnswer, err error) {
	err = c.callOnce(ctx, "STREAM.INFO."+stream, nil, &a)
	return a, err
}

// StreamInfo returns the state of a partition's stream. It retries until an answer arrives or the context ends.
func (n *Namespace) StreamInfo(ctx context.Context, p events.Partition) (StreamInfo, error) {
	a, err := n.c.streamInfo(ctx, n.name.Stream(p))
	return a.info(p), err
}

// Purge removes all messages of a partition below keepFrom. A repeated purge is harmless. All publishers of the
// partition wait meanwhile (nats-server holds the stream's lock; tens of milliseconds for a million messages).
//
// The stream must have the epoch, and keepFrom must be at most one beyond its last sequence (otherwise the server would
// advance the sequence). If not, nothing is removed and the error wraps [ErrMismatch].
func (n *Namespace) Purge(ctx context.Context, p events.Partition, epoch Epoch, keepFrom events.StreamSeq) error {
	action := fmt.Sprintf("purge partition %d below %d", p, keepFrom)
	info, err := n.StreamInfo(ctx, p)
	if err != nil {
		return fmt.Errorf("%s: %w", action, err)
	}
	if info.Epoch != epoch {
		return fmt.Errorf("%s: %w: the stream's epoch is %s, not %s", action, ErrMismatch, info.Epoch, epoch)
	}
	if keepFrom == 0 || keepFrom > info.Last+1 {
		return fmt.Errorf("%s: %w: the stream has %d to %d", action, ErrMismatch, info.First, info.Last)
	}
	if keepFrom <= info.First {
		return nil
	}
	return n.c.call(ctx, action, "STREAM.PURGE."+info.Name, purgeArgs{Sequence: uint64(keepFrom)}, nil)
}

// Writable returns nil if a partition's stream accepts messages, by the server's report. After a failed write, as on a
// full disk, a stream accepts nothing until the server is restarted. No other request shows this state: a publish gets
// no answer. The error then wraps [ErrFull] and has the system's text. Writable writes nothing.
func (n *Namespace) Writable(ctx context.Context, p events.Partition) error {
	return n.c.writable(ctx, n.name.Stream(p), n.name.nobodysSubject(p))
}

// writable purges nobody, a subject without messages. A stream in the failed state refuses a purge (nats-server
// server/filestore.go, PurgeEx).
func (c *Conn) writable(ctx context.Context, stream, nobody string) error {
	action := "write to stream " + stream
	err := c.call(ctx, action, "STREAM.PURGE."+stream, purgeArgs{Subject: nobody}, nil)
	if api, is := errors.AsType[*apiError](err); is && api.ErrCode == codeStreamGeneral {
		return fmt.Errorf("%s: %w: %s", action, ErrFull, api.Description)
	}
	return err
}

type purgeArgs struct {
	Sequence uint64 `json:"seq,omitempty"`
	Subject  string `json:"filter,omitempty"`
}
