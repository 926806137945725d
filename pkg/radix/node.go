package radix

import (
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// node is a run of consecutive blocks in the arena. Readers load its words atomically between two looks at its version.
type node struct {
	version  uint32 // odd while the writer changes the node, its holders or its children; never goes back
	parent   uint32 // 0: this is the root of a space, and has no blocks; or the node is free
	start    uint32 // block
	len      uint32
	depth    uint32 // how many blocks come before it
	children uint32
	parts    uint32 // where its list of parts begins
	nparts   uint32
}

// view is what readers go by. A slice is replaced, and a new view published, when it has to move; a reader that finds
// another view at its end starts again, so what the old one holds stays as it was.
type view struct {
	nodes []node
	// by plane and node, stride words each: the ranks that hold all of it; nil for a plane that nobody uses
	masks  [planeWatch + 1][]uint64
	planes int    // all of holders that are in use are below it
	ends   []part // by node: on what those who have all of it agree; see ends.go
	stride int
	parts  []part
	bits   []uint64 // bitmaps of parts
	edges  []uint64 // a power of two: hash<<32 | child, 0 or gone
	starts []uint32 // by edge: where its child's run begins, to be asked for early; where there is none it means nothing
	locals []uint64 // by block
	ids    []uint32 // RankID by slot
	roots  []root
	// by slot: how engines load copies, and who loads chunks; empty if nobody does
	loading []events.Loading
	chunked []uint64
	reuse   []*reuse // by slot: what limits a rank's prefixes beside what it holds; empty if there is no such rank
	kinds   []kind   // the same, the other way round
}

// root is the node above all first blocks of a space.
type root struct{ space, node uint32 }

func (v *view) root(space uint32) uint32 {
	for _, r := range v.roots {
		if r.space == space {
			return r.node
		}
	}
	return 0
}

// edgeHash spreads (parent, first local hash).
func edgeHash(parent uint32, local uint64) uint64 {
	h := (local ^ uint64(parent)*0xff51afd7ed558ccd) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}

const (
	edgeGone = 1  // the place of an edge that was taken away; node 0 is no child
	runAhead = 32 // words of a child's run that are asked for before the node says where they are
)

// edge finds the edge from parent to the child that begins with local: its slot, and the child; 0 if there is none.
func (v *view) edge(parent uint32, local uint64) (slot int, child uint32) {
	h := edgeHash(parent, local)
	mask := uint64(len(v.edges) - 1)
	for i, probes := h&mask, 0; probes < len(v.edges); i, probes = (i+1)&mask, probes+1 {
		e := atomic.LoadUint64(&v.edges[i])
		if e == 0 {
			break
		}
		if c := uint32(e); e>>32 == h>>32 && e != edgeGone && int(c) < len(v.nodes) {
			if start := int(atomic.LoadUint32(&v.starts[i])); start < len(v.locals) {
				prefetchWords(&v.locals[start], runAhead)
			}
			n := &v.nodes[c]
			start := atomic.LoadUint32(&n.start)
			if atomic.LoadUint32(&n.parent) == parent && int(start) < len(v.locals) &&
				atomic.LoadUint64(&v.locals[start]) == local {
				return int(i), c
			}
		}
	}
	return 0, 0
}

// lock is the writer's side of a node's seqlock: it makes the version odd, after the export that is under way, if any,
// has taken its copy. Locks of one node do not nest.
func (x *Index) lock(n uint32) {
	x.touch(n)
	atomic.AddUint32(&x.v.nodes[n].version, 1)
}

// touch says that what an image tells of a node is about to change.
func (x *Index) touch(n uint32) {
	for _, e := range x.exports {
		e.before(n)
	}
}

// unlock makes the version even again.
func (x *Index) unlock(n uint32) { atomic.AddUint32(&x.v.nodes[n].version, 1) }

// publish gives readers a new view: the one they have, changed by f.
func (x *Index) publish(f func(v *view)) {
	v := *x.v
	f(&v)
	x.v = &v
	x.view.Store(x.v)
}

// firstNode is the first id of a node that is no root. Those below are for the roots of the first spaces, so that their
// number does not stand in the way of the ids that an image wishes for.
const firstNode = 16

// newRoot makes a node above the first blocks of a space.
func (x *Index) newRoot() uint32 {
	if id := uint32(len(x.v.roots)) + 1; id < firstNode {
		x.nodes++
		return id
	}
	return x.newNode(0, node{})
}

// newNode takes a free node, and makes its words those of a node without holders and children. wish is the id to take
// if it can be had; 0 is no wish.
func (x *Index) newNode(wish uint32, n node) uint32 {
	id := x.freeNode(wish)
	x.nodes++
	p := &x.v.nodes[id]
	atomic.AddUint32(&p.version, 1)
	put32(&p.parent, n.parent)
	put32(&p.start, n.start)
	put32(&p.len, n.len)
	put32(&p.depth, n.depth)
	p.children = 0
	put32(&p.parts, 0)
	put32(&p.nparts, 0)
	atomic.AddUint32(&p.version, 1)
	return id
}

func (x *Index) freeNode(wish uint32) uint32 {
	if wish != 0 && x.wishable(wish) {
		for int(wish) >= len(x.v.nodes) {
			x.growNodes()
		}
		for x.nodeEnd <= wish {
			x.freeNodes.add(x.nodeEnd)
			x.nodeEnd++
		}
		if x.freeNodes.take(wish) {
			return wish
		}
	}
	if x.freeNodes.n > 0 && wish == 0 { // who wished in vain takes nobody else's
		id := x.freeNodes.lowest()
		x.freeNodes.take(id)
		return id
	}
	if int(x.nodeEnd) == len(x.v.nodes) {
		x.growNodes()
	}
	x.nodeEnd++
	return x.nodeEnd - 1
}

// wishable keeps an image with wild numbers from making the array of nodes wildly large.
func (x *Index) wishable(id uint32) bool { return int(id) < 2*len(x.v.nodes)+1<<16 }

func (x *Index) growNodes() {
	size := len(x.v.nodes) + len(x.v.nodes)/4 + 16
	x.publish(func(v *view) {
		v.nodes = append(make([]node, 0, size), v.nodes...)[:size]
		for t, m := range v.masks {
			if m != nil {
				v.masks[t] = append(make([]uint64, 0, size*v.stride), m...)[:size*v.stride]
			}
		}
		if v.ends != nil {
			v.ends = append(make([]part, 0, size), v.ends...)[:size]
		}
	})
	x.kin = append(make([]kin, 0, size), x.kin...)[:size]
}

// kin is where a node stands among the children of its parent.
type kin struct {
	child, next, before uint32 // the first of its own children; the next and the one before of its parent's
	misses              int32  // how many ends did not agree with view.ends; see ends.go
}

// adopt puts a node at the head of its parent's children.
func (x *Index) adopt(parent, child uint32) {
	next := x.kin[parent].child
	x.kin[child].next, x.kin[child].before = next, 0
	if next != 0 {
		x.kin[next].before = child
	}
	x.kin[parent].child = child
}

// disown takes it out.
func (x *Index) disown(parent, child uint32) {
	k := &x.kin[child]
	if k.before != 0 {
		x.kin[k.before].next = k.next
	} else {
		x.kin[parent].child = k.next
	}
	if k.next != 0 {
		x.kin[k.next].before = k.before
	}
}

// link adds an edge from a parent, which is open, to a child.
func (x *Index) link(parent, child uint32) {
	if (x.edgeUsed+1)*4 > len(x.v.edges)*3 {
		x.rehashEdges()
	}
	local := x.v.locals[x.v.nodes[child].start]
	h := edgeHash(parent, local)
	mask := uint64(len(x.v.edges) - 1)
	i := h & mask
	for x.v.edges[i] != 0 {
		i = (i + 1) & mask
	}
	x.edgeUsed++
	x.edgeCount++
	put32(&x.v.starts[i], x.v.nodes[child].start)
	put64(&x.v.edges[i], h>>32<<32|uint64(child))
	if x.v.nodes[parent].children == mostWide && x.v.masks[planeWatch] != nil {
		x.tooWide(parent)
	}
	x.v.nodes[parent].children++
	x.adopt(parent, child)
}

// unlink takes the edge away that leads to a child from its parent, which is open.
func (x *Index) unlink(child uint32) {
	n := &x.v.nodes[child]
	i, _ := x.v.edge(n.parent, x.v.locals[n.start])
	put64(&x.v.edges[i], edgeGone)
	x.edgeCount--
	x.v.nodes[n.parent].children--
	x.disown(n.parent, child)
}

// rehashEdges makes a new table, larger if need be, without the places of edges that are gone.
func (x *Index) rehashEdges() {
	size := 64
	for size*3 < (x.edgeCount+1)*4*3/2 {
		size *= 2
	}
	old := x.v.edges
	edges, starts := make([]uint64, size), make([]uint32, size)
	mask := uint64(size - 1)
	for _, e := range old {
		if e != 0 && e != edgeGone {
			n := &x.v.nodes[uint32(e)]
			i := edgeHash(n.parent, x.v.locals[n.start]) & mask
			for edges[i] != 0 {
				i = (i + 1) & mask
			}
			edges[i], starts[i] = e, n.start
		}
	}
	x.edgeUsed = x.edgeCount
	x.publish(func(v *view) { v.edges, v.starts = edges, starts })
}

// split cuts a node in two before its block at off. The blocks before get a new node, which it returns; the rest, with
// the children, stays the node that it was, so that no child has to learn of another parent.
func (x *Index) split(id uint32, off uint32) uint32 {
	x.splits++
	v := x.v
	n := v.nodes[id]
	head := x.newNode(0, node{parent: n.parent, start: n.start, len: off, depth: n.depth})
	if (x.edgeUsed+1)*4 > len(x.v.edges)*3 {
		x.rehashEdges()
	}
	v = x.v
	x.lock(n.parent)
	x.lock(id)
	x.lock(head)
	slot, _ := v.edge(n.parent, v.locals[n.start])
	put64(&v.edges[slot], edgeHash(n.parent, v.locals[n.start])>>32<<32|uint64(head))
	for g := (n.start + slabBlocks - 1) / slabBlocks; (g+1)*slabBlocks <= n.start+off; g++ {
		x.slabs.s[g].node = head
	}
	if first := n.start / slabBlocks; n.start%slabBlocks != 0 && x.slabs.s[first].node == id &&
		(first+1)*slabBlocks <= n.start+off {
		x.slabs.s[first].node = head
	}
	p := &v.nodes[id]
	put32(&p.parent, head)
	put32(&p.start, n.start+off)
	put32(&p.len, n.len-off)
	put32(&p.depth, n.depth+off)
	x.splitHolders(head, id, off)
	x.disown(n.parent, id)
	x.adopt(n.parent, head)
	x.link(head, id)
	x.unlock(head)
	x.unlock(id)
	x.unlock(n.parent)
	return head
}

// where is the node of a block: the deepest that has blocks in its slab, or one above it.
func (x *Index) where(block uint32) (id uint32, n *node) {
	id = x.slabs.s[block/slabBlocks].node
	for n = &x.v.nodes[id]; block < n.start; n = &x.v.nodes[id] {
		id = n.parent
	}
	return id, n
}

// reclaim cuts off what is dead at the end of a node: held by nobody, remembered by nobody, followed by nothing. A node
// of which nothing is left goes, and then what is above it may go too.
func (x *Index) reclaim(id uint32) {
	for {
		n := &x.v.nodes[id]
		if n.parent == 0 || n.children > 0 {
			return
		}
		keep := x.extent(id)
		for end := n.start + n.len; keep < n.len; {
			g := (end - 1) / slabBlocks
			if x.slabs.s[g].pins > 0 {
				keep = max(keep, end-n.start)
				break
			}
			if end = g * slabBlocks; end <= n.start+keep {
				break
			}
		}
		if keep == n.len {
			return
		}
		parent, start, end := n.parent, n.start, n.start+n.len
		if keep > 0 {
			x.lock(id)
			put32(&n.len, keep)
			x.shortened(id)
			x.unlock(id)
			x.freeSlabs((start+keep+slabBlocks-1)/slabBlocks, (end+slabBlocks-1)/slabBlocks)
			return
		}
		x.lock(parent)
		x.lock(id)
		x.unlink(id)
		put32(&n.parent, 0)
		put32(&n.len, 0)
		x.unlock(id)
		x.unlock(parent)
		first := start / slabBlocks
		if start%slabBlocks != 0 && x.v.nodes[parent].start+x.v.nodes[parent].len == start && x.v.nodes[parent].len > 0 {
			x.slabs.s[first].node = parent // it shares this one with what is above it
			first++
		} else if start%slabBlocks != 0 {
			panic("radix: a node begins amid a slab that is not its parent's")
		}
		x.freeSlabs(first, (end+slabBlocks-1)/slabBlocks)
		x.freeNodes.add(id)
		x.nodes--
		id = parent
	}
}
