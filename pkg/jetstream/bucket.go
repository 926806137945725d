package jetstream

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/nats-io/nuid"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// MaxValue is the largest size of a value in bytes. The default limit of a message, 1 MiB, includes the headers of
// conditional writes.
const MaxValue = 900_000

// A commit shares the server's disk with publishers. Values of more than batchBytes in all are stored one by one. After
// each value, the commit pauses restFactor times the time of the write, at most restMost. An event therefore waits for
// one value instead of all values.
const (
	batchBytes = 128 << 10
	restFactor = 2
	restMost   = 20 * time.Millisecond
)

// BucketConfig has the limits of a bucket. A zero field keeps the limit of an existing bucket, and means the default
// for a new bucket.
type BucketConfig struct {
	MaxBytes int64 // default: none; a full bucket refuses writes with [ErrFull]
	Replicas int   // 1, 3 or 5; default: the replicas of the namespace's record

	// TTL is the time after the last write of a key until the server deletes the key, by the servers' clocks. Zero:
	// never. An existing bucket with another TTL is refused.
	TTL time.Duration

	batches bool // the bucket accepts atomic batches, for commits of values with a guard
	once    bool // the server refuses to replace or delete a value; only [Bucket.Erase] removes it

	largest int32 // bytes of a message, headers included; 0: the limit of the server
}

// largestRecord bounds a registration and the record of a model, in bytes with headers, since shims write them.
const largestRecord = 64 << 10

// Bucket is a NATS key-value bucket of history 1, which `nats kv` can read. Revisions are sequences of its stream: a
// later write has a greater revision, over all keys. Its methods may be called from any goroutine.
type Bucket struct {
	c      *Conn
	name   string
	stream string
	atomic bool
	own    bool // the caller may read only keys that it may write
}

// Entry is the value of a key.
type Entry struct {
	Key      string
	Value    []byte
	Revision uint64
	Written  time.Time // by the server's clock
	Deleted  bool      // in a [Watched]: the entry is a delete marker
}

// Value is a key with the value to store.
type Value struct {
	Key  string
	Data []byte
}

// EnsureSnapshots opens the bucket for snapshots. It creates the bucket if it is missing, and applies the limits of the
// configuration.
func (n *Namespace) EnsureSnapshots(ctx context.Context, cfg BucketConfig) (*Bucket, error) {
	cfg.batches = true
	return ensureBucket(ctx, n.c, n.name.SnapshotBucket(), cfg, n.replicas)
}

// OpenSnapshots opens the bucket for snapshots. It returns [ErrNotFound] if there is none.
func (n *Namespace) OpenSnapshots(ctx context.Context) (*Bucket, error) {
	b := openBucket(n.c, n.name.SnapshotBucket())
	a, err := n.c.streamInfo(ctx, b.stream)
	if err != nil {
		return nil, err
	}
	b.atomic = a.Config.AllowAtomicPublish && n.c.atomicBatches()
	return b, nil
}

// EnsureWorkers opens the bucket for workers' registrations, for indexers. It creates the bucket if it is missing, and
// applies the limits of the configuration.
func (n *Namespace) EnsureWorkers(ctx context.Context, cfg BucketConfig) (*Bucket, error) {
	cfg.largest = largestRecord
	return ensureBucket(ctx, n.c, n.name.WorkersBucket(), cfg, n.replicas)
}

// OpenWorkers returns the bucket for workers' registrations, for shims with permissions for their own keys only. Until
// an indexer has created the bucket, its methods return [ErrUnavailable] or [ErrNotFound].
func (n *Namespace) OpenWorkers() *Bucket {
	b := openBucket(n.c, n.name.WorkersBucket())
	b.own = true
	return b
}

// roomForValues returns an error if the server's messages have no room for the largest value with its headers.
func (c *Conn) roomForValues() error {
	const need = MessageRoom
	if limit := int(c.nc.MaxPayload()); limit < need {
		return fmt.Errorf(
			"%w: NATS server %s accepts messages of at most %d bytes, an indexer needs %d: set max_payload: %d or more in the server's configuration (default 1048576)",
			ErrTooLarge, c.nc.ConnectedServerName(), limit, need, need)
	}
	return nil
}

func openBucket(c *Conn, name string) *Bucket {
	return &Bucket{c: c, name: name, stream: BucketStream(name)}
}

// ensureBucket creates a bucket, or updates an existing one. The stream has the settings of nats.go's CreateKeyValue
// (jetstream/kv.go) with two differences. Rollups are off: a message with the header Nats-Rollup would remove the keys
// of other users. Atomic batches are on only in buckets that need them.
func ensureBucket(ctx context.Context, c *Conn, name string, cfg BucketConfig, replicas int) (*Bucket, error) {
	b := openBucket(c, name)
	b.atomic = cfg.batches && c.atomicBatches()
	want := jetstream.StreamConfig{
		Name:               b.stream,
		Subjects:           []string{KeySubject(name, ">")},
		MaxMsgsPerSubject:  1,
		MaxBytes:           cmp.Or(cfg.MaxBytes, -1),
		MaxMsgSize:         cmp.Or(cfg.largest, -1),
		MaxMsgs:            -1,
		MaxConsumers:       -1,
		MaxAge:             cfg.TTL,
		Storage:            jetstream.FileStorage,
		Replicas:           cmp.Or(cfg.Replicas, replicas),
		DenyDelete:         true,
		AllowDirect:        true,
		Discard:            jetstream.DiscardNew,
		AllowAtomicPublish: b.atomic,

		DiscardNewPerSubject: cfg.once,
	}
	err := c.ensure(ctx, want, func(there *jetstream.StreamConfig) error {
		odd := oddBucket(there)
		if there.MaxAge != want.MaxAge {
			odd = append(odd, fmt.Sprintf("a life of %v per key, not %v (0: for ever)", there.MaxAge, want.MaxAge))
		}
		if len(odd) > 0 {
			return fmt.Errorf("bucket %s: %w: its stream %s has %q; copy what is needed, delete the stream, start again",
				name, ErrMismatch, want.Name, odd)
		}
		there.AllowRollup, there.AllowBatchPublish, there.RePublish = false, false, nil
		there.MaxBytes = cmp.Or(cfg.MaxBytes, there.MaxBytes)
		there.Replicas = cmp.Or(cfg.Replicas, there.Replicas)
		there.AllowDirect, there.DiscardNewPerSubject = true, cfg.once
		there.MaxMsgSize = want.MaxMsgSize
		there.AllowAtomicPublish = cfg.batches && there.AllowAtomicPublish || want.AllowAtomicPublish
		return nil
	})
	if err != nil {
		return nil, err
	}
	return b, nil
}

// Name returns the bucket's name.
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

// Latest reads a key from the stream's leader, so the result includes all earlier acknowledged writes. Use Latest for
// manifests and other values that must not be stale. The error is [ErrNotFound] if the key does not exist.
func (b *Bucket) Latest(ctx context.Context, key string) (Entry, error) {
	entry, deleted, err := b.last(ctx, key)
	if err == nil && deleted {
		err = fmt.Errorf("key %s in bucket %s: %w: deleted", key, b.name, ErrNotFound)
	}
	return entry, err
}

// last is Latest with a distinction: a deleted key has a revision, and a key that never existed is [ErrNotFound].
func (b *Bucket) last(ctx context.Context, key string) (entry Entry, deleted bool, err error) {
	if !validKey(key) {
		return Entry{}, false, fmt.Errorf("key %.64q in bucket %s: %w", key, b.name, ErrBadName)
	}
	read := b.c.lastOn
	if b.own {
		read = b.c.lastOwn
	}
	m, err := read(ctx, b.stream, KeySubject(b.name, key))
	if err != nil {
		return Entry{}, false, err
	}
	deleted = m.header.Get(headerKVOperation) != "" // DEL or PURGE, as from `nats kv del`
	return Entry{Key: key, Value: m.Data, Revision: uint64(m.Seq), Written: time.UnixMilli(int64(m.Time))}, deleted, nil
}

// Get reads a key from any replica, which may be slightly behind. Use Get for values that never change, such as chunks
// named by their content. If the replica lacks the key, Get reads from the leader. The error is [ErrNotFound] if the
// key does not exist.
func (b *Bucket) Get(ctx context.Context, key string) ([]byte, error) {
	if !validKey(key) {
		return nil, fmt.Errorf("key %.64q in bucket %s: %w", key, b.name, ErrBadName)
	}
	subject := b.c.api + "DIRECT.GET." + b.stream + "." + KeySubject(b.name, key)
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

// Put stores a value unconditionally.
func (b *Bucket) Put(ctx context.Context, key string, data []byte) (revision uint64, err error) {
	if err := b.check(Value{key, data}); err != nil {
		return 0, err
	}
	m := &nats.Msg{Subject: KeySubject(b.name, key), Data: data}
	err = b.c.retry(ctx, func() (err error) {
		revision, err = b.c.store(ctx, b.stream, m)
		return err
	})
	return revision, failed("put "+key+" in bucket "+b.name, err)
}

// PutAll stores values unconditionally, in as few atomic batches as possible if the server has them, otherwise one by
// one. After an error, some values may be stored.
func (b *Bucket) PutAll(ctx context.Context, values []Value) error {
	for _, v := range values {
		if err := b.check(v); err != nil {
			return err
		}
	}
	return failed(fmt.Sprintf("put %d keys in bucket %s", len(values), b.name), b.storeAll(ctx, len(values),
		func(i int) *nats.Msg {
			return &nats.Msg{Subject: KeySubject(b.name, values[i].Key), Data: values[i].Data}
		}))
}

// DeleteAll writes delete markers for keys unconditionally, like PutAll. The markers follow all earlier writes of this
// connection, including abandoned ones.
func (b *Bucket) DeleteAll(ctx context.Context, keys []string) error {
	for _, key := range keys {
		if err := b.check(Value{Key: key}); err != nil {
			return err
		}
	}
	return failed(fmt.Sprintf("delete %d keys in bucket %s", len(keys), b.name), b.storeAll(ctx, len(keys),
		func(i int) *nats.Msg {
			return &nats.Msg{Subject: KeySubject(b.name, keys[i]), Header: nats.Header{headerKVOperation: {"DEL"}}}
		}))
}

// storeAll stores n messages without conditions, in batches of at most maxBatch messages and batchBytes bytes.
func (b *Bucket) storeAll(ctx context.Context, n int, message func(i int) *nats.Msg) error {
	for from := 0; from < n; {
		to := from + 1
		for size := len(message(from).Data); to < min(n, from+maxBatch); to++ {
			if size += len(message(to).Data); size > batchBytes {
				break
			}
		}
		batch := b.atomic && to-from > 1
		err := b.c.retry(ctx, func() error {
			if batch {
				_, err := b.c.storeBatch(ctx, b.stream, KeySubject(b.name, ""), nuid.Next(), to-from,
					func(i int) *nats.Msg { return message(from + i) })
				if !batchRefused(codeOf(err)) {
					return err
				}
				batch = false
			}
			for ; from < to; from++ {
				if _, err := b.c.store(ctx, b.stream, message(from)); err != nil {
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		from = to
	}
	return nil
}

// create stores a value if the key has none. It returns [ErrConflict] if the key has a value.
func (b *Bucket) create(ctx context.Context, key string, data []byte) error {
	_, err := b.Commit(ctx, nil, Value{key, data}, 0)
	if !errors.Is(err, ErrConflict) {
		return err
	}
	entry, deleted, lastErr := b.last(ctx, key)
	if lastErr != nil || !deleted {
		return err
	}
	return b.replace(ctx, key, data, entry.Revision)
}

// replace stores a value in a bucket with once, in place of the value at a revision (0: no value). The error wraps
// [ErrConflict] if the key has a later value.
func (b *Bucket) replace(ctx context.Context, key string, data []byte, revision uint64) error {
	if revision != 0 {
		if err := b.Erase(ctx, key, revision); err != nil {
			return err
		}
	}
	_, err := b.Commit(ctx, nil, Value{key, data}, 0)
	return err
}

// eraseMarkers erases the delete markers of earlier releases, because a bucket with once refuses values after a marker.
func (b *Bucket) eraseMarkers(ctx context.Context) error {
	keys, err := b.Keys(ctx, "")
	if err != nil {
		return err
	}
	for _, key := range keys {
		entry, deleted, err := b.last(ctx, key)
		if err == nil && deleted {
			err = b.Erase(ctx, key, entry.Revision)
		}
		if err != nil && !errors.Is(err, ErrNotFound) {
			return err
		}
	}
	return nil
}

// Commit stores values and then the guard, if the revision of the guard equals expected (0: no guard yet). A snapshot's
// chunks are the values, and the manifest is the guard. Commit returns the guard's new revision. An error that wraps
// [ErrConflict] means that the guard has been written meanwhile.
//
// On a suitable server, a small commit is an atomic batch: everything is stored or nothing. Otherwise Commit stores the
// values one by one, with pauses for publishers, and then the guard. After a failure or a conflict, values without a
// reference may remain, and [Bucket.Sweep] removes such values.
//
// A commit may refer to an existing value without a new write only if the guard of the expected revision refers to the
// value. Mere presence in the bucket is not enough: a sweep may remove the value (see DESIGN.md). Read the guard before
// the first Commit of a save, not after.
func (b *Bucket) Commit(ctx context.Context, values []Value, guard Value, expected uint64) (revision uint64,
	err error) {
	return b.commit(ctx, "commit "+guard.Key+" in bucket "+b.name, values, guard, expected, false)
}

// Delete writes a delete marker in place of a key's value, like `nats kv del`, if the revision equals expected.
// Otherwise the error wraps [ErrConflict]. Watchers receive the marker. [Bucket.Erase] removes it.
func (b *Bucket) Delete(ctx context.Context, key string, expected uint64) (revision uint64, err error) {
	return b.commit(ctx, "delete "+key+" in bucket "+b.name, nil, Value{Key: key}, expected, true)
}

// commit stores values, and then writes or deletes the guard if its revision equals expected.
func (b *Bucket) commit(ctx context.Context, action string, values []Value, guard Value, expected uint64,
	deletes bool) (revision uint64, err error) {
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
	stored := 0 // stored values, without a batch
	indeterminate := false
	for retry := newBackoff(); ; {
		last := &nats.Msg{Subject: KeySubject(b.name, guard.Key), Data: guard.Data, Header: nats.Header{
			headerExpectedLast: []string{strconv.FormatUint(expected, 10)}}}
		if deletes {
			last.Header[headerKVOperation] = []string{"DEL"}
		}
		if batch {
			revision, err = b.commitBatch(ctx, values, last)
		} else {
			revision, err = b.commitGuardLast(ctx, values, &stored, last)
		}
		if err == nil {
			return revision, nil
		}
		class := classOf(err)
		switch {
		case batch && batchRefused(codeOf(err)):
			batch = false
		case class == ErrConflict:
			entry, deleted, lastErr := b.last(ctx, guard.Key)
			done := deletes && deleted || indeterminate && !deletes && bytes.Equal(entry.Value, guard.Data)
			switch {
			case lastErr == nil && done && entry.Revision > expected:
				return entry.Revision, nil // an attempt of this call was stored, or the key is deleted already
			case lastErr != nil && !errors.Is(lastErr, ErrNotFound):
				return 0, fmt.Errorf("%s: %w", action, lastErr)
			case entry.Revision != expected: // 0 if there is none
				return 0, fmt.Errorf("%s: %w", action, &conflictError{Subject: last.Subject, Expected: expected,
					Found: entry.Revision, Server: err.Error()})
			}
			// The leader still processes an attempt of this or another caller (code 10164): repeat.
		case class == ErrUnavailable:
			indeterminate = true
		default:
			return 0, failed(action, err)
		}
		if b.c.nc.IsClosed() || !retry.Wait(ctx) {
			return 0, fmt.Errorf("%s: %w: %w", action, ErrUnavailable, err)
		}
	}
}

func (b *Bucket) commitBatch(ctx context.Context, values []Value, guard *nats.Msg) (uint64, error) {
	return b.c.storeBatch(ctx, b.stream, KeySubject(b.name, ""), nuid.Next(), len(values)+1, func(i int) *nats.Msg {
		if i == len(values) {
			return guard
		}
		return &nats.Msg{Subject: KeySubject(b.name, values[i].Key), Data: values[i].Data}
	})
}

// commitGuardLast stores the values from index *stored on, and then the guard.
func (b *Bucket) commitGuardLast(ctx context.Context, values []Value, stored *int, guard *nats.Msg) (uint64, error) {
	for ; *stored < len(values); *stored++ {
		v, begun := values[*stored], time.Now()
		if _, err := b.c.store(ctx, b.stream, &nats.Msg{Subject: KeySubject(b.name, v.Key), Data: v.Data}); err != nil {
			return 0, err
		}
		if !loop.Wait(ctx, min(restFactor*time.Since(begun), restMost)) {
			return 0, ctx.Err()
		}
	}
	return b.c.store(ctx, b.stream, guard)
}

// Erase removes the values of a key at revisions up to upTo, without a trace. Later values stay. A watch that has not
// received a delete marker yet does not receive it after Erase.
func (b *Bucket) Erase(ctx context.Context, key string, upTo uint64) error {
	if !validKey(key) {
		return fmt.Errorf("key %.64q in bucket %s: %w", key, b.name, ErrBadName)
	}
	return b.c.call(ctx, "erase "+key+" from bucket "+b.name, "STREAM.PURGE."+b.stream,
		purgeArgs{Sequence: upTo + 1, Subject: KeySubject(b.name, key)}, nil)
}

// Keys returns the sorted keys with a prefix (empty, or ending in '.'), from the stream's leader.
func (b *Bucket) Keys(ctx context.Context, prefix string) ([]string, error) {
	if prefix != "" && (!strings.HasSuffix(prefix, ".") || !validKey(prefix[:len(prefix)-1])) {
		return nil, fmt.Errorf("prefix %.64q in bucket %s: %w: must end in '.'", prefix, b.name, ErrBadName)
	}
	subjects, err := b.c.subjects(ctx, "list keys of bucket "+b.name, b.stream, KeySubject(b.name, prefix+">"))
	if err != nil {
		return nil, err
	}
	for i, subject := range subjects {
		subjects[i] = subject[len(KeySubject(b.name, "")):]
	}
	slices.Sort(subjects)
	return subjects, nil
}

// subjects returns the subjects of a stream's messages from its leader, unordered.
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

// Sweep removes keys with a prefix, if keep returns false and the value is older than the revision before. Sweep
// returns the number of removed keys. The revision is of a guard that the caller has committed. Sweep never removes
// later values, so no lock is needed (DESIGN.md has the argument).
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
		var answer struct {
			Purged int `json:"purged"`
		}
		if err := b.c.call(ctx, "remove "+key+" from bucket "+b.name, "STREAM.PURGE."+b.stream,
			purgeArgs{Sequence: before, Subject: KeySubject(b.name, key)}, &answer); err != nil {
			return removed, err
		}
		removed += answer.Purged
	}
	return removed, nil
}

// Writable is [Namespace.Writable] for the bucket.
func (b *Bucket) Writable(ctx context.Context) error {
	return b.c.writable(ctx, b.stream, KeySubject(b.name, nobodysKey))
}

// goneFor is the least time for which a bucket must be missing before the recreation. If nats-server 2.15.3 creates a
// stream during the removal of a stream with the same name, the new stream may store nothing, ever. In a loop with
// immediate recreation, one or two of 150 streams failed. After the acknowledged removal, all of 150 succeeded.
const goneFor = time.Second

// Gone reports whether the bucket was deleted, so that it may be recreated. A positive result needs a second.
func (b *Bucket) Gone(ctx context.Context) bool {
	for look := range 3 {
		if look > 0 && !loop.Wait(ctx, goneFor/2) {
			return false
		}
		if _, err := b.c.streamInfo(ctx, b.stream); !errors.Is(err, ErrNotFound) {
			return false
		}
	}
	return true
}

// RecreateIfGone calls recreate if the bucket was deleted, and logs the result. entries names the contents of the
// bucket.
func (b *Bucket) RecreateIfGone(ctx context.Context, recreate func(context.Context) error, log *slog.Logger,
	entries string) {
	if !b.Gone(ctx) {
		return
	}
	if err := recreate(ctx); err != nil {
		log.Error("the bucket of "+entries+" is gone and cannot be recreated; the creation is retried", "error", err,
			"what_to_do", "check that NATS has room and quorum, and that this user may create buckets")
		return
	}
	log.Warn("the bucket of " + entries + " was gone; it is recreated")
}

// BucketUsage is the size of a bucket.
type BucketUsage struct {
	Bytes, Limit int64 // Limit -1: no limit
	Epoch        Epoch // changes if the bucket is deleted and recreated
}

// Usage returns the size of the bucket. It returns [ErrNotFound] if the bucket was deleted.
func (b *Bucket) Usage(ctx context.Context) (BucketUsage, error) {
	a, err := b.c.streamInfo(ctx, b.stream)
	if err != nil {
		return BucketUsage{}, err
	}
	return BucketUsage{Bytes: int64(a.State.Bytes), Limit: a.Config.MaxBytes, Epoch: a.epoch()}, nil
}

// EnsureNodes opens the bucket for the announcements of indexer nodes, and creates it if it is missing. A value is
// deleted after life without a write, by the server's clock. This deletion only tidies up. The bucket has as many
// replicas as the namespace.
func (n *Namespace) EnsureNodes(ctx context.Context, life time.Duration) (*Bucket, error) {
	return ensureBucket(ctx, n.c, n.name.NodesBucket(), BucketConfig{TTL: life, Replicas: n.replicas}, 1)
}

// All reads every value of a small bucket with one request from any replica, which may be slightly behind. It makes a
// single attempt.
func (b *Bucket) All(ctx context.Context) (entries []Entry, err error) {
	action := "read bucket " + b.name
	args, err := json.Marshal(map[string]any{"multi_last": []string{KeySubject(b.name, ">")}, "batch": 1024})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", action, err)
	}
	m := &nats.Msg{Subject: b.c.api + "DIRECT.GET." + b.stream, Data: args}
	err = b.c.collect(ctx, b.c.attempt, m, "", func(m *nats.Msg) (bool, error) {
		switch m.Header.Get("Status") {
		case "":
			entry, err := b.entry(m)
			if err == nil && m.Header.Get(headerKVOperation) == "" {
				entries = append(entries, entry)
			}
			return false, err
		case "204", "404": // the end; empty
			return true, nil
		case "503":
			return false, nats.ErrNoResponders
		}
		return false, fmt.Errorf("%s %s", m.Header.Get("Status"), m.Header.Get("Description"))
	})
	return entries, failed(action, err)
}

// entry decodes an answer to a direct get.
func (b *Bucket) entry(m *nats.Msg) (Entry, error) {
	last, err := readDirect(m)
	if err != nil {
		return Entry{}, err
	}
	key, ok := strings.CutPrefix(last.Subject, KeySubject(b.name, ""))
	if !ok {
		return Entry{}, fmt.Errorf("the answer is of subject %.128q", last.Subject)
	}
	return Entry{Key: key, Value: last.Data, Revision: uint64(last.Seq), Written: time.UnixMilli(int64(last.Time))}, nil
}
