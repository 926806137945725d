package tokenize

import (
	"crypto/sha256"
	"math"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// key is the digest of what tokens were made of.
type key [sha256.Size]byte

// cache is an LRU of tokens, bounded by bytes. Any number of goroutines may use it.
type cache struct {
	most int64

	mu    sync.Mutex
	bytes int64
	lru   *simplelru.LRU[key, Tokens]
}

// overhead is about what an entry takes beside its tokens.
const overhead = 192

func newCache(most int64) *cache {
	c := &cache{most: most}
	c.lru, _ = simplelru.NewLRU(math.MaxInt, func(_ key, t Tokens) { c.bytes -= size(t) })
	return c
}

func size(t Tokens) int64 { return int64(4*cap(t.IDs) + overhead) }

func (c *cache) get(k key) (Tokens, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lru.Get(k)
}

func (c *cache) add(k key, t Tokens) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if size(t) > c.most || c.lru.Contains(k) {
		return
	}
	c.lru.Add(k, t)
	for c.bytes += size(t); c.bytes > c.most; {
		c.lru.RemoveOldest()
	}
}
