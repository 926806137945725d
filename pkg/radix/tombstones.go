package radix

import (
	"math/bits"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// tombstones is a ring of a rank's latest removals: the name and the block. Entries are numbered. The ring has the
// entries from first up to next, and chains with equal hashes of names from the newest back. A chain ends at the first
// number outside of the ring, so no entry needs to be unlinked. find adds the entries since its last call to the
// chains, because most removals are never looked for.
type tombstones struct {
	ring []tombstone // a power of two; see shrink
	// by hash of the name: number of the newest entry, plus one; as long as ring, or nil without chains; an outdated
	// entry is harmless, because names are compared
	heads       []uint32
	first, next uint32 // numbers wrap around
	chained     uint32 // number of the first entry that is not in a chain, if in the ring
}

type tombstone struct {
	name  events.BlockHash
	since events.Millis
	block uint32
	back  uint32 // distance back to the next entry of the same hash; 0: none
}

func (m *tombstones) len() int { return int(m.next - m.first) }

func (m *tombstones) bytes() int64 { return int64(len(m.ring))*24 + int64(len(m.heads))*4 }

func (m *tombstones) bucket(name events.BlockHash) *uint32 {
	return &m.heads[uint64(name)*0x9e3779b97f4a7c15>>32&uint64(len(m.heads)-1)]
}

func (m *tombstones) at(n uint32) *tombstone { return &m.ring[n&uint32(len(m.ring)-1)] }

// push adds an entry.
func (m *tombstones) push(r tombstone) {
	if m.len() == len(m.ring) {
		m.grow()
	}
	*m.at(m.next) = r
	m.next++
}

// chain adds all entries to the chains.
func (m *tombstones) chain() {
	if m.heads == nil {
		m.heads = make([]uint32, len(m.ring))
	}
	if m.next-m.chained > uint32(m.len()) {
		m.chained = m.first
	}
	for ; m.chained != m.next; m.chained++ {
		e := m.at(m.chained)
		head := m.bucket(e.name)
		e.back = 0
		if back := m.chained + 1 - *head; back <= m.chained-m.first {
			e.back = back
		}
		*head = m.chained + 1
	}
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
	m.chain()
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

func (m *tombstones) grow() { m.move(make([]tombstone, ringSize(2*len(m.ring)))) }

// reserve makes room for n more entries, in the spare ring if it is long enough.
func (m *tombstones) reserve(spare *[]tombstone, n int) {
	switch need := m.len() + n; {
	case need <= len(m.ring):
	case need <= len(*spare):
		m.move(*spare)
		*spare = nil
	default:
		m.move(make([]tombstone, ringSize(need)))
	}
}

// shrink frees the memory of a message with many removals: more than four times the limit, rounded up to a power of
// two. The ring replaces a shorter spare: the next such message, of any rank, needs it again.
func (m *tombstones) shrink(spare *[]tombstone, bound int) {
	if size := ringSize(bound); len(m.ring) > 4*size {
		if old := m.move(make([]tombstone, size)); len(old) > len(*spare) {
			*spare = old
		}
	}
}

// ringSize returns the length of a ring for n entries.
func ringSize(n int) int { return 1 << bits.Len(uint(max(n, 16)-1)) }

// move moves the entries into another ring and returns the old one.
func (m *tombstones) move(ring []tombstone) (old []tombstone) {
	to := tombstones{ring: ring}
	for n := m.first; n != m.next; n++ {
		*to.at(to.next) = *m.at(n)
		to.next++
	}
	old, *m = m.ring, to
	return old
}
