package radix

import (
	"math/bits"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Named is the answer to a query by engine hashes, with scratch memory. Reuse it like an [Answer].
type Named struct {
	Answer

	locals  []events.LocalHash
	sharing RankSet
	private Answer
}

// MatchNames is [Index.Match] for a prompt in engine hashes. A block counts for a rank if the rank holds the block
// under the given name, at the place in the prompt. Ranks that share names are matched together, every other rank by
// its own names. It is safe for concurrent use. It blocks while the writer changes the index.
func (x *Index) MatchNames(space uint32, names []events.BlockHash, allowed *RankSet, out *Named) {
	x.naming.RLock()
	defer x.naming.RUnlock()
	out.Ranks, out.Within, out.private.Sets = out.Ranks[:0], out.Within[:0], out.Sets
	out.locals = x.path(space, names, x.sharedPlace, out.locals[:0])
	out.sharing.words = append(out.sharing.words[:0], x.sharedMask...)
	for i := range out.sharing.words {
		out.sharing.words[i] &^= x.v.chunkedRanks(i) // matched one by one
		if allowed != nil {
			out.sharing.words[i] &= allowed.word(i)
		}
	}
	if len(out.locals) > 0 {
		x.Match(space, out.locals, &out.sharing, &out.Answer)
	}
	for i, shares := range x.sharedMask {
		for set := ^shares | x.v.chunkedRanks(i); set != 0; set &= set - 1 {
			slot := i<<6 + bits.TrailingZeros64(set)
			if slot >= len(x.slots) {
				break
			}
			r := x.slots[slot]
			if r == nil || r.space != space || allowed != nil && !allowed.Has(r.id) {
				continue
			}
			place := func(name events.BlockHash) (uint32, bool) { return x.heldPlace(r, name) }
			if r.loading.Chunked() {
				out.locals = x.pathToLast(names, place, out.locals[:0])
			} else {
				out.locals = x.path(space, names, place, out.locals[:0])
			}
			if len(out.locals) == 0 {
				continue
			}
			out.sharing.Clear()
			out.sharing.Add(r.id)
			x.Match(space, out.locals, &out.sharing, &out.private)
			out.Ranks = append(out.Ranks, out.private.Ranks...)
			out.Within = append(out.Within, out.private.Within...)
		}
	}
}

// sharedPlace returns the block with the given shared name.
func (x *Index) sharedPlace(name events.BlockHash) (block uint32, ok bool) {
	ref, _, ok := x.names.find(uint64(name), x.names.hash(uint64(name), sharedOwner), sharedOwner)
	block, _, _ = x.names.at(ref)
	return block, ok
}

// path appends the local hashes of the named blocks, as long as each follows the previous block. The first must start a
// prompt.
func (x *Index) path(
	space uint32, names []events.BlockHash, place func(events.BlockHash) (uint32, bool), locals []events.LocalHash,
) []events.LocalHash {
	at, end := x.v.root(space), uint32(0) // the current node, and the position after the last block
	for i, name := range names {
		block, ok := place(name)
		if !ok {
			break
		}
		if i == 0 || block != end || end == x.v.nodes[at].start+x.v.nodes[at].len {
			id, n := x.where(block)
			whole := i == 0 || end == x.v.nodes[at].start+x.v.nodes[at].len
			if n.start != block || n.parent != at || !whole {
				break
			}
			at = id
		}
		locals, end = append(locals, events.LocalHash(x.v.locals[block])), block+1
	}
	return locals
}

// pathToLast appends the local hashes of the blocks up to the last block with its name at its place. A rank may have
// only the name of a chunk's last block. An engine's hash covers all blocks before, so the names before need no check.
func (x *Index) pathToLast(
	names []events.BlockHash, place func(events.BlockHash) (uint32, bool), locals []events.LocalHash,
) []events.LocalHash {
	for i := len(names) - 1; i >= 0; i-- {
		block, ok := place(names[i])
		if !ok || x.depth(block) != uint32(i) {
			continue
		}
		return x.pathTo(block, locals[:0])
	}
	return locals[:0]
}

// pathTo appends the local hashes of the blocks from the start of the prompt up to a block.
func (x *Index) pathTo(block uint32, locals []events.LocalHash) []events.LocalHash {
	begin, length := len(locals), int(x.depth(block))+1
	locals = slices.Grow(locals, length)[:begin+length]
	path := locals[begin:]
	_, n := x.where(block)
	for end := block + 1; n.parent != 0; end = n.start + n.len {
		for at := n.start; at < end; at++ {
			path[n.depth+at-n.start] = events.LocalHash(x.v.locals[at])
		}
		n = &x.v.nodes[n.parent]
	}
	return locals
}

// Path appends the local hashes of the blocks from the start of the prompt up to the block that a rank holds under a
// name, or held at the latest remembered removal. It returns false for an unknown name. The writer calls it.
func (x *Index) Path(id RankID, name events.BlockHash, locals []events.LocalHash) ([]events.LocalHash, bool) {
	block, ok := x.known(x.rank(id), name)
	if !ok {
		return locals, false
	}
	return x.pathTo(block, locals), true
}

// Names returns the engine hashes of the leading blocks that a rank holds in any tier, at most as many as local hashes.
// It ends before the first block that the rank does not hold. A rank with several hashes of a block returns the hash of
// the copy in the first tier. It is safe for concurrent use. It blocks while the writer changes the index.
func (x *Index) Names(id RankID, locals []events.LocalHash) (names []events.BlockHash) {
	x.naming.RLock()
	defer x.naming.RUnlock()
	if id.Slot() >= len(x.slots) || x.slots[id.Slot()] == nil || x.slots[id.Slot()].id != id {
		return nil
	}
	r := x.slots[id.Slot()]
	name := x.namesOf(r)
	x.along(r.space, locals, func(block uint32) bool {
		n, ok := name(block)
		if ok {
			names = append(names, n)
		}
		return ok
	})
	return names
}

// along calls visit with the blocks of a path, until visit returns false or the index has no next block.
func (x *Index) along(space uint32, locals []events.LocalHash, visit func(block uint32) bool) {
	at, off := x.v.root(space), uint32(0)
	for _, local := range locals {
		if off == x.v.nodes[at].len {
			if _, at = x.v.edge(at, uint64(local)); at == 0 {
				return
			}
			off = 0
		}
		block := x.v.nodes[at].start + off
		if x.v.locals[block] != uint64(local) || !visit(block) {
			return
		}
		off++
	}
}

// Knows reports whether [Index.Path] has the blocks up to a name. The writer calls it.
func (x *Index) Knows(id RankID, name events.BlockHash) bool {
	_, ok := x.known(x.rank(id), name)
	return ok
}

// LastHeld returns a function that finds the last block of a path that a rank holds under a name. The function returns
// the name and the number of blocks up to the block; 0 blocks have no name. ok is false if more than most blocks
// follow. The writer calls both functions, and [Index.Path] has these blocks until the next change.
func (x *Index) LastHeld(id RankID) func(path []events.LocalHash, most int) (name events.BlockHash, n int, ok bool) {
	r, blocks := x.rank(id), []uint32(nil)
	find := x.namesOf(r)
	return func(path []events.LocalHash, most int) (name events.BlockHash, n int, ok bool) {
		blocks = blocks[:0]
		x.along(r.space, path, func(block uint32) bool {
			blocks = append(blocks, block)
			return true
		})
		least := max(0, len(path)-most)
		for n = len(blocks); n > 0 && n >= least; n-- {
			if name, ok = find(blocks[n-1]); ok {
				return name, n, true
			}
		}
		return 0, 0, least == 0
	}
}

// namesOf returns a function from the blocks of a rank to their names. The function reports false for a block that the
// rank does not hold.
func (x *Index) namesOf(r *rank) func(block uint32) (events.BlockHash, bool) {
	switch r.naming {
	case namesExact:
		return r.exact.name
	case namesOwn:
		aliases := map[uint32]uint64{}
		x.names.aliases.each(r.owner(), func(_ uint32, a alias) { aliases[a.block] = a.name })
		return func(block uint32) (events.BlockHash, bool) {
			if x.slabs.s[block/slabBlocks].names(block%slabBlocks, r.owner()) {
				return events.BlockHash(x.engines.s[block]), true
			}
			name, ok := aliases[block]
			return events.BlockHash(name), ok
		}
	}
	return func(block uint32) (events.BlockHash, bool) {
		if !x.holdsAny(r.slot(), block) {
			return 0, false
		}
		name, _, ok := x.sharedName(block)
		return events.BlockHash(name), ok
	}
}

// word is one word of the set.
func (s *RankSet) word(i int) uint64 {
	if i < len(s.words) {
		return s.words[i]
	}
	return 0
}
