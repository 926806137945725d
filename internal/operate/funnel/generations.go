package funnel

import "math/bits"

// generations are a hash table of bounded size: the older of two is forgotten when the younger is full.
//
// It is our own since a prompt's blocks are looked up on a core that others need for their answers. A slot has key and
// value side by side, so that a look-up costs one access to memory; a Go map costs several and a hash function.
type generations[V any] struct {
	young, old table[V]
	most       int // of each
	moved      int // of the old, which are in the young too
	lost       uint64
}

// get is what is under a key.
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

// touch reads the slots where a key is looked for first, and returns something of them. Slots of several keys that are
// touched one after the other come from memory at the same time.
func (g *generations[V]) touch(k uint64) uint64 { return g.young.touch(k) ^ g.old.touch(k) }

// put is the place of a key in the younger generation, with what was under it. It is valid until the next put. turned
// means that a generation was forgotten.
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

// table is a hash table with open addressing and linear probing, out of which nothing is removed.
type table[V any] struct {
	slots []slot[V]
	n     int
}

type slot[V any] struct {
	key   uint64 // 0: none
	value V
}

// spread is odd. Names are hashes, but engines may count their blocks.
const spread = 0x9e3779b97f4a7c15

// key is what stands for k in slots, where 0 is none.
func key(k uint64) uint64 {
	if k == 0 {
		return spread
	}
	return k
}

// first is where to look for a key.
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

// add is the place of a key that is not there, in a table of at most so many.
func (t *table[V]) add(k uint64, most int) *V {
	if t.n >= len(t.slots)/4*3 {
		t.grow(min(max(64, 2*len(t.slots)), slotsFor(most)))
	}
	t.n++
	return t.place(key(k))
}

// slotsFor returns the slots of a table of most keys.
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
