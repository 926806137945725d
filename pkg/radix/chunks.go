package radix

import (
	"math/bits"
	"slices"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Chunks are groups of several blocks that engines load only as a whole.
//
// The name of a chunk is the name of its last block, or a name of the connector for the same place. So a chunk is a
// copy at a single place and needs nothing special for names, tombstones and images. Two things differ. The rank has
// the number of blocks in a chunk (events.Loading). A reader goes through the tiers below the device chunk by chunk: a
// chunk is present if its last block is held. The other blocks of the chunk need no mark.

// learnLoading updates the loading of a rank's engine from the current event. block is the place of the name. byContent
// means that the name was unknown.
func (x *Index) learnLoading(r *rank, e *events.Event, block uint32, byContent bool) {
	l := r.loading
	switch {
	case e.Chunk == events.ChunkSizeUnknown && l.Told:
	case e.Chunk == events.ChunkSizeUnknown: // chunks count from the start of the prompt
		l.Blocks = commonDivisor(l.Blocks, x.depth(block)+1)
	case !l.Told:
		l.Blocks, l.Told = e.Chunk, true
	default: // LMCache may store the end of a prompt as a smaller chunk
		l.Blocks = max(l.Blocks, e.Chunk)
	}
	l.Own = l.Own || byContent
	x.setLoading(r, l)
}

// setLoading publishes the loading of a rank's engine to readers.
func (x *Index) setLoading(r *rank, l events.Loading) {
	was := r.loading
	r.loading = l
	if l == was || !l.Chunked() && !was.Chunked() {
		return
	}
	slot := int(r.slot())
	x.publish(func(v *view) {
		v.loading = append(make([]events.Loading, 0, len(v.ids)), v.loading...)[:len(v.ids)]
		v.loading[slot] = l
		v.chunked = append(make([]uint64, 0, v.stride), v.chunked...)[:v.stride]
		v.chunked[slot>>6] &^= 1 << (slot & 63)
		if l.Chunked() {
			v.chunked[slot>>6] |= 1 << (slot & 63)
		}
	})
}

func commonDivisor(a, b uint32) uint32 {
	for a != 0 {
		a, b = b%a, a
	}
	return b
}

// depth returns the number of blocks before a block on the path.
func (x *Index) depth(block uint32) uint32 {
	_, n := x.where(block)
	return n.depth + block - n.start
}

// storedOwn places a chunk that may have a name of the connector, or makes it pending. A chunk without a known previous
// chunk does not wait, because all events that could place it came before.
func (x *Index) storedOwn(r *rank, e *events.Event, c *Counts) {
	block, byContent, ok := x.ownPlace(r, e)
	switch {
	case ok:
		x.placeOwn(r, e, block, byContent, c)
	case e.HasParent && e.Parent == 0:
		c.Pending++
		c.Overflowed++
	default:
		x.wait(r, e, c)
	}
}

// placeOwn adds a chunk to the rank.
func (x *Index) placeOwn(r *rank, e *events.Event, block uint32, byContent bool, c *Counts) {
	one := *e
	one.Locals, one.HasParent, one.Parent, one.Own = nil, false, 0, byContent
	x.place(r, &one, block, nil, c)
}

// ownPlace finds the place of a chunk's last block by name. Otherwise it uses the content, if the rank's device has
// announced the same blocks without salt, adapter or images.
func (x *Index) ownPlace(r *rank, e *events.Event) (block uint32, byContent, ok bool) {
	if block, ok = x.known(r, e.Blocks[0]); ok {
		return block, false, true
	}
	locals := unsafe.Slice((*uint64)(unsafe.SliceData(e.Locals)), len(e.Locals))
	switch {
	case !e.HasParent:
		block, ok = x.announced(r, 0, locals)
	case e.Parent != 0:
		var before uint32
		if before, ok = x.known(r, e.Parent); ok {
			block, ok = x.announced(r, before, locals)
		}
	default:
		block, ok = x.continues(r, e, locals)
	}
	return block, true, ok
}

// announced follows blocks after block at (0: start of a prompt). ok reports whether the index has all of them and the
// rank's device has announced the last one. It has then announced all blocks before too.
func (x *Index) announced(r *rank, at uint32, locals []uint64) (last uint32, ok bool) {
	if last, ok = x.follow(r.space, at, locals); !ok {
		return 0, false
	}
	if r.naming == namesExact && len(r.exact.at[last]) > 0 || r.naming != namesExact && x.holdsAny(r.slot(), last) {
		return last, true
	}
	for n := r.tombstones.next; n != r.tombstones.first; n-- {
		if r.tombstones.at(n-1).block == last {
			return last, true
		}
	}
	return 0, false
}

// follow finds the last of some blocks after block at (0: start of a prompt).
func (x *Index) follow(space, at uint32, locals []uint64) (last uint32, ok bool) {
	id, off := x.v.root(space), uint32(0)
	if at != 0 {
		var n *node
		id, n = x.where(at)
		off = at - n.start + 1
	}
	for len(locals) > 0 {
		n := &x.v.nodes[id]
		if off == n.len {
			if _, id = x.v.edge(id, locals[0]); id == 0 {
				return 0, false
			}
			off = 0
			continue
		}
		k := min(n.len-off, uint32(len(locals)))
		if sameRun(x.v.locals[n.start+off:n.start+off+k], locals[:k]) < int(k) {
			return 0, false
		}
		last, off, locals = n.start+off+k-1, off+k, locals[k:]
	}
	return last, last != 0
}

// continues finds the place of a chunk without a previous chunk. LMCache in process writes parent 0 if it stores only
// the end of a prompt (LMCache/LMCache › lmcache/v1/cache_engine.py, store). It has the chunks before, so the place
// follows a chunk of the rank. With several possible places, none is returned.
func (x *Index) continues(r *rank, e *events.Event, locals []uint64) (last uint32, ok bool) {
	size, tier := uint32(len(locals)), int(e.Tier)-1
	if x.v.masks[tier] != nil {
		x.tidy(r)
		for _, id := range r.nodes {
			n := &x.v.nodes[id]
			for off := size - 1 - n.depth%size; off < n.len; off += size {
				if off+1 < n.len && x.v.locals[n.start+off+1] != locals[0] || !x.v.holds(id, off, tier, r.slot()) {
					continue
				}
				block, found := x.announced(r, n.start+off, locals)
				if found && ok && block != last {
					return 0, false
				}
				if found {
					last, ok = block, true
				}
			}
		}
	}
	if !ok { // for the publisher, 0 is not a parent
		last, ok = x.announced(r, 0, locals)
	}
	return last, ok
}

// chunkedRanks returns the ranks of a word with engines that load chunks.
func (v *view) chunkedRanks(word int) uint64 {
	if word < len(v.chunked) {
		return v.chunked[word]
	}
	return 0
}

// loading returns the loading of a rank's engine.
func (w *walk) loading(slot uint32) events.Loading {
	if int(slot) < len(w.v.loading) {
		return w.v.loading[slot]
	}
	return events.Loading{}
}

// matched returns the number of the query's blocks on the path.
func (w *walk) matched() uint32 {
	s := &w.path[len(w.path)-1]
	return s.base + s.match
}

// holds reports whether a rank holds block i of the query in any of some tiers.
func (w *walk) holds(i uint32, slot uint32, tiers TierSet) bool {
	s := &w.path[w.stopOf(i)]
	off := i - s.base
	for ; tiers != 0; tiers &= tiers - 1 {
		if t := bits.TrailingZeros8(uint8(tiers)); off < s.match && w.v.masks[t] != nil && w.run(s, off, t, slot) > 0 {
			return true
		}
	}
	return false
}

// chunks extends a prefix of n blocks chunk by chunk, while each chunk is in any of some tiers.
func (w *walk) chunks(l events.Loading, slot, n uint32, tiers TierSet) uint32 {
	for most := w.matched(); ; {
		end := (n/l.Blocks + 1) * l.Blocks
		if end > most || !w.holds(end-1, slot, tiers) {
			return n
		}
		n = end
	}
}

// loaded returns the end of the prefix that an engine loads of chunks from block n up to end.
func loaded(l events.Loading, n, end uint32) uint32 {
	if !l.Own && end-n < l.Blocks {
		return n
	}
	return end
}

// othersInChunks extends a rank's prefix through the tiers below the device.
func (w *walk) othersInChunks(o *Overlap, l events.Loading, slot uint32) {
	begin := o.Depth[device]
	n, seen := begin, w.seen(slot)
	for t := device + 1; t < events.NumTiers; t++ {
		end := w.chunks(l, slot, n, seen&(1<<t))
		o.Depth[t], n = end-n, end
	}
	if loaded(l, begin, n) == begin {
		*o = Overlap{Depth: [events.NumTiers]uint32{begin}}
	}
}

// heldInChunks is held for a rank with an engine that loads chunks.
func (w *walk) heldInChunks(l events.Loading, slot uint32, tiers TierSet) uint32 {
	most := w.matched()
	n := uint32(0)
	inDevice := func() {
		for n < most && w.holds(n, slot, tiers&(1<<device)) {
			n++
		}
	}
	inDevice()
	for {
		end := loaded(l, n, w.chunks(l, slot, n, tiers&^(1<<device)))
		if end == n {
			return n
		}
		n = end
		inDevice()
	}
}

// waitsForContent registers a waiter under the last local hash of the chunk.
func (p *pendingEvents) waitsForContent(w *waiter) {
	if w.event.Own {
		if p.content == nil {
			p.content = map[events.LocalHash][]uint64{}
		}
		last := w.event.Locals[len(w.event.Locals)-1]
		p.content[last] = append(p.content[last], w.id)
	}
}

// announced marks chunks as ready that end with a block the device has announced.
func (p *pendingEvents) announced(locals []events.LocalHash) {
	for _, l := range locals {
		p.ready = append(p.ready, p.content[l]...)
	}
	slices.Sort(p.ready) // a sorted list is a heap
}
