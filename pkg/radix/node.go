package radix

import (
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// node is a run of consecutive blocks in the arena. Readers load its words atomically between two checks of its
// version.
type node struct {
	version  uint32 // odd during a change of the node, its holders or its children; never decreases
	parent   uint32 // 0: the root of a space, without blocks, or a free node
	start    uint32 // block
	len      uint32
	depth    uint32 // number of blocks before the node
	children uint32
	parts    uint32 // start of the list of parts
	nparts   uint32
}

// view is the state of readers. If a slice has to move, the writer replaces it and publishes a new view. A reader with
// an outdated view at the end starts again, so the content of an old view stays unchanged.
type view struct {
	nodes []node
	// by plane and node, stride words each: the ranks that hold all of the node; nil for an unused plane
	masks  [planeWatch + 1][]uint64
	planes int    // all used planes of holders are below
	ends   []part // by node: the agreed end of the ranks with all of the node; see ends.go
	stride int
	parts  []part
	bits   []uint64 // bitmaps of parts
	edges  []uint64 // a power of two; hash<<32 | child; 0 is empty, edgeGone is removed
	starts []uint32 // by edge: start of the child's run, for a prefetch; meaningless without an edge
	locals []uint64 // by block
	ids    []uint32 // RankID by slot
	roots  []root
	// by slot: loading of copies, and the ranks that load chunks; empty without such ranks
	loading []events.Loading
	chunked []uint64
	reuse   []*reuse // by slot: limits of a rank's prefixes besides the held blocks; empty without such ranks
	kinds   []kind   // the inverse of reuse
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

// edgeHash hashes (parent, first local hash).
func edgeHash(parent uint32, local uint64) uint64 {
	h := (local ^ uint64(parent)*0xff51afd7ed558ccd) * 0x9e3779b97f4a7c15
	return h ^ h>>29
}

const (
	edgeGone = 1  // the place of a removed edge; node 0 is never a child
	runAhead = 32 // words of a child's run to prefetch before the node is read
)

// edge returns the slot of the edge from parent to the child that begins with local, and the child, or 0.
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

// lock is the writer's side of a node's seqlock. It makes the version odd, after active exports have copied the node.
// Locks of a node do not nest.
func (x *Index) lock(n uint32) {
	x.touch(n)
	atomic.AddUint32(&x.v.nodes[n].version, 1)
}

// touch announces a change of a node to the exports.
func (x *Index) touch(n uint32) {
	for _, e := range x.exports {
		e.before(n)
	}
}

// unlock makes the version even again.
func (x *Index) unlock(n uint32) { atomic.AddUint32(&x.v.nodes[n].version, 1) }

// publish publishes a new view: a copy of the old view, changed by f.
func (x *Index) publish(f func(v *view)) {
	v := *x.v
	f(&v)
	x.v = &v
	x.view.Store(x.v)
}

// firstNode is the first id of a node that is not a root. The lower ids are for the roots of the first spaces, so that
// the roots do not use ids that an image requests.
const firstNode = 16

// newRoot creates the node above the first blocks of a space.
func (x *Index) newRoot() uint32 {
	if id := uint32(len(x.v.roots)) + 1; id < firstNode {
		x.nodes++
		return id
	}
	return x.newNode(0, node{})
}

// newNode allocates a node without holders and children. wish is the preferred id, or 0.
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
		if x.freeNodes.remove(wish) {
			return wish
		}
	}
	if x.freeNodes.n > 0 && wish == 0 { // after a failed wish, the node gets a new id
		id := x.freeNodes.lowest()
		x.freeNodes.remove(id)
		return id
	}
	if int(x.nodeEnd) == len(x.v.nodes) {
		x.growNodes()
	}
	x.nodeEnd++
	return x.nodeEnd - 1
}

// wishable limits the growth of the array of nodes for images with arbitrary ids.
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

// kin has a node's place among the children of its parent.
type kin struct {
	child, next, before uint32 // the first child; the next and the previous sibling
	misses              int32  // number of ends that did not agree with view.ends; see ends.go
}

// adopt inserts a node at the head of its parent's children.
func (x *Index) adopt(parent, child uint32) {
	next := x.kin[parent].child
	x.kin[child].next, x.kin[child].before = next, 0
	if next != 0 {
		x.kin[next].before = child
	}
	x.kin[parent].child = child
}

// disown removes a node from its parent's children.
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

// link adds an edge from an open parent to a child.
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

// unlink removes the edge to a child from its open parent.
func (x *Index) unlink(child uint32) {
	n := &x.v.nodes[child]
	i, _ := x.v.edge(n.parent, x.v.locals[n.start])
	put64(&x.v.edges[i], edgeGone)
	x.edgeCount--
	x.v.nodes[n.parent].children--
	x.disown(n.parent, child)
}

// rehashEdges builds a new table of edges without removed edges, larger if necessary.
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

// split divides a node before its block at off. The blocks before become a new node, which is returned. The rest keeps
// the id and the children, so no child gets another parent.
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

// where returns the node of a block: the deepest node in the block's slab, or a node above.
func (x *Index) where(block uint32) (id uint32, n *node) {
	id = x.slabs.s[block/slabBlocks].node
	for n = &x.v.nodes[id]; block < n.start; n = &x.v.nodes[id] {
		id = n.parent
	}
	return id, n
}

// reclaim removes dead blocks from the end of a node: blocks without holders, tombstones and followers. It removes an
// empty node, and then possibly the nodes above.
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
			x.slabs.s[first].node = parent // shared with the node above
			first++
		} else if start%slabBlocks != 0 {
			panic("radix: a node begins inside a slab of another node than its parent")
		}
		x.freeSlabs(first, (end+slabBlocks-1)/slabBlocks)
		x.freeNodes.add(id)
		x.nodes--
		id = parent
	}
}
