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

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/index/scatter"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/rpc"
)

const (
	beat      = time.Second
	deadAfter = 5 * time.Second
	lease     = registry.DefaultLease
	renewal   = lease / 3
	ms        = time.Millisecond
)

// size is how large a world is, and how much goes wrong in it by itself.
type size struct {
	nodes, copies, workers int // copies as asked for; 0: as many as usual
	partitions             uint32
	// that a restore of one partition may take; default 230 ms: 20,000 to 300,000 holdings
	slowest time.Duration
	stale   bool // a look may be at a replica of the bucket that is behind
	zones   int  // that nodes are in; 0: they say none
	old     int  // one of so many nodes is of a version that knows no zones; 0: none is
}

// world is nodes, workers and a NATS in virtual time.
type world struct {
	testing.TB
	size
	rng     *rand.Rand
	now     time.Duration
	queue   queue
	count   int // of what was ever queued
	down    bool
	offline []func() // renewals that wait until it is back
	calm    bool     // no more workers come and go

	bucket   map[string]cluster.Seen   // what nodes announce
	past     []map[string]cluster.Seen // the bucket a while ago, if looks may be stale
	revision uint64
	nodes    map[string]*node  // those that live
	zone     map[string]string // of all that ever lived
	lives    int

	ready    []int                       // by partition: live nodes that serve it
	single   []time.Duration             // since when only one does; -1: more, or none
	died     []time.Duration             // when one that served it died last; -1: never
	allowed  func(events.Partition) bool // may be without any owner
	without  cluster.Set                 // were without
	longest  time.Duration               // with one only
	settling bool                        // owners have not been there yet: nothing is asserted of them

	bookings *bookings // nil: none

	workers []*worker // all that ever were
	changes []change  // of the workers' bucket, in order

	counts struct {
		takes, restores, releases   int
		expiries, clears, fenced    int
		returns, renewals           int
		beats, beatBytes, beatMost  int
		queries, requests, nextAsks int
		missing                     int // partitions of which queries had no answer
		heard                       int // changes of workers' records, by all nodes
	}
}

// event is something that happens at a time.
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
		w.remember()
	}
	return w
}

// remember keeps what the bucket was at the last few moments.
func (w *world) remember() {
	if w.past = append(w.past, maps.Clone(w.bucket)); len(w.past) > 3 {
		w.past = w.past[1:]
	}
	w.after(400*ms, w.remember)
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

// names lists the nodes that live, and do not leave, in order.
func (w *world) names() (list []string) {
	for name, n := range w.nodes {
		if !n.leaves {
			list = append(list, name)
		}
	}
	slices.Sort(list)
	return list
}

// node is one life of a node.
type node struct {
	w       *world
	name    string
	machine *cluster.Machine
	leases  *registry.Machine
	peers   *scatter.Peers
	view    *cluster.View
	serves  cluster.Set
	said    cluster.Set                        // to be served, to the others
	since   map[events.Partition]time.Duration // it serves them
	todo    []events.Partition                 // taken, to be restored one after the other
	acked   uint64
	told    int // of the workers' bucket's changes
	booker  *booker
	leaves  bool
	old     bool
	ended   bool
	held    bool // by SIGSTOP
	waiting []func()
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
		n.hear()
		n.leases.Current()
		n.probe()
	})
	n.after(w.between(0, beat), n.announce)
	return n
}

// after does something unless the life has ended; while it is held, later.
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

// end ends a life: what it served is served no more, and the others learn of it later.
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
		n.said.Add(p)
	}
	r := n.known(n.machine.Announce(s, n.leaves))
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

// known is what a node writes, or reads, of a record.
func (n *node) known(r cluster.Record) cluster.Record {
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
			s.Record = n.known(s.Record)
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
				if n.said.Has(p) { // else nobody knew that it did
					w.mustServe(p)
				}
			}
			n.said.Remove(p)
		}
		if n.leaves && n.machine.Drained() {
			n.end()
			delete(w.bucket, n.name)
			return
		}
		n.after(w.between(beat*95/100, beat*105/100), n.announce)
	})
}

// restore restores what was taken, one partition after the other.
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

// View is what the node knows, made when it is asked for.
func (n *node) View() *cluster.View {
	if n.view == nil {
		n.view = n.machine.View()
	}
	return n.view
}

// serve tells that one node more or less serves a partition.
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

// mustServe fails if nobody serves a partition any more.
func (w *world) mustServe(p events.Partition) {
	if w.settling || w.ready[p] > 0 {
		return
	}
	if w.without.Add(p); !w.allowed(p) {
		w.Fatalf("at %v nobody serves partition %d any more", w.now, p)
	}
}

// settled says what is not as it is to be when nothing happens.
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

// writers says which partition has not one writer of snapshots, as the nodes see it.
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

// untilSettled runs until everything is where it belongs, and says how long that took.
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

// mustMove is how many partitions change hands if owners change from those among some nodes to those among others, and
// no more: at least if all see the change at once, at most if they see it node by node.
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

// heardAfter is how long after it began to serve a partition a node is known to all to do so: a beat of its own, one of
// theirs, one that was lost.
const heardAfter = 4 * beat

// query asks a node for everything, as a query for a model that every worker serves is: what anybody is known to serve
// must be found.
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
				w.Fatalf("at %v a query to %s lacks partition %d, which %s serves; asked were %v", w.now, self.name, p,
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
