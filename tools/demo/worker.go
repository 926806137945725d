package demo

import (
	"context"
	"fmt"
	"sync"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// worker is a simulated engine with its shim and the twin of its cache.
type worker struct {
	key       events.RankKey
	partition events.Partition
	engine    *enginesim.Engine
	ended     chan error
	cancel    context.CancelFunc

	mu         sync.Mutex
	changed    chan struct{} // closed by a change of the fields below
	twin       *twin.Rank
	hasher     *events.Hasher
	last       *events.EngineSeq // of the last announced event; nil before the first
	events     uint64            // number of announced events, as the log counts them
	blocks     uint64            // announced in stored events
	published  events.Cursor
	at         events.StreamSeq // of the log, for published
	registered bool             // the shim's first event is in the log

	// With a shared store: the store's names of the held blocks and of the evicted blocks.
	page    int // tokens; 0: no store
	pages   map[events.BlockHash]hicache.PageHash
	evicted []hicache.PageHash
}

// startWorker starts engine i and its shim. As in production, the shim has a separate NATS connection.
func startWorker(ctx context.Context, conn *jetstream.Conn, cfg Config, i int) (*worker, error) {
	hasher, err := events.NewHasher(uint32(cfg.BlockSize), events.Space{})
	if err != nil {
		return nil, err
	}
	w := &worker{
		key: events.RankKey{Instance: events.WorkerID(fmt.Sprintf("engine-%d", i))}, hasher: hasher,
		twin:  twin.New(twin.Config{}, uint32(cfg.BlockSize)),
		ended: make(chan error, 1), changed: make(chan struct{}),
	}
	if cfg.L3 != nil {
		w.page, w.pages = cfg.BlockSize, map[events.BlockHash]hicache.PageHash{}
	}
	if w.engine, err = enginesim.Start(ctx, enginesim.Config{
		BlockSize: cfg.BlockSize, Capacity: cfg.Capacity, Seed: uint64(i), Announced: w.apply,
	}); err != nil {
		return nil, err
	}
	own, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{conn.ServerURL()}, Name: "kvatlas shim " +
		string(w.key.Instance), Wait: true})
	if err != nil {
		return nil, err
	}
	ns, err := jetstream.OpenNamespace(ctx, own, namespace)
	if err != nil {
		return nil, err
	}
	if err := ns.RegisterModel(ctx, jetstream.Model{Name: model, BlockSize: uint32(cfg.BlockSize)}); err != nil {
		return nil, err
	}
	if w.partition, err = ns.PartitionOf(w.key.Instance); err != nil {
		return nil, err
	}
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: uint32(cfg.BlockSize)})
	if err != nil {
		return nil, err
	}
	ctx, w.cancel = context.WithCancel(ctx)
	go func() {
		defer own.Close()
		w.ended <- shim.Run(ctx, shim.Config{
			Engine: w.engine.Endpoint(), Replay: w.engine.Replay(), Decoder: decoder, Log: shim.NewStreamLog(ns, w.key,
				func(error) {}),
			Identity: shim.Identity{Model: model, BlockSize: uint32(cfg.BlockSize)},
			Observer: publishedTo{w: w},
		})
	}()
	return w, nil
}

func (w *worker) stop() {
	w.cancel()
	<-w.ended
	w.engine.Stop()
}

// apply applies an event of the engine to the twin.
func (w *worker) apply(a enginesim.Announced) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := events.Event{Kind: a.Kind, Tier: events.Device, HasParent: a.HasParent, Parent: a.Parent, Blocks: a.Blocks}
	w.events++
	if a.Kind == events.Stored {
		e.Locals = w.hasher.Hash(nil, a.Tokens)
		w.blocks += uint64(len(a.Blocks))
		w.events += uint64((len(a.Blocks) - 1) / events.MaxBlocksPerEvent) // a long event is split
	}
	w.twin.Apply(0, []events.Event{e})
	if w.page > 0 {
		w.applyPages(a)
	}
	seq := a.Seq
	w.last = &seq
}

// publishedTo records in a worker the position of its shim in the log.
type publishedTo struct {
	shim.Unobserved
	w *worker
}

func (p publishedTo) Published(cursor events.Cursor, at events.StreamSeq) {
	w := p.w
	w.mu.Lock()
	defer w.mu.Unlock()
	w.published, w.registered = cursor, true
	w.at = max(w.at, at)
	close(w.changed)
	w.changed = make(chan struct{})
}

// wait returns after reached has reported true. The caller of reached holds the lock.
func (w *worker) wait(ctx context.Context, what string, reached func() bool) error {
	for {
		w.mu.Lock()
		done, changed := reached(), w.changed
		w.mu.Unlock()
		if done {
			return nil
		}
		select {
		case <-changed:
		case err := <-w.ended:
			w.ended <- err
			return fmt.Errorf("the shim of %s has ended: %w", w.key, err)
		case <-ctx.Done():
			return fmt.Errorf("%s: %s: %w", w.key, what, ctx.Err())
		}
	}
}

// waitSubscribed waits until the engine has a subscriber and the log has the worker.
func (w *worker) waitSubscribed(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := w.engine.WaitSubscribers(ctx, 1); err != nil {
		return fmt.Errorf("%s: %w", w.key, err)
	}
	return w.wait(ctx, "waiting for the shim's first event", func() bool { return w.registered })
}

// waitPublished waits until the log has all announced events, and returns the end of the log.
func (w *worker) waitPublished(ctx context.Context) (at api.PartitionSeq, err error) {
	err = w.wait(ctx, "waiting for the engine's events in the log", func() bool {
		at = api.PartitionSeq{Partition: w.partition, Seq: w.at}
		return w.last == nil || w.published.Known && w.published.Seq >= *w.last
	})
	return at, err
}

func (w *worker) serve(prompt, answer []uint32) error {
	_, err := w.engine.Serve(prompt, answer)
	return err
}

// truth returns the depths of a prompt in the engine, by tier.
func (w *worker) truth(locals []events.LocalHash) [events.NumTiers]uint32 {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.twin.Match(locals)
}

func (w *worker) announced() (events, blocks uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.events, w.blocks
}
