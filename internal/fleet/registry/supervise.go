package registry

import (
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

// supervise probes the bucket, and has leases ended that have expired, until ctx ends. A probe waits for none of them:
// after a longer silence than leases allow, all ages would begin anew.
func (r *Registry) supervise(ctx context.Context) {
	const idle = time.Second
	swept := r.now()
	for {
		if now := r.now(); now-swept >= claimSweep {
			swept = now
			r.sweepClaims(ctx)
			r.sweepJunk(ctx)
		}
		r.recreate(ctx)
		r.endMissing(ctx)
		r.mu.Lock()
		every := r.machine.Every()
		r.mu.Unlock()
		wait := every
		if every == 0 {
			wait = idle
		}
		select {
		case <-ctx.Done():
			return
		case <-r.hurry:
		case <-time.After(wait):
		}
		if every == 0 {
			r.sweep(ctx)
			continue
		}
		sent := r.now()
		probing, cancel := context.WithTimeout(ctx, 2*every)
		_, err := r.cfg.Bucket.Put(probing, jetstream.ProbeKey, nil)
		cancel()
		if err != nil {
			continue // the silence tells
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
		r.sweep(ctx)
	}
}

// endLater has a lease ended, and says if that fails.
func (r *Registry) endLater(ctx context.Context, d Due, end func(context.Context, Due) error) {
	key := d.Record.Key()
	p, err := r.cfg.Namespace.PartitionOf(key.Instance)
	if err != nil {
		r.cfg.Hooks.Failed(key, err)
		return
	}
	r.ends.add(p, key, func() {
		ending, cancel := context.WithTimeout(ctx, endTime)
		defer cancel()
		if err := end(ending, d); err != nil && ctx.Err() == nil {
			r.cfg.Hooks.Failed(key, err)
		}
	})
}

// refillsAtOnce is how many records are written into a new bucket at the same time.
const refillsAtOnce = 16

// recreate makes the bucket anew if it was deleted, and writes into a new one what the old one had: shims renew their
// leases there as if nothing had been, and those that are gone expire. What somebody else has written meanwhile stays.
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
		if r.cfg.Bucket.Gone(recreating) {
			r.cfg.Hooks.Recreated(r.cfg.Recreate(recreating))
		}
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
			if !errors.Is(err, jetstream.ErrUnavailable) { // else it is tried again
				r.mu.Lock()
				delete(r.lost, name)
				r.mu.Unlock()
			}
			return nil
		})
	}
	_ = all.Wait()
	r.cfg.Hooks.Refilled(int(written.Load()))
}

// endMissing has the leases ended of those whose records have gone without a word, once a shim that lives would have
// written again. Who was ended already is ended twice, which does no harm.
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

// endTime bounds one attempt to end a lease.
const endTime = 10 * time.Second

// endShown is how long the record of a lease that its shim has ended stays. The bucket keeps the last value of a key
// only: a watch that saw nothing but the deletion would take the lease for one that has expired.
const endShown = 500 * time.Millisecond

// end brings a lease that is due to its end, as far as nobody else does.
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
			return r.gone(ctx, name, d) // or it was renewed, or another node is at it
		}
		if err != nil {
			return err
		}
		r.cfg.Hooks.Expired(record)
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
		r.cfg.Hooks.Cleared(record)
	}
	return err
}

// gone ends a lease whose record the watch has shown and that is no more in the bucket: another node has ended it, and
// the mark of its deletion was erased before the watch came to it, or somebody has emptied the bucket. To end it twice
// does no harm.
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

// leave forgets a registration, unless it was written again since it was due. r.mu is held.
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

// sweep erases marks of deletion that it has seen, but those of operators' records. A server that was killed reads its
// files anew, and finds there a value that was replaced, since it wrote down only what was erased: without its mark, a
// drain that has ended would come back. A lease that comes back so has expired, and ends again.
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
