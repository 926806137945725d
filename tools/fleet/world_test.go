package fleet

import (
	"container/heap"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

const (
	beat      = time.Second
	deadAfter = 5 * time.Second
	lease     = registry.DefaultLease
	renewal   = lease / 3
	ms        = time.Millisecond
)

// size is the size of a world with the rate of spontaneous faults.
type size struct {
	nodes, copies, workers int // configured copies; 0: the default
	partitions             uint32
	// longest restore of a partition; default 230 ms: 20,000 to 300,000 holdings
	slowest time.Duration
	stale   bool // a read may use a lagging replica of the bucket
	zones   int  // number of zones; 0: no zones
	old     int  // every old-th node has a version without zones; 0: no old nodes
}

// world is nodes, workers and a NATS in virtual time.
type world struct {
	testing.TB
	size
	rng     *rand.Rand
	now     time.Duration
	queue   queue
	count   int // number of all queued events
	down    bool
	offline []func() // renewals that wait for NATS
	calm    bool     // no more workers come and go

	bucket   map[string]cluster.Seen   // announcements of nodes
	past     []map[string]cluster.Seen // the bucket a while ago, if looks may be stale
	revision uint64
	nodes    map[string]*node  // live nodes
	zone     map[string]string // zone of every node that ever lived
	lives    int

	ready    []int                       // by partition: number of ready live nodes
	single   []time.Duration             // since when a single node serves the partition; -1: more or none
	died     []time.Duration             // last death of a serving node; -1: never
	allowed  func(events.Partition) bool // may be without any owner
	without  cluster.Set                 // were without
	longest  time.Duration               // longest time with a single replica
	settling bool                        // before the first owners: no assertions about owners

	bookings *bookings // nil: none

	workers []*worker // all workers that ever lived
	changes []change  // of the workers' bucket, in order

	counts struct {
		takes, restores, releases   int
		expiries, clears, fenced    int
		returns, renewals           int
		beats, beatBytes, beatMost  int
		queries, requests, nextAsks int
		missing                     int // partitions missing in queries' answers
		heard                       int // changes of workers' records, by all nodes
	}
}

// event is a scheduled function call.
type event struct {
	at  time.Duration
	seq int
	do  func()
}

type queue []event

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	return q[i].at < q[j].at || q[i].at == q[j].at && q[i].seq < q[j].seq
}
func (q queue) Swap(i, j int) { q[i], q[j] = q[j], q[i] }
func (q *queue) Push(x any)   { *q = append(*q, x.(event)) }
func (q *queue) Pop() any {
	last := (*q)[len(*q)-1]
	*q = (*q)[:len(*q)-1]
	return last
}

func newWorld(t testing.TB, seed uint64, s size) *world {
	w := &world{TB: t, size: s, rng: rand.New(rand.NewPCG(seed, 8)), bucket: map[string]cluster.Seen{},
		nodes: map[string]*node{}, zone: map[string]string{},
		ready: make([]int, s.partitions), single: make([]time.Duration, s.partitions), died: make([]time.Duration,
			s.partitions), settling: true}
	for p := range w.single {
		w.single[p], w.died[p] = -1, -1
	}
	if w.slowest == 0 {
		w.slowest = 230 * ms
	}
	if w.stale {
		w.keepPast()
	}
	return w
}

// keepPast keeps the last states of the bucket.
func (w *world) keepPast() {
	if w.past = append(w.past, maps.Clone(w.bucket)); len(w.past) > 3 {
		w.past = w.past[1:]
	}
	w.after(400*ms, w.keepPast)
}

func (w *world) after(d time.Duration, do func()) {
	w.count++
	heap.Push(&w.queue, event{w.now + d, w.count, do})
}

func (w *world) run(d time.Duration) {
	for end := w.now + d; ; {
		if len(w.queue) == 0 || w.queue[0].at > end {
			w.now = end
			return
		}
		e := heap.Pop(&w.queue).(event)
		w.now = e.at
		e.do()
	}
}

func (w *world) between(a, b time.Duration) time.Duration {
	return a + time.Duration(w.rng.Int64N(int64(b-a)+1))
}

// names lists the live nodes that do not leave, in order.
func (w *world) names() (list []string) {
	for name, n := range w.nodes {
		if !n.leaves {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// node is a life of a node.
type node struct {
	w         *world
	name      string
	machine   *cluster.Machine
	leases    *registry.Machine
	peers     *scatter.Peers
	view      *cluster.View
	serves    cluster.Set
	announced cluster.Set                        // announced as served to the other nodes
	since     map[events.Partition]time.Duration // start of the service
	todo      []events.Partition                 // assigned partitions in the order of restore
	acked     uint64
	applied   int // of the workers' bucket's changes
	booker    *booker
	leaves    bool
	old       bool
	ended     bool
	held      bool // by SIGSTOP
	waiting   []func()
}

func (w *world) start(name string) *node {
	w.lives++
	if w.zones > 0 && w.zone[name] == "" {
		w.zone[name] = fmt.Sprint("rack-", len(w.zone)%w.zones)
	}
	n := &node{w: w, name: name, old: w.old > 0 && w.rng.IntN(w.old) == 0, since: map[events.Partition]time.Duration{},
		leases: registry.NewMachine(), peers: scatter.NewPeers(&rpc.Budget{}), machine: cluster.New(cluster.Config{
			Node: name, Session: fmt.Sprint(w.lives), Build: "v0.0.0", Zone: w.zone[name], Partitions: w.partitions,
			Replication: w.copies, Heartbeat: beat, DeadAfter: deadAfter,
		})}
	w.nodes[name] = n
	if w.bookings != nil {
		w.bookings.join(n)
	}
	n.leases.Anew()
	n.after(w.between(0, beat), func() {
		n.applyChanges()
		n.leases.Current()
		n.probe()
	})
	n.after(w.between(0, beat), n.announce)
	return n
}

// after schedules do unless the life has ended. A paused node runs do later.
func (n *node) after(d time.Duration, do func()) {
	n.w.after(d, func() {
		switch {
		case n.ended:
		case n.held:
			n.waiting = append(n.waiting, do)
		default:
			do()
		}
	})
}

func (n *node) resume() {
	n.held = false
	todo := n.waiting
	n.waiting = nil
	for _, do := range todo {
		n.after(0, do)
	}
}

// end ends a life. The node stops serving, and other nodes learn about the end later.
func (n *node) end() {
	n.ended = true
	delete(n.w.nodes, n.name)
	for _, p := range n.serves.List() {
		n.w.died[p] = n.w.now
		n.w.serve(p, -1)
		n.w.mustServe(p)
	}
}

// announce is a member's beat.
func (n *node) announce() {
	w := n.w
	s := cluster.Advertisement{Ready: slices.Clone(n.serves)}
	s.SetModels(map[string]cluster.Set{"meta-llama/Llama-3.3-70B-Instruct": s.Ready})
	for _, p := range n.serves.List() {
		n.announced.Add(p)
	}
	r := n.supported(n.machine.Announce(s, n.leaves))
	if text, err := json.Marshal(r); err == nil {
		w.counts.beats++
		w.counts.beatBytes += len(text)
		w.counts.beatMost = max(w.counts.beatMost, len(text))
	}
	lost := w.rng.IntN(50) == 0
	n.after(w.between(0, 20*ms), func() { // the write reaches the bucket
		lost = lost || w.down
		if !lost {
			w.revision++
			w.bucket[n.name] = cluster.Seen{Record: r, Revision: w.revision}
		}
		n.after(w.between(0, 20*ms), func() {
			if !lost {
				n.acked = r.Heartbeat
			}
			n.look()
		})
	})
}

// supported returns the fields of a record that the version of the node reads and writes.
func (n *node) supported(r cluster.Record) cluster.Record {
	if n.old {
		r.Zone, r.Placement = "", 0
	}
	return r
}

func (n *node) look() {
	w := n.w
	var look *cluster.Look
	if !w.down {
		look = &cluster.Look{}
		from := w.bucket
		if n.machine.Releasing() {
			look.After = n.acked
		} else if len(w.past) > 0 && w.rng.IntN(3) == 0 {
			from = w.past[w.rng.IntN(len(w.past))]
		}
		for _, s := range from {
			s.Record = n.supported(s.Record)
			look.Records = append(look.Records, s)
		}
	}
	n.after(w.between(0, 20*ms), func() {
		a := n.machine.Step(w.now, n.acked, look)
		n.view = nil
		w.counts.takes += len(a.Acquire)
		if n.todo = append(n.todo, a.Acquire...); len(n.todo) == len(a.Acquire) && len(n.todo) > 0 {
			n.restore()
		}
		for _, p := range a.Release {
			w.counts.releases++
			if n.serves.Has(p) {
				n.serves.Remove(p)
				w.serve(p, -1)
				if n.announced.Has(p) { // otherwise no other node routes to this partition
					w.mustServe(p)
				}
			}
			n.announced.Remove(p)
		}
		if n.leaves && n.machine.Drained() {
			n.end()
			delete(w.bucket, n.name)
			return
		}
		n.after(w.between(beat*95/100, beat*105/100), n.announce)
	})
}

// restore restores the assigned partitions in sequence.
func (n *node) restore() {
	wanted := func(p events.Partition) bool { held := n.machine.Held(); return held.Has(p) && !n.serves.Has(p) }
	for len(n.todo) > 0 && !wanted(n.todo[0]) { // let go again
		n.todo = n.todo[1:]
	}
	if len(n.todo) == 0 {
		return
	}
	n.w.counts.restores++
	n.after(n.w.between(20*ms, n.w.slowest), func() {
		p := n.todo[0]
		n.todo = n.todo[1:]
		if wanted(p) {
			n.serves.Add(p)
			n.since[p] = n.w.now
			n.w.serve(p, 1)
		}
		n.restore()
	})
}

// View returns the node's view of the cluster, computed on demand.
func (n *node) View() *cluster.View {
	if n.view == nil {
		n.view = n.machine.View()
	}
	return n.view
}

// serve changes the number of nodes that serve a partition.
func (w *world) serve(p events.Partition, d int) {
	w.ready[p] += d
	if w.single[p] >= 0 {
		w.longest = max(w.longest, w.now-w.single[p])
		w.single[p] = -1
	}
	if w.settling {
		return
	}
	if w.ready[p] == 1 {
		w.single[p] = w.now
	}
}

// mustServe fails if no node serves a partition.
func (w *world) mustServe(p events.Partition) {
	if w.settling || w.ready[p] > 0 {
		return
	}
	if w.without.Add(p); !w.allowed(p) {
		w.Fatalf("at %v no node serves partition %d", w.now, p)
	}
}

// settled returns an error if the cluster is not in the intended final state.
func (w *world) settled() error {
	names, zones := w.names(), w.zone
	for _, n := range w.nodes {
		if n.old {
			zones = nil
		}
	}
	copies := cluster.Replication(len(names), w.copies)
	owned := map[string]cluster.Set{}
	for p := range events.Partition(w.partitions) {
		for _, name := range cluster.Order(names, zones, p)[:copies] {
			set := owned[name]
			set.Add(p)
			owned[name] = set
		}
	}
	for _, name := range names {
		n, want := w.nodes[name], owned[name]
		if held := n.machine.Held(); held.String() != want.String() || n.serves.String() != want.String() ||
			n.machine.Releasing() {
			return fmt.Errorf("%s is to keep %v, holds %v, serves %v", name, want, held, n.serves)
		}
	}
	for _, n := range w.nodes {
		if n.leaves {
			return fmt.Errorf("%s has not left", n.name)
		}
	}
	return nil
}

// writers returns an error if a partition does not have a single writer of snapshots in the nodes' views.
func (w *world) writers() error {
	writers := make([]int, w.partitions)
	for name, n := range w.nodes {
		for p, writer := range n.machine.View().Writer {
			if writer == name {
				writers[p]++
			}
		}
	}
	for p, n := range writers {
		if n != 1 {
			return fmt.Errorf("partition %d has %d writers of snapshots", p, n)
		}
	}
	return nil
}

// untilSettled runs until all partitions are at their places, and returns the duration.
func (w *world) untilSettled() time.Duration {
	begun := w.now
	for w.settled() != nil {
		if w.now-begun > 2*time.Minute {
			w.Fatalf("after %v: %v", w.now-begun, w.settled())
		}
		w.run(100 * ms)
	}
	return w.now - begun
}

// mustMove returns the least and the greatest number of moves for a change of owners. The least is for a change that
// all nodes see at once, the greatest for a change that nodes see in sequence.
func (w *world) mustMove(before, after []string) (least, most int) {
	least = w.moves(before, after)
	most = least
	for _, name := range before {
		if !slices.Contains(after, name) {
			mid := slices.DeleteFunc(slices.Clone(before), func(s string) bool { return s == name })
			most = max(most, w.moves(before, mid)+w.moves(mid, after))
		}
	}
	for _, name := range after {
		if !slices.Contains(before, name) {
			mid := append(slices.Clone(before), name)
			most = max(most, w.moves(before, mid)+w.moves(mid, after))
		}
	}
	return least, most
}

func (w *world) moves(before, after []string) (n int) {
	for p := range events.Partition(w.partitions) {
		had := cluster.Order(before, w.zone, p)[:min(w.copies, len(before))]
		for _, name := range cluster.Order(after, w.zone, p)[:min(w.copies, len(after))] {
			if !slices.Contains(had, name) {
				n++
			}
		}
	}
	return n
}

// heardAfter is the delay until all nodes have the news of a served partition: the node's own heartbeat, another node's
// heartbeat and a lost heartbeat.
const heardAfter = 4 * beat

// query sends a query for all partitions to a node, as for a model of all workers. The answer must include all
// partitions of the known nodes.
func (w *world) query() {
	names := slices.DeleteFunc(w.names(), func(name string) bool {
		n := w.nodes[name]
		return n.held || n.serves.Len() == 0 || n.acked < 3
	})
	self := w.nodes[names[w.rng.IntN(len(names))]]
	wanted := make([]scatter.Wanted, w.partitions)
	for p := range wanted {
		p := events.Partition(p)
		wanted[p] = scatter.Wanted{Partition: p, Serving: self.View().Serving(p), Fit: self.View().Fit(p)}
	}
	type reply struct {
		at  time.Duration
		ask scatter.Request
	}
	now, coming := w.now, []reply(nil)
	round := scatter.NewRound(self.peers, self.name, now+5*time.Second, false)
	send := func(asks []scatter.Request) {
		for _, a := range asks {
			a.Partitions = slices.Clone(a.Partitions)
			if a.Node != self.name {
				w.counts.requests++
			}
			if a.Kind == scatter.Next {
				w.counts.nextAsks++
			}
			if n := w.nodes[a.Node]; n == nil || !n.held {
				coming = append(coming, reply{now + w.between(ms/4, ms), a})
			}
		}
	}
	w.counts.queries++
	send(round.Begin(now, wanted))
	for !round.Done() {
		first := -1
		for i := range coming {
			if first < 0 || coming[i].at < coming[first].at {
				first = i
			}
		}
		if first < 0 || coming[first].at > round.Next() {
			now = max(now, round.Next())
			send(round.Tick(now))
			continue
		}
		r := coming[first]
		coming, now = slices.Delete(coming, first, first+1), r.at
		n := w.nodes[r.ask.Node]
		if n == nil {
			send(round.Fail(now, r.ask.ID, true))
			continue
		}
		var not []events.Partition
		for _, p := range r.ask.Partitions {
			if !n.serves.Has(p) {
				not = append(not, p)
			}
		}
		_, asks := round.Answer(now, r.ask.ID, not)
		send(asks)
	}
	round.End(now)
	w.counts.missing += len(round.Missing())
	for _, p := range round.Missing() {
		for _, n := range w.nodes {
			if n.serves.Has(p) && !n.held && w.now-n.since[p] > heardAfter {
				w.Fatalf("at %v a query to %s lacks partition %d of %s; queried nodes: %v", w.now, self.name, p,
					n.name, self.View().Serving(p))
			}
		}
	}
}

// partitionOf is where a worker belongs.
func (w *world) partitionOf(id events.WorkerID) events.Partition {
	p, err := jetstream.PartitionOf(id, w.partitions)
	if err != nil {
		w.Fatal(err)
	}
	return p
}
