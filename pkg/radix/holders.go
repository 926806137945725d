package radix

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// part has the blocks of a node that a rank holds in a tier, if the rank does not hold all of them.
type part struct {
	key   uint32 // plane<<slotBits | slot
	lead  uint32 // the first lead blocks are held, and the next is missing
	count uint32 // number of held blocks: at least one, not all
	bits  uint32 // start of a bitmap of all held blocks; 0: only the lead is held
	words uint32 // words of the bitmap; later blocks are not held

	// Summaries for ranks with windows; 0 without a summary. In a window's plane, in blocks from the start of the node:
	// fit is the longest prefix for which the node has all blocks of the window, and from is the first block of the run
	// that the prefix ends. In device and in planeKnown: fit and from are the first step (see usable) of the prefix
	// that ends after lead blocks or after the node, as its blocks plus one and its least. In planeKnown, lead and
	// count are the second step, and bits has further steps, a word each.
	fit, from uint32
}

func keyOf(slot uint32, plane int) uint32 { return uint32(plane)<<slotBits + slot }

func slotOf(key uint32) uint32 { return key & slotMask }

func planeOf(key uint32) int { return int(key >> slotBits) }

// full reports whether a rank holds all of a node.
func (v *view) full(id uint32, tier int, slot uint32) bool {
	m := v.masks[tier]
	return m != nil && m[int(id)*v.stride+int(slot>>6)]>>(slot&63)&1 != 0
}

// part returns the part of a rank that holds some of a node. It returns nil for none and for all.
func (v *view) part(id uint32, key uint32) *part {
	n := &v.nodes[id]
	list := v.parts[n.parts : n.parts+n.nparts]
	if i := search(list, key); i < len(list) && list[i].key == key {
		return &list[i]
	}
	return nil
}

// heldParts returns a node's parts except the parts in planeKnown, which hold nothing.
func (v *view) heldParts(n *node) []part {
	list := v.parts[n.parts : n.parts+n.nparts]
	return list[:search(list, keyOf(0, planeKnown))]
}

// search returns the position of the first part in a node's list with a key of at least key.
func search(list []part, key uint32) int {
	lo, hi := 0, len(list)
	for lo < hi {
		if mid := int(uint(lo+hi) >> 1); atomic.LoadUint32(&list[mid].key) < key {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	return lo
}

// rowOf returns the parts of a plane and of a word of slots in a node's list.
func rowOf(list []part, plane, word int) []part {
	list = list[search(list, keyOf(uint32(word)<<6, plane)):]
	return list[:search(list, keyOf(uint32(word+1)<<6, plane))]
}

func (v *view) partHas(p *part, off uint32) bool {
	return off < p.lead || p.bits != 0 && off>>6 < p.words && v.bits[p.bits+off>>6]>>(off&63)&1 != 0
}

// partHasSome reports whether a part has any of the blocks from lo up to hi.
func (v *view) partHasSome(p *part, lo, hi uint32) bool {
	if lo < p.lead {
		return true
	}
	for w := lo >> 6; p.bits != 0 && w < p.words && w<<6 < hi; w++ {
		if v.bits[p.bits+w]&rangeMask(w, lo, hi) != 0 {
			return true
		}
	}
	return false
}

// holds reports whether a rank holds block off of a node.
func (v *view) holds(id uint32, off uint32, tier int, slot uint32) bool {
	if v.full(id, tier, slot) {
		return true
	}
	p := v.part(id, keyOf(slot, tier))
	return p != nil && v.partHas(p, off)
}

// holdsAny reports whether a rank holds a block in any tier.
func (x *Index) holdsAny(slot, block uint32) bool {
	id, n := x.where(block)
	for t := range events.NumTiers {
		if x.v.masks[t] != nil && x.v.holds(id, block-n.start, t, slot) {
			return true
		}
	}
	return false
}

// holdsSome reports whether a rank holds any of a node's blocks from lo up to hi in any tier.
func (x *Index) holdsSome(slot, id, lo, hi uint32) bool {
	for t := range events.NumTiers {
		if x.v.masks[t] == nil {
			continue
		}
		if x.v.full(id, t, slot) {
			return true
		}
		if p := x.v.part(id, keyOf(slot, t)); p != nil && x.v.partHasSome(p, lo, hi) {
			return true
		}
	}
	return false
}

// present reports whether a rank holds any block of a node, for any group.
func (x *Index) present(id, slot uint32) bool {
	for t := range x.v.planes {
		if x.v.masks[t] != nil && (x.v.full(id, t, slot) || x.v.part(id, keyOf(slot, t)) != nil) {
			return true
		}
	}
	return false
}

// onlyHolder reports whether no other rank holds all of a node.
func (x *Index) onlyHolder(id, slot uint32) bool {
	for _, m := range x.v.masks[:x.v.planes] {
		if m == nil {
			continue
		}
		for w, word := range m[int(id)*x.v.stride : (int(id)+1)*x.v.stride] {
			if w == int(slot>>6) {
				word &^= 1 << (slot & 63)
			}
			if word != 0 {
				return false
			}
		}
	}
	return true
}

// heldWhole reports whether a rank holds all of a node.
func (v *view) heldWhole(id uint32) bool {
	held := func(m []uint64) bool {
		return m != nil && slices.ContainsFunc(m[int(id)*v.stride:(int(id)+1)*v.stride],
			func(word uint64) bool { return word != 0 })
	}
	return slices.ContainsFunc(v.masks[:v.planes], held)
}

// extent returns the end of the last block of a node with a holder.
func (x *Index) extent(id uint32) uint32 {
	v := x.v
	n := &v.nodes[id]
	if v.heldWhole(id) {
		return n.len
	}
	far := uint32(0)
	list := v.heldParts(n)
	for i := range list {
		p := &list[i]
		far = max(far, p.lead)
		for w := p.words; p.bits != 0 && w<<6 > far; w-- {
			if word := v.bits[p.bits+w-1]; word != 0 {
				far = max(far, w<<6-uint32(bits.LeadingZeros64(word)))
				break
			}
		}
	}
	return far
}

func (x *Index) setFull(id uint32, tier int, slot uint32, on bool) {
	w := &x.v.masks[tier][int(id)*x.v.stride+int(slot>>6)]
	if on {
		put64(w, *w|1<<(slot&63))
	} else {
		put64(w, *w&^(1<<(slot&63)))
		if tier == device {
			x.dropEnd(id, slot)
		}
	}
}

// useTier creates the masks of a tier or plane before its first block.
func (x *Index) useTier(plane int) {
	if x.v.masks[plane] == nil {
		x.publish(func(v *view) {
			v.masks[plane] = make([]uint64, len(v.nodes)*v.stride)
			v.planes = max(v.planes, plane+1)
		})
	}
}

// widen extends all masks for a slot.
func (x *Index) widen(slot uint32) {
	if int(slot>>6) < x.v.stride {
		return
	}
	old, stride := x.v.stride, max(int(slot>>6)+1, x.v.stride+x.v.stride/4)
	x.publish(func(v *view) {
		for t, m := range v.masks {
			if m == nil {
				continue
			}
			v.masks[t] = make([]uint64, len(v.nodes)*stride)
			for i := range v.nodes {
				copy(v.masks[t][i*stride:], m[i*old:(i+1)*old])
			}
		}
		v.stride = stride
		v.kinds = kindsOf(v.reuse, stride)
	})
}

// addPart inserts a part into a node's list. The list is sorted by key, and its capacity is the next power of two. The
// node is open.
func (x *Index) addPart(id uint32, p part) {
	n := &x.v.nodes[id]
	if n.nparts&(n.nparts-1) == 0 { // the list is full or empty
		x.moveParts(n, max(1, n.nparts*2), n.nparts)
	}
	list := x.v.parts[n.parts : n.parts+n.nparts+1]
	i := search(list[:n.nparts], p.key)
	putParts(list[i+1:], list[i:n.nparts])
	putPart(&list[i], &p)
	put32(&n.nparts, n.nparts+1)
}

// moveParts moves the first used parts of a node's list to a new place with the given capacity. Capacity 0 means no
// list.
func (x *Index) moveParts(n *node, capacity, used uint32) {
	from, to := n.parts, uint32(0)
	if capacity > 0 {
		to = x.partSpace.allocate(capacity)
		if end := int(to + capacity); end > len(x.v.parts) {
			x.publish(func(v *view) { v.parts = append(make([]part, 0, end+end/4), v.parts...)[:end+end/4] })
		}
		putParts(x.v.parts[to:], x.v.parts[from:from+used])
	}
	put32(&n.parts, to)
	if n.nparts > 0 {
		x.partSpace.release(from, 1<<bits.Len32(n.nparts-1))
	}
}

func putPart(to, p *part) {
	put32(&to.key, p.key)
	put32(&to.lead, p.lead)
	put32(&to.count, p.count)
	put32(&to.bits, p.bits)
	put32(&to.words, p.words)
	put32(&to.fit, p.fit)
	put32(&to.from, p.from)
}

// dropPart removes a part from a node's list and frees its bitmap. The node is open.
func (x *Index) dropPart(id uint32, p *part) {
	x.freeBits(p)
	n, key := &x.v.nodes[id], p.key
	list := x.v.parts[n.parts : n.parts+n.nparts]
	i, rest := search(list, key), n.nparts-1
	putParts(list[i:], list[i+1:])
	if rest&(rest-1) == 0 { // fills half the capacity exactly, or is empty
		x.moveParts(n, rest, rest)
	}
	put32(&n.nparts, rest)
	if planeOf(key) == device {
		x.dropEnd(id, slotOf(key))
	}
}

// allocator allocates ranges of 1, 2, 4... elements in an array.
type allocator struct {
	free [32][]uint32
	end  uint32
	used int64 // allocated elements
}

func (r *allocator) allocate(n uint32) uint32 { // n is a power of two
	r.used += int64(n)
	c := bits.TrailingZeros32(n)
	if l := len(r.free[c]); l > 0 {
		at := r.free[c][l-1]
		r.free[c] = r.free[c][:l-1]
		return at
	}
	for bigger := c + 1; bigger < min(c+3, 32); bigger++ { // divide a larger free range
		if l := len(r.free[bigger]); l > 0 {
			at := r.free[bigger][l-1]
			r.free[bigger] = r.free[bigger][:l-1]
			for b := bigger - 1; b >= c; b-- {
				r.free[b] = append(r.free[b], at+1<<b)
			}
			return at
		}
	}
	at := r.end
	r.end += n
	return at
}

func (r *allocator) release(at, n uint32) {
	r.used -= int64(n)
	c := bits.TrailingZeros32(n)
	r.free[c] = append(r.free[c], at)
}

// roomFor returns the number of words in a bitmap for n blocks.
func roomFor(n uint32) uint32 {
	words := (n + 63) >> 6
	return 1 << bits.Len32(words-1)
}

// allocateBits allocates an empty bitmap for n blocks.
func (x *Index) allocateBits(n uint32) (at, words uint32) {
	words = roomFor(n)
	at = x.bitSpace.allocate(words)
	if n := int(at + words); n > len(x.v.bits) {
		x.publish(func(v *view) { v.bits = append(make([]uint64, 0, n+n/4), v.bits...)[:n+n/4] })
	}
	for i := range words {
		put64(&x.v.bits[at+i], 0)
	}
	return at, words
}

func (x *Index) freeBits(p *part) {
	if p.bits != 0 {
		x.bitSpace.release(p.bits, p.words)
		put32(&p.bits, 0)
		put32(&p.words, 0)
	}
}

// rangeMask returns the bits of word w for the blocks from lo up to hi.
func rangeMask(w, lo, hi uint32) uint64 {
	m := ^uint64(0)
	if base := w << 6; lo > base {
		m <<= lo - base
	}
	if end := w<<6 + 64; hi < end {
		m &= ^uint64(0) >> (end - hi)
	}
	return m
}

// flip sets or clears blocks from lo up to hi in a bitmap.
func (x *Index) flip(p *part, lo, hi uint32, on bool) {
	for w := lo >> 6; w<<6 < hi; w++ {
		word := &x.v.bits[p.bits+w]
		if m := rangeMask(w, lo, hi); on {
			put64(word, *word|m)
		} else {
			put64(word, *word&^m)
		}
	}
}

// withBits gives a part a bitmap with at least n blocks.
func (x *Index) withBits(p *part, n uint32) {
	if p.bits != 0 && n <= p.words<<6 {
		return
	}
	old := *p
	at, words := x.allocateBits(n)
	put32(&p.bits, at)
	put32(&p.words, words)
	if old.bits == 0 {
		x.flip(p, 0, old.lead, true)
		return
	}
	for w := range old.words {
		put64(&x.v.bits[at+w], x.v.bits[old.bits+w])
	}
	x.bitSpace.release(old.bits, old.words)
}

// run returns the number of consecutive held blocks from lo on, up to n.
func (v *view) run(p *part, lo, n uint32) uint32 {
	first, words := atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
	if first == 0 {
		return min(max(atomic.LoadUint32(&p.lead), lo), n) - lo
	}
	if uint64(first)+uint64(words) > uint64(len(v.bits)) {
		return 0 // a reader may see this in a part that is being changed
	}
	at := lo
	for at < n && at>>6 < words {
		if word := ^atomic.LoadUint64(&v.bits[first+at>>6]) >> (at & 63); word != 0 {
			return min(at+uint32(bits.TrailingZeros64(word)), n) - lo
		}
		at = (at>>6 + 1) << 6
	}
	return min(at, n) - lo
}

// settle normalizes a changed part: it moves to the mask, disappears, or loses the bitmap.
func (x *Index) settle(id uint32, p *part) {
	n := &x.v.nodes[id]
	switch {
	case p.count == n.len:
		slot, tier := slotOf(p.key), planeOf(p.key)
		x.dropPart(id, p)
		x.setFull(id, tier, slot, true)
	case p.count == 0:
		x.dropPart(id, p)
	case p.count == p.lead:
		x.freeBits(p)
	}
}

// mark marks a rank as the holder of blocks from lo up to hi of an open node. It returns the number of new blocks, and
// calls again for each block that the rank held before.
func (x *Index) mark(id uint32, lo, hi uint32, r *rank, tier int, again func(block uint32)) uint32 {
	n := x.v.nodes[id]
	key := keyOf(r.slot(), tier)
	x.windowChanges(id, hi, r, tier)
	p := x.v.part(id, key)
	switch {
	case x.v.full(id, tier, r.slot()):
		for b := lo; b < hi; b++ {
			again(n.start + b)
		}
		return 0
	case p == nil:
		x.joins(id, r)
		if lo == 0 && hi == n.len {
			x.setFull(id, tier, r.slot(), true)
			x.endChanged(id, lo, hi, r, tier)
			return hi
		}
		fresh := part{key: key, count: hi - lo}
		if lo == 0 {
			fresh.lead = hi
		} else {
			fresh.bits, fresh.words = x.allocateBits(n.len)
			x.flip(&fresh, lo, hi, true)
		}
		x.fitAdded(&fresh, &n, lo)
		x.addPart(id, fresh)
		x.endChanged(id, lo, hi, r, tier)
		return hi - lo
	}
	was := p.count
	if p.bits == 0 && lo <= p.lead {
		for b := lo; b < min(p.lead, hi); b++ {
			again(n.start + b)
		}
		put32(&p.lead, max(p.lead, hi))
		put32(&p.count, p.lead)
	} else {
		x.withBits(p, hi)
		added := uint32(0)
		for w := lo >> 6; w<<6 < hi; w++ {
			word := &x.v.bits[p.bits+w]
			m := rangeMask(w, lo, hi)
			for had := *word & m; had != 0; had &= had - 1 {
				again(n.start + w<<6 + uint32(bits.TrailingZeros64(had)))
			}
			added += uint32(bits.OnesCount64(m &^ *word))
			put64(word, *word|m)
		}
		put32(&p.count, p.count+added)
		if lo <= p.lead {
			put32(&p.lead, p.lead+x.v.run(p, p.lead, n.len))
		}
	}
	added := p.count - was
	x.fitAdded(p, &n, lo)
	x.settle(id, p)
	x.endChanged(id, lo, hi, r, tier)
	return added
}

// unmark unmarks blocks from lo up to hi of an open node. The rank holds all of them.
func (x *Index) unmark(id uint32, lo, hi uint32, r *rank, tier int) {
	n := x.v.nodes[id]
	x.windowChanges(id, hi, r, tier) // it may move parts
	p := x.v.part(id, keyOf(r.slot(), tier))
	if p == nil {
		x.setFull(id, tier, r.slot(), false)
		if lo > 0 || hi < n.len {
			rest := part{key: keyOf(r.slot(), tier), lead: n.len, count: n.len}
			if hi < n.len {
				rest.bits, rest.words = x.allocateBits(n.len)
				x.flip(&rest, 0, lo, true)
				x.flip(&rest, hi, n.len, true)
			}
			rest.lead, rest.count = lo, n.len-(hi-lo)
			rest.fit, rest.from = x.fitOf(&rest, &n, n.len)
			x.addPart(id, rest)
		}
		x.endChanged(id, lo, hi, r, tier)
		return
	}
	if p.bits == 0 && hi < p.lead {
		x.withBits(p, p.lead)
	}
	if p.bits != 0 {
		x.flip(p, lo, hi, false)
	}
	put32(&p.lead, min(p.lead, lo))
	put32(&p.count, p.count-(hi-lo))
	if p.fit > 0 {
		x.fitRemoved(p, &n, lo, hi)
	}
	x.settle(id, p)
	x.endChanged(id, lo, hi, r, tier)
}

// joins adds a node to a rank's list before the rank gets its first block of the node in the current tier.
func (x *Index) joins(id uint32, r *rank) {
	if !x.present(id, r.slot()) {
		if len(r.nodes) >= r.tidyAt {
			x.tidy(r)
		}
		r.nodes = append(r.nodes, id)
	}
}

// tidy removes duplicates, and nodes without blocks of the rank, from a rank's list.
func (x *Index) tidy(r *rank) {
	slices.Sort(r.nodes)
	r.nodes = slices.Compact(r.nodes)
	r.nodes = slices.DeleteFunc(r.nodes, func(id uint32) bool { return !x.present(id, r.slot()) })
	r.tidyAt = 2*len(r.nodes) + 64
}

// alsoIn adds a node that was just split off to a rank's list.
func (r *rank) alsoIn(head uint32) {
	if n := len(r.nodes); n == 0 || r.nodes[n-1] != head {
		r.nodes = append(r.nodes, head)
	}
}

// extend makes an open node longer. The ranks that held all of the node then hold a part. The optional rank r also
// holds the new blocks in a tier.
func (x *Index) extend(id uint32, by uint32, r *rank, tier int) {
	n := x.v.nodes[id]
	for t, m := range x.v.masks[:x.v.planes] {
		if m == nil {
			continue
		}
		for w := range x.v.stride {
			word := m[int(id)*x.v.stride+w]
			if r != nil && t == tier && w == int(r.slot()>>6) {
				word &^= 1 << (r.slot() & 63)
			}
			for ; word != 0; word &= word - 1 {
				slot := uint32(w<<6 + bits.TrailingZeros64(word))
				p := part{key: keyOf(slot, t), lead: n.len, count: n.len}
				p.fit, p.from = x.fitOf(&p, &n, n.len)
				if t == device {
					x.later(id, slot)
				}
				x.setFull(id, t, slot, false)
				x.addPart(id, p)
			}
		}
	}
	put32(&x.v.nodes[id].len, n.len+by)
	if r != nil {
		x.endChanged(id, n.len, n.len+by, r, device)
	}
}

// shortened settles the parts of an open node that has lost blocks without holders.
func (x *Index) shortened(id uint32) {
	for i := x.v.nodes[id].nparts; i > 0; i-- {
		if p := &x.v.parts[x.v.nodes[id].parts+i-1]; planeOf(p.key) == planeKnown {
			x.dropPart(id, p)
		} else {
			x.settle(id, p)
		}
	}
	if x.v.masks[planeKnown] != nil {
		x.later(id, noSlot)
	}
}

// splitHolders divides the masks and parts of a split node. The first off blocks have become head. Both nodes are open.
func (x *Index) splitHolders(head, id uint32, off uint32) {
	v := x.v
	for _, m := range v.masks[:v.planes] {
		if m == nil {
			continue
		}
		for w := range v.stride {
			word := m[int(id)*v.stride+w]
			put64(&m[int(head)*v.stride+w], word)
			for ; word != 0; word &= word - 1 {
				x.slots[w<<6+bits.TrailingZeros64(word)].alsoIn(head)
			}
		}
	}
	n := v.nodes[id] // the rest
	old := append([]part(nil), v.parts[n.parts:n.parts+n.nparts]...)
	for n := &x.v.nodes[id]; n.nparts > 0; n = &x.v.nodes[id] {
		p := &x.v.parts[n.parts+n.nparts-1]
		put32(&p.bits, 0) // the bitmap stays in old
		x.dropPart(id, p)
	}
	for _, p := range old {
		x.splitPart(head, id, off, n.len, p)
	}
	x.splitEnds(head, id)
}

func (x *Index) splitPart(head, id, off, rest uint32, p part) {
	r, tier := x.slots[slotOf(p.key)], planeOf(p.key)
	if tier == planeKnown {
		x.freeBits(&p)
		return
	}
	first := part{key: p.key, lead: min(p.lead, off)}
	second := part{key: p.key, lead: max(p.lead, off) - off}
	if p.bits == 0 {
		first.count, second.count = first.lead, second.lead
	} else {
		for w := uint32(0); w<<6 < off && w < p.words; w++ {
			first.count += uint32(bits.OnesCount64(x.v.bits[p.bits+w] & rangeMask(w, 0, off)))
		}
		second.count = p.count - first.count
		if first.count > first.lead && first.count < off {
			first.bits, first.words = x.allocateBits(off)
			for w := range min(first.words, p.words) {
				put64(&x.v.bits[first.bits+w], x.v.bits[p.bits+w]&rangeMask(w, 0, off))
			}
		}
		if second.count > 0 && second.count < rest {
			second.bits, second.words = x.allocateBits(rest)
			for w := range second.words {
				put64(&x.v.bits[second.bits+w], x.v.wordAt(&p, off+w<<6))
			}
			second.lead = x.v.run(&second, 0, rest)
		}
		x.freeBits(&p)
	}
	if first.count > 0 {
		r.alsoIn(head)
	}
	for _, half := range []struct {
		id, len uint32
		part
	}{{head, off, first}, {id, rest, second}} {
		switch {
		case half.count == half.len:
			x.setFull(half.id, tier, r.slot(), true)
		case half.count > 0:
			if half.bits != 0 && half.count == half.lead {
				x.freeBits(&half.part)
			}
			half.fit, half.from = x.fitOf(&half.part, &x.v.nodes[half.id], half.len)
			x.addPart(half.id, half.part)
		}
	}
}

// wordAt returns 64 blocks of a bitmap from block at on.
func (v *view) wordAt(p *part, at uint32) uint64 {
	w, shift := at>>6, at&63
	var word uint64
	if w < p.words {
		word = v.bits[p.bits+w] >> shift
	}
	if shift != 0 && w+1 < p.words {
		word |= v.bits[p.bits+w+1] << (64 - shift)
	}
	return word
}

// deviceOnly reports whether no other tier is in use.
func (v *view) deviceOnly() bool {
	return v.masks[1] == nil && v.masks[2] == nil && v.masks[3] == nil
}

// device is the position of the device among the tiers of this package, which count from zero.
const device = 0
