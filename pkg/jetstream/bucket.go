package jetstream

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sort"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"
)

// MaxValue is how large a value may be. Conditional writes carry headers, and the default limit on a message, 1
// MiB, counts them.
const MaxValue = 900_000

// A commit shares the server's disk with whoever publishes. What is more than batchBytes goes value by value, and after
// each the disk is left alone restFactor times as long as that took, restMost at most: so an event waits for one value,
// not for all.
const (
	batchBytes = 128 << 10
	restFactor = 2
	restMost   = 20 * time.Millisecond
)

// BucketConfig bounds a bucket. A zero field means: as it is, or the default for a bucket that is created now.
type BucketConfig struct {
	MaxBytes int64 // default none; a full bucket refuses writes with [ErrFull]
	Replicas int   // 1, 3 or 5; default that of the namespace's record

	// TTL is after how long without being written a key goes, by the servers' clocks. Zero: never. It is part of what a
	// bucket is: a bucket that is there with another is refused.
	TTL time.Duration
}

// Bucket is a NATS key-value bucket of history 1, which `nats kv` can read. Revisions are sequences of its
// stream: what is written later has a greater one, over all keys. Its methods may be called from any goroutine.
type Bucket struct {
	c      *Conn
	name   string
	stream string
	atomic bool
	own    bool // only keys are read that the caller may write, and it may be permitted no others
}

// Entry is one key's value.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Written  time.Time // by the server's clock
	Deleted  bool      // in a [Watched]: there is only a mark that there was a value
}

// Value is a key with what shall be stored there.
type Value struct {
	Key  string
	Data []byte
}

// EnsureSnapshots opens the bucket for snapshots, creates it if it is missing, and sets the limits that the
// configuration names.
func (n *Namespace) EnsureSnapshots(ctx context.Context, cfg BucketConfig) (*Bucket, error) {
	return ensureBucket(ctx, n.c, snapshotBucket(n.name), cfg, n.replicas)
}

// OpenSnapshots opens the bucket for snapshots; [ErrNotFound] if there is none.
func (n *Namespace) OpenSnapshots(ctx context.Context) (*Bucket, error) {
	b := openBucket(n.c, snapshotBucket(n.name))
	a, err := n.c.streamInfo(ctx, b.stream)
	if err != nil {
		return nil, err
	}
	b.atomic = a.Config.AllowAtomicPublish && n.c.atomicBatches()
	return b, nil
}

// roomForValues refuses a server whose messages have no room for a value of the largest size with its headers.
func (c *Conn) roomForValues() error {
	const need = MaxValue + headerRoom
	if limit := int(c.nc.MaxPayload()); limit < need {
		return fmt.Errorf(
			"%w: NATS server %s takes messages of %d bytes at most, an indexer needs %d: set max_payload: %d or more in the server's configuration (1048576 is its default)",
			ErrTooLarge, c.nc.ConnectedServerName(), limit, need, need)
	}
	return nil
}

func openBucket(c *Conn, name string) *Bucket {
	return &Bucket{c: c, name: name, stream: bucketStream(name)}
}

// ensureBucket creates a bucket as nats.go's CreateKeyValue would (jetstream/kv.go), with atomic batches
// allowed where the server has them.
func ensureBucket(ctx context.Context, c *Conn, name string, cfg BucketConfig, replicas int) (*Bucket, error) {
	b := openBucket(c, name)
	b.atomic = c.atomicBatches()
	want := jetstream.StreamConfig{
		Name:               b.stream,
		Subjects:           []string{keySubject(name, ">")},
		MaxMsgsPerSubject:  1,
		MaxBytes:           cmp.Or(cfg.MaxBytes, -1),
		MaxMsgSize:         -1,
		MaxMsgs:            -1,
		MaxConsumers:       -1,
		MaxAge:             cfg.TTL,
		Storage:            jetstream.FileStorage,
		Replicas:           cmp.Or(cfg.Replicas, replicas),
		AllowRollup:        true,
		DenyDelete:         true,
		AllowDirect:        true,
		Discard:            jetstream.DiscardNew,
		AllowAtomicPublish: b.atomic,
	}
	err := c.ensure(ctx, want, func(there *jetstream.StreamConfig) error {
		if there.MaxMsgsPerSubject != 1 || there.Storage != want.Storage || there.Discard != want.Discard ||
			there.MaxAge != want.MaxAge {
			return fmt.Errorf(
				"bucket %s: %w: want history 1, file storage and life %v per key (0: for ever), have history %d, %v storage, life %v",
				name, ErrMismatch, want.MaxAge, there.MaxMsgsPerSubject, there.Storage, there.MaxAge)
		}
		there.MaxBytes = cmp.Or(cfg.MaxBytes, there.MaxBytes)
		there.Replicas = cmp.Or(cfg.Replicas, there.Replicas)
		there.AllowDirect = true
		there.AllowAtomicPublish = there.AllowAtomicPublish || want.AllowAtomicPublish
		return nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Name is the bucket's name.
func (b *Bucket) Name() string { return b.name }

func (b *Bucket) check(v Value) error {
	if !validKey(v.Key) {
		return fmt.Errorf("key %.64q in bucket %s: %w", v.Key, b.name, ErrBadName)
	}
	if limit := min(MaxValue, b.c.maxMessage(0)); len(v.Data) > limit {
		return fmt.Errorf("key %s in bucket %s: %w: %d bytes, the limit is %d", v.Key, b.name, ErrTooLarge, len(v.Data),
			limit)
	}
	return nil
}

// Latest reads a key as the stream's leader has it: it does not miss what was acknowledged before. For manifests and
// whatever else must not be stale. [ErrNotFound] if there is no such key.
func (b *Bucket) Latest(ctx context.Context, key string) (Entry, error) {
	entry, deleted, err := b.last(ctx, key)
	if err == nil && deleted {
		err = fmt.Errorf("key %s in bucket %s: %w: deleted", key, b.name, ErrNotFound)
	}
	return entry, err
}

// last is Latest that tells a deleted key, which has a revision, from one that never was.
func (b *Bucket) last(ctx context.Context, key string) (entry Entry, deleted bool, err error) {
	if !validKey(key) {
		return Entry{}, false, fmt.Errorf("key %.64q in bucket %s: %w", key, b.name, ErrBadName)
	}
	read := b.c.lastOn
	if b.own {
		read = b.c.lastOwn
	}
	m, err := read(ctx, b.stream, keySubject(b.name, key))
	if err != nil {
		return Entry{}, false, err
	}
	deleted = m.header.Get(headerKVOperation) != "" // DEL or PURGE, by somebody's `nats kv del`
	return Entry{Key: key, Value: m.Data, Revision: uint64(m.Seq), Written: time.UnixMilli(int64(m.Time))}, deleted, nil
}

// Get reads a key from whichever replica answers, which may be a moment behind: for values that never change,
// as chunks named by their content. What that replica does not have is asked of the leader. [ErrNotFound] if
// there is no such key.
func (b *Bucket) Get(ctx context.Context, key string) ([]byte, error) {
	if !validKey(key) {
		return nil, fmt.Errorf("key %.64q in bucket %s: %w", key, b.name, ErrBadName)
	}
	subject := b.c.api + "DIRECT.GET." + b.stream + "." + keySubject(b.name, key)
	var reply *nats.Msg
	err := b.c.retry(ctx, func() (err error) {
		reply, err = b.c.request(ctx, &nats.Msg{Subject: subject})
		return err
	})
	if err != nil {
		return nil, failed("get "+key+" of bucket "+b.name, err)
	}
	if reply.Header.Get("Status") == "" && reply.Header.Get(headerKVOperation) == "" {
		return reply.Data, nil
	}
	entry, err := b.Latest(ctx, key)
	return entry.Value, err
}

// Put stores a value whatever was there.
func (b *Bucket) Put(ctx context.Context, key string, data []byte) (revision uint64, err error) {
	if err := b.check(Value{key, data}); err != nil {
		return 0, err
	}
	m := &nats.Msg{Subject: keySubject(b.name, key), Data: data}
	err = b.c.retry(ctx, func() (err error) {
		revision, err = b.c.store(ctx, b.stream, m)
		return err
	})
	return revision, failed("put "+key+" in bucket "+b.name, err)
}

// create stores a value if the key has none; [ErrConflict] if it has.
func (b *Bucket) create(ctx context.Context, key string, data []byte) error {
	_, err := b.Commit(ctx, nil, Value{key, data}, 0)
	if !errors.Is(err, ErrConflict) {
		return err
	}
	entry, deleted, lastErr := b.last(ctx, key)
	if lastErr != nil || !deleted {
		return err
	}
	_, err = b.Commit(ctx, nil, Value{key, data}, entry.Revision)
	return err
}

// Commit stores values and then, if its revision is still the one expected (0: there is none), the guard: a
// snapshot's chunks and its manifest. It returns the guard's new revision. An error that wraps [ErrConflict]
// says that the guard was written meanwhile.
//
// Where the server can, what is small goes as one atomic batch: all is stored or nothing. Else values are stored first,
// one after the other with rests between them, so that publishers get their turns at the disk, and the guard last:
// after a failure or a conflict some of the values may remain, which nothing refers to; [Bucket.Sweep] removes them.
//
// Who refers to a value without storing it again must have found it referred to by the guard of the expected
// revision, not merely in the bucket: only that keeps it from being swept (see DESIGN.md). Read the guard
// before the first Commit of a save, not after.
func (b *Bucket) Commit(ctx context.Context, values []Value, guard Value, expected uint64) (revision uint64,
	err error) {
	action := "commit " + guard.Key + " in bucket " + b.name
	size := 0
	for _, v := range values {
		if err := b.check(v); err != nil {
			return 0, err
		}
		size += len(v.Data)
	}
	if err := b.check(guard); err != nil {
		return 0, err
	}
	batch := b.atomic && len(values) > 0 && len(values) < maxBatch && size <= batchBytes
	stored := 0 // values that are there, if they do not go as a batch
	doubt := false
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		if batch {
			revision, err = b.commitBatch(ctx, values, guard, expected)
		} else {
			revision, err = b.commitGuardLast(ctx, values, &stored, guard, expected)
		}
		if err == nil {
			return revision, nil
		}
		class := classOf(err)
		var api *apiError
		switch {
		case errors.As(err, &api) && batch && batchRefused(api.ErrCode):
			batch = false
		case class == ErrConflict:
			entry, _, lastErr := b.last(ctx, guard.Key)
			if doubt && lastErr == nil && bytes.Equal(entry.Value, guard.Data) && entry.Revision > expected {
				return entry.Revision, nil // an attempt of ours was stored after all
			}
			if errors.Is(lastErr, ErrNotFound) {
				lastErr = nil // revision 0
			}
			if lastErr == nil && entry.Revision != expected {
				return 0, fmt.Errorf("%s: %w", action, &ConflictError{Subject: keySubject(b.name, guard.Key),
					Expected: expected, Found: entry.Revision, Server: err.Error()})
			}
			if lastErr != nil {
				return 0, fmt.Errorf("%s: %w", action, lastErr)
			}
			// The leader still works on an attempt, ours or another's (code 10164): wait and see.
		case class == ErrUnavailable:
			doubt = true
		default:
			return 0, failed(action, err)
		}
		if b.c.nc.IsClosed() || !sleep(ctx, pause) {
			return 0, fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
		}
	}
}

func (b *Bucket) guardMessage(guard Value, expected uint64) *nats.Msg {
	return &nats.Msg{
		Subject: keySubject(b.name, guard.Key),
		Data:    guard.Data,
		Header:  nats.Header{headerExpectedLast: []string{strconv.FormatUint(expected, 10)}},
	}
}

func (b *Bucket) commitBatch(ctx context.Context, values []Value, guard Value, expected uint64) (uint64, error) {
	return b.c.storeBatch(ctx, b.stream, keySubject(b.name, ""), nuid.Next(), len(values)+1, func(i int) *nats.Msg {
		if i == len(values) {
			return b.guardMessage(guard, expected)
		}
		return &nats.Msg{Subject: keySubject(b.name, values[i].Key), Data: values[i].Data}
	})
}

// commitGuardLast stores the values from the first that is not yet, and then the guard.
func (b *Bucket) commitGuardLast(ctx context.Context, values []Value, stored *int, guard Value,
	expected uint64) (uint64, error) {
	for ; *stored < len(values); *stored++ {
		v, begun := values[*stored], time.Now()
		if _, err := b.c.store(ctx, b.stream, &nats.Msg{Subject: keySubject(b.name, v.Key), Data: v.Data}); err != nil {
			return 0, err
		}
		if !sleep(ctx, min(restFactor*time.Since(begun), restMost)) {
			return 0, ctx.Err()
		}
	}
	return b.c.store(ctx, b.stream, b.guardMessage(guard, expected))
}

// Keys lists the keys that begin with a prefix (which is empty or ends in '.'), sorted, as the stream's leader
// has them.
func (b *Bucket) Keys(ctx context.Context, prefix string) ([]string, error) {
	if prefix != "" && (!strings.HasSuffix(prefix, ".") || !validKey(prefix[:len(prefix)-1])) {
		return nil, fmt.Errorf("prefix %.64q in bucket %s: %w: must end in '.'", prefix, b.name, ErrBadName)
	}
	subjects, err := b.c.subjects(ctx, "list keys of bucket "+b.name, b.stream, keySubject(b.name, prefix+">"))
	if err != nil {
		return nil, err
	}
	keys := subjects
	for i, subject := range subjects {
		keys[i] = subject[len(keySubject(b.name, "")):]
	}
	sort.Strings(keys)
	return keys, nil
}

// subjects lists those of a stream's messages, as its leader has them, in no order.
func (c *Conn) subjects(ctx context.Context, action, stream, filter string) (list []string, err error) {
	for {
		var a streamAnswer
		args := map[string]any{"subjects_filter": filter, "offset": len(list)}
		if err := c.call(ctx, action, "STREAM.INFO."+stream, args, &a); err != nil {
			return nil, err
		}
		for subject := range a.State.Subjects {
			list = append(list, subject)
		}
		if len(a.State.Subjects) == 0 || len(list) >= a.Total {
			return list, nil
		}
	}
}

// Sweep removes the keys with a prefix for which keep is false and whose value is older than the revision
// before, and says how many it removed. The revision is that of a guard which the caller has committed: what
// others have stored since is never touched, so that no lock is needed (DESIGN.md has the argument).
func (b *Bucket) Sweep(ctx context.Context, prefix string, keep func(key string) bool, before uint64) (removed int,
	err error) {
	keys, err := b.Keys(ctx, prefix)
	if err != nil {
		return 0, err
	}
	for _, key := range keys {
		if keep(key) {
			continue
		}
		args, err := json.Marshal(purgeArgs{Sequence: before, Subject: keySubject(b.name, key)})
		if err != nil {
			return removed, err
		}
		var answer struct {
			Purged int `json:"purged"`
		}
		err = b.c.retry(ctx, func() error { return b.c.callOnce(ctx, "STREAM.PURGE."+b.stream, args, &answer) })
		if err != nil {
			return removed, failed("remove "+key+" from bucket "+b.name, err)
		}
		removed += answer.Purged
	}
	return removed, nil
}

// Writable is [Namespace.Writable] for the bucket.
func (b *Bucket) Writable(ctx context.Context) error {
	return b.c.writable(ctx, b.stream, keySubject(b.name, nobodysKey))
}

// goneFor is for how long a bucket must have been gone before it is made anew. A stream that nats-server 2.15.2 makes
// while it still removes one of the same name may store nothing, ever: in a loop that made it as soon as it was not
// found, the 4th and the 24th did not; once the removal was acknowledged, all of 150 did.
const goneFor = time.Second

// Gone reports whether the bucket was deleted, so that it may be made anew. It takes a second to say yes.
func (b *Bucket) Gone(ctx context.Context) bool {
	for range 2 {
		if _, err := b.c.streamInfo(ctx, b.stream); !errors.Is(err, ErrNotFound) {
			return false
		}
		if !sleep(ctx, goneFor/2) {
			return false
		}
	}
	_, err := b.c.streamInfo(ctx, b.stream)
	return errors.Is(err, ErrNotFound)
}

// Usage is how many bytes the bucket has and may have (-1: no limit).
func (b *Bucket) Usage(ctx context.Context) (used, limit int64, err error) {
	a, err := b.c.streamInfo(ctx, b.stream)
	if err != nil {
		return 0, 0, err
	}
	return int64(a.State.Bytes), a.Config.MaxBytes, nil
}
