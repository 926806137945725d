package radix

import (
	"math/bits"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// tombstones is the removal history of one rank, a ring of its latest removals: which name left which block. Entries
// are numbered as they come; the ring holds those from first up to next, and chains those of equal hash from the newest
// back. A chain ends at the first number that is no longer in the ring, so that nothing has to be unlinked.
type tombstones struct {
	ring []tombstone // a power of two; see shrink
	// by hash of the name: number of the newest entry, plus one; names are compared, so a stale one does no harm
	heads       []uint32
	first, next uint32 // numbers wrap around
}

type tombstone struct {
	name  events.BlockHash
	since events.Millis
	block uint32
	back  uint32 // how many entries back the next of the same hash is; 0: there is none
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

// shift takes the oldest entry out.
func (m *tombstones) shift() tombstone {
	r := *m.at(m.first)
	m.first++
	return r
}

// find returns the block that the name left last.
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

// shrink gives up the memory of a message with many removals: more than four times what the bound, rounded up to a
// power of two, takes.
func (m *tombstones) shrink(bound int) {
	if room := 1 << bits.Len(uint(max(bound, 16)-1)); len(m.ring) > 4*room {
		m.resize(room)
	}
}

// resize moves the entries, of which there are at most size, into a ring of that size.
func (m *tombstones) resize(size int) {
	old := *m
	*m = tombstones{ring: make([]tombstone, size)}
	m.heads = make([]uint32, len(m.ring))
	for n := old.first; n != old.next; n++ {
		m.push(*old.at(n))
	}
}
