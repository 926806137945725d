// Package durable measures the cost of durability for the command `indexer bench durable`. The machines and logs of
// real shims write a corpus to the log. A node replays the log, writes snapshots and restores them. A NATS server with
// file storage runs in this process.
//
// The steps, in order: publish all events of the corpus; replay the log; write a first snapshot during events and
// queries; write a snapshot without changes; write a snapshot after a change of a single worker; stop and restore.
package durable

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsauth"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/corpus"
)

// Options configures a measurement.
type Options struct {
	File       string // a corpus
	Partitions uint32 // of the log
	Shards     int    // indexes of the node
	// longest delay from an acknowledgement of the log to the disk; 0 syncs before every acknowledgement
	Sync     time.Duration
	Accounts bool // gives the shims and the node separate NATS accounts
}

// Report is the result of a measurement. Times are wall times. The server and the node share the machine.
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

// Delays are latencies during a step.
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
	flushAt   = 24 << 20 // waiting bytes of a worker before a publication: the capacity of a shim's flight
	pause     = 2 * time.Millisecond
)

// bed is the NATS server with the measured parts.
type bed struct {
	ctx    context.Context
	o      Options
	c      *corpus.Reader
	conn   *jetstream.Conn
	ns     *jetstream.Namespace
	shims  *jetstream.Namespace // the same namespace with the shims' connection
	bucket *jetstream.Bucket
	fleet  []*worker
	probe  *worker // a further worker for timed events
	report Report
}

// worker is the shim of a worker. The corpus is the engine.
type worker struct {
	at      events.Partition
	log     *shim.StreamLog
	machine *shim.Machine
	said    events.Event     // the result of the next Decode
	next    events.EngineSeq // of the engine's messages, with a single event in a message
	held    []events.BlockHash
}

// decode returns the event of the next message, for [shim.Whole].
func (w *worker) decode([]byte) (events.Message, error) {
	return events.Message{Events: w.said.Cut()}, nil
}

// Run measures all steps. It calls progress with a line for every step.
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
	keys, err := os.MkdirTemp("", "kvatlas-bench-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(keys)
	node, shims, config, err := users(keys, o)
	if err != nil {
		return nil, err
	}
	server, err := natsserver.Start(ctx, natsserver.Options{Dir: dir, SyncInterval: o.Sync, ConfigFile: config,
		Listen: "127.0.0.1:0"})
	if err != nil {
		return nil, err
	}
	defer server.Stop()
	b := &bed{ctx: ctx, o: o, c: c}
	node.Server, shims.Server = server, server
	if b.conn, err = jetstream.Connect(ctx, node); err != nil {
		return nil, err
	}
	defer b.conn.Close()
	publishing, err := jetstream.Connect(ctx, shims)
	if err != nil {
		return nil, err
	}
	defer publishing.Close()
	if b.ns, err = jetstream.JoinNamespace(ctx, b.conn, jetstream.NamespaceConfig{Name: "bench",
		Partitions: o.Partitions}); err != nil {
		return nil, err
	}
	if err = b.ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 2 << 30}); err != nil {
		return nil, err
	}
	if b.shims, err = jetstream.OpenNamespace(ctx, publishing, "bench"); err != nil {
		return nil, err
	}
	if b.bucket, err = b.ns.EnsureSnapshots(ctx, jetstream.BucketConfig{MaxBytes: -1}); err != nil {
		return nil, err
	}
	recall, err := shim.ServeRecall(b.ns) // shims may not read snapshots
	if err != nil {
		return nil, err
	}
	defer recall(ctx)
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

// users returns the connection options of the node and of the shims, and the server's configuration. The configuration
// is empty without accounts.
func users(dir string, o Options) (node, shims jetstream.ConnOptions, config string, err error) {
	if !o.Accounts {
		return node, shims, "", nil
	}
	ring, err := natsauth.Create(filepath.Join(dir, "keys"), natsauth.Static)
	if err != nil {
		return node, shims, "", err
	}
	if err = ring.AddNamespace("bench", o.Partitions); err != nil {
		return node, shims, "", err
	}
	pool, err := ring.Add(natsauth.Member{Namespace: "bench", Role: natsauth.RolePool})
	if err != nil {
		return node, shims, "", err
	}
	text, err := ring.ServerConfig("")
	if err != nil {
		return node, shims, "", err
	}
	own := natsauth.NodeGrant("bench")
	node = jetstream.ConnOptions{NkeyFile: ring.SeedFile("bench", &own), InboxPrefix: own.Inbox}
	shims = jetstream.ConnOptions{NkeyFile: ring.SeedFile("bench", &pool), InboxPrefix: pool.Inbox}
	config = filepath.Join(dir, "accounts.conf")
	return node, shims, config, os.WriteFile(config, []byte(text), 0o600)
}

func (b *bed) open(name string) (*worker, error) {
	key := events.RankKey{Instance: events.WorkerID(name)}
	at, err := b.ns.PartitionOf(key.Instance)
	if err != nil {
		return nil, err
	}
	w := &worker{at: at, log: shim.NewStreamLog(b.shims, key, nil)}
	before, err := w.log.Last(b.ctx)
	if err != nil {
		return nil, err
	}
	w.machine = shim.NewMachine(shim.Identity{Model: model, BlockSize: blockSize}, shim.Limits{}, false,
		shim.Whole{Decode: w.decode})
	w.machine.Recovered(before, events.Millis(time.Now().UnixMilli()))
	return w, nil
}

// add passes an event of the engine to the shim. flush publishes the waiting events and returns the end of the log.
func (w *worker) add(ctx context.Context, e events.Event) error {
	w.said = e
	w.machine.Live(shim.Frame{Seq: w.next}, 0)
	w.next++
	if _, waiting := w.machine.Queued(); waiting >= flushAt {
		_, err := w.flush(ctx)
		return err
	}
	return nil
}

func (w *worker) flush(ctx context.Context) (seq events.StreamSeq, err error) {
	for {
		ready, err := w.machine.Advance(true)
		if err != nil || ready.Flight == nil {
			return seq, err
		}
		if seq, err = w.log.Publish(ctx, ready.Flight); err != nil {
			return 0, err
		}
		w.machine.Flushed()
	}
}

func (b *bed) publish() error {
	begun := time.Now()
	for w := range b.c.Header().Workers {
		one, err := b.open(fmt.Sprintf("w%d", w))
		if err != nil {
			return err
		}
		b.fleet = append(b.fleet, one)
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
		w := b.fleet[op.Worker]
		if err := w.add(b.ctx, e); err != nil {
			return err
		}
		if e.Kind == events.Stored {
			w.held = append(w.held[:0], op.Blocks...)
		}
	}
	for _, w := range b.fleet {
		if _, err := w.flush(b.ctx); err != nil {
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

// running is a running node.
type running struct {
	*node.Node
	stop  func()
	ready time.Duration // since the start
}

// start starts a node and waits for readiness. The node writes snapshots only on request.
func (b *bed) start() (*running, error) {
	isReady := make(chan struct{})
	n := node.New(node.Config{
		ID: "bench", Namespace: b.ns, Snapshots: b.bucket, Shards: b.o.Shards,
		SnapshotInterval: 1000 * time.Hour, SnapshotBlocks: 1 << 62,
		Ready: func() { close(isReady) },
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

	status, err := n.Status(b.ctx)
	if err != nil {
		return err
	}
	if held := status.Index.Blocks.Device; held != r.Holdings {
		return fmt.Errorf("the index has %d blocks held, the corpus ends with %d", held, r.Holdings)
	}
	if _, _, err := b.nudge(n); err != nil { // registers the probe before any timed step
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

// changeOneWorker removes the newest blocks of the first worker and stores the same number of new blocks.
func (b *bed) changeOneWorker(n *running) error {
	w := b.fleet[0]
	fresh := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull}
	for i := range 1000 {
		fresh.Blocks = append(fresh.Blocks, events.BlockHash(corpus.Mix(uint64(i)+1)))
		fresh.Locals = append(fresh.Locals, events.LocalHash(corpus.Mix(uint64(i)+1<<32)))
	}
	for _, e := range []events.Event{{Kind: events.Removed, Tier: events.Device, Blocks: slices.Clone(w.held)}, fresh} {
		if err := w.add(b.ctx, e); err != nil {
			return err
		}
	}
	_, _, err := b.settle(n, w)
	return err
}

// settle publishes the waiting events of a worker and waits until the index has applied them. It returns the durations
// of both parts.
func (b *bed) settle(n *running, w *worker) (publish, apply time.Duration, err error) {
	begun := time.Now()
	seq, err := w.flush(b.ctx)
	if err != nil {
		return 0, 0, err
	}
	published := time.Now()
	ctx, cancel := context.WithTimeout(b.ctx, 10*time.Minute)
	defer cancel()
	_, err = n.Find(ctx, &api.Query{Model: model, Hashes: api.Hashes{0},
		MinSeq: []api.PartitionSeq{{Partition: w.at, Seq: seq}}})
	return published.Sub(begun), time.Since(published), err
}

// nudge sends a small event from the shim to the index.
func (b *bed) nudge(n *running) (publish, apply time.Duration, err error) {
	name := uint64(b.probe.next) + 1
	e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{events.BlockHash(name)},
		Locals: []events.LocalHash{events.LocalHash(name)}}
	if err := b.probe.add(b.ctx, e); err != nil {
		return 0, 0, err
	}
	return b.settle(n, b.probe)
}

// watch times a query and an event every few milliseconds during do, and at least once.
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
		for i := 0; (i == 0 || !over.Load()) && queryErr == nil; i++ {
			begun := time.Now()
			_, queryErr = n.Find(b.ctx, &api.Query{Model: model, Hashes: prompts[i%len(prompts)]})
			queries = append(queries, time.Since(begun))
			time.Sleep(pause)
		}
	})
	wg.Go(func() {
		for i := 0; (i == 0 || !over.Load()) && eventErr == nil; i++ {
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
