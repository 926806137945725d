package routesim

// block is a block of the workload: a number from 1. No request looks for block 0, such as output.
type block int32

// sparse is an array over all blocks of a workload. Pages with only zeros are not allocated.
type sparse[T comparable] struct {
	pages []*[pageSize]T
	used  int // nonzero elements, from add and set
}

const pageSize = 128

func newSparse[T comparable](blocks int) sparse[T] {
	return sparse[T]{pages: make([]*[pageSize]T, blocks/pageSize+1)}
}

func (s *sparse[T]) get(b block) (v T) {
	if p := s.pages[b/pageSize]; p != nil {
		v = p[b%pageSize]
	}
	return v
}

func (s *sparse[T]) set(b block, v T) {
	p := s.pages[b/pageSize]
	if p == nil {
		p = new([pageSize]T)
		s.pages[b/pageSize] = p
	}
	var zero T
	if old := p[b%pageSize]; old == zero && v != zero {
		s.used++
	} else if old != zero && v == zero {
		s.used--
	}
	p[b%pageSize] = v
}

func (s *sparse[T]) clear() {
	clear(s.pages)
	s.used = 0
}

// pool is the KV memory of an engine: slots for a block each. A slot is in use by requests, or free. A free slot keeps
// its block until the slot is needed, and a later request can find the block by name. The slot with the longest time in
// the free list is reused first, as in vLLM. A request releases its slots from the last to the first, so the tail of a
// prompt is evicted before the head.
//
// Two concurrent computations of a block are stored once, under the same name. A real engine keeps the second copy
// until the end of the request. As an invariant, the ancestors of a held block are held too.
type pool struct {
	at     sparse[int32] // the slots of held blocks
	slots  []slot        // slots[0] is the anchor of the ring of free slots, longest free first
	fresh  int32         // slots from here on were never used
	pinned int           // slots in use
	gone   func(block)   // called for every evicted block; may be nil
}

type slot struct {
	name       block
	refs       int32
	prev, next int32
}

// newPool returns an empty pool with capacity slots for a workload with the given number of blocks.
func newPool(capacity, blocks int, gone func(block)) *pool {
	return &pool{at: newSparse[int32](blocks), slots: make([]slot, capacity+1), fresh: 1, gone: gone}
}

func (p *pool) capacity() int { return len(p.slots) - 1 }

// held reports whether a block is there, in use or not.
func (p *pool) held(name block) bool {
	return p.at.get(name) != 0
}

// available returns the number of available slots.
func (p *pool) available() int { return p.capacity() - p.pinned }

// idle returns the number of slots without content, and the number of slots with content and without a request.
func (p *pool) idle() (free, evictable int) {
	free = len(p.slots) - int(p.fresh)
	return free, p.available() - free
}

// oldest calls see for the blocks of the next n slots to reuse, after all slots were used once.
func (p *pool) oldest(n int, see func(block)) {
	for i := p.slots[0].next; i != 0 && n > 0; i, n = p.slots[i].next, n-1 {
		if b := p.slots[i].name; b != 0 {
			see(b)
		}
	}
}

// pin reserves the slot of a held block.
func (p *pool) pin(name block) (int32, bool) {
	i := p.at.get(name)
	if i == 0 {
		return 0, false
	}
	if p.slots[i].refs == 0 {
		p.unlink(i)
		p.pinned++
	}
	p.slots[i].refs++
	return i, true
}

// take reserves a slot for a block that is not held; name 0 is an anonymous block. It reports false if all slots are in
// use.
func (p *pool) take(name block) (int32, bool) {
	i := p.fresh
	switch {
	case int(i) < len(p.slots):
		p.fresh++
	case p.slots[0].next != 0:
		i = p.slots[0].next
		p.unlink(i)
		if old := p.slots[i].name; old != 0 {
			p.at.set(old, 0)
			if p.gone != nil {
				p.gone(old)
			}
		}
	default:
		return 0, false
	}
	p.slots[i] = slot{name: name, refs: 1}
	if name != 0 {
		p.at.set(name, i)
	}
	p.pinned++
	return i, true
}

// release releases slots, the last first.
func (p *pool) release(slots []int32) {
	for n := len(slots) - 1; n >= 0; n-- {
		i := slots[n]
		s := &p.slots[i]
		if s.refs--; s.refs > 0 {
			continue
		}
		last := p.slots[0].prev
		s.prev, s.next = last, 0
		p.slots[last].next, p.slots[0].prev = i, i
		p.pinned--
	}
}

// forget drops the blocks without a request, as a reset of the prefix cache does. Blocks in use can no longer be found.
func (p *pool) forget() {
	p.at.clear()
	for i := range p.slots {
		p.slots[i].name = 0
	}
}

func (p *pool) unlink(i int32) {
	s := p.slots[i]
	p.slots[s.prev].next, p.slots[s.next].prev = s.next, s.prev
}

// prefix returns the number of leading blocks that satisfy has. If has holds for a block, it must hold for the
// ancestors.
func prefix(names []block, has func(block) bool) int {
	if len(names) == 0 || !has(names[0]) {
		return 0
	}
	lo, hi := 1, len(names) // the first lo hold
	if has(names[hi-1]) {
		return hi
	}
	for hi--; lo < hi; {
		if m := (lo + hi) / 2; has(names[m]) {
			lo = m + 1
		} else {
			hi = m
		}
	}
	return lo
}
