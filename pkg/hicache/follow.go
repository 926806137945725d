package hicache

import (
	"cmp"
	"context"
	"math/bits"
	"slices"
)

// Limits of Follow in pages: the distance ahead of the present pages, and the size of a request. Together they use all
// threads of a master. maxAhead is also the maximum number of unneeded answers at the end of a run.
const (
	maxAhead     = 512
	requestPages = 128
	mostRequests = maxAhead/requestPages + 1 // concurrent requests of a question, for any number of runs
)

// firstSounding is the distance of the first sounding from the start of a run, in pages. soundingSteps is the factor to
// the next sounding, up to maxAhead. The name of a page depends on all pages before, so distant soundings are
// expensive.
const (
	firstSounding = 64
	soundingSteps = 4
)

// Sound sends the first requests of Follow and does not wait. A caller that follows several lanes calls Sound for all
// lanes first.
func (q *Question) Sound(starts []int) {
	var parts []part
	for _, start := range starts {
		if start < q.lane.Pages && q.cache.seen(&q.lane, start) == 0 {
			parts = q.soundings(parts, start)
		}
	}
	q.lookup(parts)
}

// soundings appends the first page of a possible run and a few single pages ahead, at growing distances. The answers
// show the possible length of the run.
func (q *Question) soundings(dst []part, start int) []part {
	if start < q.lane.Pages {
		dst = append(dst, single(start))
	}
	for n := firstSounding; n <= maxAhead && start+n <= q.lane.Pages; n *= soundingSteps {
		dst = append(dst, single(start+n-1))
	}
	return dst
}

// sounded returns the possible length of a run that begins at start, by the received soundings.
func (q *Question) sounded(start int) (pages int) {
	for n := firstSounding; n <= maxAhead && start+n <= q.lane.Pages && q.present.Get(start+n-1); n *= soundingSteps {
		pages = n
	}
	return pages
}

// trail is the progress of Follow in an unbroken run.
type trail struct {
	start int // first page of the run
	at    int // first page not known to be present
	asked int // end of the requested pages
}

// Follow requests the unbroken run of pages at each of starts, and waits for the answers until ctx is done. It sounds
// each run first. If the first page is present, it requests whole runs ahead, in overlapping requests: up to twice the
// sounded length and four times the length found so far, at most maxAhead. It does not request pages after a missing
// page, and has at most mostRequests in flight. It does not wait for answers about pages after a missing page. If
// earlier answers of any age had the pages, Follow requests that far ahead at once.
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
		if asked { // the cached answers may be enough
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

// extend updates the trails and requests more pages of the runs that are not finished, unless late is set. It returns
// the number of unfinished runs, and whether it sent a request.
func (q *Question) extend(trails []trail, late bool) (open int, asked bool) {
	var parts []part // the next request
	pages := 0       // pages in the next request
	full := q.requests() >= mostRequests
	flush := func() {
		if len(parts) > 0 {
			q.lookup(parts)
			parts, pages, asked = parts[:0], 0, true
			full = q.requests() >= mostRequests
		}
	}
	for i := range trails {
		t := &trails[i]
		t.at = next(q.present, q.known, t.at, q.lane.Pages, ^uint64(0))
		if t.at == q.lane.Pages || q.known.Get(t.at) || q.asked.Get(t.at) && !q.awaits(t.at) {
			continue // the run is complete or ends here, or no more answers are possible
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
			continue // wait until the request is large enough
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

// requests returns the number of requests in flight for q.
func (q *Question) requests() (n int) {
	var last *flight // the entries of a request are adjacent in waiting
	for _, w := range q.waiting {
		if w.on != last {
			n, last = n+1, w.on
		}
	}
	return n
}

// gone returns the first page in [at, end) that is known to be missing, or end.
func (q *Question) gone(at, end int) int {
	for at < end {
		if rest := (q.known[at>>6] &^ q.present[at>>6]) >> (at & 63); rest != 0 {
			return min(end, at+bits.TrailingZeros64(rest))
		}
		at = (at | 63) + 1
	}
	return end
}
