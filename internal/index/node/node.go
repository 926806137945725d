package node

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// Config is one node's.
type Config struct {
	ID      string // how the node calls itself, in snapshots and in its status
	Version string

	Namespace *jetstream.Namespace
	Snapshots *jetstream.Bucket

	// Shared says that this node shares the namespace with others, and that [Node.Keep] says which partitions it keeps.
	// Else it keeps all.
	Shared bool

	// View, if not nil, returns what is known of the nodes that share the namespace.
	View func() *cluster.View

	Index radix.Config

	// Shards is how many indexes the node has, each with a writer of its own; at most one for each partition, default 1.
	// Answers do not depend on it.
	Shards int

	L3 L3Config

	// A partition's snapshot is due when SnapshotInterval (default 1 m) has passed since the one before, or, earlier,
	// when SnapshotBlocks (default 2,000,000) blocks were stored or removed since, or a quarter of what the log may
	// take has come; never while nothing changed. More often means a shorter replay after a crash and more writing.
	SnapshotInterval time.Duration
	SnapshotBlocks   uint64

	// Watch is how often each partition's stream is checked for what no message shows; default 3 s.
	Watch time.Duration

	// ResyncPause is the time between the first two rounds of resync requests to shims; default 2 s.
	ResyncPause time.Duration

	// CapacityCheck is how often the node measures how full the log, the bucket and the storage are; default 5 s, and
	// five times as often while one of them rejects writes.
	CapacityCheck time.Duration

	// StoreLimit, if not nil, returns what all streams and buckets may take now, in bytes. It is used if the account
	// has no limit.
	StoreLimit func() int64

	// Recreate, if not nil, creates the missing streams of the log; it is called when a stream was deleted.
	Recreate func(context.Context) error

	// RecreateSnapshots, if not nil, creates the bucket for snapshots; it is called when the bucket was deleted.
	RecreateSnapshots func(context.Context) error

	// Health, if not nil, returns what is wrong with the NATS server in this process.
	Health func() error

	// Source returns how a rank's engine speaks, as its shim registered it; empty if that is not known. Writers call it:
	// it must not block. nil: it is never known.
	Source func(events.RankKey) string

	// Claimed reports whether queries may use a worker under a model. Writers call it: it must not block. After its
	// results have changed, [Node.ClaimsChanged] must be called. nil: they may use all.
	Claimed func(instance events.WorkerID, model string) bool
	// BlockSize returns the registered block size of a model, in tokens; 0 if none is known. It decides which ranks of
	// the model queries see. Writers call it: it must not block. nil: none is known.
	BlockSize func(model string) uint32

	// Decoded, if not nil, is called with each readable message before it is applied. It must keep nothing of the batch,
	// and not block. Writers call it.
	Decoded func(m *jetstream.Message, b *events.Batch)

	Traced bool // the trace headers of the log's messages are read

	Ready func() // called when every kept partition serves; nil: not called

	Log     *slog.Logger // nil: nothing is logged
	Metrics Metrics      // nil: nothing is measured
}

// Metrics measures queries and the log. Any goroutine of the node may call its methods, which must not block.
type Metrics interface {
	// Stage records the duration of a part of the context's query: StageHash, StageIndex or StageStore.
	Stage(ctx context.Context, stage string, took time.Duration)

	// AppliedTraced is called after messages with a trace context have been applied.
	AppliedTraced(p events.Partition, messages []jetstream.Message, took time.Duration)
}

type noMetrics struct{}

func (noMetrics) Stage(context.Context, string, time.Duration) {}

func (noMetrics) AppliedTraced(events.Partition, []jetstream.Message, time.Duration) {}

// Restored says from what a partition was restored.
type Restored struct {
	Seq      events.StreamSeq // of the snapshot; 0: none
	Ranks    int
	Holdings uint64
	Took     time.Duration
	Lost     string // what is lost, so that a resync is needed; empty if nothing is known to be
}

// Node keeps the index of a namespace's partitions, or of some: it restores, follows the log, answers, and writes
// snapshots.
//
// Partitions are dealt out among shards, each with an index, a machine, and one goroutine, the writer, which owns both
// and takes work from a bounded queue. Each partition has an owner, which restores it, reads its log and hands messages
// over. One goroutine writes snapshots, a
// little at a time. Queries run wherever they are called.
type Node struct {
	cfg           Config
	shards        []*shard
	spaces        spaces
	views         views
	l3            *l3
	notifier      notifier
	modelsChanged chan struct{} // of ModelsChanged
	started       time.Time
	parts         []*owner
	ready         atomic.Bool
	saving        sync.Mutex // one snapshot, or one partition being emptied, at a time

	keeping  sync.Mutex      // which partitions are wanted; before any owner's
	running  context.Context // while Run runs
	owners   sync.WaitGroup  // the partitions' goroutines
	assigned atomic.Bool     // it is known which are wanted

	unready atomic.Int32  // partitions that are wanted and do not serve
	lapses  atomic.Uint64 // how often a partition ceased to serve

	aged       atomic.Bool   // what is known of some partition was not of now, when last looked at
	rereads    atomic.Uint64 // how often messages were missing between a reader and the index
	resyncs    resyncCounts
	saves      struct{ written, failed atomic.Uint64 }
	rejections [snapshot.NumReasons]atomic.Uint64
	capacity   capacity
	outages    *outages
}

// work is something for the writer: messages of a partition, or something to do with the machine.
type work struct {
	partition events.Partition
	messages  []jetstream.Message
	live      bool             // the partition served when they were read
	end       *jetstream.AtEnd // not nil: the log had nothing more then
	do        func(*Machine)
	taken     *atomic.Bool  // do is, by the writer, or by whoever wanted it and waits no more
	done      chan struct{} // closed after do
}

// run does what is to be done with the machine, unless nobody waits for it any more.
func (w *work) run(m *Machine) {
	if w.taken.CompareAndSwap(false, true) {
		w.do(m)
	}
	close(w.done)
}

// owner carries out what one partition's machine decides. The node's goroutines step the machine by way of [Node.step].
type owner struct {
	mu sync.Mutex // guards all below
	partition
	running bool   // the owner's goroutine runs
	cancel  func() // breaks off what that goroutine does for the present phase
}

// New returns a node that does nothing until Run.
func New(cfg Config) *Node {
	cfg.SnapshotInterval = cmp.Or(max(cfg.SnapshotInterval, 0), time.Minute)
	cfg.SnapshotBlocks = cmp.Or(cfg.SnapshotBlocks, 2_000_000)
	cfg.ResyncPause = cmp.Or(max(cfg.ResyncPause, 0), resyncPause)
	cfg.CapacityCheck = cmp.Or(max(cfg.CapacityCheck, 0), 5*time.Second)
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	cfg.Metrics = cmp.Or[Metrics](cfg.Metrics, noMetrics{})
	n := &Node{cfg: cfg, outages: newOutages(cfg.Log), l3: newL3(cfg.L3), modelsChanged: make(chan struct{}, 1),
		started: time.Now()}
	partitions := int(cfg.Namespace.Partitions())
	of := &policy{
		started: n.started, snapshotInterval: cfg.SnapshotInterval,
		snapshotBlocks: cfg.SnapshotBlocks, resyncPause: cfg.ResyncPause, newID: rand.Text,
	}
	for p := range partitions {
		n.parts = append(n.parts, &owner{partition: partition{policy: of, phase: &absent{}}})
		if !cfg.Shared {
			n.step(events.Partition(p), func(pt *partition) effects { return pt.keep(true) })
		}
	}
	n.assigned.Store(!cfg.Shared)
	for i := range min(max(1, cfg.Shards), partitions) {
		n.views.of = append(n.views.of, &View{})
		n.shards = append(n.shards, n.newShard(i))
	}
	n.views.all.Store(&View{})
	return n
}

// Run runs the node until ctx ends. Before it returns it writes the snapshots that are worth it, within a bound.
func (n *Node) Run(ctx context.Context) {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.l3.watch(running)
	var writers, others sync.WaitGroup
	for _, s := range n.shards {
		writers.Go(func() { n.write(running, s) })
	}
	waitForOwners := n.startOwners(ctx)
	others.Go(func() { n.saveWhenDue(ctx) })
	others.Go(func() { n.resyncWhenNeeded(ctx) })
	others.Go(func() { n.watchCapacity(ctx) })
	others.Go(func() { n.watchAge(ctx) })
	others.Wait()
	waitForOwners()
	last, cancel := context.WithTimeout(running, lastSave)
	n.saveChanged(last)
	cancel()
	stop()
	writers.Wait()
}

// lastSave bounds the snapshots that are written when the node stops.
const lastSave = 10 * time.Second

// apply applies messages of a log, and reports to the partition's machine if some are missing. What the reader sends is
// unbroken, so they were lost between the reader and the index.
func (n *Node) apply(m *Machine, w work) {
	begun := time.Time{}
	if n.cfg.Traced && slices.ContainsFunc(w.messages, func(m jetstream.Message) bool { return m.Trace != "" }) {
		begun = time.Now()
	}
	whole := m.Apply(w.partition, w.messages)
	if !begun.IsZero() {
		n.cfg.Metrics.AppliedTraced(w.partition, w.messages, time.Since(begun))
	}
	if w.live {
		m.applied(w.messages, time.Now())
	}
	if whole && w.end == nil {
		return
	}
	now, applied := time.Now(), m.Applied(w.partition)
	n.step(w.partition, func(pt *partition) effects {
		if !whole {
			return pt.missed(now, applied)
		}
		return pt.noticed(now, *w.end, applied)
	})
}

// read applies what follows in a partition's log, until ctx ends.
func (n *Node) read(ctx context.Context, p events.Partition, epoch jetstream.Epoch) {
	at := jetstream.Position{Epoch: epoch}
	if n.do(ctx, p, func(m *Machine) { at.Seq, at.Time = m.Applied(p), m.parts[p].time }) != nil {
		return
	}
	begun := time.Now() // nothing of the reader before is under way to the writer any more
	n.step(p, func(pt *partition) effects { return pt.opened(begun) })
	reader, err := n.cfg.Namespace.StartReader(jetstream.ReaderConfig{
		Partition: p, After: at, Watch: n.cfg.Watch, Ends: endsEvery, Traced: n.cfg.Traced,
		Deliver: func(ctx context.Context, u jetstream.Update) { n.deliver(ctx, p, u) },
	})
	if err != nil {
		n.step(p, func(pt *partition) effects { return pt.failed(begun, err) })
		return
	}
	<-ctx.Done()
	reader.Stop()
}

// deliver passes an update of a partition's log to the writer of its shard, and waits while the writer is busy.
func (n *Node) deliver(ctx context.Context, p events.Partition, u jetstream.Update) {
	w := work{partition: p, messages: u.Messages}
	switch notice := u.Notice.(type) {
	case nil:
		last := u.Messages[len(u.Messages)-1].Seq + events.StreamSeq(u.Pending)
		n.step(p, func(pt *partition) effects {
			w.live = pt.serves()
			return pt.received(last)
		})
	case jetstream.AtEnd:
		w.end = &notice
	default:
		applied := events.StreamSeq(0)
		if n.do(ctx, p, func(m *Machine) { applied = m.Applied(p) }) != nil { // what was read before is applied then
			return
		}
		now := time.Now()
		n.step(p, func(pt *partition) effects { return pt.noticed(now, notice, applied) })
		return
	}
	select {
	case n.shard(p).work <- w:
	case <-ctx.Done():
	}
}

// step steps a partition's machine, and carries out what needs no waiting. Any goroutine may call it.
func (n *Node) step(p events.Partition, f func(*partition) effects) {
	o := n.parts[p]
	o.mu.Lock()
	owed, lapses := o.owed(), o.lapses
	e := f(&o.partition)
	now := o.owed()
	n.unready.Add(now - owed)
	n.lapses.Add(o.lapses - lapses)
	if e.interrupt && o.cancel != nil {
		o.cancel()
	}
	o.mu.Unlock()
	n.report(p, &e)
	if owed > 0 && now == 0 {
		n.checkReady()
	}
}

type at struct {
	epoch  time.Time
	seq    events.StreamSeq
	whole  bool   // the partition serves
	resync bool   // it needs a resync
	stale  uint64 // how old this may be, in milliseconds; 0: it is of now
	lapses uint64 // how often it ceased to
}

func (a at) status(p events.Partition) api.PartitionStatus {
	return api.PartitionStatus{Partition: p, Epoch: a.epoch, Seq: a.seq, StaleMS: a.stale, ResyncNeeded: a.resync}
}

// applied is how far a partition's log has been applied.
func (n *Node) applied(p events.Partition) events.StreamSeq { return n.shard(p).machine.Applied(p) }

// view is what is known of ranks and models now.
func (n *Node) view() *View { return n.views.all.Load() }

// progress appends to out, by partition, what answers reflect now.
func (n *Node) progress(out []at) []at {
	aged, now := n.aged.Load(), time.Time{}
	if aged { // else no query reads the clock
		now = time.Now()
	}
	for p, o := range n.parts {
		reflects := at{seq: n.applied(events.Partition(p))}
		o.mu.Lock()
		reflects.whole, reflects.resync, reflects.lapses = o.serves(), o.need() != nil, o.lapses
		if k := o.phase.data(); k != nil {
			reflects.epoch = k.epoch.Time()
		}
		if aged {
			reflects.stale = o.age(now)
		}
		o.mu.Unlock()
		out = append(out, reflects)
	}
	return out
}

// maxWait bounds how long a query waits for a position of the log, whatever its deadline. A waiting query holds one of
// the node's workers, and the node does not learn that its client has gone.
const maxWait = 30 * time.Second

func (n *Node) waitFor(ctx context.Context, want api.PartitionSeq) error {
	if int(want.Partition) >= len(n.parts) {
		return api.Errorf(api.CodeMalformed, "min_seq names partition %d; there are %d", want.Partition, len(n.parts))
	}
	if !n.keeps(want.Partition) {
		return nil // the answer names it as missing, if it is about it
	}
	ctx, cancel := context.WithTimeout(ctx, maxWait)
	defer cancel()
	err := n.notifier.wait(ctx, func() bool { return n.applied(want.Partition) >= want.Seq })
	if errors.Is(err, context.DeadlineExceeded) {
		return api.Errorf(api.CodeBehind, "partition %d is at %d and did not reach %d before the deadline",
			want.Partition, n.applied(want.Partition), want.Seq)
	}
	return err
}
