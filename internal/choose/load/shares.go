package load

import (
	"math"

	"github.com/kvatlas/kvatlas/internal/choose/prompts"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// node is a node of the trie of all requests' prompts. The table splits a node where a prompt ends, leaves the path, or
// has blocks of another weight. The table removes a node with its last request. Nodes are never merged.
type node = prompts.Node[share]

// share is the share of a row in a node.
type share struct {
	weight uint64 // of each block: the greatest copy
	n      int32  // requests with the node
	mixed  bool   // the copies differ
}

// cut splits the path to n so that a node begins at the block at.
func (t *Table) cut(n *node, at int) {
	for n.Start > at {
		n = n.Parent
	}
	if n.Start < at && at < n.End() {
		t.prompts.Split(n, at-n.Start)
	}
}

// enter adds a request of the row to a node. w is the weight of each block.
func (r *row) enter(n *node, w uint64) {
	i, ok := n.Find(r.id)
	if !ok {
		n.Insert(i, prompts.Slot[share]{ID: r.id, Share: share{weight: w, n: 1}})
		r.weight += uint64(len(n.Edge)) * w
		return
	}
	s := &n.Slots[i].Share
	s.n++
	s.mixed = s.mixed || w != s.weight
	r.weigh(n, s, max(w, s.weight))
}

// leave removes a request from a node, and removes the node after the last request. The request is no longer in
// row.records.
func (r *row) leave(n *node) {
	i, _ := n.Find(r.id)
	s := &n.Slots[i].Share
	if s.n--; s.n > 0 {
		if s.mixed {
			r.remix(n, s)
		}
		return
	}
	r.weigh(n, s, 0)
	n.Remove(i)
}

// change sets the weight of a request to w. The runs of the request are already set.
func (r *row) change(n *node, w uint64) {
	i, _ := n.Find(r.id)
	if s := &n.Slots[i].Share; s.n == 1 {
		r.weigh(n, s, w)
		s.mixed = false
	} else {
		r.remix(n, s)
	}
}

func (r *row) weigh(n *node, s *share, w uint64) {
	r.weight += uint64(len(n.Edge)) * (w - s.weight) // modulo 2^64
	s.weight = w
}

// remix reads all copies again. Copies rarely differ: see invariant 2 of [Table].
func (r *row) remix(n *node, s *share) {
	least, most := uint64(math.MaxUint64), uint64(0)
	for _, q := range r.records {
		if len(q.hashes) < n.End() || !above(n, q.tail) {
			continue
		}
		w := weightAt(q.runs, n.Start)
		least, most = min(least, w), max(most, w)
	}
	s.mixed = least != most
	r.weigh(n, s, most)
}

// above reports whether the path to tail contains n.
func above(n, tail *node) bool {
	for tail != nil && tail.Start > n.Start {
		tail = tail.Parent
	}
	return tail == n
}

// inherited returns the weights of a new request: copies of the weights of the row's blocks.
func (t *Table) inherited(r *row, hashes []events.SeqHash) (runs []run) {
	weight := uint64(one)
	note := func(at int, w uint64) {
		if w != weight {
			runs, weight = append(runs, run{uint32(at), w}), w
		}
	}
	n := &t.prompts.Root
	for pos := 0; pos < len(hashes); {
		n = n.Kid(hashes[pos])
		if n == nil {
			note(pos, one)
			break
		}
		i, ok := n.Find(r.id)
		if !ok {
			note(pos, one)
			break
		}
		note(pos, n.Slots[i].Share.weight)
		k := prompts.Common(n.Edge, hashes[pos:])
		if pos += k; k < len(n.Edge) {
			if pos < len(hashes) {
				note(pos, one)
			}
			break
		}
	}
	return runs
}

// exclusive returns the first block of the path to n's end held by only a single request of the row, or length.
func (r *row) exclusive(n *node, length int) int {
	from := length
	for ; n.Parent != nil; n = n.Parent {
		if i, _ := n.Find(r.id); n.Slots[i].Share.n != 1 {
			break
		}
		from = n.Start
	}
	return from
}
