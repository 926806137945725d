package load

import (
	"cmp"
	"math"
	"slices"
	"time"
)

// span is the numbers from first to last.
type span struct{ first, last uint64 }

// seen is which bookings of one origin a table knows, or knew until they ended: ordered spans with gaps between them,
// mostly one. A number that was seen is never entered again, so a booking that arrives after its end stays out, and of
// a booking that only one of two tables has it is known whether it is new or was ended.
type seen struct {
	spans  []span
	live   int           // how many of them are under way
	active time.Duration // when the origin was last heard of

	// under are the requests under way, and some that have ended: see underWay. mixed says that they may be in another
	// order than that of their numbers.
	under []*record
	mixed bool
}

// enter adds a request that is under way.
func (s *seen) enter(r *record) {
	s.add(r.key.Seq, r.key.Seq)
	s.live++
	s.mixed = s.mixed || len(s.under) > 0 && s.under[len(s.under)-1].key.Seq > r.key.Seq
	s.under = append(s.under, r)
}

// leave notes that a request of under has ended.
func (s *seen) leave() {
	if s.live--; len(s.under)-s.live > 16+s.live/4 {
		s.sweep()
	}
}

// sweep drops requests that have ended from under.
func (s *seen) sweep() {
	s.under = slices.DeleteFunc(s.under, func(r *record) bool { return r.ended })
}

// underWay returns the requests under way with the numbers from first to last, by number. It is valid until the next
// change.
func (s *seen) underWay(first, last uint64) []*record {
	if s == nil {
		return nil
	}
	if len(s.under) > s.live {
		s.sweep()
	}
	if s.mixed {
		slices.SortFunc(s.under, func(a, b *record) int { return cmp.Compare(a.key.Seq, b.key.Seq) })
		s.mixed = false
	}
	at := func(n uint64) int {
		i, _ := slices.BinarySearchFunc(s.under, n, func(r *record, n uint64) int { return cmp.Compare(r.key.Seq, n) })
		return i
	}
	list := s.under[at(first):]
	if last < math.MaxUint64 {
		list = s.under[at(first):at(last+1)]
	}
	return list
}

// seenOf returns what was seen of an origin, from which something comes now.
func (t *Table) seenOf(origin uint64, now time.Duration) *seen {
	s := t.seen[origin]
	if s == nil {
		s = &seen{}
		t.seen[origin] = s
	}
	s.active = max(s.active, now)
	return s
}

// at is the first span that ends at n or later.
func (s *seen) at(n uint64) int {
	if k := len(s.spans); k > 0 && s.spans[k-1].last < n {
		return k
	}
	i, _ := slices.BinarySearchFunc(s.spans, n, func(p span, n uint64) int { return cmp.Compare(p.last, n) })
	return i
}

func (s *seen) has(n uint64) bool {
	if s == nil {
		return false
	}
	i := s.at(n)
	return i < len(s.spans) && s.spans[i].first <= n
}

// add marks first to last as seen; first is at least 1.
func (s *seen) add(first, last uint64) {
	if first > last {
		return
	}
	i := s.at(first - 1) // the first that touches, or is after
	j := i
	for ; j < len(s.spans) && s.spans[j].first-1 <= last; j++ {
		first, last = min(first, s.spans[j].first), max(last, s.spans[j].last)
	}
	s.spans = slices.Replace(s.spans, i, j, span{first, last})
}

// all reports whether 1 to n were seen.
func (s *seen) all(n uint64) bool {
	return n == 0 || s != nil && len(s.spans) > 0 && s.spans[0].first == 1 && s.spans[0].last >= n
}
