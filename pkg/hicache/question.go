package hicache

import (
	"cmp"
	"context"
	"math/bits"
	"slices"
	"time"
)

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

// ask looks at what is cached, and has the store asked for the rest in one request. It sorts parts.
func (q *Question) ask(parts []part) {
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
			c.asked[part] = f // others may wait for it
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
