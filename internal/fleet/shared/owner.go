package shared

import (
	"slices"
	"time"
)

// owner is the state of the entries of a session of a node.
//
// Numbers from 1 to last that are neither in entries nor in holes have ended. No tombstones are needed. The owner is
// kept until no node can have an entry of the owner (Config.Memory).
type owner struct {
	id      uint64
	last    uint64            // greatest known number
	holes   spans             // unknown numbers up to last: the entry may live
	entries map[uint64]*entry // by number
	count   int               // published entries
	sum     uint64            // of their hashes
	touched time.Duration     // last message about the owner

	// The exchange with the node that received the request for the owner's entries.
	asked time.Duration   // time of the request
	ask   uint64          // its number
	parts map[uint64]bool // received parts of the answer
	whole bool            // all parts have been received
	wants map[uint64]bool // requested entries that have not arrived
}

// entry is the published state of an entry.
type entry struct {
	published bool   // false: the writer lacks it
	hash      uint64 // of the published state
}

// publish records the published state of an entry.
func (o *owner) publish(e *entry, hash uint64) {
	o.retract(e)
	e.published, e.hash = true, hash
	o.count++
	o.sum += hash
}

// retract records that the writer lacks an entry.
func (o *owner) retract(e *entry) {
	if e.published {
		e.published = false
		o.count--
		o.sum -= e.hash
	}
}

// isKnown reports whether the entry of a number is here or has ended.
func (o *owner) isKnown(seq uint64) bool { return seq <= o.last && !o.holes.has(seq) }

// markKnown marks a number. The result is false if the number was known before.
func (o *owner) markKnown(seq uint64) bool {
	if o.isKnown(seq) {
		return false
	}
	o.extend(seq)
	o.holes.cut(seq, seq)
	return true
}

// extend marks numbers up to last as assigned. The new ones are holes.
func (o *owner) extend(last uint64) {
	if last > o.last {
		o.holes.add(o.last+1, last)
		o.last = last
	}
}

// span has the numbers from first to last.
type span struct{ first, last uint64 }

// spans are ascending, with a gap between neighbours.
type spans []span

// from returns the index of the first span that ends at n or later.
func (s spans) from(n uint64) int {
	i, _ := slices.BinarySearchFunc(s, n, func(p span, n uint64) int {
		if p.last < n {
			return -1
		}
		return 1
	})
	return i
}

func (s spans) has(n uint64) bool {
	i := s.from(n)
	return i < len(s) && s[i].first <= n
}

// size returns the count of numbers.
func (s spans) size() (n uint64) {
	for _, p := range s {
		n += p.last - p.first + 1
	}
	return n
}

// add adds the numbers from first to last; first is at least 1.
func (s *spans) add(first, last uint64) {
	i := s.from(first - 1) // the first span that touches or follows
	j := i
	for ; j < len(*s) && (*s)[j].first-1 <= last; j++ {
		first, last = min(first, (*s)[j].first), max(last, (*s)[j].last)
	}
	*s = slices.Replace(*s, i, j, span{first, last})
}

// cut removes the numbers from first to last.
func (s *spans) cut(first, last uint64) {
	i := s.from(first)
	j := i
	var rest []span
	for ; j < len(*s) && (*s)[j].first <= last; j++ {
		if p := (*s)[j]; p.first < first {
			rest = append(rest, span{p.first, first - 1})
		}
		if p := (*s)[j]; p.last > last {
			rest = append(rest, span{last + 1, p.last})
		}
	}
	*s = slices.Replace(*s, i, j, rest...)
}

// intersect returns the common numbers.
func (s spans) intersect(o spans) (both spans) {
	for i, j := 0, 0; i < len(s) && j < len(o); {
		if first, last := max(s[i].first, o[j].first), min(s[i].last, o[j].last); first <= last {
			both = append(both, span{first, last})
		}
		if s[i].last < o[j].last {
			i++
		} else {
			j++
		}
	}
	return both
}
