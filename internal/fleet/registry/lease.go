package registry

import (
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ErrTaken: another shim has taken the lease over. Returned by [Lease.Keep]; this one must stop.
var ErrTaken = errors.New("another shim has taken over this worker's lease")

// LeaseHooks tell what happens, from Keep's goroutine. Each may be nil.
type LeaseHooks struct {
	Taken  func()          // the lease is ours
	Lost   func()          // it had expired; it is ours again
	Failed func(err error) // it could not be written; it is tried again

	// Unclaimed: the NATS server does not permit this user to claim the model of the record, or one of its further
	// names. The lease is taken all the same: nodes ignore it, or the name, if they require claims.
	Unclaimed func(name string, err error)
}

// Lease is a shim's hold on the registration of its rank.
type Lease struct {
	bucket *jetstream.Bucket
	name   string
	hooks  LeaseHooks
	soon   chan struct{} // renew before it is time

	yields    bool            // see [Lease.Yield]
	unclaimed bool            // the claim of the model was refused; the goroutine that renews has it
	named     map[string]bool // further names of which a claim was attempted; likewise

	mu     sync.Mutex
	record Record // what changes is its ShimState, the names in Worker, and L3 if it is learned
	data   []byte
	giveUp context.CancelFunc // ends the attempt to renew that is under way, or a past one
	back   bool               // NATS is back, for many shims at once
}

// NewLease prepares a lease. What the record leaves open of version, holder, state and length is filled in. It writes
// nothing yet.
func NewLease(ns *jetstream.Namespace, record Record, h LeaseHooks) (*Lease, error) {
	record.Version, record.State = recordVersion, Held
	if record.LeaseMS == 0 {
		record.LeaseMS = DefaultLease.Milliseconds()
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	record.Holder = Holder{ID: crand.Text(), Host: host, PID: os.Getpid(), Since: time.Now().UTC().Truncate(time.Second)}
	if err := record.Check(); err != nil {
		return nil, err
	}
	name, err := ns.WorkerKey(record.Key())
	if err != nil {
		return nil, err
	}
	data, err := record.encode()
	if err != nil {
		return nil, err
	}
	hooks.Fill(&h)
	return &Lease{bucket: ns.OpenWorkers(), name: name, record: record, data: data, hooks: h,
		soon: make(chan struct{}, 1), named: map[string]bool{}}, nil
}

// Yield has the lease taken only while no shim serves the rank: it stands for a rank whose events are published on
// another host, where a shim may register it at any time. Call it before Keep, which returns [ErrTaken] as long as the
// rank has another holder. A record of such a lease of an earlier process is taken over.
func (l *Lease) Yield() { l.yields = true }

// SetState changes what the record says of how it stands. It is written soon, and any goroutine may call it.
func (l *Lease) SetState(s ShimState) {
	s.Since = s.Since.UTC().Truncate(time.Millisecond)
	l.mu.Lock()
	if l.record.Shim == nil || *l.record.Shim != s {
		l.record.Shim = &s
		if data, err := l.record.encode(); err == nil { // it cannot fail: the record was encoded before
			l.data = data
		}
	}
	l.mu.Unlock()
	loop.Wake(l.soon)
}

// SetNames changes which further names of the model the engine accepts, and which LoRA adapters it has. Names that no
// worker can have are left out; it returns how many. It is written soon, and any goroutine may call it.
func (l *Lease) SetNames(names, adapters []string) (left int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	spec := api.WorkerSpec{}
	if l.record.Worker != nil {
		spec = *l.record.Worker
	}
	left = spec.SetNames(names, adapters)
	if l.record.Worker != nil && slices.Equal(spec.ServedNames, l.record.Worker.ServedNames) &&
		slices.Equal(spec.LoRAAdapters, l.record.Worker.LoRAAdapters) {
		return left
	}
	l.record.Worker = &spec
	if data, err := l.record.encode(); err == nil { // it cannot fail: the record was encoded before
		l.data = data
	}
	loop.Wake(l.soon)
	return left
}

// SetStore changes what the record says of the shared store. It is written soon, and any goroutine may call it.
func (l *Lease) SetStore(c *hicache.Config) {
	l.mu.Lock()
	l.record.L3 = c
	if data, err := l.record.encode(); err == nil { // it cannot fail: the configuration was decoded before
		l.data = data
	}
	l.mu.Unlock()
	loop.Wake(l.soon)
}

// Renew has the lease renewed soon rather than when it is time: NATS was away, and is to see that the shim is there.
// What is being tried is given up, as it may wait for an answer that is lost. As NATS is back for every shim at the
// same moment, each waits for a random part of a twelfth of its lease. Any goroutine may call it.
func (l *Lease) Renew() {
	l.mu.Lock()
	if l.giveUp != nil {
		l.giveUp()
	}
	l.back = true
	l.mu.Unlock()
	loop.Wake(l.soon)
}

// attempt is the context of one attempt to renew.
func (l *Lease) attempt(ctx context.Context, most time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, most)
	l.mu.Lock()
	l.giveUp = cancel
	l.mu.Unlock()
	return ctx, cancel
}

// text is the record as it is to be written.
func (l *Lease) text() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.data
}

// calm is the least time between two renewals of which one is not due yet, so that what changes to and fro is not
// written each time.
const calm = 100 * time.Millisecond

// pause waits until the lease is to be renewed: when it is time, or soon. It reports false if ctx ends first.
func (l *Lease) pause(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	case <-l.soon:
		return loop.Wait(ctx, min(d, l.haste()))
	}
}

// haste is how long to wait before a renewal that is not due yet.
func (l *Lease) haste() time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.back {
		return calm
	}
	l.back = false
	return max(calm, rand.N(l.record.Lease()/12))
}

// Keep claims the model of the record for the worker.
//
// It takes the lease, from whoever has it, and renews it three times in its length, at random a twelfth of that early
// so that shims which began together do not stay together, until ctx ends; then it returns nil, and the lease stays
// until it expires: a shim that is started again takes it over. When it finds that the lease had expired it takes it
// again and calls lost, twice: at once, and when it renews for the next time, by when a clear that was under way has
// come into the log or never will.
//
// It returns [ErrTaken] if another holder has taken the lease, and an error that wraps [jetstream.ErrDenied] if the
// bucket may not be written.
func (l *Lease) Keep(ctx context.Context, lost func()) error {
	every := l.record.Lease() / 3
	revision, look := uint64(0), time.Time{} // when to look into the log once more; zero: not at all
	for {
		begun := time.Now()
		trying, cancel := l.attempt(ctx, every)
		next, expired, err := l.renew(trying, revision)
		if err == nil {
			l.claimNames(trying, revision == 0)
		}
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil
		case errors.Is(err, ErrTaken), errors.Is(err, jetstream.ErrDenied):
			return err
		case err != nil:
			l.hooks.Failed(err)
		default:
			if revision == 0 {
				l.hooks.Taken()
			}
			switch {
			case expired:
				l.hooks.Lost()
				lost()
				// which the renewal that is due next is behind, and one that comes early is not
				look = begun.Add(every * 9 / 10)
			case !look.IsZero() && begun.After(look):
				lost()
				look = time.Time{}
			}
			revision = next
		}
		wait := every - rand.N(every/12) - time.Since(begun)
		if err != nil {
			wait = every/10 + rand.N(every/10)
		}
		if l.unclaimed {
			wait = min(wait, claimAgain)
		}
		if !l.pause(ctx, wait) {
			return nil
		}
	}
}

// claimAgain is the longest pause before a claim that the NATS server refused is tried again: permissions may have been
// changed.
const claimAgain = 10 * time.Second

// End ends the lease before it expires, because the engine is gone: a node then clears what the rank held and deletes
// the record. stopped reports that the shim was told to stop: such an end is expected, and nodes forget the worker.
// Keep's context must be done. A lease that another shim has taken over stays as it is.
func (l *Lease) End(ctx context.Context, stopped bool) error { return l.last(ctx, Expired, stopped) }

// Leave notes in the lease that the shim stops while its engine runs on. The lease stays until it expires or another
// shim takes it over. Keep's context must be done.
func (l *Lease) Leave(ctx context.Context) error { return l.last(ctx, Held, true) }

// last writes the record for the last time. A renewal that Keep has given up may still arrive, so a conflict with the
// shim's own record is retried.
func (l *Lease) last(ctx context.Context, state State, stopped bool) error {
	l.mu.Lock()
	record := l.record
	l.mu.Unlock()
	record.State = state
	if stopped {
		shim := ShimState{}
		if record.Shim != nil {
			shim = *record.Shim
		}
		shim.Stopped = time.Now().UTC().Truncate(time.Millisecond)
		record.Shim = &shim
	}
	data, err := record.encode()
	if err != nil {
		return err
	}
	for {
		entry, err := l.bucket.Latest(ctx, l.name)
		if errors.Is(err, jetstream.ErrNotFound) {
			return nil
		}
		if err != nil {
			return err
		}
		var there Record
		if strictjson.Unmarshal(entry.Value, &there) != nil || there.Holder.ID != record.Holder.ID ||
			there.State == Expired {
			return nil // another shim has taken it over, or a node has ended it
		}
		if _, err = l.write(ctx, data, entry.Revision); !errors.Is(err, jetstream.ErrConflict) {
			return err
		}
	}
}

// renew writes the record after the revision that it had, or after what it finds there. It writes even where an attempt
// whose acknowledgement was lost has stored the same: a node that began since has not heard from this shim. revision is
// 0 for a lease that is not ours yet.
func (l *Lease) renew(ctx context.Context, revision uint64) (next uint64, expired bool, err error) {
	data := l.text()
	if revision != 0 {
		if l.unclaimed { // permissions may have changed
			if err := l.claim(ctx); err != nil {
				return 0, false, err
			}
		}
		next, err = l.write(ctx, data, revision)
		if !errors.Is(err, jetstream.ErrConflict) {
			return next, false, err
		}
	}
	entry, err := l.bucket.Latest(ctx, l.name)
	switch {
	case errors.Is(err, jetstream.ErrNotFound):
		expired = revision != 0 // ended, and deleted
	case err != nil:
		return 0, false, err
	default:
		// A record that names no holder, or another rank, is no shim's: it is overwritten, as one that cannot be read.
		var there Record
		if strictjson.Unmarshal(entry.Value, &there) == nil && there.Key() == l.record.Key() && there.Holder.ID != "" {
			expired = there.State == Expired
			remote := there.Shim != nil && there.Shim.Engine == api.EngineRemote
			if (revision != 0 || l.yields && !remote) && there.Holder.ID != l.record.Holder.ID {
				return 0, false, fmt.Errorf("%w: process %d on %s, since %s", ErrTaken, there.Holder.PID,
					there.Holder.Host, there.Holder.Since.Format(time.RFC3339))
			}
		}
	}
	if err := l.claim(ctx); err != nil {
		return 0, false, err
	}
	next, err = l.write(ctx, data, entry.Revision)
	return next, expired, err
}

// maxNames is how many further names a lease claims: fewer than a worker may claim, so that its model always can be.
const maxNames = 48

// claimNames claims the further names of the record's model that are not claimed yet, and deletes the claims of names
// that the record has no more. What fails is tried again with the next renewal, and a name that the NATS server does
// not permit when the lease is taken anew.
func (l *Lease) claimNames(ctx context.Context, taken bool) {
	l.mu.Lock()
	var names []string
	if w := l.record.Worker; w != nil {
		names = slices.Concat(w.ServedNames, w.LoRAAdapters)
	}
	l.mu.Unlock()
	if taken {
		clear(l.named)
	}
	for name, claimed := range l.named {
		if slices.Contains(names, name) {
			continue
		}
		if key, err := jetstream.ClaimKey(l.record.Instance, name); err == nil && claimed &&
			l.bucket.DeleteAll(ctx, []string{key}) != nil {
			return
		}
		delete(l.named, name)
	}
	for _, name := range names {
		if _, known := l.named[name]; known || name == l.record.Model || len(l.named) >= maxNames {
			continue
		}
		err := putClaim(ctx, l.bucket, l.record.Instance, name)
		switch {
		case errors.Is(err, jetstream.ErrDenied):
			l.hooks.Unclaimed(name, err)
		case err != nil:
			return
		}
		l.named[name] = err == nil
	}
}

// claim claims the model of the record, before a lease with the model is taken. A node deletes the claims of a worker
// that has had no lease for long, so each taking of the lease writes the claim again. A NATS user whose permissions
// predate claims is refused; its nodes require none. Each renewal then tries again.
func (l *Lease) claim(ctx context.Context) error {
	err := putClaim(ctx, l.bucket, l.record.Instance, l.record.Model)
	if errors.Is(err, jetstream.ErrDenied) {
		if !l.unclaimed {
			l.hooks.Unclaimed(l.record.Model, err)
		}
		l.unclaimed = true
		return nil
	}
	l.unclaimed = l.unclaimed && err != nil
	return err
}

func (l *Lease) write(ctx context.Context, data []byte, expected uint64) (uint64, error) {
	return l.bucket.Commit(ctx, nil, jetstream.Value{Key: l.name, Data: data}, expected)
}
