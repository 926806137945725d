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

// Config configures a node that keeps the index of a namespace's partitions.
type Config struct {
	ID      string // the name of the node in snapshots and in the status
	Version string

	Namespace *jetstream.Namespace
	Snapshots *jetstream.Bucket

	// Shared means that several nodes use the namespace, and that [Node.Keep] sets the partitions of this node. Otherwise
	// the node keeps all partitions.
	Shared bool

	// View, if not nil, returns the present view of the nodes in the namespace.
	View func() *cluster.View

	Index radix.Config

	// Shards is the number of indexes of the node, with a writer per index; at most one per partition, default 1. Answers
	// do not depend on Shards.
	Shards int

	L3 L3Config

	// A partition's snapshot is due SnapshotInterval (default 1 m) after the last snapshot. The snapshot is due earlier if
	// SnapshotBlocks (default 2,000,000) blocks were stored or removed since, or if a quarter of the log's limit has
	// arrived. No snapshot is due without changes. More frequent snapshots shorten the replay after a crash and increase
	// the writes.
	SnapshotInterval time.Duration
	SnapshotBlocks   uint64

	// Watch is the interval of the checks of all partitions' streams, for changes without a message; default 3 s.
	Watch time.Duration

	// ResyncPause is the time between the first two rounds of resync requests to shims; default 2 s.
	ResyncPause time.Duration

	// CapacityCheck is the interval of the measurements of the logs, the bucket and the storage; default 5 s. The node
	// measures five times as often while a log, the bucket or the storage rejects writes.
	CapacityCheck time.Duration

	// StoreLimit, if not nil, returns the present limit of all streams and buckets, in bytes. StoreLimit applies if the
	// account has no limit.
	StoreLimit func() int64

	// Recreate, if not nil, creates the missing streams of the log. The node calls Recreate after the deletion of a
	// stream.
	Recreate func(context.Context) error

	// RecreateSnapshots, if not nil, creates the bucket for snapshots. The node calls RecreateSnapshots after the deletion
	// of the bucket.
	RecreateSnapshots func(context.Context) error

	// Health, if not nil, returns the error of the NATS server in this process.
	Health func() error

	// Source returns the protocol of a rank's engine, as registered by the shim; empty: unknown. Writers call Source,
	// which must not block. nil: always unknown.
	Source func(events.RankKey) string

	// Claimed reports whether queries may use a worker under a model. Writers call Claimed, which must not block. After a
	// change of the results, call [Node.ClaimsChanged]. nil: queries may use all.
	Claimed func(instance events.WorkerID, model string) bool
	// BlockSize returns the registered block size of a model, in tokens; 0: none. The size determines the ranks of the
	// model visible to queries. Writers call BlockSize, which must not block. nil: none for any model.
	BlockSize func(model string) uint32

	// Decoded, if not nil, receives every readable message before the application. Decoded must not keep parts of the
	// batch, and must not block. Writers call Decoded.
	Decoded func(m *jetstream.Message, b *events.Batch)

	Traced bool // read the trace headers of the log's messages

	Ready func() // called when every kept partition serves; nil: not called

	Log     *slog.Logger // nil: no logs
	Metrics Metrics      // nil: no measurements
}

// Metrics measures queries and the log. Any goroutine of the node may call the methods. The methods must not block.
type Metrics interface {
	// Stage records the duration of a part of the context's query: StageHash, StageIndex or StageStore.
	Stage(ctx context.Context, stage string, took time.Duration)

	// AppliedTraced is called after messages with a trace context have been applied.
	AppliedTraced(p events.Partition, messages []jetstream.Message, took time.Duration)
}

type noMetrics struct{}

func (noMetrics) Stage(context.Context, string, time.Duration) {}

func (noMetrics) AppliedTraced(events.Partition, []jetstream.Message, time.Duration) {}

// Restored describes the restore of a partition.
type Restored struct {
	Seq      events.StreamSeq // of the snapshot; 0: none
	Ranks    int
	Holdings uint64
	Took     time.Duration
	Lost     string // the loss that requires a resync; empty: no known loss
}

// Node keeps the index of some or all partitions of a namespace. A node restores partitions, follows the log, answers
// queries and writes snapshots.
//
// Partitions are distributed over shards. A shard has an index, a machine, and one goroutine, the writer, which owns
// index and machine and receives work from a bounded queue. A partition has a runner, which restores the partition,
// reads the log and passes messages to the writer. One goroutine writes snapshots in small steps. Queries run in the
// goroutines of the callers.
type Node struct {
	cfg           Config
	shards        []*shard
	spaces        spaces
	views         views
	l3            *l3
	notifier      notifier
	modelsChanged chan struct{} // of ModelsChanged
	started       time.Time
	parts         []*runner
	ready         atomic.Bool
	saving        sync.Mutex // held by a snapshot, or while a partition is emptied

	keeping  sync.Mutex      // guards the wanted partitions; locked before a runner
	running  context.Context // set while Run runs
	runners  sync.WaitGroup  // the partitions' goroutines
	assigned atomic.Bool     // the wanted partitions are known

	unready atomic.Int32  // wanted partitions that do not serve
	lapses  atomic.Uint64 // counts partitions that ceased to serve

	aged       atomic.Bool   // some partition was old at the last measurement
	rereads    atomic.Uint64 // counts losses of messages between a reader and the index
	resyncs    resyncCounts
	saves      struct{ written, failed atomic.Uint64 }
	rejections [snapshot.NumReasons]atomic.Uint64
	capacity   capacity
	outages    *outages
}

// work is an item of the writer's queue: messages of a partition, or a function of the machine.
type work struct {
	partition events.Partition
	messages  []jetstream.Message
	live      bool             // the partition served at the time of reading
	end       *jetstream.AtEnd // not nil: the end of the log followed the messages
	do        func(*Machine)
	taken     *atomic.Bool  // set by the writer before do, or by the caller that stops waiting
	done      chan struct{} // closed after do
}

// run runs do, unless the caller has stopped waiting.
func (w *work) run(m *Machine) {
	if w.taken.CompareAndSwap(false, true) {
		w.do(m)
	}
	close(w.done)
}

// runner performs the decisions of one partition's state machine. Goroutines of the node step the machine with
// [Node.step].
type runner struct {
	mu sync.Mutex // guards all fields below
	partition
	running bool   // the goroutine runs
	cancel  func() // interrupts the action of the present phase
}

// New returns a node that is idle until Run.
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
		n.parts = append(n.parts, &runner{partition: partition{policy: of, phase: &absent{}}})
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

// Run runs the node until ctx ends. Before the return, Run writes the snapshots of changed partitions, within a time
// limit.
func (n *Node) Run(ctx context.Context) {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.l3.watch(running)
	var writers, others sync.WaitGroup
	for _, s := range n.shards {
		writers.Go(func() { n.write(running, s) })
	}
	waitForOwners := n.startRunners(ctx)
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

// lastSave limits the time for snapshots at the end of Run.
const lastSave = 10 * time.Second

// apply applies messages of a log, and reports missing messages to the partition's machine. A reader sends messages
// without gaps, so a gap means a loss between the reader and the index.
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

// read applies new messages of a partition's log until ctx ends.
func (n *Node) read(ctx context.Context, p events.Partition, epoch jetstream.Epoch) {
	at := jetstream.Position{Epoch: epoch}
	if n.do(ctx, p, func(m *Machine) { at.Seq, at.Time = m.Applied(p), m.parts[p].time }) != nil {
		return
	}
	begun := time.Now() // the writer has no more messages of the previous reader
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

// deliver passes an update of a partition's log to the writer of the shard, and waits while the writer is busy.
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
		if n.do(ctx, p, func(m *Machine) { applied = m.Applied(p) }) != nil { // the earlier messages are applied by then
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

// step steps a partition's machine and performs the effects without waiting. step is safe for concurrent use.
func (n *Node) step(p events.Partition, f func(*partition) effects) {
	part := n.parts[p]
	part.mu.Lock()
	owed, lapses := part.owed(), part.lapses
	e := f(&part.partition)
	now := part.owed()
	n.unready.Add(now - owed)
	n.lapses.Add(part.lapses - lapses)
	if e.reread {
		n.rereads.Add(1)
	}
	if e.resynced {
		n.resyncs.ended.Add(1)
	}
	if e.interrupt && part.cancel != nil {
		part.cancel()
	}
	part.mu.Unlock()
	n.report(p, &e)
	if owed > 0 && now == 0 {
		n.checkReady()
	}
}

// progress is the part of a partition's log reflected by answers.
type progress struct {
	epoch  time.Time
	seq    events.StreamSeq
	whole  bool   // the partition serves
	resync bool   // the partition needs a resync
	stale  uint64 // the age of the state in milliseconds; 0: current
	lapses uint64 // how often the partition ceased to serve
}

func (a progress) status(p events.Partition) api.PartitionStatus {
	return api.PartitionStatus{Partition: p, Epoch: a.epoch, Seq: a.seq, StaleMS: a.stale, ResyncNeeded: a.resync}
}

// applied returns the applied position of a partition's log.
func (n *Node) applied(p events.Partition) events.StreamSeq { return n.shard(p).machine.Applied(p) }

// view returns the present ranks and models.
func (n *Node) view() *View { return n.views.all.Load() }

// progress appends the present progress of all partitions to out, by partition.
func (n *Node) progress(out []progress) []progress {
	aged, now := n.aged.Load(), time.Time{}
	if aged { // most queries need no clock
		now = time.Now()
	}
	for p, part := range n.parts {
		reflects := progress{seq: n.applied(events.Partition(p))}
		part.mu.Lock()
		reflects.whole, reflects.resync, reflects.lapses = part.serves(), part.need() != nil, part.lapses
		if k := part.phase.data(); k != nil {
			reflects.epoch = k.epoch.Time()
		}
		if aged {
			reflects.stale = part.age(now)
		}
		part.mu.Unlock()
		out = append(out, reflects)
	}
	return out
}

// maxWait limits a query's wait for a log position, whatever its deadline. A waiting query occupies one of the node's
// workers, and the node does not notice the end of the client.
const maxWait = 30 * time.Second

func (n *Node) waitFor(ctx context.Context, want api.PartitionSeq) error {
	if int(want.Partition) >= len(n.parts) {
		return api.Errorf(api.CodeMalformed, "min_seq names partition %d; there are %d", want.Partition, len(n.parts))
	}
	if !n.keeps(want.Partition) {
		return nil // the answer lists the partition as missing, if the query needs the partition
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
