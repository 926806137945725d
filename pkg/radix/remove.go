package radix

import (
	"math/bits"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// A removal has three steps. findAll looks up the names and adds their blocks to x.queue. takeQueued visits the nodes
// from the first to the last and removes the blocks from the rank. rememberLost adds tombstones for the lost names, in
// the order of the event.

// stretch is a range of blocks that the current event removes: neighbours in the event and in a node, up or down. By
// position in the event, x.hashes has the hashes of the names, x.refs their values in the table, and x.blocks the
// blocks.
type stretch struct {
	node    uint32
	block   uint32 // the first block
	step    uint32 // distance to the next block: 1 or -1, modulo 2^32; meaningless for a single block
	first   uint32 // position of the first block in the event
	n       uint32
	next    uint32 // the next stretch of the node in x.queue; the last leads to the first
	aliases bool   // some names are aliases
}

// at returns block i.
func (s *stretch) at(i uint32) uint32 { return s.block + i*s.step }

func (x *Index) removed(r *rank, e *events.Event, c *Counts) {
	r.evicts = r.evicts || e.Tier == events.Device
	switch {
	case !r.main(e.Group):
		x.removedBeside(r, e, c)
	case r.naming == namesExact:
		x.removeExact(r, e, c)
	case !r.hasGroup || r.group != e.Group || x.v.masks[e.Tier-1] == nil:
		for _, name := range e.Blocks {
			r.notHeld(e, name, c)
		}
	default:
		x.findAll(r, e, c)
		x.takeQueued(r, e, c)
		x.rememberLost(r, e)
	}
}

// notHeld counts the removal of a name without copies. It cancels a pending copy of the name.
func (r *rank) notHeld(e *events.Event, name events.BlockHash, c *Counts) {
	if r.pending.len() > 0 && r.pending.cancel(copyKey{e.Tier, e.Group, name}) {
		c.Cancelled++
	} else {
		c.UnknownRemovals++
	}
}

// findAll looks up names and adds their blocks to x.queue, including blocks that the rank does not hold.
func (x *Index) findAll(r *rank, e *events.Event, c *Counts) {
	t, owner := &x.names, r.owner()
	hashes := x.hashAll(owner, e.Blocks)
	x.refs = slices.Grow(x.refs[:0], len(hashes))[:len(hashes)]
	x.blocks = slices.Grow(x.blocks[:0], len(hashes))[:len(hashes)]
	x.queue, x.keys = x.queue[:0], x.keys[:0]
	x.startChains(len(hashes))
	var id, start, end uint32 // the node of the previous block
	prev := uint32(0)         // the previous block
	asked := 0                // the names before were prefetched
	for i := 0; i < len(hashes); {
		if prev > start { // engines evict tails first
			if n := x.below(start, prev-1, owner, e.Blocks[i:]); n > 0 {
				x.enqueue(id, prev-1, n, i)
				i, prev = i+int(n), prev-n
				continue
			}
		}
		if i >= asked {
			asked = x.scout(hashes, i)
		}
		ref, name := x.likely[i%group], uint64(e.Blocks[i])
		block, ok := uint32(0), ref != 0
		if ok {
			var n uint64
			var o uint32
			if block, n, o = t.at(ref); n != name || o != owner {
				ref, _, ok = t.find(name, hashes[i], owner)
				block, _, _ = t.at(ref)
			}
		}
		if !ok {
			r.notHeld(e, e.Blocks[i], c)
			i++
			continue
		}
		if block < start || block >= end {
			var n *node
			id, n = x.where(block)
			start, end = n.start, n.start+n.len
		}
		x.enqueue(id, block, 1, i)
		if x.refs[i] = ref; ref&aliasBit != 0 {
			x.queue[len(x.queue)-1].aliases = true
		}
		prev = block
		i++
	}
}

// below returns the number of names that an owner has in the arena for the blocks from top on downwards. It stops at
// the start of the slab, and at block start.
func (x *Index) below(start, top, owner uint32, names []events.BlockHash) (n uint32) {
	g := &x.slabs.s[top/slabBlocks]
	if g.owner != owner {
		return 0
	}
	most := min(top+1-max(start, top/slabBlocks*slabBlocks), uint32(len(names)))
	for n < most && x.engines.s[top-n] == uint64(names[n]) && g.named>>((top-n)%slabBlocks)&1 != 0 {
		n++
	}
	return n
}

// enqueue adds n blocks of a node from top on downwards to x.queue. Their names are in the arena. first is the position
// of the first in the event.
func (x *Index) enqueue(id, top, n uint32, first int) {
	for j := range n {
		x.refs[uint32(first)+j], x.blocks[uint32(first)+j] = top-j, top-j
	}
	if len(x.queue) > 0 {
		s := &x.queue[len(x.queue)-1]
		step := top - s.block - (s.n-1)*s.step
		follows := step == ^uint32(0) || step == 1 && n == 1
		if follows && s.node == id && s.first+s.n == uint32(first) && (s.n == 1 || s.step == step) {
			s.step, s.n = step, s.n+n
			return
		}
	}
	x.queue = append(x.queue, stretch{node: id, block: top, step: ^uint32(0), first: uint32(first), n: n})
	x.chain(uint32(len(x.queue) - 1))
}

// startChains makes room for n nodes in x.chains, a hash table with the last stretch of each node, plus one.
func (x *Index) startChains(n int) {
	size := 1 << bits.Len(uint(n)) * 2
	x.chains = slices.Grow(x.chains[:0], size)[:size]
	clear(x.chains)
}

// chain adds a stretch to the others of its node. For the first stretch of a node, it adds the place in x.chains to
// x.keys; the upper half of the key is the node's depth.
func (x *Index) chain(i uint32) {
	s := &x.queue[i]
	mask := uint32(len(x.chains) - 1)
	for at := s.node * 0x9e3779b1 >> 8 & mask; ; at = (at + 1) & mask {
		c := &x.chains[at]
		switch {
		case *c == 0:
			s.next = i
			x.keys = append(x.keys, uint64(x.v.nodes[s.node].depth)<<32|uint64(at))
		case x.queue[*c-1].node == s.node:
			s.next, x.queue[*c-1].next = x.queue[*c-1].next, i
		default:
			continue
		}
		*c = i + 1
		return
	}
}

// scout visits the data of the next names, stage by stage, so that the processor loads each stage together. It stores
// the likely slots in x.likely, by position modulo the size of a group. It returns the number of visited names.
func (x *Index) scout(hashes []uint64, from int) int {
	t, to := &x.names, min(from/group*group+group, len(hashes))
	if from == 0 {
		t.prefetch(hashes[from:to])
	}
	t.prefetch(hashes[to:min(to+group, len(hashes))])
	likely := x.likely[from%group:]
	t.likely(hashes[from:to], likely[:to-from])
	sum := uint64(0)
	var blocks [group]uint32
	for i, ref := range likely[:to-from] {
		block, name, owner := t.at(ref)
		blocks[i], sum = block, sum+name+uint64(owner)
	}
	var nodes [group]uint32
	for i, block := range blocks[:to-from] {
		nodes[i] = x.slabs.s[block/slabBlocks].node
	}
	for _, id := range nodes[:to-from] {
		sum += uint64(x.v.nodes[id].start)
	}
	x.touched = sum
	return to
}

// takeQueued removes the blocks in x.queue from a rank, from the first node to the last. A reader goes the same way and
// validates at the end, so it sees all of them disappear at once. Lost blocks are pinned and marked in x.lost.
func (x *Index) takeQueued(r *rank, e *events.Event, c *Counts) {
	slices.Sort(x.keys)
	words := (len(e.Blocks) + 63) / 64
	x.lost = slices.Grow(x.lost[:0], words)[:words]
	clear(x.lost)
	others := false // the rank holds blocks in another tier
	for t := range r.held {
		others = others || t != int(e.Tier)-1 && r.held[t] > 0
	}
	for k, key := range x.keys {
		if k%group == 0 {
			x.scoutNodes(r, x.keys[k:min(k+group, len(x.keys))], int(e.Tier)-1)
		}
		last := x.chains[uint32(key)] - 1
		id := x.queue[last].node
		x.lock(id)
		for i := x.queue[last].next; ; i = x.queue[i].next {
			x.removeStretch(r, e, &x.queue[i], others, c)
			if i == last {
				break
			}
		}
		x.unlock(id)
	}
	x.dropNow()
}

// scoutNodes visits the data for the removal of blocks of some nodes, like scout.
func (x *Index) scoutNodes(r *rank, keys []uint64, tier int) {
	if len(keys) == 1 || len(x.v.parts) == 0 || len(x.v.bits) == 0 {
		return // few nodes, or no parts
	}
	var nodes [group]*node
	sum, m, slot := uint64(0), x.v.masks[tier], r.slot()
	for k, key := range keys {
		id := x.queue[x.chains[uint32(key)]-1].node
		nodes[k] = &x.v.nodes[id]
		sum += m[int(id)*x.v.stride+int(slot>>6)] + uint64(x.v.parts[nodes[k].parts].key)
	}
	key := keyOf(slot, tier)
	for _, n := range nodes[:len(keys)] {
		list := x.v.parts[n.parts : n.parts+n.nparts]
		if i := search(list, key); i < len(list) && list[i].key == key {
			sum += x.v.bits[list[i].bits]
		}
	}
	x.touched = sum
}

// removeStretch removes a stretch's blocks of an open node from a rank.
func (x *Index) removeStretch(r *rank, e *events.Event, s *stretch, others bool, c *Counts) {
	tier := int(e.Tier) - 1
	for i := uint32(0); i < s.n; {
		n := x.single(r, s, i, tier)
		if n == 0 {
			if r.extra[tier].remove(s.at(i)) {
				c.Removed++
			} else {
				r.notHeld(e, e.Blocks[s.first+i], c)
			}
			i++
			continue
		}
		lo := min(s.at(i), s.at(i+n-1)) - x.v.nodes[s.node].start
		x.unmark(s.node, lo, lo+n, r, tier)
		r.held[tier] -= int64(n)
		c.Removed += uint64(n)
		if !others {
			x.lose(r, s, i, n)
		} else {
			for j := i; j < i+n; j++ {
				if !x.holdsAny(r.slot(), s.at(j)) {
					x.lose(r, s, j, 1)
				}
			}
		}
		i += n
	}
}

// single returns the number of consecutive blocks from block i on of which the rank has a single copy in a tier.
func (x *Index) single(r *rank, s *stretch, i uint32, tier int) (n uint32) {
	extra := &r.extra[tier]
	full, part := x.v.full(s.node, tier, r.slot()), (*part)(nil)
	if !full {
		if part = x.v.part(s.node, keyOf(r.slot(), tier)); part == nil {
			return 0
		}
	} else if extra.n == 0 {
		return s.n - i
	}
	start := x.v.nodes[s.node].start
	for ; i+n < s.n; n++ {
		block := s.at(i + n)
		twice := x.slabs.s[block/slabBlocks].twice>>(block%slabBlocks)&1 != 0
		if !full && !x.v.partHas(part, block-start) || twice && extra.get(block) > 0 {
			break
		}
	}
	return n
}

// lose handles n blocks of a stretch from block i on that a rank has lost in all tiers. It pins the blocks, marks them
// in x.lost, and removes their names unless another rank needs the names. The caller must call dropNow.
func (x *Index) lose(r *rank, s *stretch, i, n uint32) {
	first := s.first + i
	for w := first >> 6; w<<6 < first+n; w++ {
		x.lost[w] |= rangeMask(w, first, first+n)
	}
	lo := min(s.at(i), s.at(i+n-1))
	x.slabsOf(lo, lo+n, func(g *slab, bits uint16, n uint32) { g.pins += n })
	if r.naming == namesShared {
		if x.sharedFull(s.node) {
			return
		}
		start := x.v.nodes[s.node].start
		if x.sharedPart(s.node, lo-start, lo-start+n) {
			for j := i; n > 1 && j < i+n; j++ { // for a single block it is set
				if off := s.at(j) - start; !x.sharedPart(s.node, off, off+1) {
					x.drop(x.hashes[s.first+j], x.refs[s.first+j])
				}
			}
			return
		}
	}
	hashes, refs := x.hashes[first:first+n], x.refs[first:first+n]
	if s.aliases || n < group {
		for j, hash := range hashes {
			x.drop(hash, refs[j])
		}
		return
	}
	x.slabsOf(lo, lo+n, func(g *slab, bits uint16, n uint32) { g.named &^= bits })
	x.names.removeAll(hashes, refs)
}

// slabsOf calls f for the slabs of blocks from lo up to hi, with the blocks as bits, and the number of blocks.
func (x *Index) slabsOf(lo, hi uint32, f func(g *slab, bits uint16, n uint32)) {
	for lo < hi {
		to := min(hi, (lo/slabBlocks+1)*slabBlocks)
		f(&x.slabs.s[lo/slabBlocks], uint16((1<<(to-lo)-1)<<(lo%slabBlocks)), to-lo)
		lo = to
	}
}

// rememberLost adds tombstones for the blocks in x.lost, which are pinned.
func (x *Index) rememberLost(r *rank, e *events.Event) {
	if r.reuse != nil {
		x.spots = x.spots[:0]
		for i := range x.eachLost {
			x.spots = append(x.spots, spot{block: x.blocks[i]})
		}
		x.settleWindows(r, x.spots)
	}
	skip, total := 0, 0
	for _, word := range x.lost {
		total += bits.OnesCount64(word)
	}
	if x.trims {
		skip = max(total-x.cfg.MaxTombstones, 0) // later tombstones of the event would replace them
		over := min(r.tombstones.len(), r.tombstones.len()+total-x.cfg.MaxTombstones)
		x.forgetOldest(r, uint32(max(over, 0)))
	}
	r.tombstones.reserve(&x.spare, total-skip)
	u := unpins{x: x}
	for i := range x.eachLost {
		if skip > 0 {
			skip--
			u.add(x.blocks[i])
			continue
		}
		r.tombstones.push(tombstone{name: e.Blocks[i], since: r.clock, block: x.blocks[i]})
	}
	u.done()
}

// eachLost yields the positions in x.lost, in the order of the event.
func (x *Index) eachLost(yield func(i int) bool) {
	for w, word := range x.lost {
		for ; word != 0; word &= word - 1 {
			if !yield(w<<6 + bits.TrailingZeros64(word)) {
				return
			}
		}
	}
}

// unpins removes pins, together for each slab.
type unpins struct {
	x       *Index
	slab, n uint32
}

func (u *unpins) add(block uint32) {
	if slab := block / slabBlocks; slab != u.slab {
		u.done()
		u.slab = slab
	}
	u.n++
}

func (u *unpins) done() {
	if u.n > 0 {
		u.x.unpinSlab(u.slab, u.n)
		u.n = 0
	}
}
