package hicache

import (
	"cmp"
	"context"
	"math/bits"
	"slices"
)

// How far Follow asks ahead of what is known to be there, in pages, and how many it puts into a request: enough for
// all of a master's threads. It is also what a run's end costs at most in answers that nobody needs.
const (
	maxAhead     = 512
	requestPages = 128
	mostRequests = maxAhead/requestPages + 1 // under way for one question, however many runs it follows
)

// firstSounding is how many pages from a run's begin on the first sounding is the last of, soundingSteps how many times
// as many the next, up to maxAhead: a page's name is made of all pages before it, so that far soundings are dear.
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
	for n := firstSounding; n <= maxAhead && start+n <= q.lane.Pages; n *= soundingSteps {
		dst = append(dst, single(start+n-1))
	}
	return dst
}

// sounded is how many pages a run that begins at start may have, by the soundings that are there.
func (q *Question) sounded(start int) (pages int) {
	for n := firstSounding; n <= maxAhead && start+n <= q.lane.Pages && q.present.Get(start+n-1); n *= soundingSteps {
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
// known not to be there, and mostRequests at once. What was asked for behind the first page that is not there is not
// waited for, and nobody needs to know it. Where pages were there when they were asked for last, however long ago,
// Follow asks so far ahead at once.
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
		return (q.wanted[w.first>>6]&^q.known[w.first>>6])>>(w.first&63)&w.mask == 0
	})
}

// extend finds how far runs are known, and asks on for those of which more is to be known, unless it is too late. It
// reports how many these are, and whether it has asked for any.
func (q *Question) extend(trails []trail, late bool) (open int, asked bool) {
	var parts []part // of the next request
	pages := 0       // of these
	full := q.requests() >= mostRequests
	flush := func() {
		if len(parts) > 0 {
			q.ask(parts)
			parts, pages, asked = parts[:0], 0, true
			full = q.requests() >= mostRequests
		}
	}
	for i := range trails {
		t := &trails[i]
		t.at = next(q.present, q.known, t.at, q.lane.Pages, ^uint64(0))
		if t.at == q.lane.Pages || q.known.Get(t.at) || q.asked.Get(t.at) && !q.awaits(t.at) {
			continue // it is there whole, or ends here, or nothing more can be known
		}
		if open++; late || full {
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
		for t.asked < end && !full {
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

// requests is how many requests are under way for q.
func (q *Question) requests() (n int) {
	var last *flight // waiting has a request's runs together
	for _, w := range q.waiting {
		if w.on != last {
			n, last = n+1, w.on
		}
	}
	return n
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
