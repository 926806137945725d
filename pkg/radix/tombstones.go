package radix

import "github.com/kvatlas/kvatlas/pkg/events"

// tombstones is the removal history of one rank, a ring of its latest removals: which name left which block. Entries
// are numbered as they come; the ring holds those from first up to next, and chains those of equal hash from the newest
// back. A chain ends at the first number that is no longer in the ring, so that nothing has to be unlinked.
type tombstones struct {
	ring []tombstone // a power of two, at most the bound rounded up
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

func (m *tombstones) grow() {
	old := *m
	*m = tombstones{ring: make([]tombstone, max(16, 2*len(old.ring)))}
	m.heads = make([]uint32, len(m.ring))
	for n := old.first; n != old.next; n++ {
		m.push(*old.at(n))
	}
}
