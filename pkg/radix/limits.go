package radix

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Readers shorten the held prefixes to the part that the engines can reuse.
//
// A window needs the blocks of a prefix from window.from(n) up to n+drop. All functions here search from the end of a
// prefix to its start, node by node: n is the current prefix, and the blocks from lo up to n+drop are known to be
// present. If a block is missing, n becomes the longest prefix that does not need the block.

// cut shortens the prefixes of an answer to the part that engines can reuse.
func (w *walk) cut(out *Answer) {
	kept, sets := 0, len(out.Sets)
	for i := range out.Ranks {
		o, within := out.Ranks[i], out.Within[i*sets:(i+1)*sets]
		if u := w.limit(uint32(o.Rank.Slot())); u != nil {
			w.cutRank(&o, u)
			if o.Blocks() == 0 && !slices.ContainsFunc(within, func(n uint32) bool { return n > 0 }) {
				continue
			}
		}
		out.Ranks[kept] = o
		copy(out.Within[kept*sets:], within)
		kept++
	}
	out.Ranks, out.Within = out.Ranks[:kept], out.Within[:kept*sets]
}

// cutRank shortens a rank's prefix tier by tier. Up to each tier, every window must have its blocks in the tiers so
// far.
func (w *walk) cutRank(o *Overlap, u *reuse) {
	slot := uint32(o.Rank.Slot())
	held, before, tiers, seen := uint32(0), uint32(0), TierSet(0), w.seen(slot)
	for t := range events.NumTiers {
		if w.v.masks[t] == nil {
			continue
		}
		if t > device && !w.uses(t, slot) {
			continue
		}
		tiers |= seen & (1 << t)
		held += o.Depth[t]
		n := held - min(held, u.most)
		if before < n {
			n = w.usable(u, slot, tiers, held, n)
		}
		o.Depth[t], before = n-before, n
	}
}

// usable is longest for a prefix of held blocks in some tiers. In device, the writer usually has the result.
func (w *walk) usable(u *reuse, slot uint32, tiers TierSet, held, n uint32) uint32 {
	if tiers == 1<<device {
		at, fit := w.stopOf(held-1), uint32(0)
		s := &w.path[at]
		full := w.v.hasAll(s, device, slot)
		if full && w.v.hasAll(s, planeKnown, slot) {
			fit = w.v.known(&w.v.ends[s.id], n)
		} else if !full { // usually this part is enough, and near the previous one
			if p := s.part(w.v, keyOf(slot, device)); p != nil {
				fit = w.v.known(p, n)
			}
		}
		if fit == 0 {
			if p := s.part(w.v, keyOf(slot, planeKnown)); p != nil {
				fit = w.v.known(p, n)
			}
		}
		if fit > 0 {
			return fit - 1
		}
	}
	return w.longest(u, slot, tiers, len(w.path)-1, n)
}

// uses reports whether a rank has any block in a tier on the whole path, for any group.
func (w *walk) uses(tier int, slot uint32) bool {
	if w.usedIn[tier] != w.tries {
		w.usedIn[tier] = w.tries
		w.findUsed(tier)
	}
	return int(slot>>6) < len(w.used[tier]) && w.used[tier][slot>>6]>>(slot&63)&1 != 0
}

func (w *walk) findUsed(tier int) {
	v := w.v
	used := append(w.used[tier][:0], make([]uint64, v.stride)...)
	for plane := tier; plane < v.planes; plane += events.NumTiers {
		if v.masks[plane] == nil {
			continue
		}
		for i := range w.path[1:] {
			s := &w.path[1+i]
			mask := v.masks[plane][int(s.id)*v.stride:][:v.stride]
			for k := range mask {
				used[k] |= atomic.LoadUint64(&mask[k])
			}
			list := v.parts[s.parts : s.parts+s.nparts]
			for list = list[search(list, keyOf(0, plane)):]; len(list) > 0; list = list[1:] {
				key := atomic.LoadUint32(&list[0].key)
				if planeOf(key) != plane {
					break
				}
				if word := int(slotOf(key) >> 6); word < len(used) {
					used[word] |= 1 << (key & 63)
				}
			}
		}
	}
	w.used[tier] = used
}

// seen returns the tiers of a rank that readers may see: all except the tiers that are being cleared.
func (w *walk) seen(slot uint32) TierSet {
	tiers := TierSet(1<<events.NumTiers - 1)
	if w.hidden&hiding != 0 && uint32(w.hidden&^hiding>>8) == slot {
		tiers &^= TierSet(w.hidden)
	}
	return tiers
}

// limit returns the rules that limit a rank's prefixes besides the held blocks, or nil.
func (w *walk) limit(slot uint32) *reuse {
	if int(slot) < len(w.v.reuse) {
		return w.v.reuse[slot]
	}
	return nil
}

// longest returns the longest prefix of at most n blocks that ends at a stop and for which every window of a rank has
// its blocks in some tiers.
func (w *walk) longest(u *reuse, slot uint32, tiers TierSet, at int, n uint32) uint32 {
	for i, agreed := 0, 0; agreed < len(u.windows) && n > 0; i = (i + 1) % len(u.windows) {
		agreed++
		if m := w.fit(&u.windows[i], slot, tiers, at, n); m < n {
			n, agreed = m, 1
		}
	}
	return n
}

// fit returns the longest prefix of at most n blocks that ends at a stop and for which a window of a rank has its
// blocks in some tiers.
func (w *walk) fit(win *window, slot uint32, tiers TierSet, at int, n uint32) uint32 {
	v := w.v
	for lo := n + win.drop; n > 0 && lo > win.from(n); {
		for at > 1 && w.path[at].base >= lo {
			at--
		}
		s := &w.path[at]
		var parts [events.NumTiers]*part
		k, full := 0, false
		for rest := tiers; rest != 0; rest &= rest - 1 {
			plane := win.plane + bits.TrailingZeros8(uint8(rest))
			r := w.row(plane, int(slot>>6), at)
			full = full || r.full>>(slot&63)&1 != 0
			if bit := uint64(1) << (slot & 63); r.some&bit != 0 {
				parts[k] = &v.parts[int(s.parts)+r.first+bits.OnesCount64(r.some&(bit-1))]
				k++
			}
		}
		switch {
		case full:
			lo = s.base
		case k > 0:
			n, lo = v.within(win, s, parts[:k], n, lo)
		default:
			n, lo = win.before(s, lo)
		}
	}
	return n
}

// row has the ranks of a word that hold all or some of a stop in a plane.
type row struct {
	try, plane uint32
	word, at   int
	first      int // position in the stop's parts
	full, some uint64
}

// row returns a row from a cache, or computes it.
func (w *walk) row(plane, word, at int) *row {
	if w.rows == nil {
		w.rows = make([]row, 256)
	}
	r := &w.rows[(at+word*31+plane*17)&255]
	if r.try == w.tries && r.at == at && r.word == word && r.plane == uint32(plane) {
		return r
	}
	*r = row{try: w.tries, plane: uint32(plane), word: word, at: at}
	v, s := w.v, &w.path[at]
	m := v.masks[plane]
	if m == nil {
		return r
	}
	r.full = atomic.LoadUint64(&m[int(s.id)*v.stride+word])
	if s.nparts == 0 {
		return r
	}
	all := v.parts[s.parts : s.parts+s.nparts]
	r.first = search(all, keyOf(uint32(word)<<6, plane))
	for i := r.first; i < len(all) && atomic.LoadUint32(&all[i].key)>>6 == keyOf(uint32(word)<<6, plane)>>6; i++ {
		r.some |= 1 << (atomic.LoadUint32(&all[i].key) & 63)
	}
	return r
}

// part returns a part of a stop, or nil. The part usually comes soon after the previous result.
func (s *stop) part(v *view, key uint32) *part {
	list := s.from(v, key)
	if len(list) > 0 && atomic.LoadUint32(&list[0].key) == key {
		return &list[0]
	}
	return nil
}

// from returns a stop's parts with keys of at least key.
func (s *stop) from(v *view, key uint32) []part {
	list := v.parts[s.parts : s.parts+s.nparts]
	i := int(s.hint)
	for end := min(i+8, len(list)); i < end && atomic.LoadUint32(&list[i].key) < key; i++ {
	}
	if i >= len(list) || atomic.LoadUint32(&list[i].key) < key || i > 0 && atomic.LoadUint32(&list[i-1].key) >= key {
		i = search(list, key)
	}
	s.hint = uint32(i)
	return list[i:]
}

// hasAll reports whether a rank has all of a stop in a plane.
func (v *view) hasAll(s *stop, plane int, slot uint32) bool {
	m := v.masks[plane]
	return m != nil && atomic.LoadUint64(&m[int(s.id)*v.stride+int(slot>>6)])>>(slot&63)&1 != 0
}

// before returns the longest prefix that needs no block of a stop, or no block from the stop up to lo. The window has
// none of these blocks.
func (w *window) before(s *stop, lo uint32) (n, next uint32) {
	most := lo - 1 - min(lo-1, w.drop)
	n = s.base - min(s.base, w.drop)
	if w.size > 0 { // the start of a chunk
		n = max(n, w.from(most))
	}
	n = min(most, n)
	return n, n + w.drop
}

// within continues a prefix at a stop. The window has some parts of the stop, each in a different tier.
func (v *view) within(win *window, s *stop, parts []*part, n, lo uint32) (m, next uint32) {
	top := lo - s.base
	for _, p := range parts { // usually a single part has all
		if atomic.LoadUint32(&p.lead) >= top {
			return n, s.base
		}
		if fit := s.base + atomic.LoadUint32(&p.fit); fit >= n && win.from(n) >= s.base+atomic.LoadUint32(&p.from) &&
			fit > s.base {
			return n, 0
		}
	}
	if len(parts) == 1 && win.size == 0 { // otherwise use the summaries
		fit := s.base + atomic.LoadUint32(&parts[0].fit)
		switch {
		case fit == s.base: // no prefix has all its blocks in this stop
			if v.last(parts, false, max(win.from(n), s.base)-s.base, top) == 0 {
				return n, s.base
			}
			m = s.base + min(atomic.LoadUint32(&parts[0].lead), top)
			return m - min(m, win.drop), s.base
		case fit <= n && n+win.drop <= s.base+s.len:
			return fit, 0
		}
	}
	from := win.from(n)
	if v.last(parts, false, max(from, s.base)-s.base, top) == 0 {
		return n, s.base
	}
	if win.size > 0 { // of the chunk, only the blocks before the first missing block
		m = s.base + v.firstGap(parts, max(from, s.base)-s.base, top)
		m -= min(m, win.drop)
		switch {
		case m <= from:
			return m, m + win.drop
		case from < s.base:
			return m, s.base
		}
		return m, from
	}
	if m, _ = v.fitBelow(parts, win, s.base, top); m > 0 {
		return s.base + m, 0
	}
	// only a prefix that also needs blocks before this stop
	m = s.base + v.firstGap(parts, 0, top)
	return m - min(m, win.drop), s.base
}

// firstGap returns the first block from lo up to hi of a node that no given part has, or hi.
func (v *view) firstGap(parts []*part, lo, hi uint32) uint32 {
	for at := lo >> 6; at<<6 < hi; at++ {
		if gaps := ^v.word(parts, at) & rangeMask(at, lo, hi); gaps != 0 {
			return at<<6 + uint32(bits.TrailingZeros64(gaps))
		}
	}
	return hi
}

// fitBelow returns the longest prefix for which the node has all blocks of a window before block top. The prefix counts
// from the start of the node, which is depth blocks deep; 0 means none. gap is the start of the consecutive run of
// these blocks.
func (v *view) fitBelow(parts []*part, w *window, depth, top uint32) (m, gap uint32) {
	for top > w.drop {
		end := v.last(parts, true, 0, top)
		if end <= w.drop {
			break
		}
		m = end - w.drop
		from := w.from(depth + m)
		if from < depth {
			break
		}
		if gap = v.last(parts, false, 0, end); gap <= from-depth {
			return m, gap
		}
		top = gap - 1
	}
	return 0, 0
}

// last returns the number plus one of the last block from lo up to hi that is in any given part of a node, or in none.
// It returns 0 without such a block.
func (v *view) last(parts []*part, held bool, lo, hi uint32) uint32 {
	if lo >= hi {
		return 0
	}
	flip := ^uint64(0)
	if held {
		flip = 0
	}
	for at := (hi - 1) >> 6; ; at-- {
		if word := (v.word(parts, at) ^ flip) & rangeMask(at, lo, hi); word != 0 {
			return at<<6 + uint32(bits.Len64(word))
		}
		if at == lo>>6 {
			return 0
		}
	}
}

// word returns 64 blocks of a node that are in any given part.
func (v *view) word(parts []*part, at uint32) (word uint64) {
	for _, p := range parts {
		if lead := atomic.LoadUint32(&p.lead); at<<6 < lead {
			word |= rangeMask(at, 0, lead)
		}
		first, words := atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
		if first != 0 && at < words && uint64(first)+uint64(words) <= uint64(len(v.bits)) {
			word |= atomic.LoadUint64(&v.bits[first+at])
		}
	}
	return word
}

// stopOf returns the stop of a block of the query, or the last stop if the path ends before.
func (w *walk) stopOf(block uint32) int {
	path := w.path
	if i := len(path) - 1; block >= path[i].base { // the usual case
		return i
	}
	lo, hi := 1, len(path) // the last stop that begins at or before the block
	for hi-lo > 1 {
		if mid := (lo + hi) / 2; path[mid].base <= block {
			lo = mid
		} else {
			hi = mid
		}
	}
	return min(lo, len(path)-1)
}

// candidates are ranks of a word with a prefix of n blocks, by the given number of consecutive windows.
type candidates struct {
	set          uint64
	n            uint32
	agreed, next int
}

// state is the search state of ranks of a word: a window has all blocks of a prefix of n blocks from block lo on.
type state struct {
	set   uint64
	n, lo uint32
}

// endLimited ends the prefix in device for ranks of a word with equal limits that leave at a stop. The prefix has held
// blocks. Each window in turn shortens the prefix, until all agree.
func (w *walk) endLimited(u *reuse, word int, set uint64, at, held uint32, out *Answer) {
	if held == w.path[at].base {
		at--
	}
	id, n := w.path[at].id, held-min(held, u.most)
	agree := set & atomic.LoadUint64(&w.v.masks[planeKnown][int(id)*w.v.stride+word])
	if fit := w.v.known(&w.v.ends[id], n); agree != 0 && fit > 0 {
		if fit > 1 {
			w.emit(word, agree, fit-1, out)
		}
		set &^= agree
	}
	for _, plane := range [...]int{planeKnown, device} {
		if stop := &w.path[at]; set != 0 && stop.nparts > 0 {
			set = w.endKnown(stop, plane, word, set, n, out)
		}
	}
	if bits.OnesCount64(set) < 4 {
		for ; set != 0; set &= set - 1 {
			slot := uint32(word<<6 + bits.TrailingZeros64(set))
			w.endOne(slot, w.longest(u, slot, 1, len(w.path)-1, n), out)
		}
		return
	}
	w.todo = w.todo[:0]
	w.agree(u, word, candidates{set: set, n: n}, out)
	for len(w.todo) > 0 {
		c := w.todo[len(w.todo)-1]
		w.todo = w.todo[:len(w.todo)-1]
		w.shorten(u, word, c, out)
	}
}

// endKnown ends the prefix in device for ranks of a word if a stop's parts in a plane have the usable part of n blocks.
// It returns the other ranks.
func (w *walk) endKnown(stop *stop, plane, word int, set uint64, n uint32, out *Answer) (rest uint64) {
	if len(w.v.ids) < word<<6+64 {
		set &= 1<<max(0, len(w.v.ids)-word<<6) - 1
	}
	v, first, k := w.v, keyOf(uint32(word)<<6, plane), len(out.Ranks)
	ids, ranks := v.ids[min(len(v.ids), word<<6):], slices.Grow(out.Ranks, 64)[:k+64]
	set, more := v.endAlone(stop.from(v, first), first, set, n, ids, (*[64]Overlap)(ranks[k:]))
	out.Ranks = ranks[:k+more]
	return set
}

// endAlone is endKnown for some parts. It calls no function, so that its values stay in registers.
func (v *view) endAlone(list []part, first uint32, set uint64, n uint32, ids []uint32, to *[64]Overlap) (uint64, int) {
	k := 0
	for i := range list {
		p := &list[i]
		slot := atomic.LoadUint32(&p.key) - first
		if slot > 63 {
			break
		}
		bit := set & (1 << slot)
		if bit == 0 {
			continue
		}
		fit := atomic.LoadUint32(&p.fit)
		if n < atomic.LoadUint32(&p.from) {
			if first < planeKnown<<slotBits {
				continue
			}
			fit = atomic.LoadUint32(&p.lead)
			if n < atomic.LoadUint32(&p.count) {
				fit = 0
				at, words := atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
				if uint64(at)+uint64(words) > uint64(len(v.bits)) {
					continue
				}
				steps := v.bits[at : at+words]
				for half := words / 2; half > 4 && n < uint32(atomic.LoadUint64(&steps[half-1])); half /= 2 {
					steps = steps[half:]
				}
				for j := range steps {
					if word := atomic.LoadUint64(&steps[j]); n >= uint32(word) {
						fit = uint32(word >> 32)
						break
					}
				}
			}
			if fit > chunks+1 {
				fit = n - n%(fit-1-chunks) + 1
			}
		}
		if fit == 0 {
			continue
		}
		set &^= bit
		fit = min(fit, n+1)
		o := &to[k&63]
		o.Rank = RankID(atomic.LoadUint32(&ids[slot]))
		o.Depth = [events.NumTiers]uint32{fit - 1}
		if fit > 1 {
			k++
		}
	}
	return set, k
}

// known returns the usable part of n blocks, plus one, from the end in a part. It returns 0 if the part has no answer.
func (v *view) known(p *part, n uint32) uint32 {
	if n >= atomic.LoadUint32(&p.from) {
		return min(atomic.LoadUint32(&p.fit), n+1)
	}
	return v.further(p, n)
}

// further is known for prefixes that end before the first step.
func (v *view) further(p *part, n uint32) uint32 {
	if planeOf(atomic.LoadUint32(&p.key)) != planeKnown {
		return 0
	}
	if n >= atomic.LoadUint32(&p.count) {
		return usableAndOne(atomic.LoadUint32(&p.lead), n)
	}
	first, words := atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
	if first == 0 || uint64(first)+uint64(words) > uint64(len(v.bits)) {
		return 0
	}
	for i := range words {
		if word := atomic.LoadUint64(&v.bits[first+i]); n >= uint32(word) {
			return usableAndOne(uint32(word>>32), n)
		}
	}
	return 0
}

// usableAndOne returns the usable part of n blocks, plus one, by a step of fit-1 blocks.
func usableAndOne(fit, n uint32) uint32 {
	if fit == 0 {
		return 0
	}
	return usable{blocks: fit - 1}.limit(n) + 1
}

// agree appends ranks to the answer if all windows agree on their prefix. Otherwise the ranks stay in todo.
func (w *walk) agree(u *reuse, word int, c candidates, out *Answer) {
	switch {
	case c.set == 0 || c.n == 0:
	case c.agreed < len(u.windows):
		w.todo = append(w.todo, c)
	case c.set&(c.set-1) == 0:
		w.endOne(uint32(word<<6+bits.TrailingZeros64(c.set)), c.n, out)
	default:
		w.emit(word, c.set, c.n, out)
	}
}

// shorten finds the longest prefixes of ranks of a word for which a window has all blocks. It goes back along the path.
// The ranks stay together while they have all of a node, or nothing, or the same part.
func (w *walk) shorten(u *reuse, word int, c candidates, out *Answer) {
	win, v := &u.windows[c.next], w.v
	m := v.masks[win.plane]
	next := c.next + 1
	if next == len(u.windows) {
		next = 0
	}
	done := func(set uint64, n uint32) {
		agreed := 1
		if n == c.n {
			agreed = c.agreed + 1
		}
		w.agree(u, word, candidates{set, n, agreed, next}, out)
	}
	w.states = append(w.states[:0], state{c.set, c.n, c.n + win.drop})
	for len(w.states) > 0 {
		s := w.states[len(w.states)-1]
		w.states = w.states[:len(w.states)-1]
		if s.n == 0 || s.lo <= win.from(s.n) {
			done(s.set, s.n)
			continue
		}
		stop := &w.path[w.stopOf(s.lo-1)]
		full := uint64(0)
		if m != nil {
			full = s.set & atomic.LoadUint64(&m[int(stop.id)*v.stride+word])
		}
		if full != 0 {
			w.states = append(w.states, state{full, s.n, stop.base})
		}
		none := s.set &^ full
		if none != 0 && stop.nparts > 0 && m != nil {
			none = w.shortenParts(win, stop, word, s, none, done)
		}
		if none != 0 {
			n, lo := win.before(stop, s.lo)
			w.states = append(w.states, state{none, n, lo})
		}
	}
}

// shortenParts continues for the ranks for which the window has a part of a stop. It returns the others.
func (w *walk) shortenParts(win *window, stop *stop, word int, s state, none uint64, done func(uint64, uint32)) uint64 {
	list := rowOf(w.v.parts[stop.parts:stop.parts+stop.nparts], win.plane, word)
	if win.size == 0 && s.n+win.drop <= stop.base+stop.len {
		same, n, rest := win.shortenAlike(list, stop.base, s.n, none)
		if same != 0 {
			done(same, n)
		}
		none = rest
	}
	for i := 0; i < len(list) && none != 0; i++ {
		bit := uint64(1) << (atomic.LoadUint32(&list[i].key) & 63)
		if none&bit == 0 {
			continue
		}
		none &^= bit
		one := [1]*part{&list[i]}
		if n, lo := w.v.within(win, stop, one[:], s.n, s.lo); n > 0 && lo > win.from(n) {
			done(bit, w.fit(win, slotOf(atomic.LoadUint32(&list[i].key)), 1<<device, len(w.path)-1, n))
		} else {
			done(bit, n)
		}
	}
	return none
}

// shortenAlike finds ranks with a prefix of n blocks that their summaries shorten to the same length. The prefix ends
// at a node that begins after base blocks. rest has the other ranks.
func (w *window) shortenAlike(list []part, base, n uint32, ranks uint64) (same uint64, m uint32, rest uint64) {
	from := w.from(n)
	for i := range list {
		p := &list[i]
		fit := base + atomic.LoadUint32(&p.fit)
		if fit > n && from >= base+atomic.LoadUint32(&p.from) {
			fit = n
		}
		bit := uint64(1) << (atomic.LoadUint32(&p.key) & 63)
		if ranks&bit == 0 || fit <= base || fit > n {
			continue
		}
		if m == 0 {
			m = fit
		}
		if fit == m {
			same |= bit
		}
	}
	return same, m, ranks &^ same
}
