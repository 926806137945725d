package radix

import "math/bits"

// names is a table from engine hashes and their owners to blocks. Only the writer uses it. A slot has 32 bits of the
// hash of both above 32 bits with the place of the name: the block in the arena, or an alias if the arena has another
// name.
//
// Slots are sorted by hash. A slot is at or after its home. The home is the start of a bucket: the hash scaled to the
// number of buckets. A bucket is a cache line. A failed search ends early, and the table grows in place by any factor,
// in a single pass from the end to the start.
// factor in one pass from its end to its start.
type names struct {
	slots   array[uint64] // size slots in whole buckets, and a margin behind; 0 is empty
	size    uint64
	n       int
	coming  int // expected names
	aliases aliases
	engines *array[uint64]
	slabs   *array[slab]
	seed    uint64
}

const (
	aliasBit   = 1 << 31
	tailMargin = 128
	bucket     = 8 // slots
)

func (t *names) hash(name uint64, owner uint32) uint64 {
	hi, lo := bits.Mul64(name^t.seed^uint64(owner)*0xd6e8feb86659fd93, 0x9e3779b97f4a7c15)
	return (hi ^ lo) & (1<<32 - 1)
}

func (t *names) home(hash uint64) uint64 { return hash * (t.size / bucket) >> 32 * bucket }

// at returns the block of a slot's value, the name, and the owner of the name.
func (t *names) at(ref uint32) (block uint32, name uint64, owner uint32) {
	if ref&aliasBit != 0 {
		a := t.aliases.all.s[ref&^aliasBit]
		return a.block, a.name, a.owner
	}
	return ref, t.engines.s[ref], t.slabs.s[ref/slabBlocks].owner
}

// find looks up an owner's name and returns the value of the slot. If the name is missing, pos is its place.
func (t *names) find(name, hash uint64, owner uint32) (ref uint32, pos uint64, ok bool) {
	if t.size == 0 {
		return 0, 0, false
	}
	s := t.slots.s
	for pos = t.home(hash); ; pos++ {
		v := s[pos]
		if h := v >> 32; v == 0 || h > hash {
			return 0, pos, false
		} else if h == hash {
			if _, n, o := t.at(uint32(v)); n == name && o == owner {
				return uint32(v), pos, true
			}
		}
	}
}

// likely writes the value of the first slot with each hash, or 0.
func (t *names) likely(hashes []uint64, refs []uint32) {
	if t.size == 0 {
		clear(refs)
		return
	}
	for i := 0; i < len(hashes); i++ {
		if t.vectors() {
			if i += findVectors(&t.slots.s[0], t.size, &hashes[i], len(hashes)-i, &refs[i]); i == len(hashes) {
				break
			}
		}
		refs[i] = 0
		for pos := t.home(hashes[i]); ; pos++ {
			if v := t.slots.s[pos]; v == 0 || v>>32 > hashes[i] {
				break
			} else if v>>32 == hashes[i] {
				refs[i] = uint32(v)
				break
			}
		}
	}
}

// room makes room for n more names. Nearly every event uses the table, so it is at most two thirds full and has short
// chains. It doubles until it is very large, so that each name is rarely entered again. With expected names, it grows
// up to fourfold.
func (t *names) room(m *memory, n int) {
	const veryLarge = 1 << 22
	sizeFor := func(n int) uint64 { return uint64(n)*3/2 + 1 }
	need := sizeFor(t.n + n)
	if need <= t.size {
		return
	}
	next := t.size + t.size*2/5
	if t.size < veryLarge {
		next = min(2*t.size, veryLarge)
	}
	next = max(next, min(4*t.size, sizeFor(t.n+n+t.coming)))
	t.grow(m, (max(64, next, need)+bucket-1)/bucket*bucket)
}

// insert adds a missing name at pos of find. The table has room. ref is the place of the name.
func (t *names) insert(m *memory, hash, pos uint64, ref uint32) {
	t.n++
	t.put(m, hash<<32|uint64(ref), pos)
}

// put writes a slot's value at pos, and moves the slots from pos up to the next empty slot.
func (t *names) put(m *memory, v, pos uint64) {
	s := t.slots.s
	for {
		if int(pos) == len(s)-1 { // only for names chosen to collide
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

// enter adds an owner's name at place ref. If the name exists, it returns the block of the name.
func (t *names) enter(m *memory, name, hash uint64, owner, ref uint32) (at uint32, there bool) {
	s := t.slots.s
	for pos := t.home(hash); ; pos++ {
		v := s[pos]
		switch h := v >> 32; {
		case v == 0 && int(pos) < len(s)-1:
			s[pos] = hash<<32 | uint64(ref)
			t.n++
			return 0, false
		case v == 0 || h > hash:
			t.insert(m, hash, pos, ref)
			return 0, false
		case h == hash:
			if b, n, o := t.at(uint32(v)); n == name && o == owner {
				return b, true
			}
		}
	}
}

// enterAll adds an owner's names at places refs. The table has room. It stops at an existing name and returns the block
// of the name and the number of names before.
func (t *names) enterAll(
	m *memory, names, hashes []uint64, owner uint32, refs []uint32,
) (n int, at uint32, there bool) {
	t.prefetch(hashes[:min(ahead, len(hashes))])
	for ; n < len(hashes); n++ {
		if t.vectors() {
			done := enterVectors(&t.slots.s[0], t.size, &hashes[n], len(hashes)-n, &refs[n])
			t.n += done
			if n += done; n == len(hashes) {
				break
			}
		} else {
			t.prefetchGroup(hashes, n)
		}
		if at, there = t.enter(m, names[n], hashes[n], owner, refs[n]); there {
			return n, at, true
		}
	}
	return n, 0, false
}

// vectors reports whether the processor can handle several names at once.
func (t *names) vectors() bool { return vectors && t.size/bucket < 1<<32 }

// prefetchGroup prefetches a later group of names at the start of every group.
func (t *names) prefetchGroup(hashes []uint64, i int) {
	if i%group == 0 {
		t.prefetch(hashes[min(i+ahead, len(hashes)):min(i+ahead+group, len(hashes))])
	}
}

// remove removes an existing name. ref is its current or former place.
func (t *names) remove(hash uint64, ref uint32) {
	s := t.slots.s
	pos := t.home(hash)
	for s[pos] != hash<<32|uint64(ref) {
		pos++
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
}

// removeAll removes existing names. refs are their current or former places.
func (t *names) removeAll(hashes []uint64, refs []uint32) {
	t.prefetch(hashes[:min(ahead, len(hashes))])
	for i := 0; i < len(hashes); i++ {
		if t.vectors() {
			done := removeVectors(&t.slots.s[0], t.size, &hashes[i], len(hashes)-i, &refs[i])
			t.n -= done
			if i += done; i == len(hashes) {
				break
			}
		} else {
			t.prefetchGroup(hashes, i)
		}
		t.remove(hashes[i], refs[i])
	}
}

// grow makes room for more homes. A table on the heap is copied. A mapped table grows in place: from the end to the
// start, some slots at a time move to their new places, which are never before the old places.
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
		if end-start > len(few) { // only for names chosen to collide
			buf = make([]uint64, end-start)
		}
		k := 0
		for _, v := range s[start:end] {
			buf[k] = v
			k += int((v | -v) >> 63) // 1 if the slot has a name
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

// refill enters slots, some of them empty, into an empty table.
func (t *names) refill(m *memory, slots []uint64) {
	s, next := t.slots.s, uint64(0)
	for _, v := range slots {
		next = max(next, t.home(v>>32))
		if int(next) == len(s)-1 { // only for names chosen to collide
			t.slots.grow(m, len(s)+tailMargin, 0)
			s = t.slots.s
		}
		s[next] = v
		next += (v | -v) >> 63 // 1 if the slot has a name
	}
}
