package radix

import (
	"math/bits"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Engine hashes count only within one rank, but engines configured alike agree on them. So ranks share one table of
// names, in which a block has one name and a name one block, until one of them contradicts it: it calls a block
// otherwise than those who hold it, or other blocks hold its name. From then on that rank has a table of its own. A
// rank with two names for one block, or with several main groups, has exact counts instead, which are slow and keep
// everything apart.
//
// In the shared table a name is there as long as any sharing rank holds its block in any tier; in a rank's own, as long
// as that rank does. That a rank knows a name is thus: the name is in its table, and it holds the block.
//
// The name that came first to a block stands in the arena (slab.named), if the names of the blocks beside it are of the
// same table (slab.owner). Others are aliases in their tables; for those in the shared one, sharedElse finds them by
// block.

// Places in a table are asked for a while before they are needed, some at a time.
const (
	ahead = 32 // names
	group = 16 // names
	few   = 4  // names of an event that are all asked for at once
)

// sharedOwner is the owner of names in the shared table.
const sharedOwner = 0

// owner stands for the table that a rank without exact counts has its names in.
func (r *rank) owner() uint32 {
	if r.naming == namesOwn {
		return r.slot() + 1
	}
	return sharedOwner
}

// names reports whether an owner's name of the slab's block i stands in the arena.
func (g *slab) names(i, owner uint32) bool { return g.owner == owner && g.named>>i&1 != 0 }

// mayName reports whether an owner's names of all blocks that have none yet may stand in the arena.
func (g *slab) mayName(owner uint32) bool { return g.named == 0 || g.owner == owner }

func (g *slab) setNamed(bits uint16, owner uint32) {
	g.named |= bits
	g.owner = owner
}

func (g *slab) unname(i uint32) { g.named &^= 1 << i }

// table is where the names of a rank without exact counts are.
func (x *Index) table(r *rank) *names {
	if r.naming == namesOwn {
		return r.own
	}
	return &x.shared
}

// sharedName is what sharing ranks call a block.
func (x *Index) sharedName(block uint32) (name uint64, ok bool) {
	g := &x.slabs.s[block/slabBlocks]
	if g.names(block%slabBlocks, sharedOwner) {
		return x.engines.s[block], true
	}
	if len(x.sharedElse) == 0 {
		return 0, false
	}
	name, ok = x.sharedElse[block]
	return name, ok
}

// setName puts a name that is not there, at pos, into the rank's table.
func (x *Index) setName(r *rank, name, hash, pos uint64, block uint32) {
	g := &x.slabs.s[block/slabBlocks]
	t := x.table(r)
	taken := !g.mayName(r.owner()) || g.named>>(block%slabBlocks)&1 != 0
	if !taken {
		x.engines.s[block] = name
		g.setNamed(1<<(block%slabBlocks), r.owner())
	} else if r.naming == namesShared {
		if x.sharedElse == nil {
			x.sharedElse = map[uint32]uint64{}
		}
		x.sharedElse[block] = name
	}
	t.insert(x.memory, name, hash, pos, block, taken)
}

// dropName takes a block's name out of a rank's table.
func (x *Index) dropName(r *rank, hash uint64, block uint32) {
	if !x.table(r).remove(hash, block) {
		x.slabs.s[block/slabBlocks].unname(block % slabBlocks)
	} else if r.naming == namesShared {
		delete(x.sharedElse, block)
	}
}

// known is the block of a name: one that the rank holds, or else the one that the name left last.
func (x *Index) known(r *rank, name events.BlockHash) (uint32, bool) {
	if r.naming == namesExact {
		if n := r.exact.names[name]; n != nil {
			return n.block, true
		}
		return r.tombstones.find(name)
	}
	t := x.table(r)
	if b, _, ok := t.find(uint64(name), t.hash(uint64(name))); ok && (r.naming == namesOwn || x.holdsAny(r.slot(), b)) {
		return b, true
	}
	return r.tombstones.find(name)
}

// verdict is what naming the blocks of an event came to.
type verdict uint8

const (
	named      verdict = iota
	conflicted         // the rank has copies under that name at another place
	diverged           // the rank contradicts the others
	ambiguous          // the rank itself has another name for that block
)

// nameBlocks enters the names of an event's blocks, which lie in x.segs, for a rank without exact counts. It stops at
// the first that cannot be entered, and says how many came before.
func (x *Index) nameBlocks(r *rank, e *events.Event, cancelled []bool) (n int, v verdict) {
	for si := range x.segs {
		s := &x.segs[si]
		switch {
		case cancelled != nil:
			n, v = x.nameRest(r, e, s, 0, cancelled)
		case s.fresh && x.slabs.s[s.block/slabBlocks].mayName(r.owner()):
			n, v = x.nameFresh(r, e, s)
		default:
			n, v = x.nameRest(r, e, s, x.alreadyNamed(r, s, e.Blocks[s.first:s.first+int(s.n)]), nil)
		}
		if v != named {
			return n, v
		}
	}
	return len(e.Blocks), named
}

// alreadyNamed is how many blocks from a stretch's start on are called in the rank's table what they are called here.
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

// nameRest enters the names of a stretch's blocks from the one at from on.
func (x *Index) nameRest(r *rank, e *events.Event, s *seg, from uint32, cancelled []bool) (n int, v verdict) {
	t := x.table(r)
	first := s.first + int(from)
	names := e.Blocks[first : s.first+int(s.n)]
	t.room(x.memory, len(names))
	hashes := x.hashAll(t, names)
	t.prefetch(hashes[:min(ahead, len(hashes))])
	present := !s.fresh && x.present(s.node, r.slot())
	for j, name := range names {
		i := first + j
		if j%group == 0 {
			t.prefetch(hashes[min(j+ahead, len(hashes)):min(j+ahead+group, len(hashes))])
		}
		if cancelled != nil && cancelled[i] {
			continue
		}
		block := s.block + from + uint32(j)
		at, pos, ok := t.find(uint64(name), hashes[j])
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
			if _, other := x.sharedName(block); other {
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

// clash is the verdict on a name that stands for another block.
func (x *Index) clash(r *rank, at uint32, i int, cancelled []bool) verdict {
	if r.naming == namesOwn || x.holdsAny(r.slot(), at) || x.inEvent(at, i, cancelled) {
		return conflicted
	}
	return diverged
}

// nameFresh enters the names of a stretch that was not there before: nobody has named these blocks.
func (x *Index) nameFresh(r *rank, e *events.Event, s *seg) (n int, v verdict) {
	t := x.table(r)
	names := e.Blocks[s.first : s.first+int(s.n)]
	t.room(x.memory, len(names))
	hashes := x.hashAll(t, names)
	t.prefetch(hashes[:min(ahead, len(hashes))])
	engines := x.engines.s[s.block : s.block+s.n]
	n, v = s.first+len(names), named
	for j, name := range names {
		if j%group == 0 {
			t.prefetch(hashes[min(j+ahead, len(hashes)):min(j+ahead+group, len(hashes))])
		}
		if at, ok := t.enter(x.memory, uint64(name), hashes[j], s.block+uint32(j)); ok {
			n = s.first + j
			v = x.clash(r, at, n, nil)
			break
		}
		engines[j] = uint64(name)
	}
	for lo, hi := s.block, s.block+uint32(n-s.first); lo < hi; {
		g := lo / slabBlocks
		to := min(hi, (g+1)*slabBlocks)
		x.slabs.s[g].setNamed(uint16(1<<(to-g*slabBlocks)-1<<(lo-g*slabBlocks)), r.owner())
		lo = to
	}
	return n, v
}

// hashAll computes the hashes of names.
func (x *Index) hashAll(t *names, blocks []events.BlockHash) []uint64 {
	if cap(x.hashes) < len(blocks) {
		x.hashes = make([]uint64, len(blocks), 2*len(blocks))
	}
	x.hashes = x.hashes[:len(blocks)]
	for i, name := range blocks {
		x.hashes[i] = t.hash(uint64(name))
	}
	return x.hashes
}

// inEvent reports whether a block is one of the first i that the event in hand stores.
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

// unnameBlocks takes back what nameBlocks entered for the first n blocks.
func (x *Index) unnameBlocks(r *rank, e *events.Event, cancelled []bool, n int) {
	t := x.table(r)
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
			x.dropName(r, t.hash(uint64(e.Blocks[i])), block)
		}
	}
}

// sharedHolder reports whether any sharing rank holds a block.
func (x *Index) sharedHolder(block uint32) bool {
	id, n := x.where(block)
	return x.sharedFull(id) || x.sharedPart(id, block-n.start)
}

// sharedFull reports whether a sharing rank holds all of a node in some tier.
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

func (x *Index) sharedPart(id, off uint32) bool {
	n := &x.v.nodes[id]
	for i := range x.v.parts[n.parts : n.parts+n.nparts] {
		p := &x.v.parts[int(n.parts)+i]
		if slot := slotOf(p.key); planeOf(p.key) < events.NumTiers && x.sharedMask[slot>>6]>>(slot&63)&1 != 0 &&
			x.v.partHas(p, off) {
			return true
		}
	}
	return false
}

// forget takes the names of blocks from lo up to hi of a node, which a sharing rank no longer holds, out of the shared
// table, but for those that another sharing rank still needs.
func (x *Index) forget(r *rank, id, lo, hi uint32) {
	if x.sharedFull(id) {
		return
	}
	n := &x.v.nodes[id]
	var at [2][group]uint32
	var hashes [2][group]uint64
	var count [2]int
	next := func(k int) { // finds the next names, and asks for them
		c := 0
		for ; lo < hi && c < group; lo++ {
			if n.nparts > 0 && x.sharedPart(id, lo) {
				continue
			}
			if name, ok := x.sharedName(n.start + lo); ok {
				at[k][c], hashes[k][c] = n.start+lo, x.shared.hash(name)
				c++
			}
		}
		count[k] = c
		x.shared.prefetch(hashes[k][:c])
	}
	next(0)
	for k := 0; count[k] > 0; k ^= 1 {
		next(k ^ 1)
		for j := range count[k] {
			x.dropName(r, hashes[k][j], at[k][j])
		}
	}
}

// eachHeld calls f for every block that a rank holds in some tier, with those tiers as bits.
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

// diverge gives a sharing rank a table of its own.
func (x *Index) diverge(r *rank) {
	slot := r.slot()
	x.sharedMask[slot>>6] &^= 1 << (slot & 63)
	type pair struct {
		name  uint64
		block uint32
	}
	var moved []pair
	x.eachHeld(r, func(block uint32, _ TierSet) {
		name, _ := x.sharedName(block)
		moved = append(moved, pair{name, block})
		if !x.sharedHolder(block) {
			x.dropName(r, x.shared.hash(name), block)
		}
	})
	r.naming = namesOwn
	r.own = &names{engines: &x.engines, seed: x.shared.seed}
	r.own.room(x.memory, len(moved))
	for _, p := range moved {
		h := r.own.hash(p.name)
		_, pos, _ := r.own.find(p.name, h)
		x.setName(r, p.name, h, pos, p.block)
	}
}

// dropOwn takes all names of a rank's own table away.
func (x *Index) dropOwn(r *rank) {
	for _, v := range r.own.slots.s {
		if ref := uint32(v); v != 0 && ref&aliasBit == 0 {
			x.slabs.s[ref/slabBlocks].unname(ref % slabBlocks)
		}
	}
	r.own.slots.release(x.memory)
	r.own = &names{engines: &x.engines, seed: x.shared.seed}
}

// tiersOf is the tiers that a set has.
func (s TierSet) each(f func(tier int)) {
	for ; s != 0; s &= s - 1 {
		f(bits.TrailingZeros8(uint8(s)))
	}
}
