package compat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/ingest/shim/host"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"golang.org/x/sync/errgroup"
)

// Errors of Register and Unregister.
var (
	ErrExists   = errors.New("already registered")
	ErrMismatch = errors.New("block_size mismatch")
	ErrUnknown  = errors.New("not found")
	ErrBad      = errors.New("bad registration")
)

// Engines configures the reaction of shims to engines that refuse connections or publish nothing; see [shim.Config].
type Engines struct {
	OnRefused              shim.OnRefused
	SilentAfter, GoneAfter time.Duration

	Tracer *tracing.Tracer // traces published events; nil disables traces

	Screen registry.Screen // also checks the addresses of engines
}

// Shims runs the shims of this process.
type Shims struct {
	ns      *jetstream.Namespace
	bucket  *jetstream.Bucket
	node    string
	engines Engines
	log     *slog.Logger
	starts  chan struct{} // semaphore of starting shims

	mu     sync.Mutex
	ctx    context.Context
	ranks  map[events.RankKey]*running
	passed map[events.WorkerID]string // logged unknown fields
}

type running struct {
	record    registry.Record
	connected atomic.Bool
	cancel    context.CancelFunc // nil during the registration; Shims.mu guards it
	done      chan struct{}
}

// Listener is a registered rank with the state of the connection to the engine.
type Listener struct {
	Record    registry.Record
	Connected bool
}

// NewShims returns the shims of a node. Run starts them. A nil log is permitted.
func NewShims(ns *jetstream.Namespace, bucket *jetstream.Bucket, node string, engines Engines,
	log *slog.Logger) *Shims {
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	return &Shims{ns: ns, bucket: bucket, node: node, engines: engines, log: log,
		starts: make(chan struct{}, maxStarts), ranks: map[events.RankKey]*running{},
		passed: map[events.WorkerID]string{}}
}

// maxPassed is the maximum number of workers in Shims.passed.
const maxPassed = 10_000

// notePassed logs the unknown fields of a worker's store configuration, once for equal fields of a worker.
func (s *Shims) notePassed(key events.RankKey, fields hicache.Passed) {
	s.mu.Lock()
	known := len(fields) == 0 || s.passed[key.Instance] == fields.String()
	if !known {
		if len(s.passed) >= maxPassed {
			clear(s.passed)
		}
		s.passed[key.Instance] = fields.String()
	}
	s.mu.Unlock()
	if !known {
		s.log.Warn("unknown fields of a registration's l3 are ignored", "worker", key, "fields", fields,
			"what_to_do", fields.Remedy())
	}
}

// prefix returns the key prefix of this node's registrations. A key is registered.<node>.<partition>.<instance>.<rank>,
// in the bucket of leases.
func (s *Shims) prefix() (string, error) {
	token, err := jetstream.EscapeToken(s.node)
	return "registered." + token + ".", err
}

// keys returns the keys of a rank's lease and registration.
func (s *Shims) keys(key events.RankKey) (lease, registration string, err error) {
	prefix, err := s.prefix()
	if err != nil {
		return "", "", err
	}
	lease, err = s.ns.WorkerKey(key)
	return lease, prefix + lease, err
}

// Run starts the stored registrations of this node, and stops all shims at the end of ctx. Leases and registrations
// remain.
func (s *Shims) Run(ctx context.Context) {
	s.mu.Lock()
	s.ctx = ctx
	s.mu.Unlock()
	retry := newBackoff()
	for s.recall(ctx) != nil && retry.Wait(ctx) {
	}
	<-ctx.Done()
	s.mu.Lock()
	all := make([]*running, 0, len(s.ranks))
	for _, r := range s.ranks {
		if r.cancel != nil {
			all = append(all, r)
		}
	}
	s.mu.Unlock()
	for _, r := range all {
		r.cancel()
		<-r.done
	}
}

// newBackoff returns the pauses between attempts to read or write the stored registrations.
func newBackoff() loop.Backoff {
	return loop.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second}
}

func (s *Shims) recall(ctx context.Context) error {
	prefix, err := s.prefix()
	if err != nil {
		return err
	}
	keys, err := s.bucket.Keys(ctx, prefix)
	if err != nil {
		return err
	}
	for _, name := range keys {
		entry, err := s.bucket.Latest(ctx, name)
		if errors.Is(err, jetstream.ErrNotFound) {
			continue
		} else if err != nil {
			return err
		}
		var r registry.Record
		if strictjson.Unmarshal(entry.Value, &r) != nil || r.Engine == nil {
			continue
		}
		s.mu.Lock()
		if s.ranks[r.Key()] == nil {
			run := &running{record: r}
			s.ranks[r.Key()] = run
			s.start(run)
		}
		s.mu.Unlock()
	}
	return nil
}

// maxRemovals is the number of concurrent removals of ranks.
const maxRemovals = 64

// undoWithin is the longest wait of Register and Unregister for a removal after the end of the caller's context.
const undoWithin = 5 * time.Second

// Register stores the ranks and starts their shims. Register registers all ranks or none: shims start after all records
// are written. After an error or the end of ctx, the written records are removed.
func (s *Shims) Register(ctx context.Context, records ...registry.Record) error {
	if len(records) == 0 {
		return nil
	}
	names := make([]string, len(records))
	for i := range records {
		name, err := s.check(&records[i])
		if err != nil {
			return err
		}
		names[i] = name
	}
	runs, err := s.reserve(records)
	if err != nil {
		return err
	}
	if err := cmp.Or(s.remember(ctx, names, records), ctx.Err()); err != nil {
		return errors.Join(err, s.undo(ctx, names, runs))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, run := range runs {
		s.start(run)
	}
	return nil
}

// check refuses an invalid registration and returns the key of the record.
func (s *Shims) check(r *registry.Record) (name string, err error) {
	if r.Engine == nil || r.Model == "" || r.BlockSize == 0 || r.BlockSize > events.MaxBlockSize {
		return "", fmt.Errorf("%w: model_name, endpoint and a block_size from 1 to %d are needed", ErrBad,
			events.MaxBlockSize)
	}
	if err := s.checkAddresses(r); err != nil {
		return "", err
	}
	if _, err := events.EngineOf(r.Source); err != nil {
		return "", fmt.Errorf("%w: type: %w", ErrBad, err)
	}
	if _, err := groupsOf(r); err != nil {
		return "", fmt.Errorf("%w: kv_groups: %w", ErrBad, err)
	}
	if _, name, err = s.keys(r.Key()); err != nil {
		return "", fmt.Errorf("%w: %w", ErrBad, err)
	}
	r.Engine.Node = s.node
	return name, nil
}

// checkAddresses refuses a registration with an address or folder that the node's rules forbid. The error wraps ErrBad.
func (s *Shims) checkAddresses(r *registry.Record) error {
	for _, endpoint := range []string{r.Engine.Endpoint, r.Engine.Replay} {
		if endpoint != "" || endpoint == r.Engine.Endpoint {
			if err := zmtp.CheckRemote(endpoint, s.engines.Screen.Rule); err != nil {
				return fmt.Errorf("%w: %w", ErrBad, err)
			}
		}
	}
	if err := s.engines.Screen.Store(r.L3); err != nil {
		return fmt.Errorf("%w: l3: %w", ErrBad, err)
	}
	return nil
}

// reserve reserves the ranks of a registration, all or none.
func (s *Shims) reserve(records []registry.Record) ([]*running, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx == nil || s.ctx.Err() != nil {
		return nil, jetstream.ErrUnavailable
	}
	sizes := map[string]uint32{} // block sizes by model
	for _, other := range s.ranks {
		sizes[other.record.Model] = other.record.BlockSize
	}
	for i := range records {
		r := &records[i]
		if s.ranks[r.Key()] != nil {
			return nil, fmt.Errorf("instance %s dp_rank %d %w", r.Instance, r.Rank, ErrExists)
		}
		if size, known := sizes[r.Model]; known && size != r.BlockSize {
			return nil, fmt.Errorf("%w for model=%s: existing=%d, requested=%d", ErrMismatch, r.Model, size, r.BlockSize)
		}
	}
	runs := make([]*running, len(records))
	for i, r := range records {
		runs[i] = &running{record: r}
		s.ranks[r.Key()] = runs[i]
	}
	return runs, nil
}

// remember stores the registrations of this node, then registers the models. The models are last because a failed
// registration does not remove models.
func (s *Shims) remember(ctx context.Context, names []string, records []registry.Record) error {
	values := make([]jetstream.Value, len(records))
	for i := range records {
		text, err := json.MarshalIndent(&records[i], "", " ")
		if err != nil {
			return err
		}
		values[i] = jetstream.Value{Key: names[i], Data: text}
	}
	if err := s.bucket.PutAll(ctx, values); err != nil {
		return err
	}
	registered := map[jetstream.Model]bool{}
	for i := range records {
		model := jetstream.Model{Name: records[i].Model, BlockSize: records[i].BlockSize}
		if registered[model] {
			continue
		}
		registered[model] = true
		err := s.ns.RegisterModel(ctx, model)
		if errors.Is(err, jetstream.ErrMismatch) {
			return fmt.Errorf("%w: %w", ErrMismatch, err)
		} else if err != nil {
			return err
		}
	}
	return nil
}

// undo removes the records of ranks without a started shim.
func (s *Shims) undo(ctx context.Context, names []string, runs []*running) error {
	return s.finish(ctx, "remove an incomplete registration", func(ctx context.Context) error {
		if err := s.bucket.DeleteAll(ctx, names); err != nil {
			return err
		}
		s.release(runs)
		return nil
	})
}

// finish retries a removal until success or the end of the shims, also after the end of ctx. finish returns after the
// success, or undoWithin after the end of ctx. In the second case the removal continues.
func (s *Shims) finish(ctx context.Context, what string, remove func(context.Context) error) error {
	done := make(chan error, 1)
	var last atomic.Pointer[error]
	go func() {
		for retry := newBackoff(); ; {
			err := remove(s.ctx)
			if err == nil || !retry.Wait(s.ctx) {
				done <- err
				return
			}
			last.Store(&err)
		}
	}()
	late, cancel := context.WithCancel(context.Background())
	defer cancel()
	context.AfterFunc(ctx, func() {
		loop.Wait(late, undoWithin)
		cancel()
	})
	select {
	case err := <-done:
		return err
	case <-late.Done():
	}
	if err := last.Load(); err != nil {
		return fmt.Errorf("%s: not complete, retrying: %w", what, *err)
	}
	return fmt.Errorf("%s: %w: not complete, the removal continues", what, jetstream.ErrUnavailable)
}

// start runs a shim. The caller holds s.mu.
func (s *Shims) start(run *running) {
	ctx, cancel := context.WithCancel(s.ctx)
	run.cancel, run.done = cancel, make(chan struct{})
	go func() {
		defer close(run.done)
		for ctx.Err() == nil {
			err := s.shim(ctx, run)
			run.connected.Store(false)
			if ctx.Err() != nil {
				return
			}
			if errors.Is(err, ErrBad) { // an invalid registration waits for its removal
				s.log.Warn("a registration is not acted on", "worker", run.record.Key(), "error", err, "what_to_do",
					"unregister the worker and register it with another address, or permit it with --dial-allow or --l3-folder")
				return
			}
			s.log.Warn("a shim in this process has ended; it is started again", "worker", run.record.Key(), "error", err,
				"what_to_do", "see the error; unregister the worker if its engine is gone")
			loop.Wait(ctx, 5*time.Second)
		}
	}()
}

// shim runs the shim of a rank once.
func (s *Shims) shim(ctx context.Context, run *running) error {
	r := run.record
	if err := s.checkAddresses(&r); err != nil { // another release or other flags may have accepted the registration
		return err
	}
	groups, err := groupsOf(&r)
	if err != nil {
		return err
	}
	decoder, err := host.NewDecoder(r.Source, r.BlockSize, groups, r.L3, false)
	if err != nil {
		return err
	}
	begun, ok := s.turn(ctx)
	defer begun()
	if !ok {
		return ctx.Err()
	}
	o := &observer{log: s.log, run: run, record: r, key: r.Key(), begun: begun}
	return host.Run(ctx, host.Rank{Record: r, Decoder: decoder, Config: shim.Config{
		Engine: r.Engine.Endpoint, Replay: r.Engine.Replay,
		Tracer: s.engines.Tracer, Sockets: zmtp.Config{Rule: s.engines.Screen.Rule},
		OnRefused: s.engines.OnRefused, SilentAfter: s.engines.SilentAfter, GoneAfter: s.engines.GoneAfter,
	}}, host.Env{Namespace: s.ns, Observer: o, Prepared: o.prepared})
}

// maxStarts is the number of shims that start at the same time.
const maxStarts = 32

// startWithin is the longest time that a starting shim blocks other starts.
const startWithin = 5 * time.Second

// turn waits until fewer than maxStarts shims are starting. Thousands of concurrent starts would delay each other and
// the node beyond all deadlines of NATS. The shim calls begun when the shim holds the lease. ok is false if ctx ends
// first.
func (s *Shims) turn(ctx context.Context) (begun func(), ok bool) {
	select {
	case s.starts <- struct{}{}:
	case <-ctx.Done():
		return func() {}, false
	}
	begun = sync.OnceFunc(func() { <-s.starts })
	time.AfterFunc(startWithin, begun)
	return begun, true
}

// otherBlockSize returns the remedy for an engine with another block size than the registration. A size of 0 is
// unknown.
func otherBlockSize(size uint32, model string) string {
	is := "the size of the engine's blocks"
	if size > 0 {
		is = fmt.Sprint(size)
	}
	return fmt.Sprintf("unregister the worker and register it with block_size %s; if the model has another size then: "+
		"indexer models remove %s", is, escape.Operand(model))
}

// groupsOf returns the KV-cache groups in a registration.
func groupsOf(r *registry.Record) ([]events.GroupSpec, error) {
	switch {
	case r.KVGroups != "":
		return events.ParseGroups(r.KVGroups)
	case r.L3 != nil:
		return r.L3.GroupSpecs(r.BlockSize), nil
	}
	return nil, nil
}

// Unregister stops the matching shims of an instance, clears the blocks and removes the registrations. which selects
// the records. Unregister then calls last, which may be nil. The removal continues until success, also after the end of
// ctx and after an error.
func (s *Shims) Unregister(ctx context.Context, instance events.WorkerID, which func(registry.Record) bool,
	last func(context.Context) error) error {
	s.mu.Lock()
	var out []*running
	other := "" // a registration of the instance that which does not match
	for key, r := range s.ranks {
		switch {
		case r.cancel == nil || key.Instance != instance:
		case which(r.record):
			out = append(out, r)
		default:
			other = fmt.Sprintf("; it is registered for model=%s routing_group=%s dp_rank=%d", NameOf(r.record),
				r.record.Engine.Group, key.Rank)
		}
	}
	s.mu.Unlock()
	if len(out) == 0 {
		return fmt.Errorf("instance %s %w%s", instance, ErrUnknown, other)
	}
	return s.finish(ctx, "unregister "+string(instance), func(ctx context.Context) error {
		if err := s.remove(ctx, out); err != nil || last == nil {
			return err
		}
		return last(ctx)
	})
}

// remove stops the shims of ranks and removes the ranks. The registrations are removed first. If this process ends in
// between, the next process does not restart the shims, and the leases expire. A lease is removed after the end of the
// shim and of its last write to the lease, because both used the same connection.
func (s *Shims) remove(ctx context.Context, runs []*running) error {
	runs = s.held(runs)
	leases, registrations := make([]string, len(runs)), make([]string, len(runs))
	for i, r := range runs {
		r.cancel()
		var err error
		if leases[i], registrations[i], err = s.keys(r.record.Key()); err != nil {
			return err
		}
	}
	if err := s.bucket.DeleteAll(ctx, registrations); err != nil {
		return err
	}
	group, clearing := errgroup.WithContext(ctx)
	group.SetLimit(maxRemovals)
	for _, run := range runs {
		group.Go(func() error {
			<-run.done
			r := run.record
			return shim.Clear(clearing, s.ns, r.Key(), shim.Identity{Model: r.Model, BlockSize: r.BlockSize},
				events.ReasonOperator, func(context.Context) (bool, error) { return true, nil })
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	if err := s.bucket.DeleteAll(ctx, leases); err != nil {
		return err
	}
	s.release(runs)
	return nil
}

// held lists the runs that an earlier attempt has not released.
func (s *Shims) held(runs []*running) []*running {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(runs), func(r *running) bool { return s.ranks[r.record.Key()] != r })
}

// release releases the ranks of runs, unless another registration has reserved them since.
func (s *Shims) release(runs []*running) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, run := range runs {
		if key := run.record.Key(); s.ranks[key] == run {
			delete(s.ranks, key)
		}
	}
}

// Listeners lists the registrations of this node by instance and rank.
func (s *Shims) Listeners() (list []Listener) {
	s.mu.Lock()
	for _, r := range s.ranks {
		if r.cancel != nil {
			list = append(list, Listener{r.record, r.connected.Load()})
		}
	}
	s.mu.Unlock()
	slices.SortFunc(list, func(a, b Listener) int {
		return cmp.Or(a.Record.Key().Compare(b.Record.Key()), cmp.Compare(a.Record.Model, b.Record.Model))
	})
	return list
}
