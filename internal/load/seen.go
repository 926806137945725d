package load

import (
	"cmp"
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
