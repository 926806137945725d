package radix

// countMap counts copies by block. It is a small hash table with 8 bytes per slot, and no memory while empty.
type countMap struct {
	slots []blockCount // a power of two; an empty slot has count 0
	n     int
	total uint64
}

type blockCount struct{ block, count uint32 }

func (m *countMap) home(block uint32) uint32 {
	return uint32(uint64(block*0x9e3779b1) * uint64(len(m.slots)) >> 32)
}

func (m *countMap) find(block uint32) int {
	i := m.home(block)
	for ; m.slots[i].count != 0 && m.slots[i].block != block; i = (i + 1) & uint32(len(m.slots)-1) {
	}
	return int(i)
}

func (m *countMap) get(block uint32) uint32 {
	if m.n == 0 {
		return 0
	}
	return m.slots[m.find(block)].count
}

func (m *countMap) add(block, n uint32) {
	if n == 0 {
		return
	}
	if (m.n+1)*4 > len(m.slots)*3 {
		old := m.slots
		m.slots = make([]blockCount, max(8, 2*len(old)))
		for _, s := range old {
			if s.count != 0 {
				m.slots[m.find(s.block)] = s
			}
		}
	}
	s := &m.slots[m.find(block)]
	if s.count == 0 {
		m.n++
	}
	*s = blockCount{block, s.count + n}
	m.total += uint64(n)
}

// remove subtracts a copy. It returns false if the block has none.
func (m *countMap) remove(block uint32) bool {
	if m.n == 0 {
		return false
	}
	i := uint32(m.find(block))
	if m.slots[i].count == 0 {
		return false
	}
	m.total--
	if m.slots[i].count--; m.slots[i].count > 0 {
		return true
	}
	m.n--
	mask := uint32(len(m.slots) - 1)
	for j := (i + 1) & mask; m.slots[j].count != 0; j = (j + 1) & mask {
		if h := m.home(m.slots[j].block); (j-h)&mask >= (j-i)&mask {
			m.slots[i] = m.slots[j]
			i = j
		}
	}
	m.slots[i] = blockCount{}
	if m.n*8 < len(m.slots) {
		old := m.slots
		m.slots = nil
		if m.n > 0 {
			m.slots = make([]blockCount, len(old)/4)
			for _, s := range old {
				if s.count != 0 {
					m.slots[m.find(s.block)] = s
				}
			}
		}
	}
	return true
}
