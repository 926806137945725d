package compat

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/base/hooks"
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

// The errors that a registration may meet.
var (
	ErrExists   = errors.New("already registered")
	ErrMismatch = errors.New("block_size mismatch")
	ErrUnknown  = errors.New("not found")
	ErrBad      = errors.New("bad registration")
)

// ShimsHooks tell what happens. Each may be nil.
type ShimsHooks struct {
	Started     func(r registry.Record)
	EngineFound func(key events.RankKey, engine events.Engine, why string) // which engine it is, where that was left open
	Ended       func(key events.RankKey, err error)                        // a shim ended; it is started again
	Rejected    func(key events.RankKey, err error)                        // an earlier registration is not acted on

	// StateChanged: how it stands with an engine has changed.
	StateChanged func(key events.RankKey, s shim.State)

	// Quiet: an engine has published no event since its shim began, or (false) its first one.
	Quiet func(key events.RankKey, quiet bool)

	// Unusable: what an engine announces is passed over, since its blocks have another size than was registered.
	Unusable func(key events.RankKey, err error, do string)

	// OtherRank: the engine names another data-parallel rank than was registered. If skipped is set, its events are
	// skipped, since the registered rank publishes through the same socket.
	OtherRank func(key events.RankKey, rank events.Rank, skipped bool)

	// Unreadable: a rank's last message in the log cannot be read; a new incarnation begins.
	Unreadable func(key events.RankKey, err error)

	// Passed: fields of a worker's store configuration are not known and are passed over; once for each worker.
	Passed func(key events.RankKey, fields hicache.Passed)

	// Refused: the log does not take events, or (nil) takes them again.
	Refused func(key events.RankKey, err error)
}

// Engines is how shims take engines that refuse or are silent; see [shim.Config].
type Engines struct {
	OnRefused              shim.OnRefused
	SilentAfter, GoneAfter time.Duration

	Tracer *tracing.Tracer // of what is published

	Screen registry.Screen // its rule judges engines' addresses too
}

// Shims is the shims that this process runs.
type Shims struct {
	ns      *jetstream.Namespace
	bucket  *jetstream.Bucket
	node    string
	engines Engines
	hooks   ShimsHooks
	starts  chan struct{} // has an element for each shim that starts

	mu     sync.Mutex
	ctx    context.Context
	ranks  map[events.RankKey]*running
	passed map[events.WorkerID]string // fields that Passed was called with
}

type running struct {
	record    registry.Record
	connected atomic.Bool
	cancel    context.CancelFunc // nil while it is being registered, under Shims.mu
	done      chan struct{}
}

// Listener is one registered rank and how it stands with its engine.
type Listener struct {
	Record    registry.Record
	Connected bool
}

// NewShims returns the shims of a node. They run within Run.
func NewShims(ns *jetstream.Namespace, bucket *jetstream.Bucket, node string, engines Engines,
	h ShimsHooks) *Shims {
	hooks.Fill(&h)
	return &Shims{ns: ns, bucket: bucket, node: node, engines: engines, hooks: h,
		starts: make(chan struct{}, maxStarts), ranks: map[events.RankKey]*running{},
		passed: map[events.WorkerID]string{}}
}

// maxPassed bounds the workers whose unknown fields are remembered.
const maxPassed = 10_000

// notePassed calls the hook Passed, unless the worker registered with the same unknown fields before.
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
		s.hooks.Passed(key, fields)
	}
}

// prefix is where registrations are remembered, beside the leases: registered.<node>.<partition>.<instance>.<rank>.
func (s *Shims) prefix() (string, error) {
	token, err := jetstream.EscapeToken(s.node)
	return "registered." + token + ".", err
}

// keys are those of a rank's lease, and of its registration.
func (s *Shims) keys(key events.RankKey) (lease, registration string, err error) {
	prefix, err := s.prefix()
	if err != nil {
		return "", "", err
	}
	lease, err = s.ns.WorkerKey(key)
	return lease, prefix + lease, err
}

// Run starts what this node was told to run before, and stops all shims when ctx ends. Leases and registrations stay.
func (s *Shims) Run(ctx context.Context) {
	s.mu.Lock()
	s.ctx = ctx
	s.mu.Unlock()
	for pause := 100 * time.Millisecond; ctx.Err() == nil; pause = min(2*pause, 5*time.Second) {
		if err := s.recall(ctx); err == nil {
			break
		}
		loop.Wait(ctx, pause)
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

// maxRemovals is how many ranks are removed at the same time.
const maxRemovals = 64

// undoWithin is how long Register and Unregister wait for a removal after the caller's context is done.
const undoWithin = 5 * time.Second

// Register runs a shim for each of the ranks and remembers them. It registers all ranks or none: shims start when all
// records are written. If it fails, or ctx is done before, the written records are removed.
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

// check refuses a registration that cannot be, and returns the key of its record.
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

// checkAddresses refuses a registration with an address or a folder that this node does not use. The error is ErrBad.
func (s *Shims) checkAddresses(r *registry.Record) error {
	for _, endpoint := range []string{r.Engine.Endpoint, r.Engine.Replay, r.Engine.Snapshot} {
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

// reserve takes the places of ranks that are about to be registered: of all or of none.
func (s *Shims) reserve(records []registry.Record) ([]*running, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx == nil || s.ctx.Err() != nil {
		return nil, jetstream.ErrUnavailable
	}
	sizes := map[string]uint32{} // of blocks, by model
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

// remember writes down that this node runs the shims, and registers the models. Those come last, for nothing removes
// them after a failure.
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

// undo removes the records of ranks whose shims were not started.
func (s *Shims) undo(ctx context.Context, names []string, runs []*running) error {
	return s.finish(ctx, "remove an incomplete registration", func(ctx context.Context) error {
		if err := s.bucket.DeleteAll(ctx, names); err != nil {
			return err
		}
		s.release(runs)
		return nil
	})
}

// finish retries a removal until it succeeds or the shims stop, also after ctx is done. It returns when the removal has
// succeeded, or undoWithin after ctx is done, while the removal goes on.
func (s *Shims) finish(ctx context.Context, what string, remove func(context.Context) error) error {
	done := make(chan error, 1)
	var last atomic.Pointer[error]
	go func() {
		for pause := 100 * time.Millisecond; ; pause = min(2*pause, 5*time.Second) {
			err := remove(s.ctx)
			if err == nil || !loop.Wait(s.ctx, pause) {
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
		return fmt.Errorf("%s: not done yet, it is tried again: %w", what, *err)
	}
	return fmt.Errorf("%s: %w: not done yet, it goes on", what, jetstream.ErrUnavailable)
}

// start runs a shim. s.mu is held.
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
			if errors.Is(err, ErrBad) { // until it is unregistered
				s.hooks.Rejected(run.record.Key(), err)
				return
			}
			s.hooks.Ended(run.record.Key(), err)
			loop.Wait(ctx, 5*time.Second)
		}
	}()
}

// shim runs one rank's shim once.
func (s *Shims) shim(ctx context.Context, run *running) error {
	r := run.record
	if err := s.checkAddresses(&r); err != nil { // another release, or other flags, took the registration
		return err
	}
	engine, err := events.EngineOf(r.Source)
	if err != nil {
		return err
	}
	groups, err := groupsOf(&r)
	if err != nil {
		return err
	}
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: engine, BlockSize: r.BlockSize, Groups: groups,
		Store: r.L3 != nil && r.L3.VLLM != nil})
	if err != nil {
		return err
	}
	begun, ok := s.turn(ctx)
	defer begun()
	if !ok {
		return ctx.Err()
	}
	key, quiet := r.Key(), false
	return host.Run(ctx, host.Rank{Record: r, Decoder: decoder, Config: shim.Config{
		Engine: r.Engine.Endpoint, Replay: r.Engine.Replay, Snapshot: r.Engine.Snapshot,
		Tracer: s.engines.Tracer, Sockets: zmtp.Config{Rule: s.engines.Screen.Rule},
		OnRefused: s.engines.OnRefused, SilentAfter: s.engines.SilentAfter, GoneAfter: s.engines.GoneAfter,
	}}, host.Env{Namespace: s.ns, Lease: registry.LeaseHooks{Taken: begun}, Watch: host.Watch{
		Prepared: func(*shim.Report, *shim.Config) { s.hooks.Started(r) },
		Found:    func(e events.Engine, why string) { s.hooks.EngineFound(key, e, why) },
		Unusable: func(err error, size uint32) (remedy string, skip bool) {
			if remedy = otherBlockSize(size, r.Model); err != nil {
				s.hooks.Unusable(key, err, remedy)
			}
			return remedy, false
		},
		OtherRank: func(rank events.Rank, skipped bool) { s.hooks.OtherRank(key, rank, skipped) },
		Refused: func(err error, first bool) {
			if first {
				s.hooks.Refused(key, err)
			}
		},
		Stepped: func(_ shim.Counts, _ int, again bool) {
			if again {
				s.hooks.Refused(key, nil)
			}
		},
		Shim: shim.Hooks{
			Connected:     func(string) { run.connected.Store(true) },
			Disconnected:  func(string, error) { run.connected.Store(false) },
			LogUnreadable: func(err error) { s.hooks.Unreadable(key, err) },
			StateChanged: func(now shim.State) {
				if now.Quiet != quiet {
					quiet = now.Quiet
					s.hooks.Quiet(key, quiet)
				}
				s.hooks.StateChanged(key, now)
			},
		},
	}})
}

// maxStarts is how many shims start at the same time.
const maxStarts = 32

// startWithin is how long a shim that starts holds up others.
const startWithin = 5 * time.Second

// turn waits until fewer than maxStarts shims start: thousands at once would delay each other, and the node, beyond
// all deadlines of NATS. The shim calls begun when it has its lease. turn reports false if ctx ends first.
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

// otherBlockSize is what to do about an engine whose blocks have another size than was registered; 0: it is not known.
func otherBlockSize(size uint32, model string) string {
	is := "the size of the engine's blocks"
	if size > 0 {
		is = fmt.Sprint(size)
	}
	return fmt.Sprintf("unregister the worker and register it with block_size %s; if the model has another size then: "+
		"indexer forget --model %s", is, escape.Shell(model))
}

// groupsOf is what a registration says of the engine's KV-cache groups.
func groupsOf(r *registry.Record) ([]events.GroupSpec, error) {
	switch {
	case r.KVGroups != "":
		return events.ParseGroups(r.KVGroups)
	case r.L3 != nil:
		return r.L3.GroupSpecs(r.BlockSize), nil
	}
	return nil, nil
}

// Unregister stops the shims of an instance that which holds for, has what they hold cleared, and forgets them. Then it
// calls last, which may be nil. The removal goes on until it succeeds, also after ctx is done and after an error.
func (s *Shims) Unregister(ctx context.Context, instance events.WorkerID, which func(registry.Record) bool,
	last func(context.Context) error) error {
	s.mu.Lock()
	var out []*running
	other := "" // where the instance is registered in place of that
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

// remove stops the shims of ranks and forgets the ranks. The registrations go first: if this process ends before it is
// done, the next one does not start the shims again, and the leases expire. A lease goes after the end of its shim, and
// after a write of it that the shim has given up: both went over one connection.
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

// held lists those that an earlier attempt has not released.
func (s *Shims) held(runs []*running) []*running {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(runs), func(r *running) bool { return s.ranks[r.record.Key()] != r })
}

// release gives up the places of ranks, unless they are another registration's meanwhile.
func (s *Shims) release(runs []*running) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, run := range runs {
		if key := run.record.Key(); s.ranks[key] == run {
			delete(s.ranks, key)
		}
	}
}

// Listeners lists what is registered here, by instance and rank.
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
