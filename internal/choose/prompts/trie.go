// Package prompts has a trie of prompts with the ranks that have them.
//
//	var trie prompts.Trie[share]
//	tail := trie.Reach(hashes)
//	for n := tail; n.Parent != nil; n = n.Parent {
//		at, _ := n.Find(id)
//		n.Insert(at, prompts.Slot[share]{ID: id})
//	}
//	some := trie.Depths(query, place, depths)
//
// internal/choose/load keeps the prompts of requests under way in a trie, and internal/choose/guess the blocks that
// ranks probably hold. The owner of a trie decides about the shares of ranks.
//
// Invariants:
//  1. Every path from the root is a prompt, and no two kids of a node begin with the same hash. The path identifies a
//     block: a hash need not depend on earlier blocks.
//  2. A rank with a slot in a node has a slot in each node above, except in the root, which has no slots. The owner
//     keeps this: it inserts slots from the end of a prompt up to the root, and removes the deepest first.
//  3. Prompts end only at ends of nodes. Split keeps the pointers to ends valid.
//
// A trie may be read concurrently; changes need exclusive use.
package prompts

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Trie is a trie of prompts. The zero value is an empty trie.
type Trie[S any] struct {
	Root Node[S]

	// Copies keeps edges in memory of their own. Otherwise a node keeps the whole prompt of its first request in memory.
	Copies bool

	// Halved is called after a split. The slots of head are copies of the slots of tail. nil disables it.
	Halved func(head, tail *Node[S])
}

// Node is a run of consecutive blocks on a path from the root.
type Node[S any] struct {
	Parent *Node[S]         // nil: the root
	Edge   []events.SeqHash // the hashes of the blocks; empty in the root
	Start  int              // the number of blocks before the node
	Slots  []Slot[S]        // of the ranks with the blocks, sorted by ID

	only *Node[S] // the only kid, the usual case
	kids map[events.SeqHash]*Node[S]
	room [1]Slot[S] // of Slots, in the usual case
}

// Slot is the share of a rank in a node.
type Slot[S any] struct {
	ID    uint32 // of the rank
	Share S
}

// Common returns the number of equal leading hashes. Inlined into Depths, the loop takes twice as long, since its
// variables do not stay in registers.
//
//go:noinline
func Common(a, b []events.SeqHash) int {
	n := min(len(a), len(b))
	b = b[:n]
	for i, hash := range a[:n] {
		if hash != b[i] {
			return i
		}
	}
	return n
}

// End returns the number of blocks up to the end of the node.
func (n *Node[S]) End() int { return n.Start + len(n.Edge) }

// Path returns the hashes of all blocks up to the end of the node.
func (n *Node[S]) Path() []events.SeqHash {
	all := make([]events.SeqHash, n.End())
	for ; n.Parent != nil; n = n.Parent {
		copy(all[n.Start:], n.Edge)
	}
	return all
}

// Find returns the index of a rank's slot, or the index to insert it at and false.
func (n *Node[S]) Find(id uint32) (int, bool) {
	if len(n.Slots) == 1 { // the usual case
		return max(0, cmp.Compare(id, n.Slots[0].ID)), id == n.Slots[0].ID
	}
	return slices.BinarySearchFunc(n.Slots, id, func(s Slot[S], id uint32) int { return cmp.Compare(s.ID, id) })
}

// Insert inserts a slot at an index from Find.
func (n *Node[S]) Insert(at int, s Slot[S]) {
	if n.Slots == nil {
		n.Slots = n.room[:0]
	}
	n.Slots = slices.Insert(n.Slots, at, s)
}

// Remove removes the slot at an index, and the node from the trie if no slot is left.
func (n *Node[S]) Remove(at int) {
	if n.Slots = slices.Delete(n.Slots, at, at+1); len(n.Slots) > 0 {
		return
	}
	up := n.Parent
	if up.only == n {
		up.only = nil
		return
	}
	delete(up.kids, n.Edge[0])
	if len(up.kids) == 1 {
		for _, up.only = range up.kids {
		}
		up.kids = nil
	}
}

// Kid returns the kid that begins with a hash, or nil.
func (n *Node[S]) Kid(first events.SeqHash) *Node[S] {
	if n.only != nil && n.only.Edge[0] == first {
		return n.only
	}
	return n.kids[first]
}

// Kids iterates over the kids.
func (n *Node[S]) Kids(yield func(*Node[S]) bool) {
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

// adopt adds a kid, in place of a kid with the same first hash.
func (n *Node[S]) adopt(kid *Node[S]) {
	kid.Parent = n
	first := kid.Edge[0]
	if n.kids == nil && (n.only == nil || n.only.Edge[0] == first) {
		n.only = kid
		return
	}
	if n.kids == nil {
		n.kids = map[events.SeqHash]*Node[S]{n.only.Edge[0]: n.only}
		n.only = nil
	}
	n.kids[first] = kid
}

// Split moves the first blocks of a node, up to index at of Edge, into a new node above with the same slots, and
// returns the new node.
func (t *Trie[S]) Split(n *Node[S], at int) *Node[S] {
	head := &Node[S]{Edge: n.Edge[:at:at], Start: n.Start}
	head.Slots = append(head.room[:0], n.Slots...)
	n.Parent.adopt(head)
	n.Edge, n.Start = n.Edge[at:], n.Start+at
	head.adopt(n)
	if t.Copies {
		head.Edge, n.Edge = slices.Clone(head.Edge), slices.Clone(n.Edge)
	}
	if t.Halved != nil {
		t.Halved(head, n)
	}
	return head
}

// Reach returns the node at the end of a prompt, and creates missing nodes. The trie keeps hashes, which must not
// change.
func (t *Trie[S]) Reach(hashes []events.SeqHash) *Node[S] {
	n := &t.Root
	for pos := 0; pos < len(hashes); pos = n.End() {
		kid := n.Kid(hashes[pos])
		if kid == nil {
			kid = &Node[S]{Edge: hashes[pos:], Start: pos}
			if t.Copies && pos > 0 {
				kid.Edge = slices.Clone(kid.Edge)
			}
			n.adopt(kid)
		} else if k := Common(kid.Edge, hashes[pos:]); k < len(kid.Edge) {
			kid = t.Split(kid, k)
		}
		n = kid
	}
	return n
}

// Depths sets the number of leading hashes of seq that each rank has, at index place[ID] of depths. It skips ranks with
// a negative place, and does not change the depths of ranks without the first block. It reports whether it has set a
// depth.
//
// By invariant 2, two nodes on a path with the same number of slots have the same ranks. Therefore Depths visits only
// the ranks that end between two nodes.
func Depths[S any, D int32 | uint32](t *Trie[S], seq []events.SeqHash, place []int32, depths []D) (some bool) {
	n := &t.Root
	for pos := 0; pos < len(seq); {
		kid := n.Kid(seq[pos])
		if kid == nil {
			break
		}
		if n.Parent != nil {
			some = markEnding(n.Slots, kid.Slots, D(pos), place, depths) || some
		}
		k := Common(kid.Edge, seq[pos:])
		n, pos = kid, pos+k
		if k < len(kid.Edge) || pos == len(seq) {
			return mark(n.Slots, D(pos), place, depths) || some
		}
	}
	return mark(n.Slots, D(n.End()), place, depths) || some
}

// markEnding marks the ranks with a slot in all and none in some. The slots of some are a subsequence: up to the first
// missing rank both are equal, and after it they differ everywhere, which allows a binary search.
func markEnding[S any, D int32 | uint32](all, some []Slot[S], depth D, place []int32, depths []D) (marked bool) {
	lacks := len(all) - len(some)
	if lacks*8 >= len(all) { // a binary search per rank would cost more; the ranks of some are marked again later
		return lacks > 0 && mark(all, depth, place, depths)
	}
	for at := 0; lacks > 0; lacks-- {
		lo, hi := at, len(some) // sort.Search, inlined
		for lo < hi {
			if mid := int(uint(lo+hi) >> 1); all[mid].ID == some[mid].ID {
				lo = mid + 1
			} else {
				hi = mid
			}
		}
		marked = mark(all[lo:lo+1], depth, place, depths) || marked
		all, at = all[1:], lo
	}
	return marked
}

// mark sets the depth of ranks.
func mark[S any, D int32 | uint32](slots []Slot[S], depth D, place []int32, depths []D) (some bool) {
	for i := range slots {
		if at := place[slots[i].ID]; at >= 0 {
			depths[at], some = depth, true
		}
	}
	return some
}
