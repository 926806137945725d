package hicache

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"math/bits"
	"slices"
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

	// Flights is how many requests may be under way; default 64. Beyond, callers go without. A question that follows a
	// long run has up to four.
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

// cachedRun is what is known of a run's pages; bit i stands for its page i.
type cachedRun struct {
	present, known uint64
	hit, miss      time.Time // when the oldest of those that are there, or not, were asked for
}

// errBusy is returned by a cache that has as many questions under way as it may.
var errBusy = errors.New("too many questions to the store are under way")

// Cache asks a store and remembers its answers for a short while. For each run of pages at most one question is under
// way. Any number of goroutines may use it.
type Cache struct {
	store Store
	cfg   CacheConfig

	mu      sync.Mutex
	runs    *simplelru.LRU[runKey, cachedRun]
	asked   map[runKey]*flight
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
	wakes []chan struct{} // of those who follow several flights; guarded by Cache.mu
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
	return &Cache{store: store, cfg: cfg, runs: runs, asked: map[runKey]*flight{}}
}

// Forget drops all that is cached, and what is under way will not be cached: the store is not what it was.
func (c *Cache) Forget() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.epoch++
	c.stats.Forgotten++
	c.runs.Purge()
	c.asked = map[runKey]*flight{}
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

// Question is what is asked about one lane. It is for one goroutine.
type Question struct {
	cache   *Cache
	lane    Lane
	from    int
	wanted  Bitmap // pages that are to be known
	ends    []int  // of runs that were followed: the first page of each that was not known to be there
	asked   Bitmap // pages that were looked up, and asked for if they were not cached
	present Bitmap
	known   Bitmap
	oldest  time.Time
	err     error
	waiting []waiting
	wake    chan struct{} // of Follow, holds one signal: a flight has landed; nil otherwise
}

type waiting struct {
	on    *flight
	key   runKey
	first int
	mask  uint64 // of the run's pages
}

// Found is what is known of a lane's pages. Bit i stands for page i. A bit that is not set in Known says nothing.
type Found struct {
	Present, Known Bitmap
	Age            time.Duration // of the oldest answer used; 0 if there is none
	Err            error         // why not all of what was asked is known
}

// Begin begins a question about a lane's pages from page from on. Nothing is asked yet.
func (c *Cache) Begin(lane Lane, from int) *Question {
	return &Question{cache: c, lane: lane, from: from, wanted: NewBitmap(lane.Pages), asked: NewBitmap(lane.Pages),
		present: NewBitmap(lane.Pages), known: NewBitmap(lane.Pages)}
}

// Ask looks at what is cached of the runs in which pages from, up to and not including, to are, and has the store asked
// for the rest. It waits for nothing.
func (q *Question) Ask(from, to int) {
	parts := q.runs(nil, max(from, q.from), min(to, q.lane.Pages))
	for _, p := range parts {
		q.wanted[p.first>>6] |= p.mask << (p.first & 63)
	}
	q.ask(parts)
}

// part is some pages of a run: bit i stands for the i-th.
type part struct {
	first int // the run's first page
	mask  uint64
}

// runs appends the runs in which pages are.
func (q *Question) runs(dst []part, from, to int) []part {
	for first := from - from%runLength(from); first < to; first += runLength(first) {
		dst = append(dst, part{first, ^uint64(0) >> (64 - min(runLength(first), q.lane.Pages-first))})
	}
	return dst
}

// single is one page of a run.
func single(at int) part {
	first := at - at%runLength(at)
	return part{first, 1 << (at - first)}
}

// ask looks at what is cached, and has the store asked for the rest in one request.
func (q *Question) ask(parts []part) {
	c, now := q.cache, q.cache.cfg.Now()
	var mine *flight
	var todo []ask
	c.mu.Lock()
	for _, p := range parts {
		word, shift := p.first>>6, p.first&63
		if q.asked[word]>>shift&p.mask == p.mask {
			continue
		}
		q.asked[word] |= p.mask << shift
		key := runKey{q.lane.ID, q.lane.fingerprints[runOf(p.first)]}
		run, _ := c.runs.Get(key)
		run.age(now, &c.cfg)
		q.add(run, p.first)
		if run.known&p.mask == p.mask {
			continue
		}
		f := c.asked[key]
		if f == nil {
			if mine == nil {
				if c.flights >= c.cfg.Flights {
					if q.err == nil {
						c.stats.Busy++
					}
					q.err = errBusy
					continue
				}
				mine = &flight{done: make(chan struct{}), runs: map[runKey]cachedRun{}}
				c.flights++
				c.stats.Questions++
			}
			f = mine
			if bits.OnesCount64(p.mask) == min(runLength(p.first), q.lane.Pages-p.first) {
				c.asked[key] = f // others may wait for it, as it asks for the whole run
			}
			if i := slices.IndexFunc(todo, func(a ask) bool { return a.key == key }); i >= 0 {
				todo[i].mask |= p.mask &^ run.known
			} else {
				todo = append(todo, ask{key: key, first: p.first, mask: p.mask &^ run.known, before: run})
			}
		}
		f.signal(q.wake)
		q.waiting = append(q.waiting, waiting{f, key, p.first, p.mask})
	}
	epoch := c.epoch
	c.mu.Unlock()
	if mine != nil {
		for i := range todo {
			a := &todo[i]
			a.from = a.first + bits.TrailingZeros64(a.mask)
			a.names = q.lane.Names(a.from, a.first+bits.Len64(a.mask))
		}
		go c.request(mine, todo, epoch)
	}
}

// How far Follow asks ahead of what is known to be there, in pages, and how many it puts into a request: enough for
// all of a master's threads. It is also what a run's end costs at most in answers that nobody needs.
const (
	maxAhead     = 512
	requestPages = 128
)

// firstSounding is how many pages from a run's begin on the first sounding is the last of, soundingSteps how many times
// as many the next.
const (
	firstSounding = 64
	soundingSteps = 4
)

// Sound has the store asked what Follow asks first, and waits for nothing: who follows several lanes sounds all of them
// before.
func (q *Question) Sound(starts []int) {
	var parts []part
	for _, start := range starts {
		if start < q.lane.Pages && q.cache.seen(&q.lane, start) == 0 {
			parts = q.soundings(parts, start)
		}
	}
	q.ask(parts)
}

// soundings appends the page at which an unbroken run would begin, and a few single pages ahead of it, each four times
// as far as the one before, which say how far the run may go.
func (q *Question) soundings(dst []part, start int) []part {
	if start < q.lane.Pages {
		dst = append(dst, single(start))
	}
	for n := firstSounding; start+n <= q.lane.Pages; n *= soundingSteps {
		dst = append(dst, single(start+n-1))
	}
	return dst
}

// sounded is how many pages a run that begins at start may have, by the soundings that are there.
func (q *Question) sounded(start int) (pages int) {
	for n := firstSounding; start+n <= q.lane.Pages && q.present.Get(start+n-1); n *= soundingSteps {
		pages = n
	}
	return pages
}

// trail is how far Follow has come along an unbroken run.
type trail struct {
	start int // where the run begins
	at    int // the first page that is not known to be there
	asked int // the page up to which it was asked for
}

// Follow asks for the unbroken run of pages that begins at each of starts, and waits for the answers, until ctx ends at
// the latest. It sounds each run first. Where its first page is there, it asks for whole runs ahead, in requests that
// overlap: for twice as far as was sounded and four times what was found, up to maxAhead, and not beyond a page that is
// known not to be there. What was asked for behind the first page that is not there is not waited for, and nobody needs
// to know it. Where pages were there when they were asked for last, however long ago, Follow asks so far ahead at once.
func (q *Question) Follow(ctx context.Context, starts []int) {
	trails := make([]trail, len(starts))
	for i, start := range starts {
		trails[i] = trail{start, start, start}
	}
	q.wake = make(chan struct{}, 1)
	q.cache.subscribe(q)
	for over := false; ; {
		q.collect()
		over = over || ctx.Err() != nil
		open, asked := q.extend(trails, over)
		if open > 0 && over {
			q.err = cmp.Or(q.err, ctx.Err())
		}
		if open == 0 || over {
			break
		}
		if asked { // what is cached may have been enough
			continue
		}
		select {
		case <-q.wake:
		case <-ctx.Done():
			over = true
		}
	}
	q.wake = nil
	for _, t := range trails {
		for i := t.start; i < min(t.at+1, q.lane.Pages); i++ {
			q.wanted.Set(i)
		}
		q.ends = append(q.ends, t.at)
	}
	q.waiting = slices.DeleteFunc(q.waiting, func(w waiting) bool {
		return q.wanted[w.first>>6]>>(w.first&63)&w.mask == 0
	})
}

// extend finds how far runs are known, and asks on for those of which more is to be known, unless it is too late. It
// reports how many these are, and whether it has asked for any.
func (q *Question) extend(trails []trail, late bool) (open int, asked bool) {
	var parts []part // of the next request
	pages := 0       // of these
	flush := func() {
		if len(parts) > 0 {
			q.ask(parts)
			parts, pages, asked = parts[:0], 0, true
		}
	}
	for i := range trails {
		t := &trails[i]
		t.at = next(q.present, q.known, t.at, q.lane.Pages, ^uint64(0))
		if t.at == q.lane.Pages || q.known.Get(t.at) || q.asked.Get(t.at) && !q.awaits(t.at) {
			continue // it is there whole, or ends here, or nothing more can be known
		}
		if open++; late {
			continue
		}
		ahead := 0
		if t.at > t.start {
			ahead = min(maxAhead, max(longRun, 4*(t.at-t.start), 2*q.sounded(t.start)))
		} else if t.asked == t.start {
			if ahead = q.cache.seen(&q.lane, t.at); ahead == 0 {
				if !q.asked.Get(t.at) {
					parts = q.soundings(parts, t.at)
					pages++
				}
				continue
			}
			ahead = min(maxAhead, shortRun+ahead)
		}
		t.asked = max(t.asked, t.at)
		far := runEnd(t.at) + ahead - shortRun
		end := q.gone(t.at, min(far, q.lane.Pages))
		if t.asked > t.at && end-t.asked < requestPages && end == far {
			continue // until there is enough for a request
		}
		for t.asked < end {
			to := min(end, runEnd(t.asked+requestPages-1))
			parts = q.runs(parts, t.asked, to)
			pages += to - t.asked
			if t.asked = to; pages >= requestPages {
				flush()
			}
		}
	}
	flush()
	return open, asked
}

// gone is the first page from at on, before end, that is known not to be there; end if there is none.
func (q *Question) gone(at, end int) int {
	for at < end {
		if rest := (q.known[at>>6] &^ q.present[at>>6]) >> (at & 63); rest != 0 {
			return min(end, at+bits.TrailingZeros64(rest))
		}
		at = (at | 63) + 1
	}
	return end
}

// awaits reports whether a page was asked for and the answer is still to come.
func (q *Question) awaits(at int) bool {
	p := single(at)
	return slices.ContainsFunc(q.waiting, func(w waiting) bool { return w.first == p.first && w.mask&p.mask != 0 })
}

// collect takes the answers that have come.
func (q *Question) collect() {
	q.waiting = slices.DeleteFunc(q.waiting, func(w waiting) bool {
		select {
		case <-w.on.done:
			q.take(w)
			return true
		default:
			return false
		}
	})
}

// take takes an answer that has come.
func (q *Question) take(w waiting) {
	q.add(w.on.runs[w.key], w.first)
	if q.err == nil {
		q.err = w.on.err
	}
}

// signal has a flight's landing signalled, unless wake is nil. Called with Cache.mu held.
func (f *flight) signal(wake chan struct{}) {
	if n := len(f.wakes); wake != nil && (n == 0 || f.wakes[n-1] != wake) {
		f.wakes = append(f.wakes, wake)
	}
}

// subscribe has it signalled when a flight lands for which a question waits.
func (c *Cache) subscribe(q *Question) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range q.waiting {
		w.on.signal(q.wake)
	}
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

// add adds what is known of a run that begins at a page. A run never lies across two words of a bitmap.
func (q *Question) add(r cachedRun, first int) {
	if first < q.from {
		beyond := ^uint64(0) << (q.from - first)
		r.known &= beyond
		r.present &= beyond
	}
	if r.known == 0 {
		return
	}
	q.known[first>>6] |= r.known << (first & 63)
	q.present[first>>6] |= r.present << (first & 63)
	if r.present != 0 && (q.oldest.IsZero() || r.hit.Before(q.oldest)) {
		q.oldest = r.hit
	}
	if r.known != r.present && (q.oldest.IsZero() || r.miss.Before(q.oldest)) {
		q.oldest = r.miss
	}
}

// whole reports whether all is known that was asked for, and of runs that were followed, where they end. What comes
// after Follow was cut off may show that a run goes on.
func (q *Question) whole() bool {
	for i, want := range q.wanted {
		if from := q.from - i*64; from > 0 {
			want &= ^uint64(0) << from // 0 if it is 64 or more
		}
		if q.known[i]&want != want {
			return false
		}
	}
	return !slices.ContainsFunc(q.ends, func(end int) bool {
		at := next(q.present, q.known, end, q.lane.Pages, ^uint64(0))
		return at >= q.from && at < q.lane.Pages && !q.known.Get(at)
	})
}

// wait waits for what the store was asked, until ctx ends at the latest.
func (q *Question) wait(ctx context.Context) {
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
		q.take(w)
	}
	q.waiting = q.waiting[:0]
}

// Wait waits for what the store was asked, until ctx ends at the latest, and says what is known then.
func (q *Question) Wait(ctx context.Context) Found {
	q.wait(ctx)
	f := Found{Present: q.present, Known: q.known}
	if !q.oldest.IsZero() {
		f.Age = max(0, q.cache.cfg.Now().Sub(q.oldest))
	}
	if !q.whole() {
		f.Err = q.err
	}
	return f
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
		if c.asked[a.key] == f {
			delete(c.asked, a.key)
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
