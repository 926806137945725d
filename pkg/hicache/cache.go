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

// Lane is a chain of pages to look up in a store. The cache finds pages by fingerprints, which are cheap. It computes
// the names of pages only for a request to the store.
type Lane struct {
	ID uint64 // distinguishes lanes with equal fingerprints and different objects: an attention group

	Pages        int
	fingerprints []fingerprint // of runs, from a fingerprinter

	// Names returns the names of the objects of pages [from, to). The cache calls it only for pages to request. A page
	// is present only if all of its objects are present. Names belongs to a single goroutine.
	Names func(from, to int) PageKeys
}

// fingerprint identifies a run of pages and all pages before. It is valid only within this process.
type fingerprint [16]byte

// fingerprinter computes fingerprints. Two prompts have the same fingerprint of a run if and only if the tokens of the
// pages up to the end of the run are equal.
type fingerprinter struct {
	pageSize int    // tokens
	ahead    int    // further tokens after a page that the page depends on, as with EAGLE
	space    []byte // other inputs of the page, such as a tenant
}

// append appends the fingerprints of the first pages of a prompt. The prompt must have all tokens of the fingerprints.
func (m *fingerprinter) append(dst []fingerprint, tokens []uint32, pages int) []fingerprint {
	text := binary.LittleEndian.AppendUint64(make([]byte, 0, 64), uint64(m.pageSize))
	text = binary.LittleEndian.AppendUint64(text, uint64(m.ahead))
	last := xxh3.Hash128(append(text, m.space...))
	for first := 0; first < pages; first += runLength(first) {
		end := min(first+runLength(first), pages)
		run := tokens[first*m.pageSize : end*m.pageSize+m.ahead]
		h := xxh3.Hash128Seed(unsafe.Slice((*byte)(unsafe.Pointer(&run[0])), 4*len(run)), last.Lo)
		h.Hi += last.Hi * 0x9e3779b97f4a7c15 // the fingerprint includes all 128 bits of the previous fingerprint
		last = h
		dst = append(dst, last.Bytes())
	}
	return dst
}

// CacheConfig configures a [Cache]. The zero value selects the defaults.
type CacheConfig struct {
	// HitLife (default 2 s) is the time for which a present page counts as present. MissLife (default 500 ms) is the
	// time for which a missing page counts as missing. Longer times mean fewer requests to the store, but credit
	// evicted pages or miss new pages for longer.
	HitLife, MissLife time.Duration

	Bytes int // memory of the answers in bytes; default 64 MiB, enough for five million pages

	// Patience is the time limit of a request to the store, independent of the callers' deadlines; default 2 s. The
	// cache keeps an answer that arrives after the caller's deadline.
	Patience time.Duration

	// Flights is the maximum number of concurrent requests; default 64. Further callers get an error. A question that
	// follows runs has up to five requests.
	Flights int

	Now func() time.Time // default time.Now
}

// The cache stores pages in runs, each under a fingerprint. Runs at the start of a prompt are short, so that different
// prompts share their common part. Later runs are long, so that a long prompt has few runs. Both lengths divide 64 and
// longFrom.
const (
	shortRun = 16
	longRun  = 64
	longFrom = 1024 // pages
)

// runLength returns the number of pages in the run that begins at page first, in a long enough prompt.
func runLength(first int) int {
	if first < longFrom {
		return shortRun
	}
	return longRun
}

// runEnd returns the page after the end of a page's run, in a long enough prompt.
func runEnd(page int) int { return page - page%runLength(page) + runLength(page) }

// runOf returns the number of a page's run.
func runOf(page int) int {
	if page < longFrom {
		return page / shortRun
	}
	return longFrom/shortRun + (page-longFrom)/longRun
}

// runBytes is the memory of a cached run: the key, the answers, and the overhead of map and list.
const runBytes = 220

type runKey struct {
	lane        uint64
	fingerprint fingerprint
}

// partKey identifies some pages of a run, or the whole run if mask is 0.
type partKey struct {
	runKey
	mask uint64
}

// cachedRun has the answers for the pages of a run. Bit i is for page i.
type cachedRun struct {
	present, known uint64
	hit, miss      time.Time // time of the request for the oldest present and the oldest missing page
}

// errBusy is the error of a cache with the maximum number of requests in flight.
var errBusy = errors.New("too many requests to the store are in flight")

// Cache sends requests to a store and keeps the answers for a short time. At most one request is in flight for a run,
// or for the same part of a run. It is safe for concurrent use.
type Cache struct {
	store Store
	cfg   CacheConfig

	mu      sync.Mutex
	runs    *simplelru.LRU[runKey, cachedRun]
	asked   map[partKey]*flight
	flights int
	epoch   uint64 // counts calls of Forget
	stats   CacheStats
}

// CacheStats are the counters of a [Cache].
type CacheStats struct {
	Runs      int    // cached runs of pages
	Questions uint64 // requests to the store
	Failed    uint64 // failed requests
	Busy      uint64 // questions without a request, because too many were in flight
	Forgotten uint64 // calls of Forget
}

// flight is a request in flight. err and runs are set before done is closed.
type flight struct {
	done  chan struct{}
	err   error
	runs  map[runKey]cachedRun
	parts []partKey       // the keys of the flight in Cache.asked; Cache.mu guards parts and wakes
	wakes []chan struct{} // channels of the questions that follow several flights
}

// NewCache returns an empty cache.
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
		panic(err) // only for a size that is not positive
	}
	return &Cache{store: store, cfg: cfg, runs: runs, asked: map[partKey]*flight{}}
}

// Forget empties the cache, and discards the answers of requests in flight. Call it after a change of the store.
func (c *Cache) Forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch++
	c.stats.Forgotten++
	c.runs.Purge()
	c.asked = map[partKey]*flight{}
}

// Stats returns the counters.
func (c *Cache) Stats() CacheStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	s.Runs = c.runs.Len()
	return s
}

// Exists queries the store and caches nothing.
func (c *Cache) Exists(ctx context.Context, keys []string) (present, known Bitmap, err error) {
	return c.store.Exists(ctx, keys)
}

// seen returns the number of consecutive pages from page from that were present in the latest answers, of any age. The
// maximum is maxAhead.
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

// age removes expired answers.
func (r *cachedRun) age(now time.Time, cfg *CacheConfig) {
	if now.Sub(r.hit) > cfg.HitLife {
		r.known &^= r.present
		r.present = 0
	}
	if now.Sub(r.miss) > cfg.MissLife {
		r.known &= r.present
	}
}

// add adds the answers of a request to a run. asked is the time of the request.
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
	mask   uint64    // pages of the run to request
	from   int       // the first requested page
	names  PageKeys  // names of the pages from the field from on
	before cachedRun // cached answers of the run
}

// request sends requests to the store. For a page with several objects, it first requests only the first object, and
// the others only if the first is present. A miss is the usual answer and so costs a single key.
func (c *Cache) request(f *flight, todo []ask, epoch uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Patience)
	defer cancel()
	begun := c.cfg.Now()
	pages, first := askedPages(todo)
	found, err := c.find(ctx, pages, first, len(todo))
	f.err = err
	c.mu.Lock()
	if err != nil {
		c.stats.Failed++
	}
	for r, a := range todo {
		now, _ := c.runs.Peek(a.key) // the cache may have more answers by now
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
		default: // the channel already has a signal
		}
	}
	c.mu.Unlock()
}

// askedPage is a page of a request to the store.
type askedPage struct {
	run, bit int // the run in the request, and the page in the run
	keys     []string
}

// askedPages returns the pages of a request, and the first key of each page.
func askedPages(todo []ask) (pages []askedPage, first []string) {
	asked := 0
	for r := range todo {
		asked += bits.OnesCount64(todo[r].mask)
	}
	pages, first = make([]askedPage, 0, asked), make([]string, 0, asked)
	for r, a := range todo {
		for rest := a.mask; rest != 0; rest &= rest - 1 {
			bit := bits.TrailingZeros64(rest)
			at := (a.first + bit - a.from) * a.names.PerPage
			keys := a.names.Keys[at : at+a.names.PerPage]
			pages, first = append(pages, askedPage{r, bit, keys}), append(first, keys[0])
		}
	}
	return pages, first
}

// find asks the store for the first keys of the pages, and then for the other keys of the pages with a present first
// object. It returns the answers for each of the runs.
func (c *Cache) find(ctx context.Context, pages []askedPage, first []string, runs int) ([]cachedRun, error) {
	present, known, err := c.store.Exists(ctx, first)
	var more []string // keys of pages with a present first object
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
	found := make([]cachedRun, runs)
	at := 0 // position in more
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
	return found, err
}
