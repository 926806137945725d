package radix

import (
	"math/bits"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Engine hashes are valid only within a rank, but engines with equal configurations agree on them. So ranks share
// names: each block has a single shared name, and each shared name a single block. A rank contradicts the others if it
// has another name for a held block, or a shared name for another block. From then on, the rank owns its names. A rank
// with two names for a block, or with several main groups, has exact counts instead, which are slow and independent of
// other ranks.
//
// A single table has all names, by name and owner. A shared name exists while any sharing rank holds the block in any
// tier. A rank's own name exists while the rank holds the block. So a rank has a name if the name is in the table and
// the rank holds the block.
//
// The first name of a block is in the arena (slab.named), if the names of the neighbouring blocks have the same owner
// (slab.owner). Other names are aliases. sharedElse finds shared aliases by block.

// The prefetch distances in the table.
const (
	ahead = 32 // names
	group = 16 // names
	few   = 4  // names of a small event, prefetched at once
)

// sharedOwner is the owner of shared names.
const sharedOwner = 0

// owner returns the owner of the names of a rank without exact counts.
func (r *rank) owner() uint32 {
	if r.naming == namesOwn {
		return r.slot() + 1
	}
	return sharedOwner
}

// names reports whether the arena has an owner's name of the slab's block i.
func (g *slab) names(i, owner uint32) bool { return g.owner == owner && g.named>>i&1 != 0 }

// mayName reports whether the arena may store an owner's names for all blocks without a name.
func (g *slab) mayName(owner uint32) bool { return g.named == 0 || g.owner == owner }

// sharedName returns the shared name of a block, and its place.
func (x *Index) sharedName(block uint32) (name uint64, ref uint32, ok bool) {
	if x.slabs.s[block/slabBlocks].names(block%slabBlocks, sharedOwner) {
		return x.engines.s[block], block, true
	}
	if ref, ok = x.sharedElse[block]; ok {
		_, name, _ = x.names.at(ref)
	}
	return name, ref, ok
}

// stand stores an owner's name of a block in the arena or among the aliases. The caller then enters the name into the
// table.
func (x *Index) stand(owner uint32, name uint64, block uint32) (ref uint32) {
	g, bit := &x.slabs.s[block/slabBlocks], uint16(1)<<(block%slabBlocks)
	if g.mayName(owner) && g.named&bit == 0 {
		x.engines.s[block] = name
		g.named, g.owner = g.named|bit, owner
		return block
	}
	ref = x.names.aliases.add(x.memory, alias{name, block, owner}) | aliasBit
	if owner == sharedOwner {
		if x.sharedElse == nil {
			x.sharedElse = map[uint32]uint32{}
		}
		x.sharedElse[block] = ref
	}
	return ref
}

// unstand frees the place of a name.
func (x *Index) unstand(ref uint32) {
	if ref&aliasBit == 0 {
		x.slabs.s[ref/slabBlocks].named &^= 1 << (ref % slabBlocks)
		return
	}
	if block, _, owner := x.names.at(ref); owner == sharedOwner {
		delete(x.sharedElse, block)
	}
	x.names.aliases.remove(ref &^ aliasBit)
}

// setName enters a rank's missing name into the table at pos.
func (x *Index) setName(r *rank, name, hash, pos uint64, block uint32) {
	x.names.insert(x.memory, hash, pos, x.stand(r.owner(), name, block))
}

// drops are names without a place that are still in the table. They are removed together, so that the processor
// prefetches their slots at the same time.
type drops struct {
	hashes []uint64
	refs   []uint32
}

// drop removes a name from the table, at the latest in dropNow, which precedes the next lookup.
func (x *Index) drop(hash uint64, ref uint32) {
	x.unstand(ref)
	d := &x.drops
	d.hashes, d.refs = append(d.hashes, hash), append(d.refs, ref)
	if len(d.hashes) == 8*group {
		x.dropNow()
	}
}

func (x *Index) dropNow() {
	d := &x.drops
	x.names.removeAll(d.hashes, d.refs)
	d.hashes, d.refs = d.hashes[:0], d.refs[:0]
}

// known returns the block of a name: a block that the rank holds, or the block of the name's last tombstone.
func (x *Index) known(r *rank, name events.BlockHash) (uint32, bool) {
	if b, ok := x.heldPlace(r, name); ok {
		return b, true
	}
	return r.tombstones.find(name)
}

// verdict is the result of naming the blocks of an event.
type verdict uint8

const (
	named      verdict = iota
	conflicted         // the rank has copies under the name at another place
	diverged           // the rank contradicts the others
	ambiguous          // the rank has another name for the block
)

// nameBlocks enters the names of an event's blocks in x.segs, for a rank without exact counts. It stops at the first
// impossible name and returns the number of names before.
func (x *Index) nameBlocks(r *rank, e *events.Event, cancelled []bool) (n int, v verdict) {
	for si := range x.segs {
		s := &x.segs[si]
		switch {
		case cancelled != nil:
			n, v = x.nameRest(r, e, s, 0, cancelled)
		case s.fresh || r.naming == namesOwn && !x.holdsSome(r.slot(), s.node, s.off, s.off+s.n):
			n, v = x.nameNew(r, e, s)
		default:
			n, v = x.nameRest(r, e, s, x.alreadyNamed(r, s, e.Blocks[s.first:s.first+int(s.n)]), nil)
		}
		if v != named {
			return n, v
		}
	}
	return len(e.Blocks), named
}

// alreadyNamed returns the number of blocks from the start of a stretch that already have these names, by the rank's
// naming.
func (x *Index) alreadyNamed(r *rank, s *seg, names []events.BlockHash) uint32 {
	same := unsafe.Slice((*uint64)(unsafe.SliceData(names)), len(names))
	n := uint32(0)
	for n < s.n && x.engines.s[s.block+n] == same[n] {
		if !x.slabs.s[(s.block+n)/slabBlocks].names((s.block+n)%slabBlocks, r.owner()) {
			break
		}
		n++
	}
	return n
}

// nameRest enters the names of a stretch's blocks from block from on.
func (x *Index) nameRest(r *rank, e *events.Event, s *seg, from uint32, cancelled []bool) (n int, v verdict) {
	t, owner := &x.names, r.owner()
	first := s.first + int(from)
	names := e.Blocks[first : s.first+int(s.n)]
	t.room(x.memory, len(names))
	hashes := x.hashAll(owner, names)
	t.prefetch(hashes[:min(ahead, len(hashes))])
	present := !s.fresh && x.present(s.node, r.slot())
	for j, name := range names {
		i := first + j
		t.prefetchGroup(hashes, j)
		if cancelled != nil && cancelled[i] {
			continue
		}
		block := s.block + from + uint32(j)
		ref, pos, ok := t.find(uint64(name), hashes[j], owner)
		at, _, _ := t.at(ref)
		switch {
		case ok && at == block:
			continue
		case ok:
			return i, x.clash(r, at, i, cancelled)
		case s.fresh:
		case r.naming == namesOwn:
			if present && x.holdsAny(r.slot(), block) {
				return i, ambiguous
			}
		default:
			if _, _, other := x.sharedName(block); other {
				if present && x.holdsAny(r.slot(), block) {
					return i, ambiguous
				}
				return i, diverged
			}
		}
		x.setName(r, uint64(name), hashes[j], pos, block)
	}
	return s.first + int(s.n), named
}

// clash returns the verdict on a name that belongs to another block.
func (x *Index) clash(r *rank, at uint32, i int, cancelled []bool) verdict {
	if r.naming == namesOwn || x.holdsAny(r.slot(), at) || x.inEvent(at, i, cancelled) {
		return conflicted
	}
	return diverged
}

// nameNew enters the names of a stretch. No rank with the same owner of names holds any of its blocks.
func (x *Index) nameNew(r *rank, e *events.Event, s *seg) (n int, v verdict) {
	t, owner := &x.names, r.owner()
	blocks := e.Blocks[s.first : s.first+int(s.n)]
	names := unsafe.Slice((*uint64)(unsafe.SliceData(blocks)), len(blocks))
	t.room(x.memory, len(names))
	x.refs = x.refs[:0]
	if s.fresh && x.slabs.s[s.block/slabBlocks].mayName(owner) {
		copy(x.engines.s[s.block:], names)
		for block, end := s.block, s.block+s.n; block < end; block++ {
			g := &x.slabs.s[block/slabBlocks]
			g.named, g.owner = g.named|1<<(block%slabBlocks), owner
			x.refs = append(x.refs, block)
		}
	} else {
		for j, name := range names {
			x.refs = append(x.refs, x.stand(owner, name, s.block+uint32(j)))
		}
	}
	n, at, there := t.enterAll(x.memory, names, x.hashAll(owner, blocks), owner, x.refs)
	for _, ref := range x.refs[n:] {
		x.unstand(ref)
	}
	if n += s.first; there {
		v = x.clash(r, at, n, nil)
	}
	return n, v
}

// hashAll computes the hashes of an owner's names.
func (x *Index) hashAll(owner uint32, blocks []events.BlockHash) []uint64 {
	if cap(x.hashes) < len(blocks) {
		x.hashes = make([]uint64, len(blocks), 2*len(blocks))
	}
	x.hashes = x.hashes[:len(blocks)]
	for i, name := range blocks {
		x.hashes[i] = x.names.hash(uint64(name), owner)
	}
	return x.hashes
}

// inEvent reports whether a block is among the first i blocks that the current event stores.
func (x *Index) inEvent(block uint32, i int, cancelled []bool) bool {
	for si := range x.segs {
		s := &x.segs[si]
		if block >= s.block && block < s.block+s.n {
			k := s.first + int(block-s.block)
			return k < i && (cancelled == nil || !cancelled[k])
		}
	}
	return false
}

// unnameBlocks undoes nameBlocks for the first n blocks.
func (x *Index) unnameBlocks(r *rank, e *events.Event, cancelled []bool, n int) {
	for si := range x.segs {
		s := &x.segs[si]
		for j := range s.n {
			i := s.first + int(j)
			if i >= n || cancelled != nil && cancelled[i] {
				continue
			}
			block := s.block + j
			if !s.grows && (r.naming == namesOwn && x.holdsAny(r.slot(), block) || r.naming == namesShared &&
				x.sharedHolder(block)) {
				continue
			}
			hash := x.names.hash(uint64(e.Blocks[i]), r.owner())
			ref, _, _ := x.names.find(uint64(e.Blocks[i]), hash, r.owner())
			x.drop(hash, ref)
			x.dropNow()
		}
	}
}

// sharedHolder reports whether any sharing rank holds a block.
func (x *Index) sharedHolder(block uint32) bool {
	id, n := x.where(block)
	return x.sharedFull(id) || x.sharedPart(id, block-n.start, block-n.start+1)
}

// sharedFull reports whether a sharing rank holds all of a node in any tier.
func (x *Index) sharedFull(id uint32) bool {
	for _, m := range x.v.masks[:events.NumTiers] {
		if m == nil {
			continue
		}
		row := m[int(id)*x.v.stride : (int(id)+1)*x.v.stride]
		for w, word := range row {
			if word != 0 && word&x.sharedMask[w] != 0 {
				return true
			}
		}
	}
	return false
}

// sharedPart reports whether a sharing rank with a part of a node holds any of its blocks from lo up to hi.
func (x *Index) sharedPart(id, lo, hi uint32) bool {
	n := &x.v.nodes[id]
	for i := range x.v.parts[n.parts : n.parts+n.nparts] {
		p := &x.v.parts[int(n.parts)+i]
		if slot := slotOf(p.key); planeOf(p.key) < events.NumTiers && x.sharedMask[slot>>6]>>(slot&63)&1 != 0 &&
			x.v.partHasSome(p, lo, hi) {
			return true
		}
	}
	return false
}

// forget removes the names of blocks from lo up to hi of a node from the table, after a sharing rank has lost the
// blocks. Names that another sharing rank needs stay.
func (x *Index) forget(id, lo, hi uint32) {
	if x.sharedFull(id) {
		return
	}
	n := &x.v.nodes[id]
	for ; lo < hi; lo++ {
		if n.nparts > 0 && x.sharedPart(id, lo, lo+1) {
			continue
		}
		if name, ref, ok := x.sharedName(n.start + lo); ok {
			x.drop(x.names.hash(name, sharedOwner), ref)
		}
	}
	x.dropNow()
}

// eachHeld calls f for every block that a rank holds in any tier, with the tiers as bits.
func (x *Index) eachHeld(r *rank, f func(block uint32, tiers TierSet)) {
	x.tidy(r)
	for _, id := range r.nodes {
		n := x.v.nodes[id]
		for off := range n.len {
			var tiers TierSet
			for t := range events.NumTiers {
				if x.v.masks[t] != nil && x.v.holds(id, off, t, r.slot()) {
					tiers |= 1 << t
				}
			}
			if tiers != 0 {
				f(n.start+off, tiers)
			}
		}
	}
}

// diverge switches a sharing rank to own names.
func (x *Index) diverge(r *rank) {
	slot := r.slot()
	x.sharedMask[slot>>6] &^= 1 << (slot & 63)
	type pair struct {
		name  uint64
		block uint32
	}
	var moved []pair
	x.eachHeld(r, func(block uint32, _ TierSet) {
		name, ref, _ := x.sharedName(block)
		moved = append(moved, pair{name, block})
		if !x.sharedHolder(block) {
			x.drop(x.names.hash(name, sharedOwner), ref)
		}
	})
	x.dropNow()
	r.naming = namesOwn
	x.names.room(x.memory, len(moved))
	for _, p := range moved {
		h := x.names.hash(p.name, r.owner())
		_, pos, _ := x.names.find(p.name, h, r.owner())
		x.setName(r, p.name, h, pos, p.block)
	}
}

// eachOwn calls f for every own name of a rank in some nodes and for every alias, with the value of its slot. f may
// drop the name.
func (x *Index) eachOwn(r *rank, nodes []uint32, f func(name uint64, block, ref uint32)) {
	owner := r.owner()
	for _, id := range nodes {
		n := &x.v.nodes[id]
		for block, end := n.start, n.start+n.len; block < end; {
			g := &x.slabs.s[block/slabBlocks]
			to := min(end, (block/slabBlocks+1)*slabBlocks)
			for bits := g.named; g.owner == owner && block < to; block++ {
				if bits>>(block%slabBlocks)&1 != 0 {
					f(x.engines.s[block], block, block)
				}
			}
			block = to
		}
	}
	x.names.aliases.each(owner, func(i uint32, a alias) { f(a.name, a.block, i|aliasBit) })
}

// dropOwn removes a rank's own names: all of them, or the names of blocks that the rank no longer holds.
func (x *Index) dropOwn(r *rank, nodes []uint32, all bool) {
	x.eachOwn(r, nodes, func(name uint64, block, ref uint32) {
		if all || !x.holdsAny(r.slot(), block) {
			x.drop(x.names.hash(name, r.owner()), ref)
		}
	})
	x.dropNow()
}

// each calls f for every tier of a set.
func (s TierSet) each(f func(tier int)) {
	for ; s != 0; s &= s - 1 {
		f(bits.TrailingZeros8(uint8(s)))
	}
}
