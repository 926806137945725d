package corpus

import (
	"iter"
	"math/rand/v2"
)

// engine is the cache of a worker with an eviction rule. A store of a held block makes a second copy. Every copy is
// evicted separately.
type engine interface {
	holds(block uint64) bool

	// use processes the blocks of a request in order. Blocks before fresh are read, the rest are stored.
	use(blocks []uint64, fresh int)

	// shrink evicts copies down to capacity and appends the blocks to gone.
	shrink(capacity int, gone []uint64) []uint64

	// held iterates over the held blocks, without duplicates.
	held() iter.Seq[uint64]
}

func newEngine(evict Evict, worker int) engine {
	if evict == Random || evict == Holes {
		return &randomEngine{rng: rand.New(rand.NewPCG(99, uint64(worker))), count: map[uint64]int{}}
	}
	return &lruEngine{at: map[uint64]int32{}, links: []link{{}}}
}

// lruEngine keeps blocks in a ring, least recently used first. links[0] is the anchor of the ring. free is the head of
// a free list that next links.
type lruEngine struct {
	at    map[uint64]int32
	links []link
	free  int32
}

type link struct {
	block      uint64
	prev, next int32
}

func (e *lruEngine) holds(block uint64) bool {
	_, ok := e.at[block]
	return ok
}

// use goes from the tail to the head, so a tail is evicted before the head.
func (e *lruEngine) use(blocks []uint64, _ int) {
	for i := len(blocks) - 1; i >= 0; i-- {
		at, known := e.at[blocks[i]]
		if known {
			e.unlink(at)
		} else {
			at = e.place(blocks[i])
		}
		last := e.links[0].prev
		e.links[at].prev, e.links[at].next = last, 0
		e.links[last].next, e.links[0].prev = at, at
	}
}

func (e *lruEngine) place(block uint64) int32 {
	at := e.free
	if at == 0 {
		at = int32(len(e.links))
		e.links = append(e.links, link{})
	} else {
		e.free = e.links[at].next
	}
	e.links[at].block = block
	e.at[block] = at
	return at
}

func (e *lruEngine) unlink(at int32) {
	l := e.links[at]
	e.links[l.prev].next, e.links[l.next].prev = l.next, l.prev
}

func (e *lruEngine) shrink(capacity int, gone []uint64) []uint64 {
	for len(e.at) > capacity {
		oldest := e.links[0].next
		block := e.links[oldest].block
		e.unlink(oldest)
		delete(e.at, block)
		e.links[oldest].next, e.free = e.free, oldest
		gone = append(gone, block)
	}
	return gone
}

func (e *lruEngine) held() iter.Seq[uint64] {
	return func(yield func(uint64) bool) {
		for at := e.links[0].next; at != 0; at = e.links[at].next {
			if !yield(e.links[at].block) {
				return
			}
		}
	}
}

// randomEngine evicts any copy with equal probability. The order of copies and the use of rng are part of the format:
// another order gives other bytes.
type randomEngine struct {
	rng    *rand.Rand
	copies []uint64
	count  map[uint64]int
}

func (e *randomEngine) holds(block uint64) bool { return e.count[block] > 0 }

func (e *randomEngine) use(blocks []uint64, fresh int) {
	e.copies = append(e.copies, blocks[fresh:]...)
	for _, block := range blocks[fresh:] {
		e.count[block]++
	}
}

func (e *randomEngine) shrink(capacity int, gone []uint64) []uint64 {
	for len(e.copies) > capacity {
		last := len(e.copies) - 1
		i := e.rng.IntN(last + 1)
		block := e.copies[i]
		e.copies[i] = e.copies[last]
		e.copies = e.copies[:last]
		if e.count[block] == 1 {
			delete(e.count, block)
		} else {
			e.count[block]--
		}
		gone = append(gone, block)
	}
	return gone
}

func (e *randomEngine) held() iter.Seq[uint64] {
	return func(yield func(uint64) bool) {
		for block := range e.count {
			if !yield(block) {
				return
			}
		}
	}
}
