package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// MessageRoom is the least size of messages that an indexer's NATS server must accept, in bytes.
const MessageRoom = MaxValue + headerRoom

// BatchLevel is the first level of the JetStream API with atomic batches: nats-server 2.12.
const BatchLevel = 2

// ServerInfo describes the NATS server of a connection.
type ServerInfo struct {
	Name, Version, Cluster, URL string
	RoundTrip                   time.Duration
	MaxPayload                  int64 // bytes of a message
}

// Server measures a round trip to the server. It waits until ctx ends, which must have a deadline.
func (c *Conn) Server(ctx context.Context) (s ServerInfo, err error) {
	s = ServerInfo{Name: c.nc.ConnectedServerName(), Version: c.nc.ConnectedServerVersion(),
		Cluster: c.nc.ConnectedClusterName(), URL: c.ServerURL(), MaxPayload: c.nc.MaxPayload()}
	asked := time.Now()
	if err = c.nc.FlushWithContext(ctx); err != nil {
		return s, failed("measure a round trip to the NATS server", err)
	}
	s.RoundTrip = time.Since(asked)
	return s, nil
}

// AccountInfo has the usage and limits of an account in JetStream. A limit of 0 or less is no limit.
type AccountInfo struct {
	Level                   int // of the API
	Storage, MaxStorage     int64
	Streams, MaxStreams     int
	Consumers, MaxConsumers int
}

// Account returns the usage and limits of the connection's account. It works on a [ConnOptions.Core] connection too.
// The error wraps [ErrNoJetStream] or [ErrNoLeader] like the error of [Connect].
func (c *Conn) Account(ctx context.Context) (a AccountInfo, err error) {
	if a.Level, err = c.apiLevel(ctx); err != nil {
		return a, failed("read the account from JetStream", err)
	}
	var got jetstream.AccountInfo
	if err := c.call(ctx, "read the account from JetStream", "INFO", nil, &got); err != nil {
		return a, err
	}
	a.Storage, a.MaxStorage = int64(got.Store), got.Limits.MaxStore
	a.Streams, a.MaxStreams = got.Streams, got.Limits.MaxStreams
	a.Consumers, a.MaxConsumers = got.Consumers, got.Limits.MaxConsumers
	return a, nil
}

// StreamState is the state of a stream of a namespace, or of a bucket's stream.
type StreamState struct {
	Name   string
	Bucket string // empty: a partition's log
	Usage  string // contents of a bucket
	Err    error  // why the state is unknown; [ErrNotFound] if the stream is missing
	Odd    []string

	Partition       events.Partition // of a log
	Bytes           uint64
	MaxBytes        int64
	MaxAge          time.Duration
	Replicas        int
	Direct, Batches bool     // it allows direct gets; it allows atomic batches, or needs none
	Rollups         bool     // of a bucket: it allows rollups; an indexer turns them off at its start
	Behind          []string // servers with a replica that is offline or not current
	Refused         error    // reason for refused writes, by the server; [ErrDenied]: this user may not check

	// Ahead is the least lead of the answering server's clock over ours; negative: behind. It is 0 if the time of the
	// request explains the difference.
	Ahead  time.Duration
	Server string // the answering server: the stream's leader
}

// inspectedAtOnce is the number of concurrent inspections of streams.
const inspectedAtOnce = 16

// Inspect reads the state of all streams and buckets of the namespace once. It writes nothing.
func (n *Namespace) Inspect(ctx context.Context) []StreamState {
	buckets := []struct{ name, what string }{
		{n.name.MetaBucket(), "the namespace's record and models"}, {n.name.SnapshotBucket(), "snapshots"},
		{n.name.NodesBucket(), "announcements of nodes"}, {n.name.WorkersBucket(), "workers' registrations"},
	}
	list := make([]StreamState, int(n.partitions)+len(buckets))
	slots := make(chan struct{}, inspectedAtOnce)
	var all sync.WaitGroup
	for i := range list {
		all.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			s := &list[i]
			if p := events.Partition(i); i < int(n.partitions) {
				*s = StreamState{Name: n.name.Stream(p), Partition: p}
				n.inspect(ctx, s, n.name.nobodysSubject(p), func(there *jetstream.StreamConfig) []string {
					return oddLog(there, n.name.streamSubjects(p))
				})
				return
			}
			b := buckets[i-int(n.partitions)]
			*s = StreamState{Name: BucketStream(b.name), Bucket: b.name, Usage: b.what}
			n.inspect(ctx, s, KeySubject(b.name, nobodysKey), func(there *jetstream.StreamConfig) []string {
				s.Rollups = there.AllowRollup
				return oddBucket(there)
			})
			s.Batches = s.Batches || b.name != n.name.SnapshotBucket()
		})
	}
	all.Wait()
	return list
}

func (n *Namespace) inspect(ctx context.Context, s *StreamState, nobody string,
	odd func(*jetstream.StreamConfig) []string) {
	asked := time.Now()
	asking, done := context.WithTimeout(ctx, n.c.attempt)
	defer done()
	a, err := n.c.infoOnce(asking, s.Name)
	answered := time.Now()
	if err != nil {
		s.Err = failed("info of stream "+s.Name, err)
		return
	}
	s.Odd = odd(&a.Config)
	s.Bytes, s.MaxBytes, s.MaxAge, s.Replicas = a.State.Bytes, a.Config.MaxBytes, a.Config.MaxAge, a.Config.Replicas
	s.Direct, s.Batches = a.Config.AllowDirect, a.Config.AllowAtomicPublish
	if s.Server = n.c.nc.ConnectedServerName(); a.Cluster != nil {
		if a.Cluster.Leader != "" {
			s.Server = a.Cluster.Leader
		}
		for _, r := range a.Cluster.Replicas {
			if r.Offline || !r.Current {
				s.Behind = append(s.Behind, r.Name)
			}
		}
	}
	if !a.TimeStamp.IsZero() {
		s.Ahead = Ahead(a.TimeStamp, asked, answered)
	}
	within, cancel := context.WithTimeout(ctx, n.c.attempt)
	defer cancel()
	s.Refused = n.c.writable(within, s.Name, nobody)
	if !errors.Is(s.Refused, ErrFull) && !errors.Is(s.Refused, ErrDenied) {
		s.Refused = nil // unknown
	}
}

// Ahead returns the least lead over our clock of a clock that showed then at some moment between asked and answered.
func Ahead(then, asked, answered time.Time) time.Duration {
	if d := then.Sub(answered); d > 0 {
		return d
	}
	return min(then.Sub(asked), 0)
}

// oddities is a list of settings of a stream that could cause an unnoticed loss of messages.
type oddities []string

func (o *oddities) check(bad bool, format string, v ...any) {
	if bad {
		*o = append(*o, fmt.Sprintf(format, v...))
	}
}

// common checks settings that no stream of a namespace may have. The server never turns them off.
func (o *oddities) common(there *jetstream.StreamConfig) {
	o.check(there.Storage != jetstream.FileStorage, "storage %v, not %v", there.Storage, jetstream.FileStorage)
	o.check(there.AllowMsgTTL, "a life per message")
	o.check(there.AllowMsgSchedules, "message schedules")
	o.check(there.AllowMsgCounter, "message counters")
	o.check(there.Mirror != nil || len(there.Sources) > 0, "a mirror or sources")
	o.check(there.SubjectTransform != nil, "a subject transform")
	o.check(there.PersistMode == jetstream.AsyncPersistMode, "asynchronous persistence")
}

// oddBucket returns the invalid settings of a bucket's stream.
func oddBucket(there *jetstream.StreamConfig) []string {
	var odd oddities
	odd.check(there.MaxMsgsPerSubject != 1, "history %d, not 1", there.MaxMsgsPerSubject)
	odd.check(there.Discard != jetstream.DiscardNew, "discard %v, not %v", there.Discard, jetstream.DiscardNew)
	odd.common(there)
	return odd
}

// oddLog returns the invalid settings of a partition's stream.
func oddLog(there *jetstream.StreamConfig, subjects string) []string {
	var odd oddities
	check := odd.check
	check(!slices.Equal(there.Subjects, []string{subjects}), "subjects %q, not %q", there.Subjects, []string{subjects})
	check(there.Retention != jetstream.LimitsPolicy, "retention %v, not %v", there.Retention, jetstream.LimitsPolicy)
	check(there.Discard != jetstream.DiscardOld, "discard %v, not %v", there.Discard, jetstream.DiscardOld)
	check(there.MaxMsgsPerSubject > 0, "a limit of %d messages per subject", there.MaxMsgsPerSubject)
	check(there.AllowRollup, "rollups")
	odd.common(there)
	return odd
}
