package radix

import "math/bits"

// names is a table from engine hashes to blocks, for the writer alone. A slot is 32 bits of the name's hash above 32 bits
// that say where the name is: in the arena at its block, or, if the arena has another name there, in a list of aliases.
//
// Slots are sorted by hash, each at or after its home, which is the hash scaled to the table's size. A search that misses
// ends early, and the table grows in place by any factor in two passes from one end to the other.
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

// insert puts a name that find missed at pos. The name must stand in the arena at its block, or become an alias.
func (t *names) insert(m *memory, name, hash, pos uint64, block uint32, asAlias bool) {
	if uint64(t.n)*5 >= t.size*4 {
		t.grow(m)
		_, pos, _ = t.find(name, hash)
	}
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
	t.n++
	s := t.slots.s
	for x := hash<<32 | uint64(ref); ; pos++ {
		if int(pos) == len(s)-1 { // only names chosen to collide come here
			t.slots.grow(m, len(s)+tailMargin)
			s = t.slots.s
		}
		x, s[pos] = s[pos], x
		if x == 0 {
			return
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

// grow makes a quarter more room: all slots move to the far end, and from there to their places.
func (t *names) grow(m *memory) {
	size := max(64, t.size+t.size/4)
	old := t.slots.s
	used, next := 0, uint64(0)
	t.size = size
	for i, v := range old {
		if v != 0 {
			used = i + 1
			next = max(next, t.home(v>>32)) + 1
		}
	}
	t.slots.grow(m, max(int(size), int(next))+tailMargin)
	s := t.slots.s
	far := len(s)
	for i := used - 1; i >= 0; i-- {
		if v := s[i]; v != 0 {
			far--
			s[i] = 0
			s[far] = v
		}
	}
	next = 0
	for i := far; i < len(s); i++ {
		v := s[i]
		s[i] = 0
		next = max(next, t.home(v>>32))
		s[next] = v
		next++
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
