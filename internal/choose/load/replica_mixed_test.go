package load

import (
	"fmt"
	"testing"
	"time"
)

// pairs is a node from before the ring: what some nodes may not know it compares with each other node by itself, at
// once, however much that is.
type pairs struct {
	*Replica
	doubts map[*peer]bool // something may have reached one of the two only
}

// receive takes a message as such a node does.
func (r *pairs) receive(now time.Duration, data []byte) error {
	defer r.spread()
	m, err := decode(data, r.cfg.Origin)
	if err != nil || m.kind != kindBeat || m.from == r.cfg.Origin {
		return r.accept(now, m, err)
	}
	of := m.models
	m.models = nil // of which the rest of the replica hears only that the node is there
	r.begun = 0    // no bound
	if err := r.accept(now, m, nil); err != nil {
		return err
	}
	source := r.source == m.from && r.since == now
	for i := range of {
		r.heard(m.from, &of[i], m.ready, source)
	}
	return nil
}

// heard decides whether to compare a table with another node's.
func (r *pairs) heard(from uint64, d *modelBeat, ready, source bool) {
	m := r.model(d.Model)
	t := m.table
	t.expire(r.now)
	s := t.seen[from]
	if s == nil && d.last > 0 {
		s = t.seenOf(from, r.now)
	}
	if s != nil {
		s.active = max(s.active, r.now)
	}
	p := m.peer(from, r.now)
	equal := t.sum == d.Digest && s.all(d.last)
	if equal {
		p.agreed = r.now
	}
	switch {
	case source:
		m.waiting, m.complete, m.want = true, false, map[Key]bool{}
		r.summarize(m, from, nil)
		r.recall(m, from)
	case r.ready != ready:
	case r.now-p.exchanged < exchangeGap:
	case !p.got.all(d.sent), r.doubts[p], !equal && d.calm && m.calm(r.now), r.now-p.agreed >= doubtMost:
		p.agreed = r.now
		delete(r.doubts, p)
		r.Counts.Exchanges++
		r.summarize(m, from, nil)
	}
}

// spread makes a doubt of a table one of all pairs.
func (r *pairs) spread() {
	for _, m := range r.models {
		for _, p := range m.peers {
			r.doubts[p] = r.doubts[p] || m.doubt
		}
		m.doubt = false
	}
}

// TestMixed has nodes of which some compare tables in a ring and some, from before the ring, in pairs: as while nodes
// are replaced one by one. What holds of nodes that are alike holds of them.
func TestMixed(t *testing.T) {
	var tables Counts
	var replicas ReplicaCounts
	for round := range uint64(max(*rounds/4, 1)) {
		if err := history(*seed+round, 0.5, &tables, &replicas); err != nil {
			t.Errorf("-seed=%d -rounds=1: %v", *seed+round, err)
		}
	}
	t.Logf("%+v", replicas)
}

// TestNodesAreReplacedByOnesWithARing replaces six nodes one by one while all book. After each of them has gone the
// others have the same again though tables change all the time, and the new ones have all.
func TestNodesAreReplacedByOnesWithARing(t *testing.T) {
	w := newWorld(*seed, 0, Limits{})
	w.pairs = 1
	for i := range 6 {
		w.nodes = append(w.nodes, nil)
		w.start(i)
	}
	w.run(2 * time.Second)
	w.pairs = 0
	m, booked := testModels[0], 0
	busy := func(d time.Duration, but int) {
		for end := w.now + d; w.now < end; w.run(10 * time.Millisecond) {
			if n := w.nodes[booked%6]; n.place != but {
				if err := n.Book(w.now, m, Booking{ID: fmt.Sprint("r", booked), Rank: rankKey(booked % 8)}); err != nil {
					t.Fatal(err)
				}
			}
			if booked++; booked > 200 {
				_ = w.nodes[(booked+3)%6].Free(w.now, m, fmt.Sprint("r", booked-200))
			}
		}
	}
	for place := range 6 {
		busy(3*time.Second, place)
		// Its last booking reaches one of the others only, of each kind in turn.
		old := w.nodes[place]
		for _, n := range w.nodes {
			if n.group = 1; n.place == (place+1+place%2*4)%6 || n == old {
				n.group = 0
			}
		}
		if err := old.Book(w.now, m, Booking{ID: fmt.Sprint("last", place), Rank: rankKey(0)}); err != nil {
			t.Fatal(err)
		}
		w.run(20 * time.Millisecond)
		for _, n := range w.nodes {
			n.group = 0
		}
		w.start(place)
		busy(4*time.Second, place)
		w.run(2 * time.Second)
		if err := w.check(0); err != nil {
			t.Fatalf("%d of 6 are replaced: %v", place+1, err)
		}
		if !w.nodes[place].Ready() || !w.nodes[place].Table(m).Has(fmt.Sprint("last", place)) {
			t.Errorf("%d of 6 are replaced: the last booking of the one that went is not known to the new one", place+1)
		}
	}
}
