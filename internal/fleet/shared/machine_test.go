package shared

import (
	"cmp"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

// TestNodes plays random histories: nodes change entries while messages are lost, late, duplicated and reordered, nodes
// are cut off for seconds, killed and restarted, and clocks differ. Two seconds after the last fault, all nodes have
// the same entries, no entry of a living node is lost, and no ended entry has reappeared on its node. Without further
// creations, all entries end, and missing owners are dropped.
func TestNodes(t *testing.T) {
	var total Counts
	created := 0
	for round := range uint64(*rounds) {
		w, err := history(*seed + round)
		if err != nil {
			t.Errorf("-seed=%d -rounds=1: %d nodes at %v: %v", *seed+round, len(w.Nodes), w.Now, err)
		}
		created += len(w.keys)
		for _, n := range w.Nodes {
			total.Exchanges += n.Counts.Exchanges
			total.Pushed += n.Counts.Pushed
			total.Repeated += n.Counts.Repeated
			total.Healed += n.Counts.Healed
			total.Stray += n.Counts.Stray
			total.Unsynced += n.Counts.Unsynced
			total.Malformed += n.Counts.Malformed
		}
	}
	t.Logf("%d entries; %+v", created, total)
	if total.Malformed > 0 || *rounds >= 100 && (total.Exchanges == 0 || total.Pushed == 0 || total.Repeated == 0 ||
		total.Healed == 0 || total.Stray == 0) {
		t.Error("some kinds of events did not occur")
	}
}

func history(seed uint64) (*world, error) {
	r := rand.New(rand.NewPCG(seed, 3))
	most := 4
	switch {
	case seed%20 == 0:
		most = 63
	case seed%5 == 0:
		most = 8
	}
	life := []time.Duration{8 * time.Second, 300 * time.Second}[r.IntN(2)]
	if most > 8 {
		life = 8 * time.Second // otherwise the beats of the final quiet time need long
	}
	w := newWorld(seed, 2, life)
	w.skewed = true
	w.names = []int{60, 100_000}[r.IntN(2)]
	for range r.IntN(most) {
		w.start(len(w.Nodes))
	}
	w.Run(2 * time.Second)
	late := time.Duration(0)
	for range 4 + r.IntN(8) {
		switch r.IntN(8) {
		case 0:
			w.Loss = r.Float64() * 0.7
		case 1:
			w.Twice = r.Float64()
		case 2:
			w.Delay, w.Ordered = time.Duration(1+r.IntN(3000))*time.Millisecond, r.IntN(2) == 0
			late = max(late, w.Delay)
		case 3, 4:
			for _, n := range w.Nodes {
				n.Group = r.IntN(3)
			}
		case 5, 6:
			w.start(r.IntN(len(w.Nodes)))
		case 7:
			w.heal()
		}
		for range r.IntN(80) {
			w.op()
			w.Run(time.Duration(r.IntN(60)) * time.Millisecond)
		}
	}
	w.heal()
	w.Run(2 * time.Second)
	late = 4*late + 3*time.Second
	if err := w.check(late); err != nil {
		for i := range 100 {
			w.Run(100 * time.Millisecond)
			if w.differ(late) == nil {
				return w, fmt.Errorf("after the faults, %d00 ms late: %w", i+1, err)
			}
		}
		return w, fmt.Errorf("after the faults: %w", err)
	}
	w.Run(w.life + late)
	if err := w.check(late); err != nil {
		return w, fmt.Errorf("at the end: %w", err)
	}
	w.Run(3*w.life + 10*time.Second)
	for _, n := range w.Nodes {
		if !n.Ready() || n.size > 0 || len(n.pending) > 0 || len(n.owners) > len(w.Nodes) {
			return w, fmt.Errorf("node %d: ready %v, %d entries, %d pending, %d owners of %d nodes", n.Place, n.Ready(),
				n.size, len(n.pending), len(n.owners), len(w.Nodes))
		}
	}
	return w, nil
}

// quiet is a world of ready nodes without faults.
func quiet(t *testing.T, n int) *world {
	w := newWorld(*seed, n, 300*time.Second)
	w.Ordered = true
	w.Run(2 * time.Second)
	for _, n := range w.Nodes {
		if !n.Ready() {
			t.Fatalf("node %d is not ready", n.Place)
		}
	}
	return w
}

func (w *world) exchanges() (n uint64) {
	for _, x := range w.Nodes {
		n += x.Counts.Exchanges
	}
	return n
}

// TestBusyNodesAskNothing: a writer's digest is valid at its position in the writer's messages. Nodes with constantly
// changing entries send no requests, and detect a loss at the next beat.
func TestBusyNodesAskNothing(t *testing.T) {
	w := quiet(t, 3)
	work := func(d time.Duration) {
		for end := w.Now + d; w.Now < end; w.Run(time.Millisecond) {
			w.op()
		}
	}
	work(3 * time.Second)
	if n := w.exchanges(); n > 0 {
		t.Errorf("%d exchanges though nothing was lost", n)
	}
	w.Loss = 1
	work(20 * time.Millisecond)
	w.Loss = 0
	work(1500 * time.Millisecond)
	if w.exchanges() == 0 {
		t.Error("the loss was not found")
	}
	w.Run(10 * time.Millisecond)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
}

// TestOwnersThatDie: after the death of a quarter of 64 nodes, there are no requests and no repeated messages.
func TestOwnersThatDie(t *testing.T) {
	w := quiet(t, 64)
	for i := range 640 {
		w.create(w.Nodes[i%64])
	}
	w.Run(time.Second)
	for i := range 16 {
		w.Nodes[4*i].Group = 1 + i // alive, but cut off from all nodes
	}
	w.Run(4 * time.Second)
	first := w.Nodes[1]
	for _, n := range w.Nodes {
		if n.Group == 0 && (n.Counts.Exchanges > 0 || n.Counts.Pushed > 0 || len(n.rows) != len(first.rows)) {
			t.Errorf("node %d: %d entries, %+v", n.Place, len(n.rows), n.Counts)
		}
	}
}

// TestNodesThatWereApart changes entries on sixteen nodes without connections. Then each pair exchanges one request,
// and entries that many nodes lack are sent to all once.
func TestNodesThatWereApart(t *testing.T) {
	const nodes, each = 16, 40
	w := quiet(t, nodes)
	for i, n := range w.Nodes {
		n.Group = i
	}
	for range each {
		for _, n := range w.Nodes {
			w.create(n)
		}
	}
	w.Run(8 * time.Second)
	before := w.Received
	w.heal()
	w.Run(2 * time.Second)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
	if n := w.exchanges(); n > nodes*nodes {
		t.Errorf("%d exchanges of %d nodes", n, nodes)
	}
	pushed := uint64(0)
	for _, n := range w.Nodes {
		pushed += n.Counts.Pushed
	}
	if pushed < uint64(len(w.keys)) || pushed > 2*nodes*each {
		t.Errorf("%d entries were sent again, %d are missed", pushed, len(w.keys))
	}
	t.Logf("each node received %d bytes", (w.Received-before)/nodes)
}

// TestStart starts a node among others: when ready, the node has all entries, despite many losses. No node receives its
// own entries again. The entries of a stopped node stay on the remaining nodes.
func TestStart(t *testing.T) {
	for _, loss := range []float64{0, 0.3} {
		w := quiet(t, 3)
		for i := range 2000 {
			w.create(w.Nodes[i%3])
		}
		w.Nodes[0].memory = []string{"a", "b"}
		w.Nodes[1].memory = w.Nodes[0].memory
		w.Run(time.Second)
		w.Loss = loss
		n, began := w.start(2), w.Now
		for !n.Ready() {
			w.Run(time.Millisecond)
		}
		if took := w.Now - began; n.Counts.Unsynced > 0 || loss == 0 && took > 50*time.Millisecond {
			t.Errorf("loss %v: ready after %v, %+v", loss, took, n.Counts)
		}
		if len(n.rows) != len(w.Nodes[0].rows) || loss == 0 && len(n.memory) != 2 {
			t.Errorf("loss %v: ready with %d of %d entries, and memories %v", loss, len(n.rows), len(w.Nodes[0].rows),
				n.memory)
		}
		w.heal()
		w.Run(3 * time.Second)
		if err := w.check(0); err != nil {
			t.Errorf("loss %v: %v", loss, err)
		}
	}
}

// TestAlone: a node without other nodes is ready soon, and sends only beats.
func TestAlone(t *testing.T) {
	w := newWorld(*seed, 1, time.Minute)
	n := w.Nodes[0]
	if w.Run(time.Second); n.Ready() {
		t.Error("ready before another node could answer")
	}
	w.Run(time.Second)
	if before := w.Received; !n.Ready() || before == 0 {
		t.Errorf("ready %v", n.Ready())
	}
	for range 100 {
		w.create(n)
	}
	before := w.Received
	if w.Run(400 * time.Millisecond); w.Received-before > 200 {
		t.Errorf("%d bytes were sent to no node", w.Received-before)
	}
}

// TestMessagesAreBounded: many changes at once, and the answer to a node without them, are messages of bounded size.
func TestMessagesAreBounded(t *testing.T) {
	w := quiet(t, 2)
	w.names = 1 << 40
	for range 5_000 {
		w.create(w.Nodes[0])
	}
	w.Run(10 * time.Millisecond)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
	w.start(1)
	w.Run(time.Second)
	if err := w.check(0); err != nil {
		t.Error(err)
	}
	if w.Largest > batchBytes+partPoints*16 {
		t.Errorf("a message of %d bytes", w.Largest)
	}
}

// TestAnEndOutlivesTheWriterThatPublishedIt: a node writes for a missing owner, publishes an end and is killed. A node
// without the end returns and becomes the writer: the entry does not reappear.
func TestAnEndOutlivesTheWriterThatPublishedIt(t *testing.T) {
	w := quiet(t, 5)
	k := w.create(w.Nodes[0])
	w.create(w.Nodes[0])
	w.Run(10 * time.Millisecond)
	rest := slices.SortedFunc(slices.Values(w.Nodes[1:]), func(a, b *life) int {
		return cmp.Compare(a.Origin(), b.Origin())
	})
	away, writer := rest[0], rest[1]
	away.Group, w.Nodes[0].Group = 1, 2
	w.Run(3 * time.Second)
	if !writer.Writes(k) || !away.Writes(k) {
		t.Fatal("two nodes do not write, each on its side")
	}
	w.end(writer, k)
	w.Run(time.Second)
	writer.Group, away.Group = 3, 0
	w.Run(3 * time.Second)
	for _, n := range rest[2:] {
		if _, there := n.rows[k]; there || n.wrong != nil || !away.Writes(k) || len(n.rows) != 1 || len(away.rows) != 1 {
			t.Errorf("node %d has %d entries, the node that was away %d: %v", n.Place, len(n.rows), len(away.rows), n.wrong)
		}
	}
}
