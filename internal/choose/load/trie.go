package load

import (
	"cmp"
	"math"
	"slices"
	"sort"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// node is a piece of prompts: the blocks from start to end on one path from the root. Requests end at ends of nodes
// only, and all who have one block of a node have all of it. A block is known by its path, so hashes need not commit to
// what is before them.
//
// A node is split where a request ends, leaves it, or weighs its blocks differently, and is dropped when nobody has it.
// Two nodes are not put together again.
type node struct {
	parent *node
	edge   []events.SeqHash // part of some record's hashes; the root's is empty
	start  int
	kids   map[events.SeqHash]*node // by the first hash
	slots  []slot                   // by row.serial
	first  [1]slot                  // room for the usual case
}

// slot is a rank's share of a node: how many of its requests have it, and what each block weighs.
type slot struct {
	row    *row
	weight uint64 // the greatest copy
	n      int32
	mixed  bool // the copies are not all equal
}

func (n *node) end() int { return n.start + len(n.edge) }

// slot finds a row's share.
func (n *node) slot(r *row) (int, bool) {
	if len(n.slots) == 1 { // nearly always
		switch s := n.slots[0].row.serial; {
		case s == r.serial:
			return 0, true
		case s < r.serial:
			return 1, false
		}
		return 0, false
	}
	return slices.BinarySearchFunc(n.slots, r.serial, func(s slot, serial uint64) int {
		return cmp.Compare(s.row.serial, serial)
	})
}

// Common is how many leading hashes are equal.
func Common(a, b []events.SeqHash) int {
	n := min(len(a), len(b))
	if slices.Equal(a[:n], b[:n]) {
		return n
	}
	for i := range n {
		if a[i] != b[i] {
			return i
		}
	}
	return n
}

// adopt makes kid n's.
func (n *node) adopt(kid *node) {
	kid.parent = n
	if n.kids == nil {
		n.kids = map[events.SeqHash]*node{}
	}
	n.kids[kid.edge[0]] = kid
}

// split makes a node of n's first blocks, above n, and returns it. Requests that end at n still do.
func (n *node) split(at int) *node {
	head := &node{edge: n.edge[:at:at], start: n.start}
	head.slots = append(head.first[:0], n.slots...)
	n.parent.adopt(head)
	n.edge, n.start = n.edge[at:], n.start+at
	head.adopt(n)
	return head
}

// reach returns the node at whose end a prompt ends, from the root n, and makes what is missing.
func (n *node) reach(hashes []events.SeqHash) *node {
	for pos := 0; pos < len(hashes); pos = n.end() {
		kid := n.kids[hashes[pos]]
		if kid == nil {
			kid = &node{edge: hashes[pos:], start: pos}
			n.adopt(kid)
		} else if k := Common(kid.edge, hashes[pos:]); k < len(kid.edge) {
			kid = kid.split(k)
		}
		n = kid
	}
	return n
}

// cut splits the path to n so that a node begins at block at.
func (n *node) cut(at int) {
	for n.start > at {
		n = n.parent
	}
	if n.start < at && at < n.end() {
		n.split(at - n.start)
	}
}

// enter adds a request of a row, whose copy is w.
func (n *node) enter(r *row, w uint64) {
	i, ok := n.slot(r)
	if !ok {
		if n.slots == nil {
			n.slots = n.first[:0]
		}
		n.slots = slices.Insert(n.slots, i, slot{row: r, weight: w, n: 1})
		r.weight += uint64(len(n.edge)) * w
		return
	}
	s := &n.slots[i]
	s.n++
	s.mixed = s.mixed || w != s.weight
	n.weigh(s, max(w, s.weight))
}

// leave takes one request away, which is in row.records no more, and drops the node if it was the last.
func (n *node) leave(r *row) {
	i, _ := n.slot(r)
	s := &n.slots[i]
	if s.n--; s.n > 0 {
		if s.mixed {
			n.remix(s)
		}
		return
	}
	n.weigh(s, 0)
	n.slots = slices.Delete(n.slots, i, i+1)
	if len(n.slots) == 0 {
		delete(n.parent.kids, n.edge[0])
	}
}

// change says that the copy of one request, whose runs are set, is now w.
func (n *node) change(r *row, w uint64) {
	i, _ := n.slot(r)
	if s := &n.slots[i]; s.n == 1 {
		n.weigh(s, w)
		s.mixed = false
	} else {
		n.remix(s)
	}
}

func (n *node) weigh(s *slot, w uint64) {
	s.row.weight += uint64(len(n.edge)) * (w - s.weight) // modulo 2^64, like all of it
	s.weight = w
}

// remix looks at all copies again. That is rare: see invariant 2 of [Table].
func (n *node) remix(s *slot) {
	least, most := uint64(math.MaxUint64), uint64(0)
	for _, r := range s.row.records {
		if len(r.hashes) < n.end() || !n.above(r.tail) {
			continue
		}
		w := weightAt(r.runs, n.start)
		least, most = min(least, w), max(most, w)
	}
	s.mixed = least != most
	n.weigh(s, most)
}

// above reports whether the path to tail goes through n.
func (n *node) above(tail *node) bool {
	for tail != nil && tail.start > n.start {
		tail = tail.parent
	}
	return tail == n
}

// inherited is how a new request of a row copies the weights of blocks that the row has already; n is the root.
func (n *node) inherited(r *row, hashes []events.SeqHash) (runs []run) {
	weight := uint64(one)
	note := func(at int, w uint64) {
		if w != weight {
			runs, weight = append(runs, run{uint32(at), w}), w
		}
	}
	for pos := 0; pos < len(hashes); {
		n = n.kids[hashes[pos]]
		if n == nil {
			note(pos, one)
			break
		}
		i, ok := n.slot(r)
		if !ok {
			note(pos, one)
			break
		}
		note(pos, n.slots[i].weight)
		k := Common(n.edge, hashes[pos:])
		if pos += k; k < len(n.edge) {
			if pos < len(hashes) {
				note(pos, one)
			}
			break
		}
	}
	return runs
}

// exclusive is the first of the blocks, up to n's end, that only one request of the row has; length if none is.
func (n *node) exclusive(r *row, length int) int {
	from := length
	for ; n.parent != nil; n = n.parent {
		if i, _ := n.slot(r); n.slots[i].n != 1 {
			break
		}
		from = n.start
	}
	return from
}

// depths fills in how many leading hashes of seq each row has; n is the root. Who has a node has all nodes before it:
// two nodes on the path with as many rows have the same rows, and only rows that drop out are looked at.
func (n *node) depths(depths []int32, seq []events.SeqHash) {
	for pos := 0; pos < len(seq); {
		kid := n.kids[seq[pos]]
		if kid == nil {
			break
		}
		k := Common(kid.edge, seq[pos:])
		n.markBut(kid, depths, pos)
		n, pos = kid, pos+k
		if k < len(kid.edge) || pos == len(seq) {
			n.mark(depths, pos)
			return
		}
	}
	n.mark(depths, n.end())
}

// markBut fills in the depth of rows that have n and not kid. The slots of kid are some of n's, in the same order: so
// up to the first row that kid lacks both are the same, and beyond it they differ everywhere.
func (n *node) markBut(kid *node, depths []int32, depth int) {
	lacks := len(n.slots) - len(kid.slots)
	if lacks*8 >= len(n.slots) { // each costs a binary search; kid's rows are filled in later
		if lacks > 0 {
			n.mark(depths, depth)
		}
		return
	}
	for at, found := 0, 0; found < lacks; found++ {
		all, some := n.slots[at+found:], kid.slots[at:]
		at += sort.Search(len(some), func(i int) bool { return all[i].row != some[i].row })
		depths[n.slots[at+found].row.index] = int32(depth)
	}
}

func (n *node) mark(depths []int32, depth int) {
	for i := range n.slots {
		depths[n.slots[i].row.index] = int32(depth)
	}
}
