package node

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

const fleetPartitions = 4

// fleet is a cluster of nodes in this process on one real NATS server. Each partition has a worker with one growing
// prompt.
type fleet struct {
	*testing.T
	ctx     context.Context
	server  *natsserver.Server
	ns      *jetstream.Namespace
	workers [fleetPartitions]*grower
	lives   int
	asked   atomic.Uint64
	again   atomic.Uint64                // queries repeated with a later view
	buckets map[string]*jetstream.Bucket // for snapshots, of nodes with a bucket of their own

	mu    sync.Mutex
	peers map[string]*peer // the running nodes
}

// peer is one node of the fleet.
type peer struct {
	node   *Node
	member *cluster.Member
	conn   *jetstream.Conn
	end    context.CancelFunc // of the member: starts the drain
	gone   chan error         // the end of the member
	stop   func()
	asked  context.Context // ends before the node stops receiving queries
	drop   context.CancelFunc
}

// grower publishes one worker's events.
type grower struct {
	instance events.WorkerID
	pub      *jetstream.Publisher

	mu     sync.Mutex
	blocks int              // acknowledged
	seq    events.StreamSeq // of the last message
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	t.Cleanup(cancel)
	f := &fleet{T: t, ctx: ctx, peers: map[string]*peer{}}
	var err error
	f.server, err = natsserver.Start(ctx, natsserver.Options{Dir: t.TempDir(), SyncInterval: time.Minute})
	f.must(err)
	t.Cleanup(f.server.Stop)
	f.ns = f.join(f.connect())
	f.must(f.ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 16 << 20}))
	for found, i := 0, 0; found < fleetPartitions; i++ {
		instance := events.WorkerID(fmt.Sprint("w", i))
		p, err := f.ns.PartitionOf(instance)
		f.must(err)
		if f.workers[p] == nil {
			pub, err := f.ns.OpenPublisher(ctx, events.RankKey{Instance: instance}, jetstream.PublisherOptions{})
			f.must(err)
			f.workers[p] = &grower{instance: instance, pub: pub}
			found++
		}
	}
	return f
}

func (f *fleet) must(err error) {
	f.Helper()
	if err != nil {
		f.Fatal(err)
	}
}

func (f *fleet) connect() *jetstream.Conn {
	f.Helper()
	conn, err := jetstream.Connect(f.ctx, jetstream.ConnOptions{Server: f.server, Wait: true})
	f.must(err)
	f.Cleanup(conn.Close)
	return conn
}

func (f *fleet) join(conn *jetstream.Conn) *jetstream.Namespace {
	f.Helper()
	ns, err := jetstream.JoinNamespace(f.ctx, conn, jetstream.NamespaceConfig{Name: "fleet",
		Partitions: fleetPartitions})
	f.must(err)
	return ns
}

// start starts a node and waits until it is ready.
func (f *fleet) start(name string) *peer {
	f.Helper()
	f.lives++
	p := &peer{conn: f.connect(), gone: make(chan error, 1)}
	p.asked, p.drop = context.WithCancel(f.ctx)
	ns := f.join(p.conn)
	snapshots, err := ns.EnsureSnapshots(f.ctx, jetstream.BucketConfig{})
	f.must(err)
	if other := f.buckets[name]; other != nil {
		snapshots = other
	}
	nodes, err := ns.EnsureNodes(f.ctx, time.Hour)
	f.must(err)
	ready := make(chan struct{})
	p.node = New(Config{
		ID: name, Namespace: ns, Snapshots: snapshots, SnapshotInterval: 300 * time.Millisecond,
		Watch:  50 * time.Millisecond,
		Shards: 1 + f.lives%4, Shared: true, View: func() *cluster.View { return p.member.View() },
		Ready: func() { close(ready) },
	})
	p.member, err = cluster.Join(f.ctx, cluster.MemberConfig{
		Config: cluster.Config{
			Node: name, Session: fmt.Sprint(f.lives), Partitions: fleetPartitions, Replication: 2,
			Heartbeat: 50 * time.Millisecond, DeadAfter: 1500 * time.Millisecond,
		},
		Namespace: ns, Bucket: nodes, Keeper: p.node,
	})
	f.must(err)
	running, stop := context.WithCancel(f.ctx)
	member, end := context.WithCancel(f.ctx)
	var done sync.WaitGroup
	done.Go(func() { p.node.Run(running) })
	left := make(chan struct{})
	go func() { p.gone <- p.member.Run(member); close(left) }()
	p.end, p.stop = end, sync.OnceFunc(func() {
		end()
		stop()
		done.Wait()
		select {
		case <-left:
		case <-p.asked.Done(): // after a crash, do not wait for the end of the drain
		}
	})
	f.Cleanup(p.stop)
	select {
	case <-ready:
	case <-f.ctx.Done():
		f.Fatalf("%s is not ready: %v", name, p.node.Ready())
	}
	f.mu.Lock()
	f.peers[name] = p
	f.mu.Unlock()
	return p
}

// drop excludes a node from further queries.
func (f *fleet) drop(name string) *peer {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.peers[name]
	delete(f.peers, name)
	p.drop()
	return p
}

// drain ends a node like SIGTERM: the node leaves after other nodes have its partitions.
func (f *fleet) drain(name string) {
	f.Helper()
	f.mu.Lock()
	p := f.peers[name]
	f.mu.Unlock()
	p.end()
	select {
	case err := <-p.gone:
		if err != nil && !errors.Is(err, jetstream.ErrUnavailable) { // the record stays then
			f.Fatal(err)
		}
	case <-f.ctx.Done():
		f.Fatalf("%s does not end", name)
	}
	f.drop(name)
	p.stop()
}

// crash ends a node without a drain.
func (f *fleet) crash(name string) {
	p := f.drop(name)
	p.conn.Close()
	go p.stop()
}

// grow publishes further blocks of a partition's worker.
func (f *fleet) grow(p events.Partition) {
	g := f.workers[p]
	g.mu.Lock()
	defer g.mu.Unlock()
	const n = 3
	e := events.Event{Kind: events.Stored, Tier: events.Device, HasParent: g.blocks > 0,
		Parent: events.BlockHash(g.blocks)}
	for i := range n {
		e.Blocks = append(e.Blocks, events.BlockHash(g.blocks+i+1))
		e.Locals = append(e.Locals, f.local(p, g.blocks+i))
	}
	data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: events.EventID(g.blocks/n + 1),
		Model: "m", BlockSize: 4, Events: []events.Event{e}})
	if err == nil {
		_, err = g.pub.Publish(f.ctx, [][]byte{data})
	}
	if err != nil {
		if f.ctx.Err() == nil {
			f.Error(err)
		}
		return
	}
	g.blocks += n
	g.seq++
}

func (f *fleet) local(p events.Partition, i int) events.LocalHash {
	return events.LocalHash(1_000_000*int(p) + i)
}

// anyone returns a random running node.
func (f *fleet) anyone(rng *rand.Rand) *cluster.Member {
	f.mu.Lock()
	defer f.mu.Unlock()
	names := slices.Sorted(maps.Keys(f.peers))
	return f.peers[names[rng.IntN(len(names))]].member
}

// ask queries a partition like a cluster node: ask tries the serving nodes of a view in turn until a node answers. The
// answer must be complete and reflect all earlier acknowledged blocks. If no node answers, the view may precede a move
// of the partition; a later view of the same node must then be right.
func (f *fleet) ask(p events.Partition, rng *rand.Rand) {
	g := f.workers[p]
	g.mu.Lock()
	blocks, seq := g.blocks, g.seq
	g.mu.Unlock()
	if blocks == 0 {
		return
	}
	q := &api.Query{Model: "m", Partitions: []events.Partition{p}, MinSeq: []api.PartitionSeq{{Partition: p, Seq: seq}}}
	for i := range blocks + 30 {
		q.Hashes = append(q.Hashes, uint64(f.local(p, i)))
	}
	const looks = 5
	failed := map[*cluster.Member]uint64{} // the beat of a node's first view without an answer
	for f.ctx.Err() == nil {
		asker := f.anyone(rng)
		view := asker.View()
		answered, said := f.askThose(view, p, q, blocks)
		if answered || f.ctx.Err() != nil {
			return
		}
		first, before := failed[asker]
		if !before {
			failed[asker] = view.Self.Heartbeat
		} else if view.Self.Heartbeat >= first+looks {
			f.Errorf("no node answers for partition %d: %v", p, said)
			return
		}
		f.again.Add(1)
		time.Sleep(time.Millisecond)
	}
}

// askThose queries the nodes that serve a partition in a view. The partition's worker has at least this many blocks.
func (f *fleet) askThose(view *cluster.View, p events.Partition, q *api.Query, blocks int) (answered bool,
	said []string) {
	g, seq := f.workers[p], q.MinSeq[0].Seq
	for _, name := range view.Serving(p) {
		f.mu.Lock()
		peer := f.peers[name]
		f.mu.Unlock()
		if peer == nil {
			said = append(said, name+" is not there")
			continue
		}
		asking, cancel := context.WithTimeout(peer.asked, patience)
		a, err := peer.node.Find(asking, q)
		cancel()
		if err != nil || !a.Complete {
			said = append(said, fmt.Sprintf("%s says %+v, %v", name, a, err))
			continue
		}
		g.mu.Lock()
		most := g.blocks + 3
		g.mu.Unlock()
		if len(a.Workers) != 1 || a.Workers[0].Instance != g.instance || int(a.Workers[0].Device) < blocks ||
			int(a.Workers[0].Device) > most ||
			len(a.Partitions) != 1 || a.Partitions[0].Partition != p || a.Partitions[0].Seq < seq ||
			!view.MayServe(p, "m") {
			f.Errorf("%s answers for partition %d, with %d to %d blocks at %d or later: %+v", name, p, blocks, most,
				seq, a)
		}
		f.asked.Add(1)
		return true, nil
	}
	return false, said
}

// settled waits until every partition is ready on two nodes, or on all if there are fewer, no other node has it, all
// nodes have the same view, and replicas are equal.
func (f *fleet) settled() {
	f.Helper()
	f.mu.Lock()
	peers := map[string]*peer{}
	var names []string
	for name, p := range f.peers {
		peers[name] = p
		names = append(names, name)
	}
	f.mu.Unlock()
	slices.Sort(names)
	testkit.Eventually(f, "the nodes serve their partitions", func() (bool, string) {
		why := ""
		for p := range events.Partition(fleetPartitions) {
			want := cluster.Order(names, nil, p)[:cluster.Replication(len(names), 2)]
			for _, name := range names {
				peer := peers[name]
				if got := peer.member.View().Serving(p); !slices.Equal(got, want) {
					why = fmt.Sprintf("%s sees partition %d served by %v, not %v", name, p, got, want)
				}
				empty := false
				f.must(peer.node.do(f.ctx, p, func(m *Machine) { empty = m.Empty(p) }))
				if owns := slices.Contains(want, name); owns == empty {
					why = fmt.Sprintf("%s owns partition %d: %v, and it is empty there: %v", name, p, owns, empty)
				}
			}
		}
		return why == "", why
	})
}

// equal compares the replicas of each partition after all published messages are applied.
func (f *fleet) equal() {
	f.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	for p := range events.Partition(fleetPartitions) {
		g := f.workers[p]
		g.mu.Lock()
		seq := g.seq
		g.mu.Unlock()
		sums := map[uint64][]string{}
		for name, peer := range f.peers {
			if !peer.node.keeps(p) {
				continue
			}
			f.must(peer.node.waitFor(f.ctx, api.PartitionSeq{Partition: p, Seq: seq}))
			var sum uint64
			f.must(peer.node.do(f.ctx, p, func(m *Machine) { sum = m.checksum(p) }))
			sums[sum] = append(sums[sum], name)
		}
		if len(sums) != 1 {
			f.Errorf("replicas of partition %d differ: %v", p, sums)
		}
	}
}

// TestCluster makes nodes join, drain, crash and return on a real server, while workers publish and queries for every
// partition run without pause. Each answer is complete, covers exactly its partition, and reflects all blocks
// acknowledged before the query.
func TestCluster(t *testing.T) {
	f := newFleet(t)
	for p := range events.Partition(fleetPartitions) {
		f.grow(p)
	}
	f.start("a")
	f.settled()
	quit := make(chan struct{})
	var busy sync.WaitGroup
	for p := range events.Partition(fleetPartitions) {
		busy.Go(func() {
			for {
				select {
				case <-quit:
					return
				case <-time.After(10 * time.Millisecond):
					f.grow(p)
				}
			}
		})
		rng := rand.New(rand.NewPCG(1, uint64(p)))
		busy.Go(func() {
			for {
				select {
				case <-quit:
					return
				case <-time.After(2 * time.Millisecond):
					f.ask(p, rng)
				}
			}
		})
	}
	f.start("b")
	f.start("c")
	f.settled()
	f.drain("b")
	f.settled()
	f.start("b")
	f.start("d")
	f.settled()
	f.crash("c")
	f.settled()
	f.drain("a")
	f.settled()
	f.start("c") // its old record exists
	f.settled()
	close(quit)
	busy.Wait()
	f.equal()
	t.Logf("%d answers, %d views too old", f.asked.Load(), f.again.Load())
	bucket, err := f.ns.OpenSnapshots(f.ctx)
	f.must(err)
	for p := range events.Partition(fleetPartitions) {
		if _, err := bucket.Latest(f.ctx, snapshot.ManifestKey(p)); err != nil {
			t.Errorf("partition %d: %v", p, err)
		}
	}
}

// TestSnapshotsMoveToAnotherNode: one node cannot write snapshots. After three failures a second node with the same
// partitions writes the snapshots, and both nodes report the change.
func TestSnapshotsMoveToAnotherNode(t *testing.T) {
	f := newFleet(t)
	small, err := jetstream.JoinNamespace(f.ctx, f.connect(), jetstream.NamespaceConfig{Name: "small",
		Partitions: fleetPartitions})
	f.must(err)
	full, err := small.EnsureSnapshots(f.ctx, jetstream.BucketConfig{MaxBytes: 1})
	f.must(err)
	f.buckets = map[string]*jetstream.Bucket{"a": full}
	for p := range events.Partition(fleetPartitions) {
		f.grow(p)
	}
	a, b := f.start("a"), f.start("b")
	f.settled()
	failing := 0
	for p := range events.Partition(fleetPartitions) {
		if cluster.Order([]string{"a", "b"}, nil, p)[0] != "a" {
			continue
		}
		failing++
		for range saveAttempts {
			if _, err := a.node.saveAndReport(f.ctx, p); err == nil {
				t.Fatal("a snapshot was written into a bucket that is full")
			}
		}
	}
	if failing == 0 {
		t.Fatal("a is to write nothing")
	}
	bucket, err := f.ns.OpenSnapshots(f.ctx)
	f.must(err)
	for p := range events.Partition(fleetPartitions) {
		testkit.Eventually(t, fmt.Sprintf("b writes partition %d", p), func() (bool, string) {
			_, err := bucket.Latest(f.ctx, snapshot.ManifestKey(p))
			a, b := a.member.View().Writer[p], b.member.View().Writer[p]
			return err == nil && a == "b" && b == "b",
				fmt.Sprintf("the writer is %s on a, and %s on b; in the bucket: %v", a, b, err)
		})
	}
	status, err := a.node.Status(f.ctx)
	f.must(err)
	affected := 0
	for _, problem := range status.Problems {
		if in, _, is := strings.Cut(problem, ": "+snapshotLeft+"b"); is { // one problem for all partitions
			var of cluster.Set
			f.must(of.UnmarshalText([]byte(strings.TrimPrefix(in, "partitions "))))
			affected += of.Len()
		}
	}
	if affected != failing || status.Partitions[0].Writer != "b" {
		t.Errorf("of %d partitions: writer %s, problems %q", failing, status.Partitions[0].Writer, status.Problems)
	}
}

// TestNewModelIsAnnounced: a serving node announces the first worker of a partition, with its partition.
func TestNewModelIsAnnounced(t *testing.T) {
	f := newFleet(t)
	snapshots, err := f.ns.EnsureSnapshots(f.ctx, jetstream.BucketConfig{})
	f.must(err)
	ready := make(chan struct{})
	n := New(Config{ID: "a", Namespace: f.ns, Snapshots: snapshots, Ready: func() { close(ready) }})
	running, stop := context.WithCancel(f.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		n.Run(running)
	}()
	t.Cleanup(func() { stop(); <-done })
	wait := func(what string, c <-chan struct{}) {
		t.Helper()
		select {
		case <-c:
		case <-f.ctx.Done():
			t.Fatal(what)
		}
	}
	wait("it is not ready", ready)
	const p = events.Partition(2)
	if st := n.Advertisement(); !st.Ready.Has(p) || len(st.Models) > 0 || n.MayServe(p, "m") {
		t.Fatalf("before any worker is there: %+v", st)
	}
	f.grow(p)
	for !n.MayServe(p, "m") {
		wait("the node does not announce the worker", n.ModelsChanged())
	}
	if !n.Advertisement().Models["m"].Has(p) || n.MayServe(p+1, "m") || n.MayServe(p, "other") {
		t.Errorf("%+v", n.Advertisement())
	}
}
