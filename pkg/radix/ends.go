package radix

import (
	"math"
	"math/bits"
	"slices"
	"sort"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// An end is the place in a node where a rank's prefix in device ends, after some or all blocks of the node. The index
// stores the usable part of the prefix for an end, and of each shorter prefix that ends in the node, so that readers
// need not search windows. The usable parts are steps, longest prefixes first. The rank's part of the node has the
// first step. If more steps exist, a part in planeKnown has all of them. Most ranks with all blocks of a node have
// equal steps: their part is in view.ends, and a bit in planeKnown marks such a rank.
//
// A step depends on the windows' blocks in the node and in nodes above. Before such a block changes, the dependent ends
// below become unknown. Bits in planeWatch find them: a bit marks a rank at a node if a known end in the node or below
// depends on blocks above the node. Unknown ends are queued and resolved after the event. A step that depends on too
// many nodes, or on a node with too many children, stays unknown, and so do the steps after it.

const (
	mostUp     = 32  // maximum number of nodes above an end that a step may depend on
	mostWide   = 16  // maximum number of children of such a node
	mostQueued = 512 // ends resolved after a call of Apply
	mostSteps  = 33  // steps of an end

	unknown = 1<<32 - 1 // blocks of an unknown step
	chunks  = 1 << 31   // flag in blocks: only whole chunks are usable; the rest is the size of a chunk
)

// usable is a step. It applies to prefixes of at least least blocks, without the largest drop, that are shorter than
// the prefixes of the previous step. The usable part is blocks, or the whole prefix if shorter, or whole chunks.
type usable struct{ blocks, least uint32 }

// limit returns the usable part of n blocks by a known step.
func (s usable) limit(n uint32) uint32 {
	if s.blocks > chunks { // a reader may read any value, but the difference is never 0
		return n - n%(s.blocks-chunks)
	}
	return min(s.blocks, n)
}

// end is an end of a rank, or of all ranks if slot is noSlot.
type end struct{ node, slot uint32 }

// first returns the first block that the usable part of a prefix depends on.
func (u *reuse) first(n usable) uint32 {
	from := n.least
	for i := range u.windows {
		from = min(from, u.windows[i].from(n.least))
	}
	return from
}

// least returns the shortest prefix length from which on the windows have all required blocks, up to blocks. The result
// is at least lowest.
func (x *Index) least(r *rank, id, blocks, lowest uint32) uint32 {
	n := min(lowest, blocks)
	for i := range r.reuse.windows {
		w := &r.reuse.windows[i]
		first := x.runStart(w, r.slot(), id, w.from(n), blocks+w.drop)
		n += uint32(sort.Search(int(blocks-n), func(k int) bool { return w.from(n+uint32(k)) >= first }))
	}
	return n
}

// runStart returns the start of the run of blocks before block hi that a rank has for a window. It stops at block lo,
// and after the maximum number of nodes.
func (x *Index) runStart(win *window, slot, id, lo, hi uint32) uint32 {
	v := x.v
	for up := mostUp; hi > lo; {
		nd := &v.nodes[id]
		if nd.depth >= hi {
			if id = nd.parent; up == 0 || v.nodes[id].children > mostWide {
				break
			}
			up--
			continue
		}
		if v.masks[win.plane] == nil || !v.full(id, win.plane, slot) {
			p := v.part(id, keyOf(slot, win.plane))
			if p == nil {
				break
			}
			one := [1]*part{p}
			if gap := v.last(one[:], false, max(lo, nd.depth)-nd.depth, hi-nd.depth); gap > 0 {
				return nd.depth + gap
			}
		}
		hi = nd.depth
	}
	return hi
}

// steps computes the usable parts of a rank's prefix of held blocks that ends in a node, and of shorter prefixes.
func (x *Index) steps(r *rank, id, held uint32) []usable {
	most, depth := r.reuse.most, x.v.nodes[id].depth
	lowest := depth + 1 - min(depth+1, most) // a shorter prefix ends in a node above
	x.found = x.found[:0]
	old := x.knownEnd(id, r.slot())
	for n := held - min(held, most); len(x.found) < mostSteps && n < chunks; {
		for len(old) > 0 && old[0].least > n {
			old = old[1:]
		}
		s := usable{unknown, 0}
		if len(old) > 0 {
			s = old[0]
		}
		if s.blocks == unknown {
			blocks, ok := x.usable(r, id, n, mostUp)
			if !ok {
				break
			}
			s = usable{blocks, x.least(r, id, blocks, lowest)}
		}
		k := len(x.found)
		switch {
		case s.blocks < chunks:
			s.blocks = min(s.blocks, n)
		case k == 0: // the value must be a number, because parts in device have it too
			s = usable{s.limit(n), max(s.least, s.limit(n))}
		}
		if c := r.reuse.chunk(); c > 0 && k > 0 && s.least == s.blocks && s.blocks%c == 0 && s.least >= lowest {
			s = x.wholeChunks(r, id, s.least)
		}
		if k > 0 && s.blocks > chunks && x.found[k-1].blocks == s.blocks {
			k--
		}
		x.found = append(x.found[:k], s)
		if s.least <= lowest {
			break
		}
		n = s.least - 1
	}
	return x.found
}

// wholeChunks returns the step of prefixes that end with a chunk, or in a chunk whose first block the only window
// lacks. A prefix of least blocks is such a prefix; the function looks for shorter ones.
func (x *Index) wholeChunks(r *rank, id, least uint32) usable {
	w, n := &r.reuse.windows[0], &x.v.nodes[id]
	for least > n.depth+w.chunk && !x.v.holds(id, least-w.chunk-n.depth, w.plane, r.slot()) {
		least -= w.chunk
	}
	return usable{chunks + w.chunk, least}
}

// usable returns the usable part of a prefix of n blocks that ends in a node. ok is false if the result depends on more
// than up nodes above.
func (x *Index) usable(r *rank, id, n uint32, up int) (blocks uint32, ok bool) {
	u := r.reuse
	for i, agreed := 0, 0; agreed < len(u.windows) && n > 0; i = (i + 1) % len(u.windows) {
		m, ok := x.fitUp(&u.windows[i], r.slot(), id, n, up)
		if !ok {
			return 0, false
		}
		if agreed++; m < n {
			n, agreed = m, 1
		}
	}
	return n, true
}

// fitUp is walk.fit for the writer, in device. It goes from the end of a prefix to the nodes above.
func (x *Index) fitUp(win *window, slot, id, n uint32, up int) (fit uint32, ok bool) {
	v := x.v
	for lo := n + win.drop; n > 0 && lo > win.from(n); {
		nd := &v.nodes[id]
		if nd.depth >= lo {
			if id = nd.parent; up == 0 || up > 0 && v.nodes[id].children > mostWide {
				return 0, false
			}
			up--
			continue
		}
		s := stop{base: nd.depth, len: nd.len}
		if v.masks[win.plane] != nil && v.full(id, win.plane, slot) {
			lo = s.base
		} else if p := v.part(id, keyOf(slot, win.plane)); p != nil {
			one := [1]*part{p}
			n, lo = v.within(win, &s, one[:], n, lo)
		} else {
			n, lo = win.before(&s, lo)
		}
	}
	return n, true
}

// knownEnd returns the known steps of a rank's end in a node. The next call overwrites the result.
func (x *Index) knownEnd(id, slot uint32) []usable {
	if x.v.full(id, planeKnown, slot) {
		return x.stepsIn(&x.v.ends[id])
	}
	for _, plane := range [...]int{planeKnown, device} {
		if p := x.v.part(id, keyOf(slot, plane)); p != nil && p.fit+p.from > 0 {
			return x.stepsIn(p)
		}
	}
	return nil
}

// stepsIn returns the steps in a part. The next call overwrites the result.
func (x *Index) stepsIn(p *part) []usable {
	x.read = x.read[:0]
	if p.fit+p.from > 0 {
		x.read = append(x.read, usable{p.fit - 1, p.from})
	}
	if planeOf(p.key) == planeKnown && p.lead+p.count > 0 {
		x.read = append(x.read, usable{p.lead - 1, p.count})
		for i := uint32(0); i < p.words && x.v.bits[p.bits+i] > 0; i++ {
			word := x.v.bits[p.bits+i]
			x.read = append(x.read, usable{uint32(word>>32) - 1, uint32(word)})
		}
	}
	return x.read
}

// putSteps stores steps in a part of an open node: all steps in planeKnown, only the first in other planes.
func (x *Index) putSteps(p *part, steps []usable) {
	steps = putStep(&p.fit, &p.from, steps)
	if planeOf(p.key) != planeKnown {
		return
	}
	steps = putStep(&p.lead, &p.count, steps)
	if len(steps) == 0 || len(steps) > int(p.words) {
		x.freeBits(p)
	}
	if p.bits == 0 && len(steps) > 0 {
		at, words := x.allocateBits(64 * uint32(len(steps)))
		put32(&p.bits, at)
		put32(&p.words, words)
	}
	for i := range p.words {
		word := uint64(0)
		if int(i) < len(steps) {
			word = uint64(steps[i].blocks+1)<<32 | uint64(steps[i].least)
		}
		put64(&x.v.bits[p.bits+i], word)
	}
}

// putStep stores the first step, or none, and returns the others.
func putStep(fit, from *uint32, steps []usable) []usable {
	if len(steps) == 0 {
		put32(fit, 0)
		put32(from, 0)
		return nil
	}
	put32(fit, steps[0].blocks+1)
	put32(from, steps[0].least)
	return steps[1:]
}

// endChanged makes a rank's end in an open node unknown as far as it depends on blocks from lo up to hi. The blocks
// have just changed in a plane. The end is resolved after the event.
func (x *Index) endChanged(id, lo, hi uint32, r *rank, plane int) {
	if r.reuse.cuts() && !r.unseen {
		depth := x.v.nodes[id].depth
		if hi += depth; plane == device { // the end itself has moved
			hi = unknown
		}
		x.forgetEnd(id, depth+lo, hi, r)
		x.later(id, r.slot())
	}
}

// resolve computes a rank's end in an open node.
func (x *Index) resolve(id uint32, r *rank) {
	slot, nd := r.slot(), &x.v.nodes[id]
	p := x.v.part(id, keyOf(slot, device))
	full := p == nil && x.v.full(id, device, slot)
	if p == nil && !full {
		return
	}
	held := nd.depth + nd.len
	if p != nil {
		held = nd.depth + p.lead
	}
	steps := x.steps(r, id, held)
	if len(steps) > 0 {
		first := r.reuse.first(steps[len(steps)-1])
		for at := id; x.v.nodes[at].depth > first; at = x.v.nodes[at].parent {
			x.setFull(at, planeWatch, slot, true)
		}
	}
	agrees := false
	if full {
		if len(steps) > 0 && x.kin[id].misses >= 0 && x.nobodyKnown(id) {
			x.putEnd(id, steps)
		}
		agrees = len(steps) > 0 && slices.Equal(steps, x.stepsIn(&x.v.ends[id]))
		x.setFull(id, planeKnown, slot, agrees)
		if k := &x.kin[id]; len(steps) > 0 && !agrees {
			if k.misses++; 2*int(k.misses) > x.countFull(id) {
				k.misses = 0
				x.later(id, noSlot)
			}
		}
	}
	x.storeEnd(id, slot, steps, agrees)
}

// storeEnd stores the steps of a rank's end in an open node: in the rank's part in device, if it exists, and in a part
// in planeKnown if the rank does not agree with others.
func (x *Index) storeEnd(id, slot uint32, steps []usable, agrees bool) {
	own := !agrees && len(steps) > 0
	if p := x.v.part(id, keyOf(slot, device)); p != nil {
		x.putSteps(p, steps)
		own = len(steps) > 1
	}
	key := keyOf(slot, planeKnown)
	p := x.v.part(id, key)
	if p == nil && own {
		x.addPart(id, part{key: key})
		p = x.v.part(id, key)
	}
	switch {
	case p != nil && (own || len(steps) == 0): // the part will be needed again
		x.putSteps(p, steps)
	case p != nil:
		x.dropPart(id, p)
	}
}

// putEnd stores the steps on which the ranks with all blocks of an open node agree.
func (x *Index) putEnd(id uint32, steps []usable) {
	put32(&x.v.ends[id].key, keyOf(0, planeKnown))
	x.putSteps(&x.v.ends[id], steps)
}

func (x *Index) nobodyKnown(id uint32) bool {
	row := x.v.row(planeKnown, id)
	return !slices.ContainsFunc(row, func(word uint64) bool { return word != 0 })
}

// countFull returns the number of ranks with all blocks of a node in device.
func (x *Index) countFull(id uint32) (n int) {
	for _, word := range x.v.row(device, id) {
		n += bits.OnesCount64(word)
	}
	return n
}

// row returns the ranks with all blocks of a node in a plane.
func (v *view) row(plane int, id uint32) []uint64 {
	return v.masks[plane][int(id)*v.stride:][:v.stride]
}

// later queues an end.
func (x *Index) later(id, slot uint32) {
	if e := (end{id, slot}); len(x.ends) == 0 || x.ends[len(x.ends)-1] != e {
		x.ends = append(x.ends, e)
	}
}

// resolveEnds resolves at most most queued ends.
func (x *Index) resolveEnds(most int) {
	open, i := uint32(0), 0
	for ; i < len(x.ends) && i < most; i++ {
		e := x.ends[i]
		if e.node != open {
			if open != 0 {
				x.unlock(open)
			}
			x.lock(e.node)
			open = e.node
		}
		if e.slot == noSlot {
			most -= x.resolveAll(e.node)
		} else if r := x.slots[e.slot]; r != nil && r.reuse.cuts() {
			x.resolve(e.node, r)
		}
	}
	if open != 0 {
		x.unlock(open)
	}
	x.ends = append(x.ends[:0], x.ends[i:]...)
}

// resolveAll resolves the ends of all ranks in an open node, and finds the steps on which most ranks with all blocks
// agree. It returns the number of ends.
func (x *Index) resolveAll(id uint32) (count int) {
	v, n := x.v, &x.v.nodes[id]
	votes := 0
	x.most = x.most[:0]
	for w, word := range v.row(device, id) {
		for ; word != 0; word &= word - 1 {
			r := x.slots[w<<6+bits.TrailingZeros64(word)]
			if !r.reuse.cuts() {
				continue
			}
			count++
			switch steps := x.steps(r, id, n.depth+n.len); {
			case votes == 0:
				x.most, votes = append(x.most[:0], steps...), 1
			case slices.Equal(steps, x.most):
				votes++
			default:
				votes--
			}
		}
	}
	known := v.row(planeKnown, id)
	for w := range known {
		put64(&known[w], 0)
	}
	x.kin[id].misses = math.MinInt32 // prevents another vote meanwhile
	x.putEnd(id, x.most)
	for w, word := range v.row(device, id) {
		for ; word != 0; word &= word - 1 {
			if r := x.slots[w<<6+bits.TrailingZeros64(word)]; r.reuse.cuts() {
				x.resolve(id, r)
			}
		}
	}
	x.kin[id].misses = 0
	for i := range n.nparts {
		p := &x.v.parts[n.parts+i]
		if planeOf(p.key) != device {
			break
		}
		if r := x.slots[slotOf(p.key)]; r.reuse.cuts() {
			count++
			x.resolve(id, r)
		}
	}
	return count
}

// windowChanges makes ends of a rank unknown that depend on blocks of a plane in an open node. The blocks before block
// hi of the node are about to change.
func (x *Index) windowChanges(id, hi uint32, r *rank, plane int) {
	if plane >= events.NumTiers && plane%events.NumTiers == device && !r.unseen {
		x.forgetBelow(id, r, x.v.nodes[id].depth+hi)
	}
}

// forgetBelow makes ends of a rank below a node unknown that depend on blocks before block hi of the prefix. A longer
// prefix has a longer usable part and depends on later blocks. So all ends below a known end stay known. The result
// reports whether such ends may exist.
func (x *Index) forgetBelow(id uint32, r *rank, hi uint32) (some bool) {
	if x.v.nodes[id].children > mostWide {
		return false
	}
	for c := x.kin[id].child; c != 0; c = x.kin[c].next {
		if x.v.full(c, planeWatch, r.slot()) {
			x.forgetEnds(c, r, hi)
			some = some || x.v.full(c, planeWatch, r.slot())
		}
	}
	return some
}

// forgetEnds does the same in a node and below.
func (x *Index) forgetEnds(id uint32, r *rank, hi uint32) {
	if steps := x.knownEnd(id, r.slot()); len(steps) > 0 {
		above := steps[0].blocks != unknown && r.reuse.first(steps[0]) >= hi
		if r.reuse.first(steps[len(steps)-1]) < hi {
			x.lock(id)
			x.forgetEnd(id, 0, hi, r)
			x.unlock(id)
			x.later(id, r.slot())
		}
		if above {
			return
		}
	}
	if !x.forgetBelow(id, r, hi) && len(x.knownEnd(id, r.slot())) == 0 {
		x.setFull(id, planeWatch, r.slot(), false)
	}
}

// forgetEnd makes a rank's end in an open node unknown as far as it depends on blocks from lo up to hi of the prefix.
// The remaining steps need no block before hi, or no block after lo.
func (x *Index) forgetEnd(id, lo, hi uint32, r *rank) {
	steps, keep := x.knownEnd(id, r.slot()), 0
	for keep < len(steps) && r.reuse.first(steps[keep]) >= hi {
		keep++
	}
	if keep == len(steps) && keep > 0 {
		return
	}
	x.kept = append(x.kept[:0], steps[:keep]...)
	rest := steps[keep:]
	for len(rest) > 0 && (lo <= r.reuse.most || rest[0].least > lo-r.reuse.most) {
		rest = rest[1:]
	}
	if len(rest) > 0 && keep+len(rest) > 1 { // a single step is computed as fast as it is stored
		x.kept = append(append(x.kept, usable{unknown, lo - r.reuse.most + 1}), rest...)
	}
	x.setFull(id, planeKnown, r.slot(), false)
	x.storeEnd(id, r.slot(), x.kept, false)
}

// dropEnd deletes a rank's end in an open node that the rank leaves or holds differently.
func (x *Index) dropEnd(id, slot uint32) {
	if x.v.masks[planeKnown] == nil {
		return
	}
	x.setFull(id, planeKnown, slot, false)
	if p := x.v.part(id, keyOf(slot, planeKnown)); p != nil {
		x.dropPart(id, p)
	}
}

// tooWide makes the ends below a node unknown if they depend on it, because the node gets too many children.
func (x *Index) tooWide(id uint32) {
	for c := x.kin[id].child; c != 0; c = x.kin[c].next {
		for w, word := range x.v.row(planeWatch, c) {
			for ; word != 0; word &= word - 1 {
				slot := w<<6 + bits.TrailingZeros64(word)
				if r := x.slots[slot]; r != nil && r.reuse.cuts() {
					x.forgetEnds(c, r, x.v.nodes[c].depth)
				}
				x.setFull(c, planeWatch, uint32(slot), false)
			}
		}
	}
}

// forgetRank makes all ends of a rank unknown. Readers do not see the rank meanwhile.
func (x *Index) forgetRank(r *rank) {
	if r.reuse.cuts() {
		for _, id := range r.nodes {
			x.forgetEnd(id, 0, unknown, r)
		}
	}
	r.unseen = true
}

// showRank is the end of forgetRank.
func (x *Index) showRank(r *rank) {
	r.unseen = false
	if r.reuse.cuts() {
		for _, id := range r.nodes {
			x.later(id, r.slot())
		}
	}
}

// splitEnds makes the ends in a split node and its head unknown until the end of the event. It updates the bits of
// ranks that depend on blocks above.
func (x *Index) splitEnds(head, id uint32) {
	v := x.v
	if v.masks[planeWatch] == nil {
		return
	}
	watch := v.row(planeWatch, id)
	copy(v.row(planeWatch, head), watch)
	if v.nodes[id].children <= mostWide {
		for c := x.kin[id].child; c != 0; c = x.kin[c].next {
			for w, word := range v.row(planeWatch, c) {
				watch[w] |= word
			}
		}
	}
	for w := range watch {
		put64(&v.row(planeKnown, id)[w], 0)
	}
	x.later(head, noSlot)
	x.later(id, noSlot)
}
