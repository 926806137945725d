package radix

import "math/bits"

// names is a table from engine hashes and their owners to blocks, for the writer alone. A slot is 32 bits of the hash
// of both above 32 bits that say where the name is: in the arena at its block, or, if the arena has another name there,
// among the aliases.
//
// Slots are sorted by hash, each at or after its home, which is the start of a bucket: the hash scaled to their number.
// A bucket is a line of the processor's caches. A search that misses ends early, and the table grows in place by any
// factor in one pass from its end to its start.
type names struct {
	slots   array[uint64] // size of them, whole buckets, and a margin behind; 0 is empty
	size    uint64
	n       int
	coming  int // names that are expected soon
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

// at is the block that a slot's value stands for, its name, and whose name that is.
func (t *names) at(ref uint32) (block uint32, name uint64, owner uint32) {
	if ref&aliasBit != 0 {
		a := t.aliases.all.s[ref&^aliasBit]
		return a.block, a.name, a.owner
	}
	return ref, t.engines.s[ref], t.slabs.s[ref/slabBlocks].owner
}

// find looks an owner's name up, and returns the value of its slot. If it is not there, pos is where it would go.
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

// likely writes the value of the first slot with each hash, or 0 if there is none.
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

// room makes room for n names more. The table, which nearly every event visits, is kept at most two thirds full,
// so that chains are short; it doubles while it is not very large, so that each name is entered seldom again. While
// more names are expected it grows up to fourfold.
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

// insert puts a name that find missed at pos, for which there is room. It stands where ref says.
func (t *names) insert(m *memory, hash, pos uint64, ref uint32) {
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

// enter puts an owner's name in that stands where ref says, if it is not there yet; otherwise it says at which block it
// is.
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

// enterAll enters an owner's names that stand where refs say, for all of which there is room. It stops at one that is
// there already, and says at which block that is, and how many came before it.
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

// vectors reports whether the processor can work on several names at a time.
func (t *names) vectors() bool { return vectors && t.size/bucket < 1<<32 }

// prefetchGroup asks for a group of names when the one numbered i is in hand, if it is time.
func (t *names) prefetchGroup(hashes []uint64, i int) {
	if i%group == 0 {
		t.prefetch(hashes[min(i+ahead, len(hashes)):min(i+ahead+group, len(hashes))])
	}
}

// remove takes a name out that is there, and stands, or stood, where ref says.
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

// removeAll takes names out that are there, and stand, or stood, where refs say.
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
