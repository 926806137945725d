package jetstream

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// EnsureWorkers opens the bucket for workers' registrations, creates it if it is missing, and sets the limits that the
// configuration names. It is for indexers.
func (n *Namespace) EnsureWorkers(ctx context.Context, cfg BucketConfig) (*Bucket, error) {
	return ensureBucket(ctx, n.c, workersBucket(n.name), cfg, n.replicas)
}

// OpenWorkers returns the bucket for workers' registrations, which an indexer has created or will create: until then
// its methods return [ErrUnavailable] or [ErrNotFound]. It is for shims, which may be permitted to write and read their
// own keys only.
func (n *Namespace) OpenWorkers() *Bucket {
	b := openBucket(n.c, workersBucket(n.name))
	b.own = true
	return b
}

// Delete leaves a mark in place of a key's value, as `nats kv del` does, if the revision is still the one expected;
// else the error wraps [ErrConflict]. Those who watch see the mark. [Bucket.Erase] removes it.
func (b *Bucket) Delete(ctx context.Context, key string, expected uint64) (revision uint64, err error) {
	if err := b.check(Value{Key: key}); err != nil {
		return 0, err
	}
	m := b.guardMessage(Value{Key: key}, expected)
	m.Header[headerKVOperation] = []string{"DEL"}
	for pause := 20 * time.Millisecond; ; pause = min(2*pause, time.Second) {
		revision, err = b.c.store(ctx, b.stream, m)
		if err == nil {
			return revision, nil
		}
		class := classOf(err)
		if class == ErrConflict {
			entry, deleted, lastErr := b.last(ctx, key)
			switch {
			case lastErr == nil && deleted && entry.Revision > expected:
				return entry.Revision, nil // it is gone, whoever did it
			case lastErr == nil && entry.Revision != expected, errors.Is(lastErr, ErrNotFound):
				return 0, fmt.Errorf("delete %s in bucket %s: %w", key, b.name,
					&ConflictError{Subject: keySubject(b.name, key), Expected: expected, Found: entry.Revision,
						Server: err.Error()})
			case lastErr != nil:
				return 0, lastErr
			}
		} else if class != ErrUnavailable {
			return 0, failed("delete "+key+" in bucket "+b.name, err)
		}
		if b.c.nc.IsClosed() || !sleep(ctx, pause) {
			return 0, fmt.Errorf("delete %s in bucket %s: %w: %w", key, b.name, ErrUnavailable, err)
		}
	}
}

// Erase removes what a key has at revisions up to upTo, without a trace: what was written later stays. A watch that has
// not come to a mark of deletion yet does not hear of it once it is erased.
func (b *Bucket) Erase(ctx context.Context, key string, upTo uint64) error {
	if !validKey(key) {
		return fmt.Errorf("key %.64q in bucket %s: %w", key, b.name, ErrBadName)
	}
	return b.c.call(ctx, "erase "+key+" from bucket "+b.name, "STREAM.PURGE."+b.stream,
		purgeArgs{Sequence: upTo + 1, Subject: keySubject(b.name, key)}, nil)
}
