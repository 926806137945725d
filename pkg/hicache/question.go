package hicache

import (
	"cmp"
	"context"
	"math/bits"
	"slices"
	"time"
)

// Question is a query for a lane. It belongs to a single goroutine.
type Question struct {
	cache   *Cache
	lane    Lane
	from    int
	wanted  Bitmap // wanted pages
	ends    []int  // of followed runs: the first page that was not known to be present
	asked   Bitmap // pages looked up in the cache, and requested if not cached
	present Bitmap
	known   Bitmap
	oldest  time.Time
	err     error
	waiting []waiting
	wake    chan struct{} // of Follow: signals the end of a flight, capacity 1; otherwise nil
}

type waiting struct {
	on    *flight
	key   runKey
	first int
	mask  uint64 // pages of the run
}

// Found is the result of a question. Bit i is for page i. Present is valid only for the bits in Known.
type Found struct {
	Present, Known Bitmap
	Age            time.Duration // age of the oldest used answer; 0 without answers
	Err            error         // why a wanted page is unknown
}

// Begin returns a question about the pages of a lane from page from on. It sends no request.
func (c *Cache) Begin(lane Lane, from int) *Question {
	return &Question{cache: c, lane: lane, from: from, wanted: NewBitmap(lane.Pages), asked: NewBitmap(lane.Pages),
		present: NewBitmap(lane.Pages), known: NewBitmap(lane.Pages)}
}

// Ask looks up the runs with the pages [from, to) in the cache, and requests the rest from the store. It does not wait.
func (q *Question) Ask(from, to int) {
	parts := q.runs(nil, max(from, q.from), min(to, q.lane.Pages))
	for _, p := range parts {
		q.wanted[p.first>>6] |= p.mask << (p.first & 63)
	}
	q.lookup(parts)
}

// part has some pages of a run. Bit i is for the i-th page.
type part struct {
	first int // first page of the run
	mask  uint64
}

// runs appends the runs with the pages [from, to).
func (q *Question) runs(dst []part, from, to int) []part {
	for first := from - from%runLength(from); first < to; first += runLength(first) {
		dst = append(dst, part{first, ^uint64(0) >> (64 - min(runLength(first), q.lane.Pages-first))})
	}
	return dst
}

// single returns the part with a single page.
func single(at int) part {
	first := at - at%runLength(at)
	return part{first, 1 << (at - first)}
}

// lookup looks up parts in the cache and requests the rest in a single request. It sorts parts.
func (q *Question) lookup(parts []part) {
	slices.SortStableFunc(parts, func(a, b part) int { return a.first - b.first })
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
		part := partKey{key, p.mask}
		if bits.OnesCount64(p.mask) == min(runLength(p.first), q.lane.Pages-p.first) {
			part.mask = 0
		}
		f := cmp.Or(c.asked[partKey{runKey: key}], c.asked[part])
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
			c.asked[part] = f // other questions may wait for the flight
			f.parts = append(f.parts, part)
			if i := len(todo) - 1; i >= 0 && todo[i].key == key {
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

// awaits reports whether a page is in a pending request.
func (q *Question) awaits(at int) bool {
	p := single(at)
	return slices.ContainsFunc(q.waiting, func(w waiting) bool { return w.first == p.first && w.mask&p.mask != 0 })
}

// collect adds the received answers.
func (q *Question) collect() {
	q.waiting = slices.DeleteFunc(q.waiting, func(w waiting) bool {
		select {
		case <-w.on.done:
			q.addFlight(w)
			return true
		default:
			return false
		}
	})
}

// addFlight adds the answer of a finished flight.
func (q *Question) addFlight(w waiting) {
	q.add(w.on.runs[w.key], w.first)
	if q.err == nil {
		q.err = w.on.err
	}
}

// signal registers wake for the end of the flight. nil is ignored. The caller holds Cache.mu.
func (f *flight) signal(wake chan struct{}) {
	if n := len(f.wakes); wake != nil && (n == 0 || f.wakes[n-1] != wake) {
		f.wakes = append(f.wakes, wake)
	}
}

// subscribe registers a question for the end of all of its flights.
func (c *Cache) subscribe(q *Question) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range q.waiting {
		w.on.signal(q.wake)
	}
}

// add adds answers for a run that begins at page first. A run never extends over two words of a bitmap.
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

// whole reports whether all wanted pages are known, and the end of each followed run. Answers after the end of Follow
// may show that a run continues.
func (q *Question) whole() bool {
	for i, want := range q.wanted {
		if from := q.from - i*64; from > 0 {
			want &= ^uint64(0) << from // 0 if from is 64 or more
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

// wait waits for the answers of the store, at most until ctx is done.
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
		q.addFlight(w)
	}
	q.waiting = q.waiting[:0]
}

// Wait waits for the answers of the store, at most until ctx is done, and returns the result.
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
