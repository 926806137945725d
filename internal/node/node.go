package node

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
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

	// View, if not nil, says what is known of the nodes that share the namespace.
	View func() *cluster.View

	// BehindAfter is how long what the log had may be not applied before the node says of a partition that it is far
	// behind; default 5 s.
	BehindAfter time.Duration

	Index radix.Config

	L3 L3Config

	// A partition's snapshot is due when SnapshotInterval (default 1 m) has passed since the one before, or, earlier,
	// when SnapshotBlocks (default 2,000,000) blocks were stored or removed since, or a quarter of what the log may
	// take has come; never while nothing changed. More often means a shorter replay after a crash and more writing.
	SnapshotInterval time.Duration
	SnapshotBlocks   uint64

	// Watch is how often each partition's stream is looked at for what no message tells; default 3 s.
	Watch time.Duration

	// ResyncPause is the time between the first two rounds in which shims are asked to say again what is lost; default
	// 2 s.
	ResyncPause time.Duration

	// RoomCheck is how often the node looks at how full the log, the bucket and the storage are; default 5 s, and five
	// times as often while one of them takes nothing.
	RoomCheck time.Duration

	// StoreLimit, if not nil, says what all streams and buckets may take now, in bytes, where the account has no bound
	// of its own.
	StoreLimit func() int64

	// Mend, if not nil, makes what is missing of the log; it is called when a stream was deleted.
	Mend func(context.Context) error

	// Health, if not nil, says what is wrong with the NATS server in this process.
	Health func() error

	// Outcomes, if not nil, counts what becomes of requests to this node, for its status.
	Outcomes *api.Outcomes

	Hooks Hooks
}

// Hooks tell what happens, from the node's goroutines. Each may be nil. They must not block.
type Hooks struct {
	Restored func(p events.Partition, r Restored)
	// a snapshot that could not be used; an older one, or none, is
	Rejected func(p events.Partition, what string, err error)
	CaughtUp func(p events.Partition, seq events.StreamSeq)
	Ready    func() // every partition that is kept serves
	// the log is not the one that was applied; begin again
	Unfit     func(p events.Partition, notice jetstream.Notice)
	Trouble   func(p events.Partition, err error)                 // the log cannot be read for now
	Recovered func(p events.Partition)                            // it can be read again
	Saved     func(api.SnapshotInfo, time.Duration)               // a snapshot was written
	SaveError func(p events.Partition, err error)                 // it was not; it is tried again
	Purged    func(p events.Partition, keepFrom events.StreamSeq) // the log before was trimmed

	// shims were asked to say again what they hold
	ResyncAsked func(p events.Partition, why string, answered int, err error)
	// messages were missing between log and index; the log is read again from there
	Reread func(p events.Partition, from events.StreamSeq)
	// the stream was missing: it was made, or why it was not
	Mended   func(p events.Partition, err error)
	Resynced func(p events.Partition)             // the partition is whole again
	Filling  func(what string, used, limit int64) // something has become 80 % full
	// something takes nothing more, or, with nil, does again
	Unwritable func(what string, err error)
}

// Restored says what a partition begins with.
type Restored struct {
	Seq      events.StreamSeq // of the snapshot; 0: none
	Ranks    int
	Holdings uint64
	Took     time.Duration
	// what the log said once and nothing says now, so that a resync is needed; empty if nothing is known to be lost
	Lost string
}

// Node keeps the index of a namespace's partitions, or of some: it restores, follows the log, answers, and writes
// snapshots.
//
// One goroutine, the writer, owns the machine and writes to the index; it takes work from a bounded queue. Each
// partition has a follower, which reads its log and hands messages over. One goroutine writes snapshots, a little at a
// time. Queries run wherever they are called.
type Node struct {
	cfg     Config
	index   *radix.Index
	machine *Machine
	l3      *l3
	work    chan work
	bell    bell
	stirred chan struct{} // of Stirred
	started time.Time
	parts   []*standing
	ready   atomic.Bool
	saving  sync.Mutex // one snapshot, or one partition being emptied, at a time

	keeping  sync.Mutex      // which partitions are wanted; before any standing's
	running  context.Context // while Run runs
	tending  sync.WaitGroup  // the partitions' goroutines
	assigned atomic.Bool     // it is known which are wanted

	unready atomic.Int32  // partitions that are wanted and do not serve
	lapses  atomic.Uint64 // how often a partition ceased to serve

	aged       atomic.Bool   // what is known of some partition was not of now, when last looked at
	rereads    atomic.Uint64 // how often messages were missing between a reader and the index
	resyncs    resyncCounts
	saves      struct{ written, failed atomic.Uint64 }
	rejections [snapshot.NumReasons]atomic.Uint64
	room       room
}

// work is something for the writer: messages of a partition, or something to do with the machine.
type work struct {
	partition events.Partition
	messages  []Message
	end       *jetstream.AtEnd // not nil: the log had nothing more then
	do        func(*Machine)
	done      chan struct{} // closed after do
}

// standing is how the node stands with one partition.
type standing struct {
	mu     sync.Mutex
	wanted bool   // by Keep
	taken  bool   // by its goroutine, and not to be left; else the partition is absent
	tended bool   // it has a goroutine
	leave  func() // ends following it
	state  string
	lapses uint64 // how often it ceased to serve
	epoch  time.Time
	last   events.StreamSeq // of the log, as last heard
	err    error            // why the log cannot be read
	at     Restored
	lost   string // what the log was found to have lost, until the partition has begun again
	// the log has another message there than was applied: no snapshot of it or later is of this log. 0: none
	doubted events.StreamSeq
	need    *need // nil if nothing
	save    saveState
	log     usage // of the log
	lag     lag
	fresh   freshness
	missed  chan struct{} // of its reader: something comes when messages are missing; nil: it has been told
	mending bool          // messages were missing, and the log is read again
	behind  bool          // far behind its log, when last looked at
}

// The states of a partition.
const (
	stateAbsent      = "absent"
	stateRestoring   = "restoring"
	stateCatchingUp  = "catching_up"
	stateServing     = "serving"
	stateUnavailable = "unavailable"
	stateResync      = "resync_needed"
)

// New returns a node that does nothing until Run.
func New(cfg Config) *Node {
	if cfg.SnapshotInterval <= 0 {
		cfg.SnapshotInterval = time.Minute
	}
	if cfg.SnapshotBlocks == 0 {
		cfg.SnapshotBlocks = 2_000_000
	}
	if cfg.ResyncPause <= 0 {
		cfg.ResyncPause = resyncPause
	}
	if cfg.BehindAfter <= 0 {
		cfg.BehindAfter = 5 * time.Second
	}
	if cfg.RoomCheck <= 0 {
		cfg.RoomCheck = 5 * time.Second
	}
	cfg.Hooks = cfg.Hooks.withDefaults()
	n := &Node{cfg: cfg, index: radix.New(cfg.Index), l3: newL3(cfg.L3), work: make(chan work, 16),
		stirred: make(chan struct{}, 1), started: time.Now()}
	partitions := int(cfg.Namespace.Partitions())
	n.machine = NewMachine(n.index, partitions)
	for range partitions {
		n.parts = append(n.parts, &standing{state: stateAbsent})
	}
	if !cfg.Shared {
		for _, s := range n.parts {
			s.wanted, s.taken, s.state = true, true, stateRestoring
		}
		n.unready.Store(int32(partitions))
		n.assigned.Store(true)
	}
	return n
}

func (h Hooks) withDefaults() Hooks {
	if h.Restored == nil {
		h.Restored = func(events.Partition, Restored) {}
	}
	if h.Rejected == nil {
		h.Rejected = func(events.Partition, string, error) {}
	}
	if h.CaughtUp == nil {
		h.CaughtUp = func(events.Partition, events.StreamSeq) {}
	}
	if h.Ready == nil {
		h.Ready = func() {}
	}
	if h.Unfit == nil {
		h.Unfit = func(events.Partition, jetstream.Notice) {}
	}
	if h.Trouble == nil {
		h.Trouble = func(events.Partition, error) {}
	}
	if h.Recovered == nil {
		h.Recovered = func(events.Partition) {}
	}
	if h.Saved == nil {
		h.Saved = func(api.SnapshotInfo, time.Duration) {}
	}
	if h.SaveError == nil {
		h.SaveError = func(events.Partition, error) {}
	}
	if h.Purged == nil {
		h.Purged = func(events.Partition, events.StreamSeq) {}
	}
	if h.ResyncAsked == nil {
		h.ResyncAsked = func(events.Partition, string, int, error) {}
	}
	if h.Reread == nil {
		h.Reread = func(events.Partition, events.StreamSeq) {}
	}
	if h.Mended == nil {
		h.Mended = func(events.Partition, error) {}
	}
	if h.Resynced == nil {
		h.Resynced = func(events.Partition) {}
	}
	if h.Filling == nil {
		h.Filling = func(string, int64, int64) {}
	}
	if h.Unwritable == nil {
		h.Unwritable = func(string, error) {}
	}
	return h
}

// Run runs the node until ctx ends. Before it returns it writes the snapshots that are worth it, within a bound.
func (n *Node) Run(ctx context.Context) {
	running, stop := context.WithCancel(context.WithoutCancel(ctx))
	n.l3.watch(running)
	var writer, others sync.WaitGroup
	writer.Go(func() { n.write(running) })
	endTending := n.startTending(ctx)
	others.Go(func() { n.saveWhenDue(ctx) })
	others.Go(func() { n.resyncWhenNeeded(ctx) })
	others.Go(func() { n.watchRoom(ctx) })
	others.Go(func() { n.watchAge(ctx) })
	others.Wait()
	endTending()
	last, cancel := context.WithTimeout(running, lastSave)
	n.saveChanged(last)
	cancel()
	stop()
	writer.Wait()
}

// lastSave bounds the snapshots that are written when the node stops.
const lastSave = 10 * time.Second

// write is the writer.
func (n *Node) write(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case w := <-n.work:
			if w.do != nil {
				w.do(n.machine)
				close(w.done)
			} else {
				before := n.machine.View()
				n.apply(w)
				if n.machine.View() != before {
					select {
					case n.stirred <- struct{}{}:
					default:
					}
				}
			}
			n.bell.ring()
		}
	}
}

// apply applies messages of a log. What is missing before them or at the end is read again: the reader's run is
// unbroken, so it was lost on the way here.
func (n *Node) apply(w work) {
	whole := n.machine.Apply(w.partition, w.messages)
	if w.end != nil {
		whole = whole && n.machine.Applied(w.partition) >= w.end.Seq
	}
	s := n.parts[w.partition]
	switch {
	case !whole:
		s.mu.Lock()
		if s.missed != nil { // one reader is told once
			n.rereads.Add(1)
			s.mending = true
			close(s.missed)
			s.missed = nil
		}
		s.mu.Unlock()
	case w.end != nil:
		s.mu.Lock()
		s.fresh.readTo, s.mending = w.end.Time, false
		s.mu.Unlock()
	}
}

// do has the writer do something, and waits until it is done.
func (n *Node) do(ctx context.Context, f func(*Machine)) error {
	w := work{do: f, done: make(chan struct{})}
	select {
	case n.work <- w:
	case <-ctx.Done():
		return ctx.Err()
	}
	<-w.done // the writer outlives whoever asks it
	return nil
}

// follow keeps one partition: it restores it, applies its log, and begins again when the log turns out to be another
// one.
func (n *Node) follow(ctx context.Context, p events.Partition) {
	for ctx.Err() == nil {
		err := n.empty(ctx, p)
		var at jetstream.Position
		if err == nil {
			at, err = n.restore(ctx, p)
		}
		if ctx.Err() != nil {
			return
		}
		if err != nil {
			n.trouble(p, err)
			pause(ctx, time.Second)
			continue
		}
		n.set(p, func(s *standing) { s.state = stateCatchingUp })
		begun := time.Now()
		n.read(ctx, p, at)
		if time.Since(begun) < rest { // what could not be read at once will hardly be better now
			pause(ctx, rest)
		}
	}
}

// rest is the least time between two beginnings.
const rest = 500 * time.Millisecond

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// read applies a partition's log from a position on, until ctx ends or the log is found to be another one. If messages
// are missing on the way to the index they are read again.
func (n *Node) read(ctx context.Context, p events.Partition, at jetstream.Position) {
	for n.readOnce(ctx, p, at) {
		if n.do(ctx, func(m *Machine) { at.Seq, at.Time = m.Applied(p), m.parts[p].time }) != nil {
			return
		}
		n.cfg.Hooks.Reread(p, at.Seq+1)
		pause(ctx, rest)
	}
}

// readOnce is read with one reader; again says that messages were missing.
func (n *Node) readOnce(ctx context.Context, p events.Partition, at jetstream.Position) (again bool) {
	updates, missed := make(chan jetstream.Update, 2), make(chan struct{})
	reader, err := n.cfg.Namespace.StartReader(jetstream.ReaderConfig{
		Partition: p, After: at, Out: updates, Watch: n.cfg.Watch, Ends: endsEvery,
	})
	if err != nil {
		n.trouble(p, err)
		pause(ctx, time.Second)
		return false
	}
	defer reader.Stop()
	n.set(p, func(s *standing) { s.missed = missed })
	keys := map[string]events.RankKey{}
	for {
		var u jetstream.Update
		select {
		case u = <-updates:
		case <-missed:
			return true
		case <-ctx.Done():
			return false
		}
		if u.Notice != nil {
			if n.noticed(ctx, p, u.Notice) {
				return false
			}
			continue
		}
		w := work{partition: p, messages: make([]Message, len(u.Messages))}
		for i, m := range u.Messages {
			w.messages[i] = message(m, keys)
		}
		n.set(p, func(s *standing) { s.last = u.Messages[len(u.Messages)-1].Seq + events.StreamSeq(u.Pending) })
		select {
		case n.work <- w:
		case <-ctx.Done():
			return false
		}
	}
}

// maxKeys bounds a follower's memory of subjects.
const maxKeys = 65536

// message translates one message of the log. keys remembers what subjects mean.
func message(m jetstream.Message, keys map[string]events.RankKey) Message {
	key, known := keys[m.Subject]
	out := Message{Seq: m.Seq, Time: m.Time, Key: key, Data: m.Data}
	if !known {
		_, _, key, err := jetstream.ParseEventSubject(m.Subject)
		if err != nil {
			out.Bad = true
			return out
		}
		if len(keys) >= maxKeys {
			clear(keys)
		}
		keys[m.Subject] = key
		out.Key = key
	}
	return out
}

// noticed acts on what a reader tells, and reports whether the partition must begin again.
func (n *Node) noticed(ctx context.Context, p events.Partition, notice jetstream.Notice) (again bool) {
	switch notice := notice.(type) {
	case jetstream.CaughtUp:
		if n.do(ctx, func(*Machine) {}) != nil { // what was read before is applied then
			return true
		}
		first := false // not after some of it was read again
		n.set(p, func(s *standing) {
			first = !serves(s.state)
			s.state, s.err, s.doubted = n.settled(s), nil, 0
		})
		if first {
			n.cfg.Hooks.CaughtUp(p, notice.Seq)
		}
	case jetstream.AtEnd:
		select {
		case n.work <- work{partition: p, end: &notice}:
		case <-ctx.Done():
			return true
		}
	case jetstream.Unavailable:
		n.trouble(p, notice.Err)
	case jetstream.Recovered:
		n.set(p, func(s *standing) { s.err = nil })
		n.cfg.Hooks.Recovered(p)
	}
	if !jetstream.Final(notice) {
		return false
	}
	n.cfg.Hooks.Unfit(p, notice)
	n.set(p, func(s *standing) {
		s.state = stateRestoring
		if _, truncated := notice.(jetstream.Truncated); !truncated { // what a snapshot may make up for
			s.lost = notice.String()
		}
		if regressed, ok := notice.(jetstream.Regressed); ok {
			s.doubted = regressed.Applied
		}
	})
	return true
}

// settled is the state of a partition that has caught up. Called with s.mu held.
func (n *Node) settled(s *standing) string {
	if s.need != nil {
		return stateResync
	}
	return stateServing
}

func (n *Node) trouble(p events.Partition, err error) {
	n.set(p, func(s *standing) { s.err = err })
	n.cfg.Hooks.Trouble(p, err)
}

// serves reports whether queries may be answered from a partition in a state.
func serves(state string) bool { return state == stateServing || state == stateResync }

// set changes a partition's standing. What is not taken is absent.
func (n *Node) set(p events.Partition, change func(*standing)) {
	s := n.parts[p]
	s.mu.Lock()
	before, owed := serves(s.state), s.owed()
	change(s)
	if !s.taken {
		s.state = stateAbsent
	}
	after := serves(s.state)
	n.unready.Add(s.owed() - owed)
	settled := owed > 0 && s.owed() == 0
	if before && !after {
		s.lapses++
		n.lapses.Add(1)
	}
	s.mu.Unlock()
	if settled {
		n.settle()
	}
}

// owed is 1 if the partition is wanted and does not serve, else 0. Called with s.mu held.
func (s *standing) owed() int32 {
	if s.wanted && !serves(s.state) {
		return 1
	}
	return 0
}

func notReady(unready int32, of int) error {
	return fmt.Errorf("%d of %d partitions are not restored and caught up yet", unready, max(int(unready), of))
}

// at is what a partition's answers reflect.
type at struct {
	epoch  time.Time
	seq    events.StreamSeq
	whole  bool   // the partition serves
	resync bool   // it needs a resync
	stale  uint64 // how old this may be, in milliseconds; 0: it is of now
	lapses uint64 // how often it ceased to
}

// status is the same for who asked.
func (a at) status(p events.Partition) api.PartitionStatus {
	return api.PartitionStatus{Partition: p, Epoch: a.epoch, Seq: a.seq, StaleMS: a.stale, ResyncNeeded: a.resync}
}

// progress appends to out, by partition, what answers reflect now.
func (n *Node) progress(out []at) []at {
	aged, now := n.aged.Load(), time.Time{}
	if aged { // else no query looks at the clock
		now = time.Now()
	}
	for p, s := range n.parts {
		seq := n.machine.Applied(events.Partition(p))
		s.mu.Lock()
		reflects := at{epoch: s.epoch, seq: seq, whole: serves(s.state), resync: s.need != nil, lapses: s.lapses}
		if aged {
			reflects.stale = s.fresh.age(now, n.started)
		}
		out = append(out, reflects)
		s.mu.Unlock()
	}
	return out
}

// waitFor waits until a partition's log is applied up to a place.
func (n *Node) waitFor(ctx context.Context, want api.PartitionSeq) error {
	if int(want.Partition) >= len(n.parts) {
		return api.Errorf(api.CodeMalformed, "min_seq names partition %d; there are %d", want.Partition, len(n.parts))
	}
	if !n.keeps(want.Partition) {
		return nil // the answer names it as missing, if it is about it
	}
	err := n.bell.wait(ctx, func() bool { return n.machine.Applied(want.Partition) >= want.Seq })
	if errors.Is(err, context.DeadlineExceeded) {
		return api.Errorf(api.CodeBehind, "partition %d is at %d and did not reach %d before the deadline",
			want.Partition, n.machine.Applied(want.Partition), want.Seq)
	}
	return err
}
