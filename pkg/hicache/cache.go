package hicache

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"sync"
	"time"
	"unsafe"

	"github.com/hashicorp/golang-lru/v2/simplelru"
	"github.com/zeebo/xxh3"
)

// Lane is a chain of pages to ask a store for. What is cached of them is found by fingerprints, which are cheap; their
// names in the store are made only if it must be asked.
type Lane struct {
	ID uint64 // tells lanes of one cache apart that have the same fingerprints and other objects: an attention group

	Pages        int
	fingerprints []fingerprint // of runs, as fingerprinter makes them

	// Names names the objects of pages from, up to and not including, to. It is called only for pages that the store must
	// be asked for. A page is there only if all of its objects are. It is for one goroutine.
	Names func(from, to int) PageKeys
}

// fingerprint stands for a run of pages and all before it. It means nothing outside of this process.
type fingerprint [16]byte

// fingerprinter makes fingerprints: two prompts have the same one for a run if and only if the pages up to its end are
// made of the same tokens.
type fingerprinter struct {
	pageSize int    // tokens
	ahead    int    // tokens after a page on which it depends too, as under EAGLE
	space    []byte // what else makes a page what it is, such as a tenant
}

// append appends the fingerprints of the first pages of a prompt, which must have the tokens that these depend on.
func (m *fingerprinter) append(dst []fingerprint, tokens []uint32, pages int) []fingerprint {
	text := binary.LittleEndian.AppendUint64(make([]byte, 0, 64), uint64(m.pageSize))
	text = binary.LittleEndian.AppendUint64(text, uint64(m.ahead))
	last := xxh3.Hash128(append(text, m.space...))
	for first := 0; first < pages; first += runLength(first) {
		end := min(first+runLength(first), pages)
		run := tokens[first*m.pageSize : end*m.pageSize+m.ahead]
		h := xxh3.Hash128Seed(unsafe.Slice((*byte)(unsafe.Pointer(&run[0])), 4*len(run)), last.Lo)
		h.Hi += last.Hi * 0x9e3779b97f4a7c15 // all 128 bits of the fingerprint before are in this one
		last = h
		dst = append(dst, last.Bytes())
	}
	return dst
}

// CacheConfig bounds what is cached of a store's answers. The zero value takes the defaults.
type CacheConfig struct {
	// HitLife (default 2 s) is how long a page that was there is taken to be there; MissLife (default 500 ms) how long
	// one that was not is taken not to be. Longer spares the store and credits what was evicted since, or misses what
	// was written.
	HitLife, MissLife time.Duration

	Bytes int // the memory that answers may take; default 64 MiB, enough for five million pages

	// Patience is how long the store may take for one question, whoever still waits for it; default 2 s. What comes
	// after the caller's deadline is cached for the next one.
	Patience time.Duration

	// Flights is how many requests may be under way; default 64. Beyond, callers go without. A question that follows
	// runs has up to five.
	Flights int

	Now func() time.Time // default time.Now
}

// Pages are cached in runs, each under its fingerprint: short ones at first, so that prompts that part share what they
// have in common, and long ones further on, so that a long prompt needs few. Both divide 64 and longFrom.
const (
	shortRun = 16
	longRun  = 64
	longFrom = 1024 // pages
)

// runLength is how many pages the run has that begins at a page, if the prompt does not end before.
func runLength(first int) int {
	if first < longFrom {
		return shortRun
	}
	return longRun
}

// runEnd is the page after the last of the run that a page is in, if the prompt does not end before.
func runEnd(page int) int { return page - page%runLength(page) + runLength(page) }

// runOf is the number of the run that a page is in.
func runOf(page int) int {
	if page < longFrom {
		return page / shortRun
	}
	return longFrom/shortRun + (page-longFrom)/longRun
}

// runBytes is the memory of one cached run: its key, its answers, and what a map and a list need for them.
const runBytes = 220

type runKey struct {
	lane        uint64
	fingerprint fingerprint
}

// partKey stands for some pages of a run, or for all of it, if mask is 0.
type partKey struct {
	runKey
	mask uint64
}

// cachedRun is what is known of a run's pages; bit i stands for its page i.
type cachedRun struct {
	present, known uint64
	hit, miss      time.Time // when the oldest of those that are there, or not, were asked for
}

// errBusy is returned by a cache that has as many questions under way as it may.
var errBusy = errors.New("too many questions to the store are under way")

// Cache asks a store and remembers its answers for a short while. For each run of pages, and for the same part of one,
// at most one request is under way. Any number of goroutines may use it.
type Cache struct {
	store Store
	cfg   CacheConfig

	mu      sync.Mutex
	runs    *simplelru.LRU[runKey, cachedRun]
	asked   map[partKey]*flight
	flights int
	epoch   uint64 // counts Forget
	stats   CacheStats
}

// CacheStats says what a cache remembers and what became of its questions.
type CacheStats struct {
	Runs      int    // of pages, that are cached
	Questions uint64 // that the store was asked
	Failed    uint64 // of these, that ended with an error
	Busy      uint64 // not asked, as there were too many under way
	Forgotten uint64 // how often all was dropped
}

// flight is a request under way. err and runs are written before done is closed.
type flight struct {
	done  chan struct{}
	err   error
	runs  map[runKey]cachedRun
	parts []partKey       // under which others find it in Cache.asked; guarded by Cache.mu, like
	wakes []chan struct{} // of those who follow several flights
}

// NewCache returns a cache that remembers nothing yet.
func NewCache(store Store, cfg CacheConfig) *Cache {
	cfg.HitLife = cmp.Or(max(cfg.HitLife, 0), 2*time.Second)
	cfg.MissLife = cmp.Or(max(cfg.MissLife, 0), 500*time.Millisecond)
	cfg.Bytes = cmp.Or(max(cfg.Bytes, 0), 64<<20)
	cfg.Patience = cmp.Or(max(cfg.Patience, 0), 2*time.Second)
	cfg.Flights = cmp.Or(max(cfg.Flights, 0), 64)
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	runs, err := simplelru.NewLRU[runKey, cachedRun](max(1, cfg.Bytes/runBytes), nil)
	if err != nil {
		panic(err) // only of a size that is not positive
	}
	return &Cache{store: store, cfg: cfg, runs: runs, asked: map[partKey]*flight{}}
}

// Forget drops all that is cached, and what is under way will not be cached: the store is not what it was.
func (c *Cache) Forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch++
	c.stats.Forgotten++
	c.runs.Purge()
	c.asked = map[partKey]*flight{}
}

// Stats counts.
func (c *Cache) Stats() CacheStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Runs = c.runs.Len()
	return s
}

// Exists asks the store itself, and remembers nothing.
func (c *Cache) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	return c.store.Exists(ctx, keys)
}

// seen is how many pages from one on were there when they were asked for last, whenever that was; maxAhead at most.
func (c *Cache) seen(lane *Lane, from int) (pages int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for at := from; at < lane.Pages && pages < maxAhead; {
		first := at - at%runLength(at)
		run, _ := c.runs.Peek(runKey{lane.ID, lane.fingerprints[runOf(at)]})
		end := min(runEnd(at), lane.Pages)
		want := ^uint64(0) >> (64 - (end - at)) << (at - first)
		if run.present&want != want {
			break
		}
		pages, at = pages+end-at, end
	}
	return pages
}

// age drops what is too old.
func (r *cachedRun) age(now time.Time, cfg *CacheConfig) {
	if now.Sub(r.hit) > cfg.HitLife {
		r.known &^= r.present
		r.present = 0
	}
	if now.Sub(r.miss) > cfg.MissLife {
		r.known &= r.present
	}
}

// add adds what was found of a run's pages, which were asked for at a time.
func (r *cachedRun) add(present, known uint64, asked time.Time) {
	r.present, r.known = r.present&^known, r.known&^known
	if present != 0 && (r.present == 0 || asked.Before(r.hit)) {
		r.hit = asked
	}
	if present != known && (r.known == r.present || asked.Before(r.miss)) {
		r.miss = asked
	}
	r.present, r.known = r.present|present, r.known|known
}

type ask struct {
	key    runKey
	first  int
	mask   uint64    // of the run's pages that are asked for
	from   int       // the first of these
	names  PageKeys  // of the pages from that one on
	before cachedRun // what is known of the run
}

// request asks the store. Of pages with several objects it asks for the first alone, and for the rest only where that
// is there: a miss is the usual answer, and costs one key then.
func (c *Cache) request(f *flight, todo []ask, epoch uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Patience)
	defer cancel()
	begun := c.cfg.Now()
	type page struct {
		run, bit int
		keys     []string
	}
	asked := 0
	for r := range todo {
		asked += bits.OnesCount64(todo[r].mask)
	}
	pages, first := make([]page, 0, asked), make([]string, 0, asked)
	for r, a := range todo {
		for rest := a.mask; rest != 0; rest &= rest - 1 {
			bit := bits.TrailingZeros64(rest)
			at := (a.first + bit - a.from) * a.names.PerPage
			keys := a.names.Keys[at : at+a.names.PerPage]
			pages, first = append(pages, page{r, bit, keys}), append(first, keys[0])
		}
	}
	present, known, err := c.store.Exists(ctx, first)
	var more []string // of pages whose first key is there
	for i, p := range pages {
		if present.Get(i) && known.Get(i) {
			more = append(more, p.keys[1:]...)
		}
	}
	var presentMore, knownMore Bitmap
	if len(more) > 0 {
		var failed error
		if presentMore, knownMore, failed = c.store.Exists(ctx, more); err == nil {
			err = failed
		}
	}
	found := make([]cachedRun, len(todo)) // in this request
	at := 0                               // in more
	for i, p := range pages {
		ok, sure := present.Get(i), known.Get(i)
		if ok && sure {
			for k := at; k < at+len(p.keys)-1; k++ {
				if !knownMore.Get(k) {
					sure = false
				} else if !presentMore.Get(k) {
					ok, sure = false, true
					break
				}
			}
			at += len(p.keys) - 1
		}
		if r := &found[p.run]; sure {
			r.known |= 1 << p.bit
			if ok {
				r.present |= 1 << p.bit
			}
		}
	}
	f.err = err
	c.mu.Lock()
	if err != nil {
		c.stats.Failed++
	}
	for r, a := range todo {
		now, _ := c.runs.Peek(a.key) // which may be more by now
		now.age(begun, &c.cfg)
		now.add(found[r].present, found[r].known, begun)
		a.before.add(found[r].present, found[r].known, begun)
		f.runs[a.key] = a.before
		if epoch == c.epoch && found[r].known != 0 {
			c.runs.Add(a.key, now)
		}
	}
	for _, key := range f.parts {
		if c.asked[key] == f {
			delete(c.asked, key)
		}
	}
	c.flights--
	close(f.done)
	for _, wake := range f.wakes {
		select {
		case wake <- struct{}{}:
		default: // there is a signal already
		}
	}
	c.mu.Unlock()
}
