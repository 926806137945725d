package guess

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// node is a piece of prompts: the blocks from start on, on one path from the root. A block is known by its path. Leased
// requests end at ends of nodes only, and every rank that has one block of a node has all of it.
type node struct {
	parent *node
	edge   []events.SeqHash // the root's is empty
	start  int
	only   *node                    // its kid, if it has one, as most nodes
	kids   map[events.SeqHash]*node // by the first hash, if it has several
	slots  []ref                    // by id
}

// ref is a slot, beside its rank's id, so that a query need not follow the pointer.
type ref struct {
	id uint32
	*slot
}

// slot is what a rank is guessed to hold: all blocks of a node.
type slot struct {
	rank   *rank
	node   *node // nil: what ended requests have left behind, which has no hashes
	blocks int   // of one without a node
	used   time.Duration
	leases int // requests under way that have the node
	at     int // in rank.queue; -1: it is leased

	owner load.Key      // of the request that was last sent there
	due   time.Duration // when that had its first output token, or ended: the blocks are there; 0: not yet
}

func (n *node) end() int { return n.start + len(n.edge) }

// path is all hashes up to n's end.
func (n *node) path() []events.SeqHash {
	all := make([]events.SeqHash, n.end())
	for ; n.parent != nil; n = n.parent {
		copy(all[n.start:], n.edge)
	}
	return all
}

// covered reports whether a request that was as late at the slot's rank went further.
func (s *slot) covered() bool {
	if s.node == nil {
		return false
	}
	for kid := range s.node.each {
		if i, ok := kid.slot(s.rank.id); ok && kid.slots[i].used == s.used {
			return true
		}
	}
	return false
}

// slot finds a rank's slot.
func (n *node) slot(id uint32) (int, bool) {
	return slices.BinarySearchFunc(n.slots, id, func(r ref, id uint32) int { return cmp.Compare(r.id, id) })
}

// kid is the one that begins with a hash; nil if there is none.
func (n *node) kid(first events.SeqHash) *node {
	if n.only != nil && n.only.edge[0] == first {
		return n.only
	}
	return n.kids[first]
}

// each iterates over n's kids.
func (n *node) each(yield func(*node) bool) {
	if n.only != nil {
		yield(n.only)
		return
	}
	for _, kid := range n.kids {
		if !yield(kid) {
			return
		}
	}
}

// adopt makes kid n's, in place of one with the same first hash.
func (n *node) adopt(kid *node) {
	kid.parent = n
	first := kid.edge[0]
	if n.kids == nil && (n.only == nil || n.only.edge[0] == first) {
		n.only = kid
		return
	}
	if n.kids == nil {
		n.kids = map[events.SeqHash]*node{n.only.edge[0]: n.only}
		n.only = nil
	}
	n.kids[first] = kid
}

// orphan takes kid away from n.
func (n *node) orphan(kid *node) {
	if n.only == kid {
		n.only = nil
		return
	}
	delete(n.kids, kid.edge[0])
	if len(n.kids) == 1 {
		for _, n.only = range n.kids {
		}
		n.kids = nil
	}
}

// split makes a node of n's first blocks, above n, with slots like n's, and returns it. Both have hashes of their own,
// so that one does not keep the other's in memory.
func (n *node) split(at int) *node {
	head := &node{edge: slices.Clone(n.edge[:at]), start: n.start, slots: slices.Clone(n.slots)}
	n.parent.adopt(head)
	n.edge, n.start = slices.Clone(n.edge[at:]), n.start+at
	head.adopt(n)
	for i := range head.slots {
		s := *head.slots[i].slot
		s.node = head
		head.slots[i].slot = &s
		if s.at >= 0 {
			heap.Push(&s.rank.queue, &s) // the old one's place among the others stays
		}
	}
	return head
}

// reach returns the node at whose end a prompt ends, from the root n, and makes what is missing.
func (n *node) reach(hashes []events.SeqHash) *node {
	for pos := 0; pos < len(hashes); pos = n.end() {
		kid := n.kid(hashes[pos])
		if kid == nil {
			edge := hashes
			if pos > 0 { // else a long prompt would stay in memory for its end
				edge = slices.Clone(hashes[pos:])
			}
			kid = &node{edge: edge, start: pos}
			n.adopt(kid)
		} else if k := load.Common(kid.edge, hashes[pos:]); k < len(kid.edge) {
			kid = kid.split(k)
		}
		n = kid
	}
	return n
}

// depths calls mark for every rank that has the first block of seq, perhaps more than once; the last call has the
// depth. Who has a node has all nodes before it: two nodes on the path with as many slots have the same ranks, and only
// ranks that drop out are looked at. n is the root.
func (n *node) depths(seq []events.SeqHash, mark func(list []ref, depth int)) {
	for pos := 0; pos < len(seq); {
		kid := n.kid(seq[pos])
		if kid == nil {
			break
		}
		k := load.Common(kid.edge, seq[pos:])
		n.markBut(kid, pos, mark)
		n, pos = kid, pos+k
		if k < len(kid.edge) || pos == len(seq) {
			mark(n.slots, pos)
			return
		}
	}
	if n.parent != nil {
		mark(n.slots, n.end())
	}
}

// markBut marks ranks that have n and not kid. Kid's slots are some of n's, in the same order: up to the first rank
// that kid lacks both are the same, and beyond it they differ everywhere.
func (n *node) markBut(kid *node, depth int, mark func([]ref, int)) {
	lacks := len(n.slots) - len(kid.slots)
	if lacks == 0 || n.parent == nil {
		return
	}
	if lacks*8 >= len(n.slots) { // each costs a binary search; kid's ranks are marked again later
		mark(n.slots, depth)
		return
	}
	for at, found := 0, 0; found < lacks; found++ {
		all, some := n.slots[at+found:], kid.slots[at:]
		lo, hi := 0, len(some) // sort.Search, inlined
		for lo < hi {
			if mid := (lo + hi) / 2; all[mid].id == some[mid].id {
				lo = mid + 1
			} else {
				hi = mid
			}
		}
		at += lo
		mark(n.slots[at+found:at+found+1], depth)
	}
}

// size is how many blocks a slot stands for.
func (s *slot) size() int {
	if s.node == nil {
		return s.blocks
	}
	return len(s.node.edge)
}

// depth orders what was used at the same time: what has no hashes is the end of its request.
func (s *slot) depth() int {
	if s.node == nil {
		return int(^uint(0) >> 1)
	}
	return s.node.start
}

// queue is a heap of slots: the one that was used longest ago is on top, and of one prompt its end.
type queue []*slot

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if q[i].used != q[j].used {
		return q[i].used < q[j].used
	}
	return q[i].depth() > q[j].depth()
}
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at, q[j].at = i, j
}

func (q *queue) Push(x any) {
	s := x.(*slot)
	s.at = len(*q)
	*q = append(*q, s)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	s := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	s.at = -1
	return s
}
