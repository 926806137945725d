package funnel

import "math/bits"

// generations is a hash table of bounded size with two generations. A full younger generation replaces the older one.
//
// The look-ups of a prompt's blocks run on a core that answers need. A slot stores key and value side by side, so a
// look-up costs one access to memory. A Go map costs several accesses and a hash function.
type generations[V any] struct {
	young, old table[V]
	most       int // bound on each generation
	moved      int // entries of the old generation that are also in the young
	lost       uint64
}

// get returns the value of a key.
func (g *generations[V]) get(k uint64) (v V, ok bool) {
	p := g.young.find(k)
	if p == nil {
		p = g.old.find(k)
	}
	if p == nil {
		return v, false
	}
	return *p, true
}

// touch reads the first slots of a key, and returns a value that depends on them. Successive touches of several keys
// overlap their memory accesses.
func (g *generations[V]) touch(k uint64) uint64 { return g.young.touch(k) ^ g.old.touch(k) }

// put returns the slot of a key in the younger generation, with the key's earlier value. The pointer is valid until the
// next put. turned reports that a generation was deleted.
func (g *generations[V]) put(k uint64) (v *V, turned bool) {
	if v = g.young.find(k); v != nil {
		return v, false
	}
	var was V
	if p := g.old.find(k); p != nil {
		was = *p
		g.moved++
	}
	if g.young.n >= g.most {
		g.lost += uint64(g.old.n - g.moved)
		turned, g.moved = g.old.n > 0, 0
		g.old, g.young = g.young, g.old
		if clear(g.young.slots); len(g.young.slots) > slotsFor(g.most) {
			g.young.slots = nil // the bound has become smaller
		}
		g.young.n = 0
	}
	v = g.young.add(k, g.most)
	*v = was
	return v, turned
}

// table is a hash table with open addressing and linear probing. Entries are never removed.
type table[V any] struct {
	slots []slot[V]
	n     int
}

type slot[V any] struct {
	key   uint64 // 0: empty slot
	value V
}

// spread is odd. Names are hashes, but engines may number their blocks.
const spread = 0x9e3779b97f4a7c15

// key replaces the key 0, because 0 marks an empty slot.
func key(k uint64) uint64 {
	if k == 0 {
		return spread
	}
	return k
}

// first returns the first slot for a key.
func (t *table[V]) first(key uint64) uint64 {
	hi, _ := bits.Mul64(key*spread, uint64(len(t.slots)))
	return hi
}

func (t *table[V]) touch(k uint64) uint64 {
	if t.n == 0 {
		return 0
	}
	return t.slots[t.first(key(k))].key
}

func (t *table[V]) find(k uint64) *V {
	if t.n == 0 {
		return nil
	}
	k = key(k)
	for i := t.first(k); ; {
		switch s := &t.slots[i]; s.key {
		case k:
			return &s.value
		case 0:
			return nil
		}
		if i++; i == uint64(len(t.slots)) {
			i = 0
		}
	}
}

// add returns a slot for a new key, in a table of at most most keys.
func (t *table[V]) add(k uint64, most int) *V {
	if t.n >= len(t.slots)/4*3 {
		t.grow(min(max(64, 2*len(t.slots)), slotsFor(most)))
	}
	t.n++
	return t.place(key(k))
}

// slotsFor returns the slots for a table of most keys.
func slotsFor(most int) int { return most/2*3 + 8 }

func (t *table[V]) place(key uint64) *V {
	i := t.first(key)
	for t.slots[i].key != 0 {
		if i++; i == uint64(len(t.slots)) {
			i = 0
		}
	}
	t.slots[i].key = key
	return &t.slots[i].value
}

func (t *table[V]) grow(slots int) {
	was := t.slots
	t.slots = make([]slot[V], slots)
	for i := range was {
		if was[i].key != 0 {
			*t.place(was[i].key) = was[i].value
		}
	}
}
