package registry

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Config configures a [Registry] of a node.
type Config struct {
	Namespace *jetstream.Namespace
	Bucket    *jetstream.Bucket // Namespace.EnsureWorkers

	// Clear writes to the log that a rank's incarnation is closed, if still returns true after the read of the rank's
	// last message. Clear succeeds also if nothing is open.
	Clear func(ctx context.Context, r Record, still func(context.Context) (bool, error)) error

	// Recreate, if not nil, recreates a deleted bucket.
	Recreate func(context.Context) error

	// Began, if not zero, is the start time of the bucket's server in this process. Shim states in earlier records are
	// outdated: all of these shims count as catching up until they renew.
	Began time.Time

	// Screen decides which registered shared stores are used.
	Screen Screen

	// Absent returns the ranks with shims that are not connected to NATS, by missing subscriptions of their control
	// subjects. Absent must not block for long. nil: unknown, and no serving address is probed.
	Absent func(ctx context.Context, ranks []events.RankKey) ([]events.RankKey, error)

	// Master is the operator's master of the shared store, for workers without one.
	Master hicache.Master

	// BlockSize returns the registered block size of a model in tokens, or 0 if unknown. Registrations with another
	// block size are skipped. BlockSize must not block. nil: all are unknown. See [Registry.ModelsChanged].
	BlockSize func(model string) uint32

	// Mine reports whether this node ends the leases of a partition; otherwise other nodes do. nil: all partitions.
	Mine func(events.Partition) bool

	// ShimsWait reports whether the node's status has the waiting shims of a partition. The registry then does not add
	// them. nil: no partition.
	ShimsWait func(events.Partition) bool

	// Holds reports whether the index of this node holds blocks of a worker, or an error if unknown. Claims of such a
	// worker stay. nil: no blocks.
	Holds func(context.Context, events.WorkerID) (bool, error)

	// ClaimsChanged is called when the result of Registry.Claimed may have changed. It must not block. nil: not called.
	ClaimsChanged func()

	Log *slog.Logger // nil: nothing is logged
}

// Worker is the registered state of a rank.
type Worker struct {
	Record    Record
	Partition events.Partition
	Revision  uint64
	Renewed   time.Time // by the servers' clock: only for display

	text []byte // the encoded record
	old  bool   // with Config.Began: not renewed since

	skipped error // unused parts of the record, with the reasons; nil: none
	noStore error // why the shared store is not used; nil: used, or no store

	address string // HOST:PORT of the registered serving address; empty: no address to probe
}

// state returns the state of the rank's shim and engine.
func (w *Worker) state() ShimState {
	var s ShimState
	if w.Record.Shim != nil {
		s = *w.Record.Shim
	}
	s.CatchingUp = s.CatchingUp || w.old
	return s
}

// source returns the source of the engine's events: the configured source, or the source that the shim detected.
func (w *Worker) source() string {
	if s := w.Record.Shim; s != nil && s.Speaks != "" {
		return s.Speaks
	}
	return w.Record.Source
}

// Registry is a node's view of the workers.
type Registry struct {
	cfg   Config
	start time.Time

	mu        sync.Mutex
	machine   *Machine
	workers   map[events.RankKey]Worker
	unclaimed map[events.RankKey]Worker // ignored leases, while their models are not claimed
	marks     map[string]uint64         // keys with marks of deletion
	changed   chan struct{}
	current   bool
	down      bool
	epoch     time.Time         // of the watched bucket
	lost      map[string][]byte // by key: records of the previous bucket, to be written into this one
	listing   bool              // the watch is not complete yet
	heard     uint64            // the watch has shown everything up to this revision
	impaired  impaired
	claims    claims
	skipped   skipped
	junk      junk

	operators operators
	pools     atomic.Pointer[map[string]*Pool] // by model, until the next change; written with mu held
	allPools  atomic.Pointer[[]*Pool]          // of all models, likewise
	names     atomic.Pointer[names]            // the aliases of all models, likewise
	kept      map[string]*keptPool             // by model: the base of the next pool; guarded by mu
	shared    sync.Map                         // model → *hicache.Sharing, until the next change; written with mu held
	serving   sync.Map                         // model → []events.Partition, likewise
	sources   sync.Map                         // rank → source; written under mu
	ended     *lru.Cache[events.WorkerID, struct{}]
	expired   expired

	vigil vigil
	ends  ends

	// hurry wakes supervise: the watch has failed, records of a lost bucket wait, or a shim has ended its lease.
	hurry chan struct{}

	interrupt context.CancelFunc // ends a pass of supervise over the bucket; guarded by mu
}

// New returns a registry without workers. Run fills it.
func New(cfg Config) *Registry {
	if cfg.BlockSize == nil {
		cfg.BlockSize = func(string) uint32 { return 0 }
	}
	if cfg.Mine == nil {
		cfg.Mine = func(events.Partition) bool { return true }
	}
	if cfg.ShimsWait == nil {
		cfg.ShimsWait = func(events.Partition) bool { return false }
	}
	if cfg.ClaimsChanged == nil {
		cfg.ClaimsChanged = func() {}
	}
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	ended, _ := lru.New[events.WorkerID, struct{}](maxEnded) // an error means a size that is not positive
	return &Registry{
		ended: ended, expired: newExpired(),
		cfg: cfg, start: time.Now(), machine: NewMachine(), workers: map[events.RankKey]Worker{},
		unclaimed: map[events.RankKey]Worker{}, claims: newClaims(), marks: map[string]uint64{}, kept: map[string]*keptPool{},
		changed: make(chan struct{}), hurry: make(chan struct{}, 1), interrupt: func() {}, vigil: newVigil(),
		operators: operators{
			known: map[events.WorkerID]*Operator{}, texts: map[events.WorkerID][]byte{}, ended: ended,
		},
	}
}

// Workers returns the registered ranks, by instance and rank.
func (r *Registry) Workers() []Worker {
	r.mu.Lock()
	list := slices.Collect(maps.Values(r.workers))
	r.mu.Unlock()
	slices.SortFunc(list, func(a, b Worker) int { return a.Record.Key().Compare(b.Record.Key()) })
	return list
}

// Source returns the source of a rank's events: vllm, sglang, ...; empty without a registration. Source never blocks.
func (r *Registry) Source(key events.RankKey) string {
	source, _ := r.sources.Load(key)
	text, _ := source.(string)
	return text
}

// Ended reports whether a registration of a worker has ended since the start of the registry: by its shim, by its lease
// or by an operator. The list has the latest ends.
func (r *Registry) Ended(instance events.WorkerID) bool { return r.ended.Contains(instance) }

// maxEnded is the maximum number of ends in the list.
const maxEnded = 1 << 14

// forget removes the copies of a rank's state for readers without the lock. The caller holds r.mu.
func (r *Registry) forget(key events.RankKey) {
	r.impaired.forget(key)
	r.sources.Delete(key)
	r.ended.Add(key.Instance, struct{}{})
}

// Worker returns the registration of a rank.
func (r *Registry) Worker(key events.RankKey) (Worker, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	w, ok := r.workers[key]
	return w, ok
}

// Partitions returns the partitions with workers of a model, ascending. Partitions is computed once after each change.
// The caller must not change the result.
func (r *Registry) Partitions(model string) []events.Partition {
	if list, ok := r.serving.Load(model); ok {
		return list.([]events.Partition)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var list []events.Partition
	for _, w := range r.workers {
		if w.Record.Model == model {
			list = append(list, w.Partition)
		}
	}
	slices.Sort(list)
	list = slices.Compact(list)
	if len(list) > 0 { // keeps no memory for unknown names
		r.serving.Store(model, list)
	}
	return list
}

// Sharing returns the common store of a model's workers, by their registrations. Sharing is computed once after each
// change.
func (r *Registry) Sharing(model string) *hicache.Sharing {
	if s, ok := r.shared.Load(model); ok {
		return s.(*hicache.Sharing)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	ranks, known := map[events.RankKey]hicache.Config{}, false
	skipped := "" // a rank with an unused store, and the reason
	for key, w := range r.workers {
		if w.Record.Model == model && r.otherSize(&w.Record) == nil {
			if known = true; w.noStore != nil {
				skipped = max(skipped, fmt.Sprintf("%s registered a store that is not used: %v", key, w.noStore))
			} else if w.Record.L3 != nil {
				ranks[key] = w.Record.L3.WithMaster(r.cfg.Master)
			}
		}
	}
	s := hicache.Share(ranks)
	if len(ranks) == 0 && skipped != "" {
		s = &hicache.Sharing{Reason: skipped}
	}
	if known { // keeps no memory for unknown names
		r.shared.Store(model, s)
	}
	return s
}

// notify wakes the goroutines that wait for a change. The caller holds r.mu.
func (r *Registry) notify() {
	r.shared.Clear()
	r.serving.Clear()
	r.pools.Store(nil)
	r.allPools.Store(nil)
	r.names.Store(nil)
	close(r.changed)
	r.changed = make(chan struct{})
}

// Current reports whether the registry has seen all registrations.
func (r *Registry) Current() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.current
}

// Await waits until the registry has seen all registrations, or ctx is done.
func (r *Registry) Await(ctx context.Context) {
	for changed := r.Changed(); !r.Current() && ctx.Err() == nil; changed = r.Changed() {
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// Changed returns a channel that is closed at the next change of the registrations.
func (r *Registry) Changed() <-chan struct{} {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.changed
}

// Run watches, probes and ends leases until ctx is done.
func (r *Registry) Run(ctx context.Context) {
	var all sync.WaitGroup
	all.Go(func() { r.cfg.Bucket.Watch(ctx, r.observe) })
	all.Go(func() { r.supervise(ctx) })
	all.Go(func() {
		loop.Every(ctx, vigilEvery, func(time.Time) { r.keepVigil(ctx) })
		r.vigil.probes.Wait()
	})
	all.Go(func() { r.cfg.Namespace.WatchClaimsRequired(ctx, r.RequireClaims) })
	all.Wait()
	r.ends.wait()
}

// now returns the time of the process's monotonic clock.
func (r *Registry) now() time.Duration { return time.Since(r.start) }

// observe applies an update of the watch. It calls the hooks after the lock is released.
func (r *Registry) observe(u jetstream.Watched) {
	for _, call := range r.apply(u) {
		call()
	}
}

// effects are the results of an update of the watch.
type effects struct {
	changed bool     // workers, or the state of some
	calls   []func() // for the time when the lock is free: log lines, and Config.ClaimsChanged
}

func (e *effects) call(f func()) { e.calls = append(e.calls, f) }

// apply applies an update of the watch, and returns the calls that follow without the lock.
func (r *Registry) apply(u jetstream.Watched) []func() {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out effects
	if u.Err != nil {
		r.machine.Broken()
		r.down = true
		r.interrupt()
		loop.Wake(r.hurry)
		return []func(){func() { r.logWatch(u.Err) }}
	}
	if r.down {
		r.down = false
		r.machine.Resumed()
		out.call(func() { r.logWatch(nil) })
	}
	if u.Anew {
		r.beginListing(u.Epoch)
	}
	for _, e := range u.Entries {
		r.heard = max(r.heard, e.Revision)
		r.applyEntry(e, &out)
	}
	if u.Current {
		r.endListing(&out)
	}
	if out.changed {
		r.notify()
	}
	return out.calls
}

// beginListing prepares for a watch that lists all entries of the bucket again.
func (r *Registry) beginListing(epoch time.Time) {
	r.machine.Anew()
	if !r.epoch.IsZero() && !r.epoch.Equal(epoch) && r.current {
		earlier := r.lost // not written into the previous bucket
		r.lost = r.all()
		for name, text := range earlier {
			if r.lost[name] == nil {
				r.lost[name] = text
			}
		}
	}
	r.epoch, r.listing, r.heard = epoch, true, 0
	r.operators.fresh = map[events.WorkerID]bool{}
	r.claims.fresh = map[claimKey]bool{}
	clear(r.claims.surplus)
}

// endListing removes known entries that are missing in a listing.
func (r *Registry) endListing(out *effects) {
	for _, key := range r.machine.Current() {
		if w, there := r.leased(key); there && !r.refills(w) {
			r.machine.Missed(w.Record, w.Revision, r.now())
			if _, counts := r.workers[key]; counts {
				r.expired.ended(key, w)
			}
		}
		r.dropLease(key)
		out.changed = true
	}
	for _, instance := range r.claims.current(r.lost) {
		r.applyClaims(instance, out)
	}
	out.changed = r.operators.current(r.lost) || out.changed || !r.current
	r.current, r.listing = true, false
	if len(r.lost) > 0 {
		loop.Wake(r.hurry)
	}
	clear(r.kept)
}

// applyEntry applies one entry of the bucket: a claim, the lease of a rank, or an operator's record of a worker.
func (r *Registry) applyEntry(e jetstream.Entry, out *effects) {
	if instance, is := r.claims.see(e); is {
		r.mark(e)
		r.applyClaims(instance, out)
		return
	}
	p, key, ok := jetstream.ParseWorkerKey(e.Key)
	r.junk.see(&e)
	switch {
	case !ok:
		r.applyOperator(e, out)
	case key.Rank >= events.MaxRanks:
		if !e.Deleted && r.skipped.rank(key, e.Written) {
			out.call(func() { r.logSkipped(key, errOtherRank) })
		}
	case e.Deleted:
		r.mark(e)
		r.machine.Gone(key)
		if w, there := r.workers[key]; there {
			out.changed = true
			r.expired.ended(key, w)
		}
		r.dropLease(key)
	default:
		r.mark(e)
		if !r.renew(key, e) {
			r.applyLease(p, key, e, out)
		}
	}
}

// mark records the revision of the mark that a deletion leaves, or that an entry has none.
func (r *Registry) mark(e jetstream.Entry) {
	if e.Deleted {
		r.marks[e.Key] = e.Revision
	} else {
		delete(r.marks, e.Key)
	}
}

func (r *Registry) applyClaims(instance events.WorkerID, out *effects) {
	counts, calls := r.claimsOf(instance)
	out.changed = out.changed || counts
	out.calls = append(out.calls, calls...)
}

// unreadable counts an entry that cannot be read.
func (r *Registry) unreadable(key string, err error, out *effects) {
	if r.skipped.unreadable(time.Now()) {
		out.call(func() { r.logUnreadable(key, err) })
	}
}

// applyOperator applies an operator's record of a worker.
func (r *Registry) applyOperator(e jetstream.Entry, out *effects) {
	is, other, err := r.operators.see(e)
	instance, of := jetstream.ParseOperatorKey(e.Key)
	if of && other {
		r.alter(instance)
	}
	switch {
	case err != nil:
		r.unreadable(e.Key, err, out)
	case is:
		// A watch that begins again shows an old mark again: the worker is removed once for each mark.
		if e.Deleted && of && r.marks[e.Key] != e.Revision {
			r.expired.remove(instance)
		}
		r.mark(e)
	}
	out.changed = out.changed || other
}

// renew applies an entry that only renews a lease, as nearly all entries do. It returns false for other entries.
func (r *Registry) renew(key events.RankKey, e jetstream.Entry) bool {
	w, there := r.leased(key)
	if !there || !bytes.Equal(w.text, e.Value) {
		return false
	}
	was := w.old
	w.Revision, w.Renewed, w.old = e.Revision, e.Written, e.Written.Before(r.cfg.Began)
	if _, counts := r.workers[key]; !counts {
		r.unclaimed[key] = w
	} else if r.workers[key] = w; w.old != was {
		r.impaired.note(key, w.state())
	}
	r.machine.Seen(w.Record, e.Revision, r.now())
	return true
}

// applyLease applies a lease that is new or has changed.
func (r *Registry) applyLease(p events.Partition, key events.RankKey, e jetstream.Entry, out *effects) {
	record, err := decode(key, e.Value)
	if err != nil {
		r.unreadable(e.Key, err, out)
		r.machine.Unread(key)
		return
	}
	before, there := r.workers[key]
	if err := r.otherSize(&record); err != nil {
		r.skipped.sizes++
		if !there || r.otherSize(&before.Record) == nil {
			out.call(func() { r.logSkipped(key, err) })
		}
	}
	r.machine.Seen(record, e.Revision, r.now())
	if record.State == Expired && r.cfg.Mine(p) {
		loop.Wake(r.hurry)
	}
	w := Worker{
		Record: record, Partition: p, Revision: e.Revision, Renewed: e.Written, text: e.Value,
		old: e.Written.Before(r.cfg.Began), noStore: r.cfg.Screen.Store(record.L3),
	}
	if record.Worker != nil {
		w.address, _ = dial.ServingAddress(record.Worker.Endpoint)
	}
	if w.skipped = r.cfg.Screen.screen(&record); w.skipped != nil {
		out.call(func() { r.logUnused(key, w.skipped) })
	}
	if !r.claims.allows(key.Instance, record.Model) {
		if there {
			r.dropLease(key)
			out.changed = true
		}
		r.unclaimed[key] = w
		out.calls = append(out.calls, r.report([]Worker{w})...)
		return
	}
	out.changed = out.changed || !there || !sameButState(before.Record, record)
	r.expired.note(key, record, before.Renewed, e.Written)
	delete(r.unclaimed, key)
	r.register(key, w)
}

// register enters the lease of a rank. The caller holds r.mu.
func (r *Registry) register(key events.RankKey, w Worker) {
	r.workers[key] = w
	r.impaired.note(key, w.state())
	r.sources.Store(key, w.source())
	r.alter(key.Instance)
	r.pools.Store(nil)
	r.allPools.Store(nil)
}

// all returns every known record, by key.
func (r *Registry) all() map[string][]byte {
	records := map[string][]byte{}
	for _, leases := range []map[events.RankKey]Worker{r.workers, r.unclaimed} {
		for key, w := range leases {
			if name, err := jetstream.WorkerKey(w.Partition, key); err == nil { // it was one
				records[name] = w.text
			}
		}
	}
	for instance, of := range r.claims.known {
		for model, c := range of {
			if name, err := jetstream.ClaimKey(instance, model); err == nil {
				records[name] = c.text
			}
		}
	}
	for instance, text := range r.operators.texts {
		if name, err := jetstream.OperatorKey(instance); err == nil {
			records[name] = text
		}
	}
	return records
}

// refills reports whether a record of a deleted bucket will be written into the new one.
func (r *Registry) refills(w Worker) bool {
	name, err := jetstream.WorkerKey(w.Partition, w.Record.Key())
	return err == nil && r.lost[name] != nil
}
