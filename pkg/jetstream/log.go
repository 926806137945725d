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

// Epoch is when a stream was created, in nanoseconds since 1970 UTC: the name of one life of a stream. A stream
// that was deleted and made again has another. Zero means none yet.
type Epoch int64

// Time is the epoch as a time, in UTC.
func (e Epoch) Time() time.Time { return time.Unix(0, int64(e)).UTC() }

// String is the time in RFC 3339, with nanoseconds.
func (e Epoch) String() string { return e.Time().Format(time.RFC3339Nano) }

// LogConfig bounds the log. A zero field means: as it is, or the default for a stream that is created now.
type LogConfig struct {
	MaxBytes int64         // of each partition's stream; beyond it the oldest messages go
	Usual    int64         // MaxBytes of a stream that is created now, if MaxBytes does not say; default 1 GiB
	MaxAge   time.Duration // of a message; default 24 h
	Replicas int           // 1, 3 or 5; default that of the namespace's record
}

// StreamInfo is the state of one partition's stream, as its leader said.
type StreamInfo struct {
	Partition events.Partition
	Name      string
	Epoch     Epoch
	First     events.StreamSeq // first kept sequence; Last+1 if nothing is kept
	Last      events.StreamSeq // last sequence ever given
	Messages  uint64           // kept; less than Last-First+1 if there are holes
	Bytes     uint64
	MaxBytes  int64
	MaxAge    time.Duration
	Replicas  int
	maxMsg    int  // bytes of one message with headers; 0: the server's limit alone
	atomic    bool // takes atomic batches
	direct    bool // any replica may be asked for messages: publishers need it
}

// streamAnswer is the answer to STREAM.INFO, CREATE and UPDATE.
type streamAnswer struct {
	Config  jetstream.StreamConfig `json:"config"`
	Created time.Time              `json:"created"`
	State   struct {
		Messages uint64            `json:"messages"`
		Bytes    uint64            `json:"bytes"`
		FirstSeq uint64            `json:"first_seq"`
		LastSeq  uint64            `json:"last_seq"`
		Subjects map[string]uint64 `json:"subjects"`
	} `json:"state"`
	Total     int                    `json:"total"`
	Cluster   *jetstream.ClusterInfo `json:"cluster"`
	TimeStamp time.Time              `json:"ts"` // when the server answered, by its clock
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

// EnsureStreams creates what is missing of the log and sets the limits that the configuration names. What
// correctness rests on (file storage, limits retention, nothing that removes messages from the middle) is
// demanded of streams that are there: a stream of another shape is an error that wraps [ErrMismatch].
func (n *Namespace) EnsureStreams(ctx context.Context, cfg LogConfig) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(4)
	for p := range events.Partition(n.partitions) {
		g.Go(func() error { return n.ensureStream(ctx, p, cfg) })
	}
	return g.Wait()
}

func (n *Namespace) ensureStream(ctx context.Context, p events.Partition, cfg LogConfig) error {
	name := StreamName(n.name, p)
	want := jetstream.StreamConfig{
		Name:               name,
		Description:        "kvatlas events of partition " + decimal(uint64(p)),
		Subjects:           []string{streamSubjects(n.name, p)},
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
			return fmt.Errorf("stream %s: %w: it has %q, with which events could be lost unseen", name, ErrMismatch,
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

// ensure creates a stream, or lets amend change the configuration of the one that is there and updates it if it did.
func (c *Conn) ensure(ctx context.Context, want jetstream.StreamConfig,
	amend func(there *jetstream.StreamConfig) error) error {
	var refused time.Time // when the servers first had no room for all replicas
	for {
		there, err := c.streamInfo(ctx, want.Name)
		if err == nil {
			cfg := there.Config
			before := cfg
			if err := amend(&cfg); err != nil {
				return err
			}
			if reflect.DeepEqual(cfg, before) {
				return nil
			}
			err = c.call(ctx, "update stream "+want.Name, "STREAM.UPDATE."+want.Name, cfg, nil)
		} else if errors.Is(err, ErrNotFound) {
			err = c.call(ctx, "create stream "+want.Name, "STREAM.CREATE."+want.Name, want, nil)
		}
		switch codeOf(err) {
		case codeStreamNameInUse:
			continue // somebody else was faster, with other limits
		case codeNoPeers:
		default:
			return err
		}
		if refused.IsZero() {
			refused = time.Now()
		}
		if time.Since(refused) >= formingCluster || !loop.Wait(ctx, 100*time.Millisecond) {
			return err
		}
	}
}

// formingCluster is how long a stream that the servers find no place for is asked for again: servers that have just
// started count as offline until the others have heard them.
const formingCluster = 30 * time.Second

func (c *Conn) streamInfo(ctx context.Context, stream string) (*streamAnswer, error) {
	var a streamAnswer
	err := c.call(ctx, "info of stream "+stream, "STREAM.INFO."+stream, nil, &a)
	return &a, err
}

// infoOnce is streamInfo, once. The error is that of the server or of the connection, without an action.
func (c *Conn) infoOnce(ctx context.Context, stream string) (a streamAnswer, err error) {
	err = c.callOnce(ctx, "STREAM.INFO."+stream, nil, &a)
	return a, err
}

// StreamInfo asks for the state of one partition's stream. It tries until there is an answer or the context ends.
func (n *Namespace) StreamInfo(ctx context.Context, p events.Partition) (StreamInfo, error) {
	a, err := n.c.streamInfo(ctx, StreamName(n.name, p))
	return a.info(p), err
}

// Purge removes all messages of a partition below keepFrom, which itself is kept. It may be done twice. All publishing
// to the partition waits meanwhile (nats-server holds the stream's lock; tens of milliseconds for a million messages).
//
// The stream must still be the one of the epoch, and keepFrom at most one beyond its last sequence (the server
// would move the sequence forward otherwise): else nothing is removed and the error wraps [ErrMismatch].
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

// Writable is nil if a partition's stream takes messages, as far as its server knows. After a write has failed, as on a
// full disk, a stream takes nothing more until its server is started anew, and nothing else tells: a publish is not
// answered. The error then wraps [ErrFull] and has the system's words. Nothing is written to find out.
func (n *Namespace) Writable(ctx context.Context, p events.Partition) error {
	return n.c.writable(ctx, StreamName(n.name, p), nobodysSubject(n.name, p))
}

// writable has nothing be purged, which a stream that cannot be written refuses (nats-server server/filestore.go,
// PurgeEx). nobody is a subject on which there never is a message.
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
