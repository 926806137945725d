package registry

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"golang.org/x/sync/errgroup"
)

// supervise recreates a deleted bucket, probes the bucket and ends expired leases until ctx is done. A probe waits for
// no end: after a longer silence than the leases permit, all ages would restart. The failure of the watch interrupts a
// pass over the bucket, because a deleted bucket must be recreated first.
func (r *Registry) supervise(ctx context.Context) {
	const idle = time.Second
	swept := r.now()
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.hurry:
		case <-time.After(cmp.Or(r.every(), idle)):
		}
		r.recreate(ctx)
		passing, cancel := context.WithCancel(ctx)
		r.mu.Lock()
		down := r.down
		r.interrupt = cancel
		r.mu.Unlock()
		if !down {
			if now := r.now(); now-swept >= claimSweep {
				swept = now
				r.sweepClaims(passing)
				r.sweepJunk(passing)
			}
			r.endMissing(ctx)
			if r.endDue(ctx, passing) {
				r.sweep(passing)
			}
		}
		cancel()
	}
}

// every is the interval of probes; 0 without leases.
func (r *Registry) every() time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.machine.Every()
}

// endDue probes the bucket and queues the ends of expired leases. A queued end has the context ctx, and the probe has
// the context probing. The result is false after a failed probe.
func (r *Registry) endDue(ctx, probing context.Context) bool {
	every := r.every()
	if every == 0 {
		return true
	}
	sent := r.now()
	probing, cancel := context.WithTimeout(probing, 2*every)
	defer cancel()
	if _, err := r.cfg.Bucket.Put(probing, jetstream.ProbeKey, nil); err != nil {
		return false // the missing probe is enough
	}
	r.mu.Lock()
	r.machine.Probed(sent)
	due := r.machine.Due(r.now(), func(key events.RankKey) bool {
		w, _ := r.leased(key)
		return r.cfg.Mine(w.Partition)
	})
	r.mu.Unlock()
	for _, d := range due {
		if d.Unread {
			r.mu.Lock()
			r.leave(d)
			r.mu.Unlock()
			continue
		}
		r.endLater(ctx, d, r.end)
	}
	return true
}

// endLater queues the end of a lease, and reports a failure.
func (r *Registry) endLater(ctx context.Context, d Due, end func(context.Context, Due) error) {
	key := d.Record.Key()
	p, err := r.cfg.Namespace.PartitionOf(key.Instance)
	if err != nil {
		r.logEndFailed(key, err)
		return
	}
	r.ends.add(p, key, func() {
		ending, cancel := context.WithTimeout(ctx, endTime)
		defer cancel()
		if err := end(ending, d); err != nil && ctx.Err() == nil {
			r.logEndFailed(key, err)
		}
	})
}

// refillsAtOnce is the maximum number of concurrent writes of records into a new bucket.
const refillsAtOnce = 16

// recreate recreates a deleted bucket, and writes the records of the old bucket into a new one: shims renew their
// leases there as usual, and leases of dead shims expire. Records that others have written meanwhile stay.
func (r *Registry) recreate(ctx context.Context) {
	r.mu.Lock()
	down := r.down
	var lost map[string][]byte
	if !r.listing {
		lost = maps.Clone(r.lost)
	}
	r.mu.Unlock()
	if down && r.cfg.Recreate != nil {
		recreating, cancel := context.WithTimeout(ctx, endTime)
		r.cfg.Bucket.RecreateIfGone(recreating, r.cfg.Recreate, r.cfg.Log, "workers' registrations")
		cancel()
	}
	if len(lost) == 0 {
		return
	}
	var written atomic.Int64
	var all errgroup.Group
	all.SetLimit(refillsAtOnce)
	for name, text := range lost {
		all.Go(func() error {
			writing, cancel := context.WithTimeout(ctx, endTime)
			defer cancel()
			_, err := r.cfg.Bucket.Commit(writing, nil, jetstream.Value{Key: name, Data: text}, 0)
			if err == nil {
				written.Add(1)
			}
			if !errors.Is(err, jetstream.ErrUnavailable) { // otherwise it is retried
				r.mu.Lock()
				delete(r.lost, name)
				r.mu.Unlock()
			}
			return nil
		})
	}
	_ = all.Wait()
	if n := int(written.Load()); n > 0 {
		r.cfg.Log.Info("registrations of the bucket that was gone are written again", "workers", n)
	}
}

// endMissing ends the leases of records that disappeared without a mark, after a live shim would have written again. A
// second end of a lease is harmless.
func (r *Registry) endMissing(ctx context.Context) {
	r.mu.Lock()
	due := r.machine.DueMissing(r.now())
	r.mu.Unlock()
	for _, d := range due {
		r.endLater(ctx, d, func(ctx context.Context, d Due) error {
			name, err := r.cfg.Namespace.WorkerKey(d.Record.Key())
			if err == nil {
				err = r.gone(ctx, name, d)
			}
			if err != nil {
				return err
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			r.machine.Ended(d.Record.Key())
			return nil
		})
	}
}

// endTime is the time limit of an attempt to end a lease.
const endTime = 10 * time.Second

// endShown is the time between the end of a lease by a shim and the deletion of the record. The bucket keeps only the
// last value of a key: a watch with the deletion alone would consider the lease expired.
const endShown = 500 * time.Millisecond

// end ends a due lease, unless another node does.
func (r *Registry) end(ctx context.Context, d Due) error {
	record, revision := d.Record, d.Revision
	name, err := r.cfg.Namespace.WorkerKey(record.Key())
	if err != nil {
		return err
	}
	if record.State == Held {
		record.State = Expired
		data, err := record.encode()
		if err != nil {
			return err
		}
		revision, err = r.cfg.Bucket.Commit(ctx, nil, jetstream.Value{Key: name, Data: data}, revision)
		if errors.Is(err, jetstream.ErrConflict) {
			return r.gone(ctx, name, d) // renewed, or another node is ending it
		}
		if err != nil {
			return err
		}
		r.logExpired(record)
	}
	stopped := false
	still := func(ctx context.Context) (bool, error) {
		entry, err := r.cfg.Bucket.Latest(ctx, name)
		stopped = err == nil && entry.Revision != revision || errors.Is(err, jetstream.ErrNotFound)
		if errors.Is(err, jetstream.ErrNotFound) {
			err = nil
		}
		return !stopped, err
	}
	if err := r.cfg.Clear(ctx, record, still); err != nil {
		return err
	}
	if stopped {
		return r.gone(ctx, name, d)
	}
	if record.endedByShim() && !loop.Wait(ctx, endShown) {
		return ctx.Err()
	}
	_, err = r.cfg.Bucket.Delete(ctx, name, revision)
	if errors.Is(err, jetstream.ErrConflict) {
		return nil // the shim is back
	}
	if err == nil {
		r.cfg.Log.Info("a worker is gone; the worker's blocks are cleared", "worker", record.Key())
	}
	return err
}

// gone ends a lease with a record that the watch has shown and the bucket lacks: another node has ended it and erased
// the mark of deletion before the watch saw it, or the bucket was emptied. A second end is harmless.
func (r *Registry) gone(ctx context.Context, name string, d Due) error {
	absent := func(ctx context.Context) (bool, error) {
		entry, err := r.cfg.Bucket.Latest(ctx, name)
		if errors.Is(err, jetstream.ErrNotFound) {
			return entry.Revision == 0, nil
		}
		return false, err
	}
	if is, err := absent(ctx); err != nil || !is {
		return err
	}
	if err := r.cfg.Clear(ctx, d.Record, absent); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	_, counted := r.workers[d.Record.Key()]
	if w, left := r.leave(d); left && counted {
		r.expired.ended(d.Record.Key(), w)
	}
	return nil
}

// leave drops a registration, unless it was written again. The caller holds r.mu.
func (r *Registry) leave(d Due) (w Worker, left bool) {
	key := d.Record.Key()
	w, left = r.leased(key)
	if left = left && w.Revision == d.Revision; left {
		r.dropLease(key)
		r.machine.Gone(key)
		r.notify()
	}
	return w, left
}

// sweep erases known marks of deletion, except marks of operators' records. A killed server rebuilds its index from its
// files and may find a replaced value, because it only records erased messages: without its mark, an ended drain would
// return. A lease that returns in this way has expired, and ends again.
func (r *Registry) sweep(ctx context.Context) {
	r.mu.Lock()
	marks := maps.Clone(r.marks)
	r.mu.Unlock()
	for name, revision := range marks {
		if _, is := jetstream.ParseOperatorKey(name); is {
			continue
		}
		erasing, cancel := context.WithTimeout(ctx, endTime)
		err := r.cfg.Bucket.Erase(erasing, name, revision)
		cancel()
		if err != nil {
			return
		}
		r.mu.Lock()
		if r.marks[name] == revision {
			delete(r.marks, name)
		}
		r.mu.Unlock()
	}
}
