package radix

import "math/bits"

// names is a table from engine hashes to blocks, for the writer alone. A slot is 32 bits of the name's hash above 32
// bits that say where the name is: in the arena at its block, or, if the arena has another name there, in a list of
// aliases.
//
// Slots are sorted by hash, each at or after its home, which is the hash scaled to the table's size. A search that
// misses ends early, and the table grows in place by any factor in two passes from one end to the other.
type names struct {
	slots   array[uint64] // size of them and a margin behind; 0 is empty
	size    uint64
	n       int
	aliases []alias
	spare   []uint32 // aliases to use again
	engines *array[uint64]
	seed    uint64
}

type alias struct {
	name  uint64
	block uint32
}

const (
	aliasBit   = 1 << 31
	tailMargin = 128
)

func (t *names) hash(name uint64) uint64 {
	hi, lo := bits.Mul64(name^t.seed, 0x9e3779b97f4a7c15)
	return (hi ^ lo) & (1<<32 - 1)
}

func (t *names) home(hash uint64) uint64 { return hash * t.size >> 32 }

// at is the block that a slot's value stands for, and its name.
func (t *names) at(ref uint32) (block uint32, name uint64) {
	if ref&aliasBit != 0 {
		a := t.aliases[ref&^aliasBit]
		return a.block, a.name
	}
	return ref, t.engines.s[ref]
}

// find looks a name up. If it is not there, pos is where it would go.
func (t *names) find(name, hash uint64) (block uint32, pos uint64, ok bool) {
	if t.size == 0 {
		return 0, 0, false
	}
	s := t.slots.s
	for pos = t.home(hash); ; pos++ {
		v := s[pos]
		if h := v >> 32; v == 0 || h > hash {
			return 0, pos, false
		} else if h == hash {
			if b, n := t.at(uint32(v)); n == name {
				return b, pos, true
			}
		}
	}
}

// likely is the value of the first slot with a hash; 0 if there is none.
func (t *names) likely(hash uint64) uint32 {
	for pos := t.home(hash); ; pos++ {
		if v := t.slots.s[pos]; v == 0 || v>>32 > hash {
			return 0
		} else if v>>32 == hash {
			return uint32(v)
		}
	}
}

// room makes room for n names more. A small table, as a rank's own, is kept at most 80 % full and grows by a quarter,
// for there may be many. A large one, which nearly every event visits, is kept at most 65 % full: chains are short, and
// growing by two fifths, or doubling while it is not very large, enters each name less often again.
func (t *names) room(m *memory, n int) {
	const large, veryLarge = 1 << 17, 1 << 22
	want := uint64(t.n + n)
	need, next := want*5/4+1, t.size+t.size/4
	if want >= large {
		need, next = want*20/13+1, t.size+t.size*2/5
		if t.size < veryLarge {
			next = min(2*t.size, veryLarge)
		}
	}
	if need > t.size {
		t.grow(m, max(64, next, need))
	}
}

// insert puts a name that find missed at pos, for which there is room. The name must stand in the arena at its block,
// or become an alias.
func (t *names) insert(m *memory, name, hash, pos uint64, block uint32, asAlias bool) {
	ref := block
	if asAlias {
		if n := len(t.spare); n > 0 {
			ref, t.spare = t.spare[n-1], t.spare[:n-1]
		} else {
			ref = uint32(len(t.aliases))
			t.aliases = append(t.aliases, alias{})
		}
		t.aliases[ref] = alias{name, block}
		ref |= aliasBit
	}
	t.insertRef(m, hash, pos, ref)
}

func (t *names) insertRef(m *memory, hash, pos uint64, ref uint32) {
	t.n++
	t.put(m, hash<<32|uint64(ref), pos)
}

// put puts a slot's value at pos, and moves those from there on up to the next empty slot one further.
func (t *names) put(m *memory, v, pos uint64) {
	s := t.slots.s
	for {
		if int(pos) == len(s)-1 { // only names chosen to collide come here
			t.slots.grow(m, len(s)+tailMargin, 0)
			s = t.slots.s
		}
		v, s[pos] = s[pos], v
		if v == 0 {
			return
		}
		pos++
	}
}

// enter puts a name in that stands in the arena at its block, if it is not there yet; otherwise it says at which block
// it is.
func (t *names) enter(m *memory, name, hash uint64, block uint32) (at uint32, there bool) {
	s := t.slots.s
	for pos := t.home(hash); ; pos++ {
		v := s[pos]
		switch h := v >> 32; {
		case v == 0 && int(pos) < len(s)-1:
			s[pos] = hash<<32 | uint64(block)
			t.n++
			return 0, false
		case v == 0 || h > hash:
			t.insertRef(m, hash, pos, block)
			return 0, false
		case h == hash:
			if b, n := t.at(uint32(v)); n == name {
				return b, true
			}
		}
	}
}

// remove takes the name of a block out, and reports whether it was an alias. It must be there.
func (t *names) remove(hash uint64, block uint32) (wasAlias bool) {
	s := t.slots.s
	pos := t.home(hash)
	for ; ; pos++ {
		v := s[pos]
		if v>>32 == hash {
			if ref := uint32(v); ref == block {
				break
			} else if ref&aliasBit != 0 && t.aliases[ref&^aliasBit].block == block {
				t.spare = append(t.spare, ref&^aliasBit)
				wasAlias = true
				break
			}
		}
	}
	for {
		v := s[pos+1]
		if v == 0 || t.home(v>>32) == pos+1 {
			break
		}
		s[pos] = v
		pos++
	}
	s[pos] = 0
	t.n--
	return wasAlias
}

// grow makes room for more homes. A table on the heap is read from the start and written anew. A mapped one grows in
// place: from the end to the start, some slots at a time move to where they belong now, which is never before where
// they were.
func (t *names) grow(m *memory, size uint64) {
	t.size = size
	if t.slots.mapped == nil {
		was := t.slots.s
		t.slots.s = nil
		t.slots.grow(m, int(size)+tailMargin, 0)
		t.refill(m, was)
		return
	}
	end := len(t.slots.s)
	t.slots.grow(m, int(t.size)+tailMargin, 0)
	var few [512]uint64
	for end > 0 {
		s := t.slots.s
		start := max(0, end-len(few)/2)
		for start > 0 && s[start-1] != 0 {
			start--
		}
		buf := few[:]
		if end-start > len(few) { // only names chosen to collide come here
			buf = make([]uint64, end-start)
		}
		k := 0
		for _, v := range s[start:end] {
			buf[k] = v
			k += int((v | -v) >> 63) // one, if there is a name
		}
		clear(s[start:end])
		end = start
		next := uint64(0)
		for _, v := range buf[:k] {
			next = max(next, t.home(v>>32))
			if s := t.slots.s; s[next] == 0 && int(next) < len(s)-1 {
				s[next] = v
			} else {
				t.put(m, v, next)
			}
			next++
		}
	}
}

// refill enters slots, some of them empty, into a table that is empty.
func (t *names) refill(m *memory, slots []uint64) {
	s, next := t.slots.s, uint64(0)
	for _, v := range slots {
		next = max(next, t.home(v>>32))
		if int(next) == len(s)-1 { // only names chosen to collide come here
			t.slots.grow(m, len(s)+tailMargin, 0)
			s = t.slots.s
		}
		s[next] = v
		next += (v | -v) >> 63 // one, if there is a name
	}
}

// each calls f for every name.
func (t *names) each(f func(name uint64, block uint32)) {
	for _, v := range t.slots.s {
		if v != 0 {
			b, n := t.at(uint32(v))
			f(n, b)
		}
	}
}
