package radix

import (
	"math/bits"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// tombstones is a ring of a rank's latest removals: the name and the block. Entries are numbered. The ring has the
// entries from first up to next, and chains with equal hashes of names from the newest back. A chain ends at the first
// number outside of the ring, so no entry needs to be unlinked.
type tombstones struct {
	ring []tombstone // a power of two; see shrink
	// by hash of the name: number of the newest entry, plus one; an outdated entry is harmless, because names are
	// compared
	heads       []uint32
	first, next uint32 // numbers wrap around
}

type tombstone struct {
	name  events.BlockHash
	since events.Millis
	block uint32
	back  uint32 // distance back to the next entry of the same hash; 0: none
}

func (m *tombstones) len() int { return int(m.next - m.first) }

func (m *tombstones) bucket(name events.BlockHash) *uint32 {
	return &m.heads[uint64(name)*0x9e3779b97f4a7c15>>32&uint64(len(m.heads)-1)]
}

func (m *tombstones) at(n uint32) *tombstone { return &m.ring[n&uint32(len(m.ring)-1)] }

func (m *tombstones) push(r tombstone) {
	if m.len() == len(m.ring) {
		m.grow()
	}
	head := m.bucket(r.name)
	r.back = 0
	if back := m.next + 1 - *head; back <= uint32(m.len()) {
		r.back = back
	}
	*m.at(m.next) = r
	m.next++
	*head = m.next
}

// shift removes and returns the oldest entry.
func (m *tombstones) shift() tombstone {
	r := *m.at(m.first)
	m.first++
	return r
}

// find returns the block of the latest removal of the name.
func (m *tombstones) find(name events.BlockHash) (block uint32, ok bool) {
	if m.len() == 0 {
		return 0, false
	}
	n := *m.bucket(name) - 1
	for back := uint32(0); ; {
		n -= back
		if m.next-1-n >= uint32(m.len()) {
			return 0, false
		}
		e := m.at(n)
		if e.name == name {
			return e.block, true
		}
		if back = e.back; back == 0 {
			return 0, false
		}
	}
}

func (m *tombstones) grow() { m.resize(max(16, 2*len(m.ring))) }

// shrink frees the memory of a message with many removals: more than four times the limit, rounded up to a power of
// two.
func (m *tombstones) shrink(bound int) {
	if room := 1 << bits.Len(uint(max(bound, 16)-1)); len(m.ring) > 4*room {
		m.resize(room)
	}
}

// resize moves the entries, at most size, into a ring with the given size.
func (m *tombstones) resize(size int) {
	old := *m
	*m = tombstones{ring: make([]tombstone, size)}
	m.heads = make([]uint32, len(m.ring))
	for n := old.first; n != old.next; n++ {
		m.push(*old.at(n))
	}
}
