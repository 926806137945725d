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

// worker is a simulated engine, its shim, and the twin that knows the truth.
type worker struct {
	key       events.RankKey
	partition events.Partition
	engine    *enginesim.Engine
	ended     chan error
	cancel    context.CancelFunc

	mu         sync.Mutex
	changed    chan struct{} // closed when one of the fields below changes
	twin       *twin.Rank
	hasher     *events.Hasher
	last       *events.EngineSeq // of what was announced; nil: nothing
	events     uint64            // announced, as the log counts them
	blocks     uint64            // announced in stored events
	published  events.Cursor
	at         events.StreamSeq // of the log, for published
	registered bool             // the shim's first event is in the log

	// With a shared store: what it calls the blocks that the engine holds, and those that were evicted.
	page    int // tokens; 0: no store
	pages   map[events.BlockHash]hicache.PageHash
	evicted []hicache.PageHash
}

// startWorker starts engine number i and its shim. The shim has a NATS connection of its own, as in life.
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
		BlockSize: cfg.BlockSize, Capacity: cfg.Capacity, Seed: uint64(i), Announced: w.hear,
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
			Hooks:    shim.Hooks{Published: w.isPublished},
		})
	}()
	return w, nil
}

func (w *worker) stop() {
	w.cancel()
	<-w.ended
	w.engine.Stop()
}

// hear is told the truth by the engine.
func (w *worker) hear(a enginesim.Announced) {
	w.mu.Lock()
	defer w.mu.Unlock()
	e := events.Event{Kind: a.Kind, Tier: events.Device, HasParent: a.HasParent, Parent: a.Parent, Blocks: a.Blocks}
	w.events++
	if a.Kind == events.Stored {
		e.Locals = w.hasher.Hash(nil, a.Tokens)
		w.blocks += uint64(len(a.Blocks))
		w.events += uint64((len(a.Blocks) - 1) / events.MaxBlocksPerEvent) // a long one is cut
	}
	w.twin.Apply(0, []events.Event{e})
	if w.page > 0 {
		w.heard(a)
	}
	seq := a.Seq
	w.last = &seq
}

// isPublished is told by the shim what is in the log.
func (w *worker) isPublished(cursor events.Cursor, at events.StreamSeq) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.published, w.registered = cursor, true
	w.at = max(w.at, at)
	close(w.changed)
	w.changed = make(chan struct{})
}

// wait returns once reached, which is called with the lock held, reports true.
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

// waitHeard waits until the engine has a subscriber and the log knows of the worker.
func (w *worker) waitHeard(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	if err := w.engine.WaitSubscribers(ctx, 1); err != nil {
		return fmt.Errorf("%s: %w", w.key, err)
	}
	return w.wait(ctx, "waiting for the shim's first event", func() bool { return w.registered })
}

// waitPublished waits until all that the engine has announced is in the log, and says where that ends.
func (w *worker) waitPublished(ctx context.Context) (at api.PartitionSeq, err error) {
	err = w.wait(ctx, "waiting for the log to take what the engine announced", func() bool {
		at = api.PartitionSeq{Partition: w.partition, Seq: w.at}
		return w.last == nil || w.published.Known && w.published.Seq >= *w.last
	})
	return at, err
}

func (w *worker) serve(prompt, answer []uint32) error {
	_, err := w.engine.Serve(prompt, answer)
	return err
}

// truth is what the engine holds of a prompt.
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
