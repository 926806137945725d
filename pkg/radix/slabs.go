package radix

import "math/bits"

// slabBlocks is how many blocks of the arena are given out together. A node owns whole slabs, but for the first, which
// it shares with its parent if it was split off amid one.
const slabBlocks = 16

// slab is what the writer keeps for sixteen blocks.
type slab struct {
	node  uint32 // the deepest node with blocks in it
	pins  uint32 // removals that remember a block in it, and names of exact counts
	owner uint32 // whose names those in the arena are; has no meaning if there are none
	named uint16 // blocks whose name stands in the arena
	twice uint16 // blocks of which some rank has, or has had, a second copy
}

// idSet is a set of small numbers, that gives out the lowest or a wanted one.
type idSet struct {
	words []uint64
	n     int
	low   int // no word below it has a bit
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

func (s *idSet) take(i uint32) bool {
	if !s.has(i) {
		return false
	}
	s.words[i>>6] &^= 1 << (i & 63)
	s.n--
	return true
}

// lowest is the least element of a set that is not empty.
func (s *idSet) lowest() uint32 {
	for s.words[s.low] == 0 {
		s.low++
	}
	return uint32(s.low<<6 + bits.TrailingZeros64(s.words[s.low]))
}

// allocate gives out up to want slabs in a row, for a node. It gives fewer if so many in a row are hard to find and
// much is free.
func (x *Index) allocate(want uint32) (first, n uint32) {
	free := &x.freeSlab
	first, n = x.searchFree(want)
	switch {
	case n < want && uint32(free.n)*8 < x.slabEnd:
		first, n = x.slabEnd, want
		x.slabEnd += want
		x.growBlocks()
		return first, n
	case n == 0: // much is free, but not near
		x.slabHand = free.lowest() >> 6
		first, n = x.searchFree(want)
	}
	n = min(n, want)
	for g := first; g < first+n; g++ {
		free.take(g)
	}
	return first, n
}

// searchFree looks for want free slabs in a row, a while from where it stopped the last time. It returns the longest
// row that it came across.
func (x *Index) searchFree(want uint32) (first, n uint32) {
	const look = 64 // words of the bitmap
	words := x.freeSlab.words
	if x.freeSlab.n == 0 {
		return 0, 0
	}
	w, run := x.slabHand, uint32(0) // run: how many free ones end at the current place
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

// growBlocks makes the arena as large as the slabs that were given out.
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

// claim takes what a node needs to grow by n blocks in place, and reports whether it could.
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
		x.freeSlab.take(g)
		x.slabs.s[g].node = id
	}
	return true
}

// freeSlabs gives slabs from first up to end back.
func (x *Index) freeSlabs(first, end uint32) {
	for g := first; g < end; g++ {
		x.slabs.s[g].node, x.slabs.s[g].twice = 0, 0
		x.freeSlab.add(g)
	}
}

// again gives a rank n copies more of a block that it has in a tier.
func (x *Index) again(r *rank, tier int, block, n uint32) {
	x.slabs.s[block/slabBlocks].twice |= 1 << (block % slabBlocks)
	r.extra[tier].add(block, n)
}
