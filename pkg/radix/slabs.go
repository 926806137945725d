package radix

import "math/bits"

// slabBlocks is the number of blocks of the arena in a slab. A node owns whole slabs, except for the first slab, which
// it shares with its parent after a split inside the slab.
const slabBlocks = 16

// slab has the writer's state of sixteen blocks.
type slab struct {
	node  uint32 // the deepest node with blocks in the slab
	pins  uint32 // tombstones with a block in the slab, and names of exact counts
	owner uint32 // owner of the names in the arena; meaningless without names
	named uint16 // blocks with a name in the arena
	twice uint16 // blocks of which a rank has or had a second copy
}

// idSet is a set of small numbers that returns the lowest or a given number.
type idSet struct {
	words []uint64
	n     int
	low   int // lower words are zero
}

func (s *idSet) add(i uint32) {
	w := int(i >> 6)
	for len(s.words) <= w {
		s.words = append(s.words, 0)
	}
	s.words[w] |= 1 << (i & 63)
	s.low = min(s.low, w)
	s.n++
}

func (s *idSet) has(i uint32) bool {
	return int(i>>6) < len(s.words) && s.words[i>>6]>>(i&63)&1 != 0
}

func (s *idSet) remove(i uint32) bool {
	if !s.has(i) {
		return false
	}
	s.words[i>>6] &^= 1 << (i & 63)
	s.n--
	return true
}

// lowest returns the lowest number of a set that is not empty.
func (s *idSet) lowest() uint32 {
	for s.words[s.low] == 0 {
		s.low++
	}
	return uint32(s.low<<6 + bits.TrailingZeros64(s.words[s.low]))
}

// allocate allocates up to want consecutive slabs for a node. It allocates fewer if such a row is hard to find and many
// slabs are free.
func (x *Index) allocate(want uint32) (first, n uint32) {
	free := &x.freeSlab
	first, n = x.searchFree(want)
	switch {
	case n < want && uint32(free.n)*8 < x.slabEnd:
		first, n = x.slabEnd, want
		x.slabEnd += want
		x.growBlocks()
		return first, n
	case n == 0: // many slabs are free, but not near
		x.slabHand = free.lowest() >> 6
		first, n = x.searchFree(want)
	}
	n = min(n, want)
	for g := first; g < first+n; g++ {
		free.remove(g)
	}
	return first, n
}

// searchFree searches for want consecutive free slabs, for a limited distance from its last position. It returns the
// longest row that it found.
func (x *Index) searchFree(want uint32) (first, n uint32) {
	const look = 64 // words of the bitmap
	words := x.freeSlab.words
	if x.freeSlab.n == 0 {
		return 0, 0
	}
	w, run := x.slabHand, uint32(0) // number of free slabs that end at the current place
	for range min(look, len(words)) {
		if w >= uint32(len(words)) {
			w, run = 0, 0
		}
		for i := uint32(0); i < 64; {
			rest := words[w] >> i
			if rest&1 == 0 {
				run = 0
				i += uint32(bits.TrailingZeros64(rest))
				continue
			}
			ones := min(uint32(bits.TrailingZeros64(^rest)), 64-i)
			i += ones
			if run += ones; run > n {
				first, n = w<<6+i-run, run
			}
		}
		if n >= want {
			break
		}
		w++
	}
	x.slabHand = w
	return first, n
}

// growBlocks extends the arena to the allocated slabs.
func (x *Index) growBlocks() {
	if x.slabEnd > aliasBit/slabBlocks {
		panic("radix: more than 2^31 blocks at a time")
	}
	slabs := int(x.slabEnd)
	x.slabs.grow(x.memory, slabs, slabs/4)
	blocks := slabs * slabBlocks
	x.engines.grow(x.memory, blocks, blocks/4)
	if n := len(x.locals.s); n < blocks {
		x.locals.grow(x.memory, blocks, blocks/4)
		x.publish(func(v *view) { v.locals = x.locals.s })
	}
}

// claim allocates the slabs for n more blocks at the end of a node. It reports success.
func (x *Index) claim(id uint32, n uint32) bool {
	p := &x.v.nodes[id]
	end := p.start + p.len
	if end%slabBlocks != 0 && x.slabs.s[end/slabBlocks].node != id {
		return false
	}
	first, last := (end+slabBlocks-1)/slabBlocks, (end+n+slabBlocks-1)/slabBlocks
	for g := first; g < last; g++ {
		if g >= x.slabEnd {
			break
		} else if !x.freeSlab.has(g) {
			return false
		}
	}
	if last > x.slabEnd {
		for ; x.slabEnd < last; x.slabEnd++ {
			x.freeSlab.add(x.slabEnd)
		}
		x.growBlocks()
	}
	for g := first; g < last; g++ {
		x.freeSlab.remove(g)
		x.slabs.s[g].node = id
	}
	return true
}

// freeSlabs frees slabs from first up to end.
func (x *Index) freeSlabs(first, end uint32) {
	for g := first; g < end; g++ {
		x.slabs.s[g].node, x.slabs.s[g].twice = 0, 0
		x.freeSlab.add(g)
	}
}

// again adds n more copies of a block that a rank holds in a tier.
func (x *Index) again(r *rank, tier int, block, n uint32) {
	x.slabs.s[block/slabBlocks].twice |= 1 << (block % slabBlocks)
	r.extra[tier].add(block, n)
}
