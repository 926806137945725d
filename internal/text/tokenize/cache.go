package tokenize

import (
	"crypto/sha256"
	"io"
	"math"
	"slices"
	"sync"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// key is the digest of the tokenized input.
type key [sha256.Size]byte

// cache is an LRU of tokens, bounded by bytes. It is safe for concurrent use.
type cache struct {
	most int64

	mu    sync.Mutex
	bytes int64
	lru   *simplelru.LRU[key, Tokens]
}

// parts stores the tokens of parts of texts in a cache, beside the tokens of whole texts.
type parts struct{ *cache }

func (p parts) key(part string) key {
	h := sha256.New()
	_, _ = io.WriteString(h, "part "+part)
	return key(h.Sum(nil))
}

// Get implements bpe.Memory, as Add does.
func (p parts) Get(part string) ([]uint32, bool) {
	t, has := p.get(p.key(part))
	return t.IDs, has
}

// Add stores a copy of the tokens.
func (p parts) Add(part string, ids []uint32) { p.add(p.key(part), Tokens{IDs: slices.Clone(ids)}) }

// overhead is the approximate cost of an entry beside its tokens.
const overhead = 192

func newCache(most int64) *cache {
	c := &cache{most: most}
	c.lru, _ = simplelru.NewLRU(math.MaxInt, func(_ key, t Tokens) { c.bytes -= size(t) })
	return c
}

func size(t Tokens) int64 { return int64(4*cap(t.IDs) + 16*cap(t.Media) + overhead) }

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
