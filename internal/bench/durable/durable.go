// Package durable measures what the index's durability costs: a corpus goes into the log as shims would publish it, a node replays
// it, writes snapshots and restores them, on a NATS server with file storage in this process. `indexer bench durable` prints
// what it finds.
//
// The steps, in order: publish all events of the corpus; replay the log alone; write a first snapshot while events and
// queries go on; write one when nothing has changed, and one when one worker has; stop, and restore.
package durable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/corpus"
	"github.com/kvatlas/kvatlas/internal/node"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Options says what to measure.
type Options struct {
	File       string        // a corpus
	Partitions uint32        // of the log
	Sync       time.Duration // how long the log may keep what it acknowledged from the disk; 0: not at all
}

// Report is what was found. Times are wall times; server and node share the machine.
type Report struct {
	Corpus   string `json:"corpus"`
	Blocks   uint64 `json:"blocks"`   // stored and removed
	Holdings uint64 `json:"holdings"` // at the end

	PublishSeconds   float64 `json:"publish_s"` // acknowledged, in batches
	PublishBlocksPer float64 `json:"publish_blocks_per_s"`
	LogBytes         uint64  `json:"log_bytes"`
	ReplaySeconds    float64 `json:"replay_s"` // from an empty index until ready
	ReplayBlocksPerS float64 `json:"replay_blocks_per_s"`

	SnapshotSeconds float64 `json:"snapshot_s"`     // the first, of all partitions
	SnapshotBytes   int64   `json:"snapshot_bytes"` // its chunks
	BytesPerHolding float64 `json:"bytes_per_holding"`
	UnchangedBytes  int64   `json:"unchanged_written_bytes"` // manifests included
	OneWorkerBytes  int64   `json:"one_worker_written_bytes"`
	OneWorkerShare  float64 `json:"one_worker_share"` // of all chunks' bytes

	RestoreSeconds      float64 `json:"restore_s"` // from an empty index until ready
	RestoreHoldingsPerS float64 `json:"restore_holdings_per_s"`

	Idle     Delays `json:"idle"`            // while nothing else is done
	Snapshot Delays `json:"during_snapshot"` // while the first snapshot is written
}

// Delays are how long things take.
type Delays struct {
	Query   Delay `json:"query"`   // from its call to its answer
	Publish Delay `json:"publish"` // of one small event, until the log has acknowledged it
	Apply   Delay `json:"apply"`   // of that event, from then on until queries reflect it
}

// Delay is a distribution of times, in microseconds.
type Delay struct {
	N   int     `json:"n"`
	P50 float64 `json:"p50_us"`
	P99 float64 `json:"p99_us"`
	Max float64 `json:"max_us"`
}

func delayOf(took []time.Duration) Delay {
	if len(took) == 0 {
		return Delay{}
	}
	slices.Sort(took)
	at := func(q float64) float64 {
		return float64(took[min(len(took)-1, int(q*float64(len(took))))].Nanoseconds()) / 1e3
	}
	return Delay{len(took), at(0.5), at(0.99), at(1)}
}

const (
	model     = "m"
	blockSize = 16
	messages  = 200       // in one flush
	message   = 128 << 10 // bytes
	pause     = 2 * time.Millisecond
)

// bed is the server and what is measured on it.
type bed struct {
	ctx    context.Context
	o      Options
	c      *corpus.Reader
	conn   *jetstream.Conn
	ns     *jetstream.Namespace
	bucket *jetstream.Bucket
	shims  []*shim
	probe  *shim // a worker beside the corpus', for what is timed
	report Report
}

// shim publishes one worker's events, as a real one would.
type shim struct {
	pub   *jetstream.Publisher
	batch events.Batch
	size  int
	next  events.EventID
	full  [][]byte
	held  []events.BlockHash // stored last
}

// Run measures everything. Progress is told in a line for each step.
func Run(ctx context.Context, o Options, progress func(string)) (*Report, error) {
	c, err := corpus.Open(o.File)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	dir, err := os.MkdirTemp("", "kvatlas-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	server, err := jetstream.StartServer(ctx, jetstream.ServerOptions{Dir: dir, SyncInterval: o.Sync})
	if err != nil {
		return nil, err
	}
	defer server.Stop()
	b := &bed{ctx: ctx, o: o, c: c}
	if b.conn, err = jetstream.Connect(ctx, jetstream.ConnOptions{Server: server}); err != nil {
		return nil, err
	}
	defer b.conn.Close()
	if b.ns, err = jetstream.JoinNamespace(ctx, b.conn, jetstream.NamespaceConfig{Name: "bench", Partitions: o.Partitions}); err != nil {
		return nil, err
	}
	if err = b.ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 2 << 30}); err != nil {
		return nil, err
	}
	if b.bucket, err = b.ns.EnsureSnapshots(ctx, jetstream.BucketConfig{MaxBytes: -1}); err != nil {
		return nil, err
	}
	h := c.Header()
	b.report = Report{Corpus: o.File, Blocks: h.Stored + h.Removed, Holdings: h.LiveAtEnd}
	for _, step := range []struct {
		name string
		do   func() error
	}{{"publish", b.publish}, {"replay, snapshots", b.replayAndSave}, {"restore", b.restore}} {
		progress(step.name)
		if err := step.do(); err != nil {
			return nil, fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return &b.report, nil
}

func (b *bed) open(name string) (*shim, error) {
	pub, err := b.ns.OpenPublisher(b.ctx, events.RankKey{Instance: events.WorkerID(name)}, jetstream.PublisherHooks{})
	return &shim{pub: pub, next: 1, batch: events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: blockSize}}, err
}

// add queues an event; flush publishes what is queued.
func (s *shim) add(ctx context.Context, e events.Event) error {
	s.batch.Events = append(s.batch.Events, e)
	s.next++
	if s.size += e.EncodedSize(); s.size >= message {
		if err := s.seal(); err != nil {
			return err
		}
		if len(s.full) == messages {
			return s.flush(ctx)
		}
	}
	return nil
}

func (s *shim) seal() error {
	data, err := events.AppendBatch(nil, &s.batch)
	s.full = append(s.full, data)
	s.batch.Events, s.batch.FirstID, s.size = s.batch.Events[:0], s.next, 0
	return err
}

func (s *shim) flush(ctx context.Context) error {
	_, err := s.flushed(ctx)
	return err
}

func (s *shim) flushed(ctx context.Context) (seq events.StreamSeq, err error) {
	if len(s.batch.Events) > 0 {
		if err := s.seal(); err != nil {
			return 0, err
		}
	}
	if len(s.full) > 0 {
		seq, err = s.pub.Publish(ctx, s.full)
		s.full = s.full[:0]
	}
	return seq, err
}

func (b *bed) publish() error {
	begun := time.Now()
	for w := range b.c.Header().Workers {
		s, err := b.open(fmt.Sprintf("w%d", w))
		if err != nil {
			return err
		}
		b.shims = append(b.shims, s)
	}
	var err error
	if b.probe, err = b.open("probe"); err != nil {
		return err
	}
	for _, op := range b.c.Ops() {
		e := events.Event{Tier: events.Device, Blocks: op.Blocks, Attention: events.AttentionFull}
		switch op.Kind {
		case corpus.Store:
			e.Kind, e.HasParent, e.Parent, e.Locals = events.Stored, op.HasParent, op.Parent, op.Locals
		case corpus.Remove:
			e.Kind, e.Attention = events.Removed, 0
		default:
			continue
		}
		s := b.shims[op.Worker]
		for e := range cut(e) {
			if err := s.add(b.ctx, e); err != nil {
				return err
			}
		}
		if e.Kind == events.Stored {
			s.held = append(s.held[:0], op.Blocks...)
		}
	}
	for _, s := range b.shims {
		if err := s.flush(b.ctx); err != nil {
			return err
		}
	}
	b.report.PublishSeconds = time.Since(begun).Seconds()
	b.report.PublishBlocksPer = float64(b.report.Blocks) / b.report.PublishSeconds
	for p := range b.ns.Partitions() {
		info, err := b.ns.StreamInfo(b.ctx, events.Partition(p))
		if err != nil {
			return err
		}
		b.report.LogBytes += info.Bytes
	}
	return nil
}

// cut cuts an event that is too long for one, as a shim's decoder does.
func cut(e events.Event) func(yield func(events.Event) bool) {
	return func(yield func(events.Event) bool) {
		for len(e.Blocks) > events.MaxBlocksPerEvent {
			part := e
			part.Blocks = e.Blocks[:events.MaxBlocksPerEvent]
			e.HasParent, e.Parent, e.Blocks = true, part.Blocks[len(part.Blocks)-1], e.Blocks[events.MaxBlocksPerEvent:]
			if e.Kind == events.Stored {
				part.Locals, e.Locals = e.Locals[:events.MaxBlocksPerEvent], e.Locals[events.MaxBlocksPerEvent:]
			}
			if !yield(part) {
				return
			}
		}
		yield(e)
	}
}

// running is a node that runs.
type running struct {
	*node.Node
	stop  func()
	ready time.Duration // from its start
}

// start starts a node and waits until it is ready. It writes snapshots only when told.
func (b *bed) start() (*running, error) {
	isReady := make(chan struct{})
	n := node.New(node.Config{
		ID: "bench", Namespace: b.ns, Snapshots: b.bucket, SnapshotInterval: 1000 * time.Hour, SnapshotBlocks: 1 << 62,
		Hooks: node.Hooks{Ready: func() { close(isReady) }},
	})
	ctx, cancel := context.WithCancel(b.ctx)
	done := make(chan struct{})
	begun := time.Now()
	go func() {
		defer close(done)
		n.Run(ctx)
	}()
	r := &running{Node: n, stop: func() { cancel(); <-done }}
	select {
	case <-isReady:
		r.ready = time.Since(begun)
		return r, nil
	case <-b.ctx.Done():
		r.stop()
		return nil, b.ctx.Err()
	}
}

func (b *bed) replayAndSave() error {
	n, err := b.start()
	if err != nil {
		return err
	}
	defer n.stop()
	r := &b.report
	r.ReplaySeconds = n.ready.Seconds()
	r.ReplayBlocksPerS = float64(r.Blocks) / r.ReplaySeconds

	if _, _, err := b.nudge(n); err != nil { // makes the probe known before anything is timed
		return err
	}
	if r.Idle, err = b.watch(n, func() error { time.Sleep(2 * time.Second); return nil }); err != nil {
		return err
	}
	r.Snapshot, err = b.watch(n, func() error {
		begun := time.Now()
		size, _, err := save(b.ctx, n)
		r.SnapshotSeconds, r.SnapshotBytes = time.Since(begun).Seconds(), size
		return err
	})
	if err != nil {
		return err
	}
	r.BytesPerHolding = float64(r.SnapshotBytes) / float64(r.Holdings)
	for range 2 { // the probe's events came during the first
		if _, r.UnchangedBytes, err = save(b.ctx, n); err != nil {
			return err
		}
	}
	if err := b.changeOneWorker(n); err != nil {
		return err
	}
	size, written, err := save(b.ctx, n)
	r.OneWorkerBytes, r.OneWorkerShare = written, float64(written)/float64(size)
	return err
}

func save(ctx context.Context, n *running) (size, written int64, err error) {
	list, err := n.Snapshot(ctx)
	if err != nil {
		return 0, 0, err
	}
	for _, s := range list.Snapshots {
		size += s.Bytes
		written += s.Written
	}
	return size, written, nil
}

// changeOneWorker removes what the first worker has stored last, and stores as much anew.
func (b *bed) changeOneWorker(n *running) error {
	s := b.shims[0]
	fresh := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull}
	for i := range 1000 {
		fresh.Blocks = append(fresh.Blocks, events.BlockHash(corpus.Mix(uint64(i)+1)))
		fresh.Locals = append(fresh.Locals, events.LocalHash(corpus.Mix(uint64(i)+1<<32)))
	}
	for _, e := range []events.Event{{Kind: events.Removed, Tier: events.Device, Blocks: slices.Clone(s.held)}, fresh} {
		if err := s.add(b.ctx, e); err != nil {
			return err
		}
	}
	_, _, err := b.settle(n, s)
	return err
}

// settle publishes what a shim has queued and waits until the index reflects it. It returns how long each took.
func (b *bed) settle(n *running, s *shim) (publish, apply time.Duration, err error) {
	begun := time.Now()
	seq, err := s.flushed(b.ctx)
	if err != nil {
		return 0, 0, err
	}
	published := time.Now()
	ctx, cancel := context.WithTimeout(b.ctx, time.Minute)
	defer cancel()
	_, err = n.Find(ctx, &api.Query{Model: model, Hashes: api.Hashes{0}, MinSeq: []api.PartitionSeq{{Partition: s.pub.Partition(), Seq: seq}}})
	return published.Sub(begun), time.Since(published), err
}

// nudge sends one small event the whole way.
func (b *bed) nudge(n *running) (publish, apply time.Duration, err error) {
	e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{events.BlockHash(b.probe.next)}, Locals: []events.LocalHash{events.LocalHash(b.probe.next)}}
	if err := b.probe.add(b.ctx, e); err != nil {
		return 0, 0, err
	}
	return b.settle(n, b.probe)
}

// watch times queries and events, one of each every few milliseconds, while something is done.
func (b *bed) watch(n *running, do func() error) (Delays, error) {
	var prompts []api.Hashes
	for _, op := range b.c.Ops() {
		if op.Kind == corpus.Query && len(prompts) < 500 {
			q := make(api.Hashes, len(op.Locals))
			for i, l := range op.Locals {
				q[i] = uint64(l)
			}
			prompts = append(prompts, q)
		}
	}
	var over atomic.Bool
	var wg sync.WaitGroup
	var queries, publishes, applies []time.Duration
	var queryErr, eventErr error
	wg.Go(func() {
		for i := 0; !over.Load() && queryErr == nil; i++ {
			begun := time.Now()
			_, queryErr = n.Find(b.ctx, &api.Query{Model: model, Hashes: prompts[i%len(prompts)]})
			queries = append(queries, time.Since(begun))
			time.Sleep(pause)
		}
	})
	wg.Go(func() {
		for !over.Load() && eventErr == nil {
			var publish, apply time.Duration
			publish, apply, eventErr = b.nudge(n)
			publishes, applies = append(publishes, publish), append(applies, apply)
			time.Sleep(pause)
		}
	})
	err := do()
	over.Store(true)
	wg.Wait()
	return Delays{delayOf(queries), delayOf(publishes), delayOf(applies)}, errors.Join(err, queryErr, eventErr)
}

func (b *bed) restore() error {
	n, err := b.start()
	if err != nil {
		return err
	}
	defer n.stop()
	b.report.RestoreSeconds = n.ready.Seconds()
	b.report.RestoreHoldingsPerS = float64(b.report.Holdings) / b.report.RestoreSeconds
	return nil
}
