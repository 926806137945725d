package shared

import (
	"slices"
	"time"
)

// owner is what this node knows of the entries of one session of a node.
//
// The numbers from 1 to last that are neither in entries nor in holes have ended. This fact needs no tombstone, and it
// is kept until no node can still have one of the entries (Config.Memory).
type owner struct {
	id      uint64
	last    uint64            // the greatest number that this node knows of
	holes   spans             // numbers up to last of which this node knows nothing: the entry may live
	entries map[uint64]*entry // by number
	count   int               // published entries
	sum     uint64            // of their hashes
	touched time.Duration     // when a node last sent something about the owner

	// Of the exchange with the node that this node has asked for the owner's entries.
	asked time.Duration   // when
	ask   uint64          // its number
	parts map[uint64]bool // of the answer that have come
	whole bool            // all parts have come
	wants map[uint64]bool // numbers of entries that have been asked for and have not come
}

// entry is one entry as its writer has published it.
type entry struct {
	published bool   // false: the writer does not have it yet
	hash      uint64 // of the published state
}

// publish notes the published state of an entry.
func (o *owner) publish(e *entry, hash uint64) {
	o.retract(e)
	e.published, e.hash = true, hash
	o.count++
	o.sum += hash
}

// retract notes that the writer does not have an entry.
func (o *owner) retract(e *entry) {
	if e.published {
		e.published = false
		o.count--
		o.sum -= e.hash
	}
}

// knows reports whether this node knows of a number: the entry is here, or it has ended.
func (o *owner) knows(seq uint64) bool { return seq <= o.last && !o.holes.has(seq) }

// learn notes that this node knows of a number now, and reports whether it did not before.
func (o *owner) learn(seq uint64) bool {
	if o.knows(seq) {
		return false
	}
	o.extend(seq)
	o.holes.cut(seq, seq)
	return true
}

// extend notes that numbers up to last have been given. The new ones are holes.
func (o *owner) extend(last uint64) {
	if last > o.last {
		o.holes.add(o.last+1, last)
		o.last = last
	}
}

// span is the numbers from first to last.
type span struct{ first, last uint64 }

// spans are ascending, with a gap between each two.
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

// size returns how many numbers there are.
func (s spans) size() (n uint64) {
	for _, p := range s {
		n += p.last - p.first + 1
	}
	return n
}

// add adds the numbers from first to last; first is at least 1.
func (s *spans) add(first, last uint64) {
	i := s.from(first - 1) // the first that touches, or is after
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

// and returns the numbers that both have.
func (s spans) and(o spans) (both spans) {
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
