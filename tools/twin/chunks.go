package twin

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// seqs is the places of a prompt's blocks.
func seqs(locals []events.LocalHash) (all []events.SeqHash) {
	var seq events.SeqHash
	for i, l := range locals {
		seq = Next(seq, i == 0, l)
		all = append(all, seq)
	}
	return all
}

// depth returns the number of blocks up to a place, inclusive.
func (r *Rank) depth(seq events.SeqHash) (n uint32) {
	for at, more := r.path[seq], true; more; at = r.path[at.parent] {
		n++
		more = !at.root
	}
	return n
}

// localsTo is the local hashes of the blocks up to a place.
func (r *Rank) localsTo(seq events.SeqHash) (locals []events.LocalHash) {
	for at, more := r.path[seq], true; more; at = r.path[at.parent] {
		locals = append(locals, at.local)
		more = !at.root
	}
	slices.Reverse(locals)
	return locals
}

// learnLoading updates the rank's loading rule from an event. seq is the place of the event's only name.
func (r *Rank) learnLoading(e *events.Event, seq events.SeqHash, byContent bool) {
	l := &r.loading
	switch {
	case e.Chunk == 0:
		return
	case e.Chunk == events.ChunkSizeUnknown && l.Told:
	case e.Chunk == events.ChunkSizeUnknown: // the largest size that divides all places
		depth := r.depth(seq)
		size := depth
		for l.Blocks > 0 && (l.Blocks%size != 0 || depth%size != 0) {
			size--
		}
		l.Blocks = size
	default:
		if !l.Told {
			l.Blocks = 0
		}
		l.Blocks, l.Told = max(l.Blocks, e.Chunk), true
	}
	l.Own = l.Own || byContent
}

// announced returns the place of the last of some blocks after parent, or at the start of a prompt. ok reports whether
// the rank has or remembers a copy of the block.
func (r *Rank) announced(parent events.SeqHash, root bool, locals []events.LocalHash) (seq events.SeqHash, ok bool) {
	seq = parent
	for i, l := range locals {
		seq = Next(seq, root && i == 0, l)
	}
	for _, at := range r.place {
		ok = ok || at == seq
	}
	for _, g := range r.gone {
		ok = ok || g.seq == seq
	}
	return seq, ok
}

// ownPlace returns the place of the chunk of an event, if the chunk's name may be the connector's own.
func (r *Rank) ownPlace(e *events.Event) (seq events.SeqHash, byContent, ok bool) {
	if seq, ok = r.known(e.Blocks[0]); ok {
		return seq, false, true
	}
	switch {
	case !e.HasParent:
		seq, ok = r.announced(0, true, e.Locals)
		return seq, true, ok
	case e.Parent != 0:
		if seq, ok = r.known(e.Parent); ok {
			seq, ok = r.announced(seq, false, e.Locals)
		}
		return seq, true, ok
	}
	found := map[events.SeqHash]bool{} // after a chunk that the rank holds in the tier
	for _, before := range r.place {
		if r.Holds(e.Tier, before) && r.depth(before)%e.Chunk == 0 {
			if at, ok := r.announced(before, false, e.Locals); ok {
				found[at] = true
			}
		}
	}
	for at := range found {
		return at, true, len(found) == 1
	}
	seq, ok = r.announced(0, true, e.Locals)
	return seq, true, ok
}

// chunks extends a prefix of n blocks by the chunks in some tiers, for an engine that loads whole chunks. A chunk is
// present if the last block is present.
func (r *Rank) chunks(path []events.SeqHash, n int, tiers []events.Tier) int {
	size := int(r.loading.Blocks)
	for {
		end := (n/size + 1) * size
		if end > len(path) ||
			!slices.ContainsFunc(tiers, func(t events.Tier) bool { return r.Holds(t, path[end-1]) }) {
			return n
		}
		n = end
	}
}

// enough reports whether an engine loads the given number of blocks. All connectors except LMCache load at least a
// whole chunk.
func (r *Rank) enough(blocks int) bool {
	return blocks > 0 && (r.loading.Own || blocks >= int(r.loading.Blocks))
}

func (r *Rank) heldInChunks(locals []events.LocalHash, depth *[events.NumTiers]uint32) {
	path, begin := seqs(locals), int(depth[0])
	n := begin
	for t := events.Host; t <= events.External; t++ {
		end := r.chunks(path, n, []events.Tier{t})
		depth[t-1], n = uint32(end-n), end
	}
	if !r.enough(n - begin) {
		*depth = [events.NumTiers]uint32{uint32(begin)}
	}
}

func (r *Rank) withinChunks(locals []events.LocalHash, tiers []events.Tier) (n int) {
	path := seqs(locals)
	below := slices.DeleteFunc(slices.Clone(tiers), func(t events.Tier) bool { return t == events.Device })
	for {
		for n < len(path) && len(below) < len(tiers) && r.Holds(events.Device, path[n]) {
			n++
		}
		end := r.chunks(path, n, below)
		if !r.enough(end - n) {
			return n
		}
		n = end
	}
}
