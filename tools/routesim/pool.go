package routesim

// block is a block of the workload: a number from 1. 0 is a block that nobody looks for, as of output.
type block int32

// sparse is an array over all blocks of a workload, of which pages that are all zero are not in memory.
type sparse[T comparable] struct {
	pages []*[pageSize]T
	used  int // elements that are not zero, by add and set
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

// pool is the KV memory of one engine: slots of one block each. A slot is in use by some requests, or free. A free slot
// keeps its block, which a later request finds by its name, until the slot is needed: the slot that has been free
// longest is taken first. That is vLLM's rule; a request gives its slots back from its last to its first, so that the
// tail of a prompt leaves before its head.
//
// A block that is computed twice at the same time is kept once, under its name; a real engine keeps the second copy
// until its request ends. So the invariant holds that a held block's ancestors are held too.
type pool struct {
	at     sparse[int32] // the slots of held blocks
	slots  []slot        // slots[0] is the anchor of the ring of free slots, longest free first
	fresh  int32         // slots from here on were never used
	pinned int           // slots in use
	gone   func(block)   // is called for each block that leaves; may be nil
}

type slot struct {
	name       block
	refs       int32
	prev, next int32
}

// newPool is an empty pool of so many slots, for that many blocks in the workload.
func newPool(capacity, blocks int, gone func(block)) *pool {
	return &pool{at: newSparse[int32](blocks), slots: make([]slot, capacity+1), fresh: 1, gone: gone}
}

func (p *pool) capacity() int { return len(p.slots) - 1 }

// held reports whether a block is there, in use or not.
func (p *pool) held(name block) bool {
	return p.at.get(name) != 0
}

// available is how many slots could be taken now.
func (p *pool) available() int { return p.capacity() - p.pinned }

// idle returns how many slots have no content, and how many have content that no request uses.
func (p *pool) idle() (free, evictable int) {
	free = len(p.slots) - int(p.fresh)
	return free, p.available() - free
}

// oldest calls see for the blocks of the n slots that are taken next, once all slots were used.
func (p *pool) oldest(n int, see func(block)) {
	for i := p.slots[0].next; i != 0 && n > 0; i, n = p.slots[i].next, n-1 {
		if b := p.slots[i].name; b != 0 {
			see(b)
		}
	}
}

// pin takes a slot that holds the block if there is one.
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

// take takes a slot for a block that is not held; name 0 is a block that nobody looks for. It reports false if all
// slots are in use.
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

// release gives slots back, the last one first.
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

// forget drops the blocks that no request uses, as a reset of the prefix cache does; what is in use is found no more.
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

// prefix is how many leading blocks satisfy has, which must hold for a block's ancestors where it holds for the block.
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
