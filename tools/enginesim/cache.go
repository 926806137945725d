package enginesim

import (
	"encoding/binary"
	"iter"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// AppendNames appends an engine's names of the full blocks of tokens. A name depends on the seed and on all tokens up
// to the end of the block. A partial block has no name.
func AppendNames(names []events.BlockHash, seed uint64, blockSize int, tokens []uint32) []events.BlockHash {
	buf := make([]byte, 8+4*blockSize)
	last := seed
	for len(tokens) >= blockSize {
		binary.LittleEndian.PutUint64(buf, last)
		for i, t := range tokens[:blockSize] {
			binary.LittleEndian.PutUint32(buf[8+4*i:], t)
		}
		last = xxh3.HashSeed(buf, engineSeed)
		names = append(names, events.BlockHash(last))
		tokens = tokens[blockSize:]
	}
	return names
}

// engineSeed sets an engine's names apart from every hash of ours.
const engineSeed = 0x656e67696e65

// Cache is the cache of an engine: blocks by name, with a capacity and eviction of the least recently used block. It is
// not safe for concurrent use.
//
// The ancestors of a block are at least as recent as the block and are evicted later, so there are no holes.
type Cache struct {
	capacity int
	at       map[events.BlockHash]int32
	links    []link // a ring, least recently used first; links[0] is the anchor
	free     int32  // the first of the unused links, chained by next; 0: none
}

type link struct {
	name       events.BlockHash
	prev, next int32
}

// NewCache returns an empty cache for so many blocks.
func NewCache(capacity int) *Cache {
	c := &Cache{capacity: capacity}
	c.Clear()
	return c
}

// Clear empties the cache.
func (c *Cache) Clear() {
	c.at, c.links, c.free = make(map[events.BlockHash]int32), []link{{}}, 0
}

// Len is how many blocks are held.
func (c *Cache) Len() int { return len(c.at) }

// Holds reports whether a block is held.
func (c *Cache) Holds(name events.BlockHash) bool {
	_, ok := c.at[name]
	return ok
}

// All iterates over the held blocks, the least recently used first.
func (c *Cache) All() iter.Seq[events.BlockHash] {
	return func(yield func(events.BlockHash) bool) {
		for i := c.links[0].next; i != 0; i = c.links[i].next {
			if !yield(c.links[i].name) {
				return
			}
		}
	}
}

// Hit returns the number of held leading blocks. It does not change the cache.
func (c *Cache) Hit(names []events.BlockHash) int {
	n := 0
	for n < len(names) && c.Holds(names[n]) {
		n++
	}
	return n
}

// Use stores the missing blocks of a prompt, given from the start, and appends the evicted blocks to gone, in order.
func (c *Cache) Use(names, gone []events.BlockHash) []events.BlockHash {
	for i := len(names) - 1; i >= 0; i-- { // the tail first, so that the tail is evicted first
		at, held := c.at[names[i]]
		if held {
			c.unlink(at)
		} else {
			at = c.place(names[i])
		}
		last := c.links[0].prev
		c.links[at].prev, c.links[at].next = last, 0
		c.links[last].next, c.links[0].prev = at, at
	}
	for len(c.at) > c.capacity {
		at := c.links[0].next
		gone = append(gone, c.links[at].name)
		delete(c.at, c.links[at].name)
		c.unlink(at)
		c.links[at].next, c.free = c.free, at
	}
	return gone
}

func (c *Cache) place(name events.BlockHash) int32 {
	at := c.free
	if at == 0 {
		at = int32(len(c.links))
		c.links = append(c.links, link{})
	} else {
		c.free = c.links[at].next
	}
	c.links[at].name = name
	c.at[name] = at
	return at
}

func (c *Cache) unlink(at int32) {
	l := c.links[at]
	c.links[l.prev].next, c.links[l.next].prev = l.next, l.prev
}
