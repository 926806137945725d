package radix

import (
	"math/bits"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// How readers shorten what ranks hold to what their engines can reuse.

// cut shortens an answer's prefixes to what engines can reuse.
func (w *walk) cut(out *Answer) {
	kept := out.Ranks[:0]
	for i := range out.Ranks {
		o := out.Ranks[i]
		if slot := o.Rank.Slot(); slot < len(w.v.reuse) && w.v.reuse[slot] != nil {
			w.cutRank(&o, w.v.reuse[slot])
			if o.Blocks() == 0 {
				continue
			}
		}
		kept = append(kept, o)
	}
	out.Ranks = kept
}

// cutRank shortens what one rank holds, tier by tier: up to each tier there are so many blocks that every window has
// what it needs in the tiers so far.
func (w *walk) cutRank(o *Overlap, u *reuse) {
	l := look{w: w, slot: uint32(o.Rank.Slot()), at: -1}
	held, before, seen := uint32(0), uint32(0), w.seen(l.slot)
	for t := range events.NumTiers {
		if w.v.masks[t] == nil {
			continue
		}
		l.tiers |= seen & (1 << t)
		held += o.Depth[t]
		n := l.longest(u, held)
		o.Depth[t], before = n-before, n
	}
}

// limit is what limits a rank's prefixes beside what it holds; nil if nothing does.
func (w *walk) limit(slot uint32) *reuse {
	if int(slot) < len(w.v.reuse) {
		return w.v.reuse[slot]
	}
	return nil
}

// limited is the longest prefix of a rank, which holds so many blocks in device up to a stop, that all its windows have
// what they need of.
func (w *walk) limited(slot, at, held uint32) uint32 {
	u := w.limit(slot)
	if u == nil {
		return held
	}
	if n := held - min(held, u.most); len(u.windows) == 1 && n > 0 { // mostly it has all in the last node
		win, s := &u.windows[0], &w.path[at]
		from, m := win.from(n), w.v.masks[win.plane]
		switch {
		case m == nil || from < s.base:
		case atomic.LoadUint64(&m[int(s.id)*w.v.stride+int(slot>>6)])>>(slot&63)&1 != 0:
			return n
		default:
			sp := w.spread(int(at))
			e := sp.parts[int(slot)*(w.v.planes-events.NumTiers)+win.plane-events.NumTiers]
			if uint32(e>>32) == sp.stamp && w.v.covers(&w.v.parts[s.parts+uint32(e)], from-s.base, n+win.drop-s.base) {
				return n
			}
		}
	}
	l := look{w: w, slot: slot, at: -1, tiers: 1}
	return l.longest(u, held)
}

// covers reports whether a part has all blocks from lo up to hi.
func (v *view) covers(p *part, lo, hi uint32) bool {
	if atomic.LoadUint32(&p.lead) >= hi {
		return true
	}
	at, words := atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
	if at == 0 || words<<6 < hi || uint64(at)+uint64(words) > uint64(len(v.bits)) {
		return false
	}
	for i := lo >> 6; i<<6 < hi; i++ {
		if rangeMask(i, lo, hi)&^atomic.LoadUint64(&v.bits[at+i]) != 0 {
			return false
		}
	}
	return true
}

// pending is ranks of one word that have a prefix of n blocks, as so many windows one after the other have said.
type pending struct {
	set          uint64
	n            uint32
	agreed, next int
}

// state is ranks of one word for which a window has all that a prefix of n blocks needs from block lo on.
type state struct {
	set   uint64
	n, lo uint32
}

// leaveLimited ends the prefix in device, of held blocks, of ranks of one word that are limited alike: each window in
// turn shortens it, until all agree.
func (w *walk) leaveLimited(u *reuse, word int, set uint64, held uint32, out *Answer) {
	w.windows.todo = append(w.windows.todo[:0], pending{set: set, n: held - min(held, u.most)})
	for len(w.windows.todo) > 0 {
		p := w.windows.todo[len(w.windows.todo)-1]
		w.windows.todo = w.windows.todo[:len(w.windows.todo)-1]
		switch {
		case p.n == 0:
		case p.agreed >= len(u.windows):
			w.emit(word, p.set, p.n, out)
		default:
			w.shorten(u, word, p)
		}
	}
}

// shorten finds for ranks of one word the longest prefixes that one window has all of, and leaves them in todo. It goes
// back along the way, the ranks together as long as they have all of a node, or nothing.
func (w *walk) shorten(u *reuse, word int, p pending) {
	win := &u.windows[p.next]
	done := func(set uint64, n uint32) {
		agreed := 1
		if n == p.n {
			agreed = p.agreed + 1
		}
		w.windows.todo = append(w.windows.todo, pending{set, n, agreed, (p.next + 1) % len(u.windows)})
	}
	w.windows.states = append(w.windows.states[:0], state{p.set, p.n, p.n + win.drop})
	for len(w.windows.states) > 0 {
		s := &w.windows.states[len(w.windows.states)-1]
		if s.n == 0 || s.set == 0 || s.lo <= win.from(s.n) {
			set, n := s.set, s.n
			w.windows.states = w.windows.states[:len(w.windows.states)-1]
			if set != 0 && n > 0 {
				done(set, n)
			}
			continue
		}
		set, n, missing := s.set, s.n, s.lo-1
		at := w.stopOf(missing)
		stop := &w.path[at]
		m := w.v.masks[win.plane]
		if m != nil {
			s.set &= atomic.LoadUint64(&m[int(stop.id)*w.v.stride+word])
		} else {
			s.set = 0 // nobody has anything
		}
		s.lo = stop.base
		none := set &^ s.set
		if none != 0 && stop.nparts > 0 && m != nil {
			some := none & w.spread(at).some[(win.plane-events.NumTiers)*w.v.stride+word]
			none &^= some
			for ; some != 0; some &= some - 1 {
				l := look{w: w, slot: uint32(word<<6 + bits.TrailingZeros64(some)), at: -1, tiers: 1}
				if n := l.fit(win, n); n > 0 {
					done(some&-some, n)
				}
			}
		}
		if most := missing - min(missing, win.drop); none != 0 {
			n := min(most, max(stop.base-min(stop.base, win.drop), win.boundary(most)))
			w.windows.states = append(w.windows.states, state{none, n, n + win.drop})
		}
	}
}

// workings is what a walk has in hand of windows.
type workings struct {
	spreads [4]spread
	stamp   uint32
	todo    []pending
	states  []state
}

// spread is a stop's parts in planes of windows, by slot.
type spread struct {
	at    int // the stop
	stamp uint32
	parts []uint64 // by slot and plane: stamp<<32 | position among the stop's parts
	some  []uint64 // by plane, stride words each: ranks that have a part
}

// forget begins a walk with nothing spread.
func (w *walk) forget() {
	if w.windows == nil {
		w.windows = &workings{}
	}
	for i := range w.windows.spreads {
		w.windows.spreads[i].at = -1
	}
}

// spread sorts a stop's parts, once in a while.
func (w *walk) spread(at int) *spread {
	k := w.windows
	sp := &k.spreads[at%len(k.spreads)]
	if sp.at == at {
		return sp
	}
	k.stamp++
	planes := w.v.planes - events.NumTiers
	sp.at, sp.stamp = at, k.stamp
	sp.some = append(sp.some[:0], make([]uint64, planes*w.v.stride)...)
	if n := w.v.stride * 64 * planes; len(sp.parts) < n {
		sp.parts = make([]uint64, n)
	}
	s := &w.path[at]
	list := w.v.parts[s.parts : s.parts+s.nparts]
	for i := range list {
		key := atomic.LoadUint32(&list[i].key)
		if plane, slot := int(key&planeMask)-events.NumTiers, key>>planeBits; plane >= 0 && plane < planes &&
			int(slot) < w.v.stride*64 {
			sp.some[plane*w.v.stride+int(slot>>6)] |= 1 << (slot & 63)
			sp.parts[int(slot)*planes+plane] = uint64(sp.stamp)<<32 | uint64(i)
		}
	}
	return sp
}

// part is what a rank has of a stop in one plane of a window, if it is not all of it.
func (w *walk) part(at int, slot uint32, plane int) (p part, ok bool) {
	sp := w.spread(at)
	if i := int(slot)*(w.v.planes-events.NumTiers) + plane - events.NumTiers; i < len(sp.parts) &&
		uint32(sp.parts[i]>>32) == sp.stamp {
		return w.v.parts[w.path[at].parts+uint32(sp.parts[i])].load(), true
	}
	return part{}, false
}

// seen is the tiers of a rank that readers may look at: all but those that are being cleared.
func (w *walk) seen(slot uint32) TierSet {
	tiers := TierSet(1<<events.NumTiers - 1)
	if w.hidden&hiding != 0 && uint32(w.hidden&^hiding>>8) == slot {
		tiers &^= TierSet(w.hidden)
	}
	return tiers
}

// look is a reader's look at the windows of one rank, in some tiers.
type look struct {
	w     *walk
	slot  uint32
	tiers TierSet

	// The stop, window and tiers that were looked at last, and what the window has there.
	at    int
	plane int
	of    TierSet
	all   bool
	parts [events.NumTiers]part
	n     int
}

// longest is the longest prefix, of at most held blocks, that has all that is needed.
func (l *look) longest(u *reuse, held uint32) uint32 {
	n := held - min(held, u.most)
	for again := true; again && n > 0; {
		again = false
		for i := range u.windows {
			if m := l.fit(&u.windows[i], n); m < n {
				n, again = m, len(u.windows) > 1
			}
		}
	}
	return n
}

// fit is the longest prefix of at most n blocks that has what one window needs.
func (l *look) fit(w *window, n uint32) uint32 {
	for n > 0 {
		from := w.from(n)
		missing := l.last(w, false, from, n+w.drop)
		if missing == 0 {
			return n
		}
		// Every prefix from here down to the missing block needs that block, and the next shorter ones the last block
		// before it that is there.
		n = missing - 1 - min(missing-1, w.drop)
		end := l.last(w, true, 0, missing-1)
		n = min(n, max(end-min(end, w.drop), w.boundary(n)))
	}
	return 0
}

// boundary is the longest prefix of at most n blocks that needs nothing.
func (w *window) boundary(n uint32) uint32 {
	if w.size == 0 {
		return 0
	}
	return w.from(n)
}

// last looks at blocks from hi-1 down to lo for one that the window has, or has not, and returns its number plus one; 0
// if there is none.
func (l *look) last(w *window, held bool, lo, hi uint32) uint32 {
	if lo >= hi {
		return 0
	}
	path := l.w.path
	i := l.stop(hi - 1)
	for ; i > 0; i-- {
		s := &path[i]
		if s.base+s.match <= lo {
			break
		}
		from, to := max(lo, s.base)-s.base, min(hi, s.base+s.match)-s.base
		if from >= to {
			continue
		}
		l.see(w, i)
		switch {
		case l.all && held, l.n == 0 && !l.all && !held:
			return s.base + to
		case l.all || l.n == 0:
			continue
		}
		for at := (to - 1) >> 6; ; at-- {
			word := l.word(at)
			if !held {
				word = ^word
			}
			if word &= rangeMask(at, from, to); word != 0 {
				return s.base + at<<6 + uint32(bits.Len64(word))
			}
			if at == from>>6 {
				break
			}
		}
	}
	return 0
}

// stop is the stop of a block of the query; the last one if the way ends before it.
func (l *look) stop(block uint32) int {
	if i := l.at; i > 0 && block >= l.w.path[i].base && block < l.w.path[i].base+l.w.path[i].match {
		return i
	}
	return l.w.stopOf(block)
}

func (w *walk) stopOf(block uint32) int {
	path := w.path
	if i := len(path) - 1; block >= path[i].base { // as it mostly is
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

// see looks up what a window has at a stop.
func (l *look) see(w *window, at int) {
	if l.at == at && l.plane == w.plane && l.of == l.tiers {
		return
	}
	v, s := l.w.v, &l.w.path[at]
	l.at, l.plane, l.of, l.all, l.n = at, w.plane, l.tiers, false, 0
	word, bit := int(s.id)*v.stride+int(l.slot>>6), l.slot&63
	for t := range events.NumTiers {
		if m := v.masks[w.plane+t]; m != nil && l.tiers>>t&1 != 0 && atomic.LoadUint64(&m[word])>>bit&1 != 0 {
			l.all = true
			return
		}
	}
	for t := 0; t < events.NumTiers && s.nparts > 0; t++ {
		if l.tiers>>t&1 == 0 || v.masks[w.plane+t] == nil {
			continue
		}
		if p, ok := l.w.part(at, l.slot, w.plane+t); ok {
			l.parts[l.n] = p
			l.n++
		}
	}
}

// word is 64 of the blocks that a window has at the stop in hand.
func (l *look) word(at uint32) (word uint64) {
	v := l.w.v
	for i := range l.n {
		p := &l.parts[i]
		if base := at << 6; base < p.lead {
			word |= rangeMask(at, 0, p.lead)
		}
		if p.bits != 0 && at < p.words && uint64(p.bits)+uint64(p.words) <= uint64(len(v.bits)) {
			word |= atomic.LoadUint64(&v.bits[p.bits+at])
		}
	}
	return word
}
