package registry

import (
	"cmp"
	"context"
	crand "crypto/rand"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ErrTaken means that another shim has taken over the lease. [Lease.Keep] returns ErrTaken; this shim must stop.
var ErrTaken = errors.New("another shim has taken over this worker's lease")

// LeaseObserver receives the events of a lease, from the goroutine of [Lease.Keep]. [UnobservedLease] is an observer
// without effect.
type LeaseObserver interface {
	LeaseTaken()           // this shim holds the lease
	LeaseLost()            // the lease had expired, and this shim holds it again
	LeaseFailed(err error) // a write of the lease failed; Keep retries

	// Unclaimed is called if the NATS server does not permit this user to claim the model of the record, or a further
	// name. The shim still acquires the lease: nodes that require claims ignore the lease or the name.
	Unclaimed(name string, err error)
}

// UnobservedLease ignores all events. Types embed it to implement a part of [LeaseObserver].
type UnobservedLease struct{}

func (UnobservedLease) LeaseTaken()             {}
func (UnobservedLease) LeaseLost()              {}
func (UnobservedLease) LeaseFailed(error)       {}
func (UnobservedLease) Unclaimed(string, error) {}

// Lease renews the lease of a shim on the registration of its rank.
type Lease struct {
	bucket *jetstream.Bucket
	name   string
	events LeaseObserver
	soon   chan struct{} // requests an early renewal

	yields    bool            // see [Lease.Yield]
	unclaimed bool            // the server refused the claim of the model; owned by the renewing goroutine
	named     map[string]bool // further names with an attempted claim; owned by the same goroutine

	mu     sync.Mutex
	record Record // variable parts: the ShimState, the names in Worker, and a discovered L3
	data   []byte
	giveUp context.CancelFunc // cancels the current or a past renewal
	back   bool               // NATS is back, for many shims at once
}

// NewLease prepares a lease. NewLease sets the version, holder, state and length of the record, if unset. NewLease
// writes nothing. A nil observer is permitted.
func NewLease(ns *jetstream.Namespace, record Record, observer LeaseObserver) (*Lease, error) {
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
	return &Lease{bucket: ns.OpenWorkers(), name: name, record: record, data: data,
		events: cmp.Or[LeaseObserver](observer, UnobservedLease{}),
		soon:   make(chan struct{}, 1), named: map[string]bool{}}, nil
}

// Yield restricts the lease to a rank without a shim. Yield is for a rank with events on another host, where a shim may
// register the rank at any time. Call it before Keep, which returns [ErrTaken] while the rank has another holder. A
// yielding record of an earlier process is taken over.
func (l *Lease) Yield() { l.yields = true }

// SetState changes the state of the shim in the record. The lease writes it soon. SetState is safe for concurrent use.
func (l *Lease) SetState(s ShimState) {
	s.Since = s.Since.UTC().Truncate(time.Millisecond)
	l.mu.Lock()
	if l.record.Shim == nil || *l.record.Shim != s {
		l.record.Shim = &s
		if data, err := l.record.encode(); err == nil { // cannot fail: the record was encoded before
			l.data = data
		}
	}
	l.mu.Unlock()
	loop.Wake(l.soon)
}

// SetNames changes the further names of the model that the engine accepts, and its LoRA adapters. SetNames omits
// invalid names and returns their number. The lease writes the names soon. SetNames is safe for concurrent use.
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
	if data, err := l.record.encode(); err == nil { // cannot fail: the record was encoded before
		l.data = data
	}
	loop.Wake(l.soon)
	return left
}

// SetStore changes the shared store in the record. The lease writes it soon. SetStore is safe for concurrent use.
func (l *Lease) SetStore(c *hicache.Config) {
	l.mu.Lock()
	l.record.L3 = c
	if data, err := l.record.encode(); err == nil { // cannot fail: the configuration was decoded before
		l.data = data
	}
	l.mu.Unlock()
	loop.Wake(l.soon)
}

// Renew requests an early renewal: NATS is back and must see the shim. A current attempt is cancelled, because its
// answer may be lost. NATS is back for every shim at the same moment, so each shim waits for a random part of a twelfth
// of its lease. Renew is safe for concurrent use.
func (l *Lease) Renew() {
	l.mu.Lock()
	if l.giveUp != nil {
		l.giveUp()
	}
	l.back = true
	l.mu.Unlock()
	loop.Wake(l.soon)
}

// attempt returns the context of a renewal.
func (l *Lease) attempt(ctx context.Context, most time.Duration) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithTimeout(ctx, most)
	l.mu.Lock()
	l.giveUp = cancel
	l.mu.Unlock()
	return ctx, cancel
}

// text returns the record to write.
func (l *Lease) text() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.data
}

// calm is the minimum time before an early renewal, so that an alternating state is not written each time.
const calm = 100 * time.Millisecond

// pause waits for the time of the renewal, or for a request. pause returns false if ctx is done first.
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

// haste returns the wait before an early renewal.
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
// Keep acquires the lease from any holder and renews the lease three times per length until ctx is done. A random
// twelfth of the interval separates shims that started together. Keep then returns nil, and the lease stays until it
// expires: a restarted shim takes it over. If the lease had expired, Keep acquires the lease again and calls lost
// twice: at once, and at the next renewal. By then, a pending clear is in the log or never will be.
//
// Keep returns [ErrTaken] after a take-over by another holder, and an error that wraps [jetstream.ErrDenied] without
// the permission to write the bucket.
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
			l.events.LeaseFailed(err)
		default:
			if revision == 0 {
				l.events.LeaseTaken()
			}
			switch {
			case expired:
				l.events.LeaseLost()
				lost()
				// between the early renewals and the next regular renewal
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

// claimAgain is the maximum pause before a retry of a refused claim: permissions may have changed.
const claimAgain = 10 * time.Second

// End ends the lease early, because the engine is gone: a node then clears the rank's blocks and deletes the record.
// stopped reports a stop request to the shim: such an end is expected, and nodes forget the worker. Keep's context must
// be done. The lease of another shim stays.
func (l *Lease) End(ctx context.Context, stopped bool) error { return l.last(ctx, Expired, stopped) }

// Leave records in the lease that the shim stops while the engine continues. The lease stays until the expiry or a
// take-over by another shim. Keep's context must be done.
func (l *Lease) Leave(ctx context.Context) error { return l.last(ctx, Held, true) }

// last writes the record for the last time. A cancelled renewal of Keep may still arrive, so a conflict with the shim's
// own record is retried.
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
			return nil // another shim has taken over the record, or a node has ended it
		}
		if _, err = l.write(ctx, data, entry.Revision); !errors.Is(err, jetstream.ErrConflict) {
			return err
		}
	}
}

// renew writes the record after its revision, or after the current record in the bucket. renew also writes if a lost
// attempt has stored the same bytes, because a node that started since has seen no renewal. revision is 0 for a lease
// that this shim does not hold yet.
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
		expired = revision != 0 // ended and deleted
	case err != nil:
		return 0, false, err
	default:
		// A record without a holder, or of another rank, is not from a shim: it is overwritten, like an unreadable
		// record.
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

// maxNames is the maximum number of further names of a lease: fewer than the permitted claims, so that the model always
// fits.
const maxNames = 48

// claimNames claims the further names of the record's model, and deletes the claims of removed names. The next renewal
// retries failures. A refused name is retried with the next lease.
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
			l.events.Unclaimed(name, err)
		case err != nil:
			return
		}
		l.named[name] = err == nil
	}
}

// claim claims the model of the record before the lease is acquired. A node deletes the claims of a worker without a
// lease, so each take-over writes the claim again. A NATS user with permissions from before claims is refused; its
// nodes require no claims. Each renewal then retries.
func (l *Lease) claim(ctx context.Context) error {
	err := putClaim(ctx, l.bucket, l.record.Instance, l.record.Model)
	if errors.Is(err, jetstream.ErrDenied) {
		if !l.unclaimed {
			l.events.Unclaimed(l.record.Model, err)
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
