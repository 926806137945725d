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

	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/internal/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// The errors that a registration may meet.
var (
	ErrExists   = errors.New("already registered")
	ErrMismatch = errors.New("block_size mismatch")
	ErrUnknown  = errors.New("not found")
	ErrBad      = errors.New("bad registration")
)

// FleetHooks tell what happens. Each may be nil.
type FleetHooks struct {
	Started func(r registry.Record)
	Ended   func(key events.RankKey, err error) // a shim ended; it is started again
}

// Fleet is the shims that this process runs.
type Fleet struct {
	ns     *jetstream.Namespace
	bucket *jetstream.Bucket
	node   string
	hooks  FleetHooks

	mu    sync.Mutex
	ctx   context.Context
	ranks map[events.RankKey]*running
}

type running struct {
	record    registry.Record
	connected atomic.Bool
	cancel    context.CancelFunc
	done      chan struct{}
}

// Listener is one registered rank and how it stands with its engine.
type Listener struct {
	Record    registry.Record
	Connected bool
}

// NewFleet returns a fleet that runs nothing until Run.
func NewFleet(ns *jetstream.Namespace, bucket *jetstream.Bucket, node string, hooks FleetHooks) *Fleet {
	if hooks.Started == nil {
		hooks.Started = func(registry.Record) {}
	}
	if hooks.Ended == nil {
		hooks.Ended = func(events.RankKey, error) {}
	}
	return &Fleet{ns: ns, bucket: bucket, node: node, hooks: hooks, ranks: map[events.RankKey]*running{}}
}

// prefix is where registrations are remembered, beside the leases: registered.<node>.<partition>.<instance>.<rank>.
func (f *Fleet) prefix() (string, error) {
	token, err := jetstream.EscapeToken(f.node)
	return "registered." + token + ".", err
}

func (f *Fleet) key(key events.RankKey) (string, error) {
	p, err := f.ns.PartitionOf(key.Instance)
	if err != nil {
		return "", err
	}
	prefix, err := f.prefix()
	if err != nil {
		return "", err
	}
	name, err := jetstream.WorkerKey(p, key)
	return prefix + name, err
}

// Run starts what this node was told to run before, and stops all shims when ctx ends. Leases and registrations stay.
func (f *Fleet) Run(ctx context.Context) {
	f.mu.Lock()
	f.ctx = ctx
	f.mu.Unlock()
	for pause := 100 * time.Millisecond; ctx.Err() == nil; pause = min(2*pause, 5*time.Second) {
		if err := f.recall(ctx); err == nil {
			break
		}
		select {
		case <-ctx.Done():
		case <-time.After(pause):
		}
	}
	<-ctx.Done()
	f.mu.Lock()
	all := make([]*running, 0, len(f.ranks))
	for _, r := range f.ranks {
		all = append(all, r)
	}
	f.mu.Unlock()
	for _, r := range all {
		r.cancel()
		<-r.done
	}
}

func (f *Fleet) recall(ctx context.Context) error {
	prefix, err := f.prefix()
	if err != nil {
		return err
	}
	keys, err := f.bucket.Keys(ctx, prefix)
	if err != nil {
		return err
	}
	for _, name := range keys {
		entry, err := f.bucket.Latest(ctx, name)
		if errors.Is(err, jetstream.ErrNotFound) {
			continue
		} else if err != nil {
			return err
		}
		var r registry.Record
		if json.Unmarshal(entry.Value, &r) != nil || r.Engine == nil {
			continue
		}
		f.mu.Lock()
		if f.ranks[r.Key()] == nil {
			f.start(r)
		}
		f.mu.Unlock()
	}
	return nil
}

// Register runs a shim for a rank, and remembers that.
func (f *Fleet) Register(ctx context.Context, r registry.Record) error {
	if r.Engine == nil || r.Model == "" || r.BlockSize == 0 || r.BlockSize > events.MaxBlockSize {
		return fmt.Errorf("%w: model_name, endpoint and a block_size from 1 to %d are needed", ErrBad, events.MaxBlockSize)
	}
	for _, endpoint := range []string{r.Engine.Endpoint, r.Engine.Replay} {
		if endpoint != "" || endpoint == r.Engine.Endpoint {
			if err := zmtp.CheckEndpoint(endpoint); err != nil {
				return fmt.Errorf("%w: %w", ErrBad, err)
			}
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ctx == nil || f.ctx.Err() != nil {
		return jetstream.ErrUnavailable
	}
	if f.ranks[r.Key()] != nil {
		return fmt.Errorf("instance %s dp_rank %d %w", r.Instance, r.Rank, ErrExists)
	}
	for _, other := range f.ranks {
		if o := other.record; o.Model == r.Model && o.BlockSize != r.BlockSize {
			return fmt.Errorf("%w for model=%s: existing=%d, requested=%d", ErrMismatch, r.Model, o.BlockSize, r.BlockSize)
		}
	}
	err := f.ns.RegisterModel(ctx, jetstream.Model{Name: r.Model, BlockSize: r.BlockSize})
	if errors.Is(err, jetstream.ErrMismatch) {
		return fmt.Errorf("%w: %w", ErrMismatch, err)
	} else if err != nil {
		return err
	}
	r.Engine.Node = f.node
	name, err := f.key(r.Key())
	if err != nil {
		return fmt.Errorf("%w: %w", ErrBad, err)
	}
	text, err := json.MarshalIndent(r, "", " ")
	if err != nil {
		return err
	}
	if _, err := f.bucket.Put(ctx, name, text); err != nil {
		return err
	}
	f.start(r)
	return nil
}

// start runs a shim. f.mu is held.
func (f *Fleet) start(r registry.Record) {
	ctx, cancel := context.WithCancel(f.ctx)
	run := &running{record: r, cancel: cancel, done: make(chan struct{})}
	f.ranks[r.Key()] = run
	go func() {
		defer close(run.done)
		for ctx.Err() == nil {
			err := f.shim(ctx, run)
			run.connected.Store(false)
			if ctx.Err() != nil {
				return
			}
			f.hooks.Ended(r.Key(), err)
			select {
			case <-ctx.Done():
			case <-time.After(5 * time.Second):
			}
		}
	}()
}

// shim runs one rank's shim once.
func (f *Fleet) shim(ctx context.Context, run *running) error {
	r := run.record
	engine, err := events.EngineOf(r.Source)
	if err != nil {
		return err
	}
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: engine, BlockSize: r.BlockSize})
	if err != nil {
		return err
	}
	desk, err := shim.Claim(ctx, f.ns, r.Key(), r.Engine.Replay != "")
	if err != nil {
		return err
	}
	defer desk.Close()
	lease, err := registry.NewLease(f.ns, r, registry.LeaseHooks{})
	if err != nil {
		return err
	}
	f.hooks.Started(r)
	return shim.Run(ctx, shim.Config{
		Engine: r.Engine.Endpoint, Replay: r.Engine.Replay,
		Identity: shim.Identity{Model: r.Model, BlockSize: r.BlockSize},
		Decoder:  decoder, Log: shim.NewStreamLog(f.ns, r.Key(), nil), Desk: desk, Keep: lease.Keep,
		Hooks: shim.Hooks{
			Connected:    func(string) { run.connected.Store(true) },
			Disconnected: func(string, error) { run.connected.Store(false) },
		},
	})
}

// Unregister stops the shims of an instance for a model (of one rank, if rank is not nil), has what they hold cleared, and forgets them.
func (f *Fleet) Unregister(ctx context.Context, instance events.WorkerID, model string, rank *events.Rank) error {
	f.mu.Lock()
	var out []*running
	for key, r := range f.ranks {
		if key.Instance == instance && r.record.Model == model && (rank == nil || key.Rank == *rank) {
			out = append(out, r)
		}
	}
	f.mu.Unlock()
	if len(out) == 0 {
		return fmt.Errorf("instance %s %w", instance, ErrUnknown)
	}
	for _, r := range out {
		r.cancel()
		<-r.done
		if err := f.forget(ctx, r.record); err != nil {
			return err // it is still listed, and can be unregistered again
		}
		f.mu.Lock()
		delete(f.ranks, r.record.Key())
		f.mu.Unlock()
	}
	return nil
}

func (f *Fleet) forget(ctx context.Context, r registry.Record) error {
	key := r.Key()
	err := shim.Clear(ctx, f.ns, key, shim.Identity{Model: r.Model, BlockSize: r.BlockSize}, events.ReasonOperator,
		func(context.Context) (bool, error) { return true, nil })
	if err != nil {
		return err
	}
	name, err := f.key(key)
	if err != nil {
		return err
	}
	p, err := f.ns.PartitionOf(key.Instance)
	if err != nil {
		return err
	}
	leased, err := jetstream.WorkerKey(p, key)
	if err != nil {
		return err
	}
	for _, k := range []string{leased, name} {
		entry, err := f.bucket.Latest(ctx, k)
		if errors.Is(err, jetstream.ErrNotFound) {
			continue
		} else if err != nil {
			return err
		}
		if _, err := f.bucket.Delete(ctx, k, entry.Revision); err != nil && !errors.Is(err, jetstream.ErrConflict) {
			return err
		}
	}
	return nil
}

// Listeners lists what is registered here, by instance and rank.
func (f *Fleet) Listeners() (list []Listener) {
	f.mu.Lock()
	for _, r := range f.ranks {
		list = append(list, Listener{r.record, r.connected.Load()})
	}
	f.mu.Unlock()
	slices.SortFunc(list, func(a, b Listener) int {
		return cmp.Or(a.Record.Key().Compare(b.Record.Key()), cmp.Compare(a.Record.Model, b.Record.Model))
	})
	return list
}
