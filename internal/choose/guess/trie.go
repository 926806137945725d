package guess

import (
	"cmp"
	"container/heap"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// node is a node of the trie: consecutive blocks on a path from the root. The path identifies a block. Leased requests
// end only at the ends of nodes. A rank with any block of a node has all blocks of the node.
type node struct {
	parent *node
	edge   []events.SeqHash         // the hashes of the blocks; empty in the root
	start  int                      // the number of blocks before the node
	only   *node                    // the only kid, the usual case
	kids   map[events.SeqHash]*node // two or more kids, by the first hash
	slots  []ref                    // sorted by id
}

// ref is a slot with the id of its rank, which a query reads without following the pointer.
type ref struct {
	id uint32
	*slot
}

// slot is the guess that a rank holds all blocks of a node.
type slot struct {
	rank   *rank
	node   *node // nil: blocks without hashes of an ended request
	blocks int   // the number of blocks without a node
	used   time.Duration
	leases int // the number of requests under way with the node
	at     int // the index in rank.queue; -1 with a lease

	owner load.Key      // the last request with the node
	due   time.Duration // the time of the owner's first output token or end: the rank has the blocks; 0: not yet
}

func (n *node) end() int { return n.start + len(n.edge) }

// path returns all hashes up to n's end.
func (n *node) path() []events.SeqHash {
	all := make([]events.SeqHash, n.end())
	for ; n.parent != nil; n = n.parent {
		copy(all[n.start:], n.edge)
	}
	return all
}

// covered reports whether an equally recent request at the slot's rank went further.
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

// slot returns the index of a rank's slot, and whether the node has one.
func (n *node) slot(id uint32) (int, bool) {
	return slices.BinarySearchFunc(n.slots, id, func(r ref, id uint32) int { return cmp.Compare(r.id, id) })
}

// kid returns the kid with a hash at the beginning of the edge, or nil.
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

// adopt adds a kid to n, in place of a kid with the same first hash.
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

// removeKid removes a kid from n.
func (n *node) removeKid(kid *node) {
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

// split moves n's first blocks into a new node above n with equal slots, and returns it. The edges do not share memory,
// so that one node does not keep the hashes of the other.
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
			heap.Push(&s.rank.queue, &s) // the position of the old slot stays
		}
	}
	return head
}

// reach returns the node at the end of a prompt, and creates missing nodes. n is the root.
func (n *node) reach(hashes []events.SeqHash) *node {
	for pos := 0; pos < len(hashes); pos = n.end() {
		kid := n.kid(hashes[pos])
		if kid == nil {
			edge := hashes
			if pos > 0 { // otherwise the edge would keep the whole prompt in memory
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

// depths calls mark for every rank with the first block of seq, possibly more than once; the last call has the depth. A
// rank with a slot in a node has slots in all nodes before it. Therefore two nodes on the path with the same number of
// slots have the same ranks, and depths visits only the ranks that end between two nodes. n is the root.
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

// markBut marks the ranks with a slot in n and none in kid. Kid's slots are a subsequence of n's: up to the first
// missing rank both are equal, and after it they differ everywhere, which allows a binary search.
func (n *node) markBut(kid *node, depth int, mark func([]ref, int)) {
	lacks := len(n.slots) - len(kid.slots)
	if lacks == 0 || n.parent == nil {
		return
	}
	if lacks*8 >= len(n.slots) { // a binary search per rank would cost more; kid's ranks are marked again later
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

// size returns the number of the slot's blocks.
func (s *slot) size() int {
	if s.node == nil {
		return s.blocks
	}
	return len(s.node.edge)
}

// depth orders slots with equal times of use. Blocks without hashes are the end of a request.
func (s *slot) depth() int {
	if s.node == nil {
		return int(^uint(0) >> 1)
	}
	return s.node.start
}

// queue is a heap of slots with the least recently used slot on top; of the slots of one prompt, the last one.
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
