package events

import "slices"

// recycle empties a buffer for the next message, and frees a large and mostly unused buffer.
func recycle[T any](s []T) []T {
	if cap(s) > 1<<16 && len(s) < cap(s)/8 {
		return nil
	}
	return s[:0]
}

// nameSet finds repeated names. It is a hash table with linear probing. A slot of an earlier round counts as empty.
type nameSet struct {
	names  []BlockHash
	rounds []uint32 // the round of each slot
	round  uint32   // the current round
}

// repeats reports whether a name occurs twice among names and, if there is one, parent.
func (s *nameSet) repeats(names []BlockHash, parent BlockHash, hasParent bool) bool {
	if hasParent && slices.Contains(names, parent) {
		return true
	}
	if len(names) <= 8 {
		for i, name := range names {
			if slices.Contains(names[:i], name) {
				return true
			}
		}
		return false
	}
	size := 16
	for size < 2*len(names) {
		size *= 2
	}
	if size > len(s.names) || len(s.names) > 1<<16 && size < len(s.names)/64 {
		s.names, s.rounds, s.round = make([]BlockHash, size), make([]uint32, size), 0
	}
	if s.round++; s.round == 0 {
		clear(s.rounds)
		s.round = 1
	}
	mask := uint64(len(s.names) - 1)
	for _, name := range names {
		at := uint64(name) * 0x9e3779b97f4a7c15
		for at = (at ^ at>>32) & mask; s.rounds[at] == s.round; at = (at + 1) & mask {
			if s.names[at] == name {
				return true
			}
		}
		s.names[at], s.rounds[at] = name, s.round
	}
	return false
}

// perBlock is a list of values for each block of an event.
type perBlock[T any] struct {
	values []T
	ends   []int // ends[i]: the end of block i's values
}

func (p *perBlock[T]) reset()  { p.values, p.ends = recycle(p.values), recycle(p.ends) }
func (p *perBlock[T]) add(v T) { p.values = append(p.values, v) }
func (p *perBlock[T]) end()    { p.ends = append(p.ends, len(p.values)) }

// block returns the values of block i, or nil beyond the last block.
func (p *perBlock[T]) block(i int) []T {
	if i >= len(p.ends) {
		return nil
	}
	begin := 0
	if i > 0 {
		begin = p.ends[i-1]
	}
	return p.values[begin:p.ends[i]]
}

// salts maps blocks to the salt's addend to the seed, in two generations of maxSalted blocks. A full recent generation
// replaces the older one.
type salts struct {
	recent, older map[BlockHash]uint64
}

const maxSalted = 1 << 18

func (s *salts) lookup(name BlockHash) (uint64, bool) {
	if v, ok := s.recent[name]; ok {
		return v, true
	}
	v, ok := s.older[name]
	return v, ok
}

func (s *salts) remember(names []BlockHash, addend uint64) {
	for _, name := range names {
		if s.recent == nil || len(s.recent) >= maxSalted {
			s.older, s.recent = s.recent, make(map[BlockHash]uint64)
		}
		s.recent[name] = addend
	}
}

func (s *salts) clear() { *s = salts{} }
