package hicache

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/hashicorp/golang-lru/v2/simplelru"
)

// Lane is a chain of pages to ask a store for.
type Lane struct {
	// ID tells lanes apart whose pages have the same names but other objects: a layout of keys, an attention group.
	ID uint64

	// Names are the pages' hashes, each of which stands for all pages before it too.
	Names []PageHash

	// Keys names the objects of some pages. A page is there only if all of its objects are. It is called from another goroutine,
	// and only for pages that are not remembered.
	Keys func(pages []PageHash) PageKeys
}

// CacheConfig bounds what is remembered of a store's answers. The zero value takes the defaults.
type CacheConfig struct {
	// HitLife (default 2 s) is how long a page that was there is taken to be there; MissLife (default 500 ms) how long one that was
	// not is taken not to be. Longer spares the store and credits what was evicted since, or misses what was written.
	HitLife, MissLife time.Duration

	// Bytes is the memory that answers may take; default 64 MiB, enough for five million pages.
	Bytes int

	// Patience is how long the store may take for one question, whoever still waits for it; default 2 s. What comes after the
	// caller's deadline is remembered for the next one.
	Patience time.Duration

	// Flights is how many questions may be under way; default 32. Beyond, callers go without.
	Flights int

	Now func() time.Time // default time.Now
}

// runPages is how many consecutive pages are remembered together, under the name of their last.
const runPages = 16

// runBytes is the memory of one remembered run: its key, its answers, and what a map and a list need for them.
const runBytes = 200

type runKey struct {
	lane uint64
	last PageHash
}

// remembered is what is known of a run's pages; bit i stands for its page i.
type remembered struct {
	present, known uint16
	hit, miss      time.Time // when the oldest of those that are there, or not, were asked for
}

// ErrBusy is returned by a cache that has as many questions under way as it may.
var ErrBusy = errors.New("too many questions to the store are under way")

// Cache asks a store and remembers its answers for a short while. For each run of pages at most one question is under way. Any
// number of goroutines may use it.
type Cache struct {
	store Store
	cfg   CacheConfig

	mu      sync.Mutex
	runs    *simplelru.LRU[runKey, remembered]
	asked   map[runKey]*flight
	flights int
	epoch   uint64 // counts Forget
}

// flight is a question under way. Its fields are written before done is closed.
type flight struct {
	done chan struct{}
	err  error
	runs map[runKey]remembered
}

// NewCache returns a cache that remembers nothing yet.
func NewCache(store Store, cfg CacheConfig) *Cache {
	if cfg.HitLife <= 0 {
		cfg.HitLife = 2 * time.Second
	}
	if cfg.MissLife <= 0 {
		cfg.MissLife = 500 * time.Millisecond
	}
	if cfg.Bytes <= 0 {
		cfg.Bytes = 64 << 20
	}
	if cfg.Patience <= 0 {
		cfg.Patience = 2 * time.Second
	}
	if cfg.Flights <= 0 {
		cfg.Flights = 32
	}
	if cfg.Now == nil {
		cfg.Now = time.Now
	}
	runs, err := simplelru.NewLRU[runKey, remembered](max(1, cfg.Bytes/runBytes), nil)
	if err != nil {
		panic(err) // only of a size that is not positive
	}
	return &Cache{store: store, cfg: cfg, runs: runs, asked: map[runKey]*flight{}}
}

// Forget drops all that is remembered, and what is under way will not be remembered: the store is not what it was.
func (c *Cache) Forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch++
	c.runs.Purge()
	c.asked = map[runKey]*flight{}
}

// Len is how many pages' runs are remembered.
func (c *Cache) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.runs.Len()
}

// Question is what was begun with [Cache.Begin]. It is for one goroutine.
type Question struct {
	cache   *Cache
	lane    Lane
	from    int
	present Bitmap
	known   Bitmap
	oldest  time.Time
	err     error
	waiting []waiting
}

type waiting struct {
	on    *flight
	key   runKey
	first int
	pages int
}

// Found is what is known of a lane's pages. Bit i stands for page i. A bit that is not set in Known says nothing.
type Found struct {
	Present, Known Bitmap
	Age            time.Duration // of the oldest answer used; 0 if there is none
	Err            error         // why not all of what was asked is known
}

// Begin looks at what is remembered of a lane's pages from page from on, and has the store asked for the rest. It waits for nothing.
func (c *Cache) Begin(lane Lane, from int) *Question {
	q := &Question{cache: c, lane: lane, from: from, present: NewBitmap(len(lane.Names)), known: NewBitmap(len(lane.Names))}
	now := c.cfg.Now()
	var mine *flight
	var todo []ask
	c.mu.Lock()
	for first := from - from%runPages; first < len(lane.Names); first += runPages {
		pages := min(runPages, len(lane.Names)-first)
		key := runKey{lane.ID, lane.Names[first+pages-1]}
		want := uint16(1<<pages - 1)
		r, _ := c.runs.Get(key)
		r.age(now, &c.cfg)
		q.take(r, first)
		if r.known&want == want {
			continue
		}
		f := c.asked[key]
		if f == nil {
			if mine == nil {
				if c.flights >= c.cfg.Flights {
					q.err = ErrBusy
					continue
				}
				mine = &flight{done: make(chan struct{}), runs: map[runKey]remembered{}}
				c.flights++
			}
			f = mine
			c.asked[key] = f
			todo = append(todo, ask{key, first, pages, r})
		}
		q.waiting = append(q.waiting, waiting{f, key, first, pages})
	}
	epoch := c.epoch
	c.mu.Unlock()
	if mine != nil {
		go c.fly(mine, lane, todo, epoch)
	}
	return q
}

// age drops what is too old.
func (r *remembered) age(now time.Time, cfg *CacheConfig) {
	if now.Sub(r.hit) > cfg.HitLife {
		r.known &^= r.present
		r.present = 0
	}
	if now.Sub(r.miss) > cfg.MissLife {
		r.known &= r.present
	}
}

// take adds what is known of a run that begins at a page.
func (q *Question) take(r remembered, first int) {
	for i := range min(runPages, len(q.lane.Names)-first) {
		if first+i < q.from || r.known>>i&1 == 0 {
			continue
		}
		q.known.Set(first + i)
		at := r.miss
		if r.present>>i&1 != 0 {
			q.present.Set(first + i)
			at = r.hit
		}
		if q.oldest.IsZero() || at.Before(q.oldest) {
			q.oldest = at
		}
	}
}

// Wait waits for what the store was asked, until ctx ends at the latest, and says what is known then.
func (q *Question) Wait(ctx context.Context) Found {
	for _, w := range q.waiting {
		select {
		case <-w.on.done:
		default:
			select {
			case <-w.on.done:
			case <-ctx.Done():
				if q.err == nil {
					q.err = ctx.Err()
				}
				continue
			}
		}
		q.take(w.on.runs[w.key], w.first)
		if q.err == nil {
			q.err = w.on.err
		}
	}
	q.waiting = nil
	f := Found{Present: q.present, Known: q.known}
	if !q.oldest.IsZero() {
		f.Age = max(0, q.cache.cfg.Now().Sub(q.oldest))
	}
	whole := true
	for i := q.from; i < len(q.lane.Names) && whole; i++ {
		whole = q.known.Get(i)
	}
	if !whole {
		f.Err = q.err
	}
	return f
}

// ask is a run that a flight asks for.
type ask struct {
	key    runKey
	first  int
	pages  int
	before remembered // what is known of it
}

// fly asks the store. Of pages with several objects it asks for the first alone, and for the rest only where that is there: a miss
// is the usual answer, and costs one key then.
func (c *Cache) fly(f *flight, lane Lane, todo []ask, epoch uint64) {
	ctx, cancel := context.WithTimeout(context.Background(), c.cfg.Patience)
	defer cancel()
	begun := c.cfg.Now()
	type page struct{ run, bit int }
	var pages []page
	var first, rest []string
	var spans [][2]int // of rest, by page
	for r, a := range todo {
		named := lane.Keys(lane.Names[a.first : a.first+a.pages])
		for i := range a.pages {
			if a.before.known>>i&1 != 0 {
				continue
			}
			keys := named.Keys[i*named.PerPage : (i+1)*named.PerPage]
			pages = append(pages, page{r, i})
			first = append(first, keys[0])
			spans = append(spans, [2]int{len(rest), len(rest) + len(keys) - 1})
			rest = append(rest, keys[1:]...)
		}
	}
	present, known, err := c.store.Exists(ctx, first)
	var more []string
	var at []int // for each page, where its keys begin in more; -1: it has none
	for i := range pages {
		at = append(at, -1)
		if s := spans[i]; present.Get(i) && known.Get(i) && s[1] > s[0] {
			at[i] = len(more)
			more = append(more, rest[s[0]:s[1]]...)
		}
	}
	var presentMore, knownMore Bitmap
	if len(more) > 0 {
		var failed error
		if presentMore, knownMore, failed = c.store.Exists(ctx, more); err == nil {
			err = failed
		}
	}
	results := make([]remembered, len(todo))
	for r := range todo {
		results[r] = todo[r].before
	}
	for i, p := range pages {
		ok, sure := present.Get(i), known.Get(i)
		if at[i] >= 0 && sure {
			for k := at[i]; k < at[i]+spans[i][1]-spans[i][0]; k++ {
				if !knownMore.Get(k) {
					sure = false
				} else if !presentMore.Get(k) {
					ok, sure = false, true
					break
				}
			}
		}
		r := &results[p.run]
		switch {
		case !sure:
		case ok:
			if r.present == 0 {
				r.hit = begun
			}
			r.present |= 1 << p.bit
			r.known |= 1 << p.bit
		default:
			if r.known == r.present {
				r.miss = begun
			}
			r.known |= 1 << p.bit
		}
	}
	f.err = err
	c.mu.Lock()
	for r, a := range todo {
		f.runs[a.key] = results[r]
		if epoch == c.epoch && results[r].known != 0 {
			c.runs.Add(a.key, results[r])
		}
		if c.asked[a.key] == f {
			delete(c.asked, a.key)
		}
	}
	c.flights--
	c.mu.Unlock()
	close(f.done)
}
