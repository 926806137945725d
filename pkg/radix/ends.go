package radix

import (
	"math"
	"math/bits"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Where a rank's prefix in device ends, in a node of which it has the first blocks or all, it is known how much of it
// the rank's engine can use, so that readers need not look at windows. For a part that is kept in the part. Of ranks
// that have all of a node most agree: it is kept in view.ends, and a bit in planeKnown says who agrees. Each of the
// others has a part for it in that plane, of no blocks.
//
// It depends on the windows' blocks in that node and in nodes above it. Before such a block changes, the ends below
// that depend on it are made unknown; they are found by bits in planeWatch: of a rank, at a node, if an end in the node
// or below it is known and depends on blocks above the node. What became unknown is queued and worked out after the
// event. An end that depends on too many nodes, or on one with too many children, stays unknown.

const (
	mostUp     = 32  // nodes above an end's own on which it may depend
	mostWide   = 16  // children of such a node
	mostQueued = 512 // ends worked out after one call of Apply
)

// usable is how many blocks of a prefix an engine can use. If the prefix were shorter it would still be all of it, but
// for the largest drop, as long as that is at least least.
type usable struct{ blocks, least uint32 }

// end is where prefixes of one rank end, or of all: slot is then noSlot.
type end struct{ node, slot uint32 }

// first is the first block on which it depends how much of a prefix can be used.
func (u *reuse) first(n usable) uint32 {
	from := n.least
	for i := range u.windows {
		from = min(from, u.windows[i].from(n.least))
	}
	return from
}

// least completes what can be used of a prefix that ends in a node, by what its windows have in that node.
func (x *Index) least(r *rank, id, blocks uint32) usable {
	all := usable{blocks, 0}
	depth := x.v.nodes[id].depth
	for i := range r.reuse.windows {
		w, g := &r.reuse.windows[i], depth
		if p := x.v.part(id, keyOf(r.slot(), w.plane)); p != nil {
			if g += p.from; p.fit == 0 || depth+p.fit < blocks || w.from(blocks) < g {
				return usable{blocks, blocks}
			}
		} else if !x.v.full(id, w.plane, r.slot()) {
			return usable{blocks, blocks}
		}
		switch {
		case w.chunk > 0:
			g = (g + w.chunk - 1) / w.chunk * w.chunk
		case w.size > 0:
			g = blocks
		case g > 0:
			g += w.need
		}
		all.least = min(max(all.least, g), blocks)
	}
	return all
}

// usable is how much of a prefix of so many blocks, which ends in a node, a rank's engine can use. It is false if that
// depends on nodes further up than so many.
func (x *Index) usable(r *rank, id, held uint32, up int) (n uint32, ok bool) {
	u := r.reuse
	n = held - min(held, u.most)
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

// fitUp is walk.fit for the writer, in device: it goes from a prefix's end up to the nodes above.
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

// knownEnd is how much of the prefix that ends in a node a rank can use, if that is known.
func (x *Index) knownEnd(id, slot uint32) (n usable, ok bool) {
	if x.v.full(id, planeKnown, slot) {
		return x.v.ends[id], true
	}
	for _, plane := range [...]int{device, planeKnown} {
		if p := x.v.part(id, keyOf(slot, plane)); p != nil && p.fit > 0 {
			return usable{p.fit - 1, p.from}, true
		}
	}
	return usable{}, false
}

// endChanged works out a rank's end in an open node, of which its blocks, or its windows', have just changed; if that
// takes other nodes it is left for later.
func (x *Index) endChanged(id uint32, r *rank) {
	if r.reuse.cuts() && !r.unseen && !x.resolve(id, r, 0) {
		x.later(id, r.slot())
	}
}

// resolve works out a rank's end in an open node, and reports whether it could.
func (x *Index) resolve(id uint32, r *rank, up int) bool {
	v, nd := x.v, &x.v.nodes[id]
	p := v.part(id, keyOf(r.slot(), device))
	full := p == nil && v.full(id, device, r.slot())
	if p == nil && !full {
		return true
	}
	held := nd.depth + nd.len
	if p != nil {
		held = nd.depth + p.lead
	}
	blocks, ok := x.usable(r, id, held, up)
	n := usable{}
	if ok {
		n = x.least(r, id, blocks)
		first := r.reuse.first(n)
		for at := id; v.nodes[at].depth > first; at = v.nodes[at].parent {
			x.setFull(at, planeWatch, r.slot(), true)
		}
	}
	fit := part{key: keyOf(r.slot(), device)}
	if ok {
		fit.fit, fit.from = n.blocks+1, n.least
	}
	if full {
		if ok && x.kin[id].misses >= 0 && x.nobodyKnown(id) {
			x.putEnd(id, n)
		}
		agrees := ok && v.ends[id] == n
		x.setFull(id, planeKnown, r.slot(), agrees)
		fit.key = keyOf(r.slot(), planeKnown)
		p = v.part(id, fit.key)
		switch {
		case agrees && p != nil:
			x.dropPart(id, p)
			return true
		case agrees:
			return true
		case p == nil && ok:
			x.addPart(id, fit)
			p = x.v.part(id, fit.key)
		}
		if k := &x.kin[id]; ok {
			if k.misses++; 2*int(k.misses) > x.countFull(id) {
				k.misses = 0
				x.later(id, noSlot)
			}
		}
	}
	if p != nil {
		put32(&p.fit, fit.fit)
		put32(&p.from, fit.from)
	}
	return ok
}

func (x *Index) putEnd(id uint32, n usable) {
	put32(&x.v.ends[id].blocks, n.blocks)
	put32(&x.v.ends[id].least, n.least)
}

func (x *Index) nobodyKnown(id uint32) bool {
	row := x.v.row(planeKnown, id)
	return !slices.ContainsFunc(row, func(word uint64) bool { return word != 0 })
}

// countFull is how many ranks have all of a node in device.
func (x *Index) countFull(id uint32) (n int) {
	for _, word := range x.v.row(device, id) {
		n += bits.OnesCount64(word)
	}
	return n
}

// row is the ranks of a plane that have all of a node.
func (v *view) row(plane int, id uint32) []uint64 {
	return v.masks[plane][int(id)*v.stride:][:v.stride]
}

// later queues an end.
func (x *Index) later(id, slot uint32) {
	if e := (end{id, slot}); len(x.ends) == 0 || x.ends[len(x.ends)-1] != e {
		x.ends = append(x.ends, e)
	}
}

// resolveEnds works out ends that are queued, at most so many.
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
			x.resolve(e.node, r, mostUp)
		}
	}
	if open != 0 {
		x.unlock(open)
	}
	x.ends = append(x.ends[:0], x.ends[i:]...)
}

// resolveAll works out the ends of all ranks in an open node, and finds on what most of those who have all of it agree.
// It returns how many ends there are.
func (x *Index) resolveAll(id uint32) (count int) {
	v, n := x.v, &x.v.nodes[id]
	most, votes := usable{}, 0
	for w, word := range v.row(device, id) {
		for ; word != 0; word &= word - 1 {
			r := x.slots[w<<6+bits.TrailingZeros64(word)]
			if !r.reuse.cuts() {
				continue
			}
			count++
			blocks, ok := x.usable(r, id, n.depth+n.len, mostUp)
			if n := x.least(r, id, blocks); ok && votes == 0 {
				most, votes = n, 1
			} else if ok && n == most {
				votes++
			} else if votes > 0 {
				votes--
			}
		}
	}
	known := v.row(planeKnown, id)
	for w := range known {
		put64(&known[w], 0)
	}
	x.kin[id].misses = math.MinInt32 // so that nothing else is agreed on meanwhile
	x.putEnd(id, most)
	for w, word := range v.row(device, id) {
		for ; word != 0; word &= word - 1 {
			if r := x.slots[w<<6+bits.TrailingZeros64(word)]; r.reuse.cuts() {
				x.resolve(id, r, mostUp)
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
			x.resolve(id, r, mostUp)
		}
	}
	return count
}

// windowChanges makes ends of a rank unknown that depend on blocks of a plane in an open node, before block hi of it,
// which are about to change.
func (x *Index) windowChanges(id, hi uint32, r *rank, plane int) {
	if plane >= events.NumTiers && plane%events.NumTiers == device && !r.unseen {
		x.forgetBelow(id, r, x.v.nodes[id].depth+hi)
	}
}

// forgetBelow makes ends of a rank below a node unknown that depend on blocks before block hi of the prefix. The longer
// a prefix, the more of it can be used, and the later begins what it depends on (see inNode): so below an end that
// stays known all do. It reports whether there may be such ends.
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

// forgetEnds does so in a node and below it.
func (x *Index) forgetEnds(id uint32, r *rank, hi uint32) {
	if n, ok := x.knownEnd(id, r.slot()); ok {
		if r.reuse.first(n) >= hi {
			return
		}
		x.lock(id)
		x.forgetEnd(id, r.slot())
		x.unlock(id)
		x.later(id, r.slot())
	}
	if !x.forgetBelow(id, r, hi) {
		x.setFull(id, planeWatch, r.slot(), false)
	}
}

// forgetEnd makes a rank's end in an open node unknown.
func (x *Index) forgetEnd(id, slot uint32) {
	x.setFull(id, planeKnown, slot, false)
	for _, plane := range [...]int{device, planeKnown} {
		if p := x.v.part(id, keyOf(slot, plane)); p != nil {
			put32(&p.fit, 0)
			put32(&p.from, 0)
		}
	}
}

// tooWide makes the ends below a node, which is to have too many children, unknown if they depend on it.
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

// forgetRank makes all ends of a rank unknown. Readers do not see it.
func (x *Index) forgetRank(r *rank) {
	if r.reuse.cuts() {
		for _, id := range r.nodes {
			x.forgetEnd(id, r.slot())
		}
	}
	r.unseen = true
}

// showRank ends what forgetRank has begun.
func (x *Index) showRank(r *rank) {
	r.unseen = false
	if r.reuse.cuts() {
		for _, id := range r.nodes {
			x.later(id, r.slot())
		}
	}
}

// inNode is an end of a node at a depth. What it depends on begins in the node, or as late as its blocks allow: else an
// end further down might depend on more than one that is passed first, and forgetEnds would stop there. (Without
// windows it depends on nothing.)
func (n usable) inNode(depth uint32) usable {
	if n.least < depth {
		n.least = n.blocks
	}
	return n
}

// splitEnds brings ends in line after a node was split: those in the rest can be used as before, those in head are
// unknown.
func (x *Index) splitEnds(head, id uint32) {
	v := x.v
	if v.masks[planeWatch] == nil {
		return
	}
	watch := v.row(planeWatch, id)
	copy(v.row(planeWatch, head), watch)
	add := func(row []uint64) {
		for w, word := range row {
			watch[w] |= word
		}
	}
	add(v.row(planeKnown, id))
	if v.nodes[id].children <= mostWide {
		for c := x.kin[id].child; c != 0; c = x.kin[c].next {
			add(v.row(planeWatch, c))
		}
	}
	depth := v.nodes[id].depth
	x.putEnd(id, v.ends[id].inNode(depth))
	for i := range v.nodes[id].nparts {
		if p := &v.parts[v.nodes[id].parts+i]; (planeOf(p.key) == device || planeOf(p.key) == planeKnown) && p.fit > 0 {
			watch[slotOf(p.key)>>6] |= 1 << (slotOf(p.key) & 63)
			put32(&p.from, usable{p.fit - 1, p.from}.inNode(depth).least)
		}
	}
	x.later(head, noSlot)
	x.later(id, noSlot)
}
