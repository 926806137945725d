package radix

import (
	"math/bits"
	"slices"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// What an engine wants beside the blocks of a prefix. A window is what groups of one kind and size need: a block counts for it in a tier if each
// of these groups has a copy there under a name of that block. Which blocks those are is kept as marks, like those of the prefix itself: each
// window of a rank has a plane of marks for each tier, behind the tiers' own.

// Planes of marks. The first NumTiers are the tiers; the next the tiers of each rank's first window, and so on.
const (
	planeBits  = 5
	planeMask  = 1<<planeBits - 1
	maxPlanes  = 1 << planeBits
	maxWindows = maxPlanes/events.NumTiers - 1
)

// reuse is what decides how much of a rank's prefix its engine can use. It does not change once readers know it.
type reuse struct {
	drop    uint32 // blocks behind a prefix's end that must be there as well: 1 if a draft model has the last one dropped
	most    uint32 // the largest drop of the main groups and all windows
	windows []window
	unknown bool // some group's needs are not known: the prefix may be shorter than is said
}

// window is what some groups of equal needs want of a prefix.
type window struct {
	kind   events.GroupKind    // the first group, for people
	groups []events.GroupIndex // all of them
	plane  int                 // its marks in device; those in other tiers follow
	drop   uint32              // as of reuse
	size   uint32              // tokens of a chunk; or else 0
	block  uint32              // tokens of a block
	need   uint32              // blocks before a prefix's end, unless it has chunks
}

// from is the first block that a prefix of n blocks needs.
func (w *window) from(n uint32) uint32 {
	if w.size > 0 {
		return uint32(uint64(n) * uint64(w.block) / uint64(w.size) * uint64(w.size) / uint64(w.block))
	}
	return n - min(n, w.need)
}

// reuseOf is what groups want; nil if nothing.
func reuseOf(groups []events.GroupKind, block uint32) *reuse {
	u := &reuse{}
	for _, g := range groups {
		drop := uint32(0)
		if g.Drops {
			drop = 1
		}
		w := window{kind: g, groups: []events.GroupIndex{g.Group}, drop: drop, block: max(1, block)}
		switch {
		case g.Kind.Main():
			u.drop, u.unknown = max(u.drop, drop), u.unknown || g.Window > 0
			continue
		case g.Kind == events.AttentionMamba:
			w.need, w.drop = 1, 0 // its state is at the very end, or not
		case g.Kind.Windowed() && g.Window == 0, g.Kind == events.AttentionOther:
			u.unknown = true
			continue
		case g.Kind == events.AttentionChunkedLocal:
			w.size = g.Window
		case g.Kind.Windowed():
			w.need = max(1, (g.Window-1+w.block-1)/w.block)
		default: // encoders' groups are no matter of the prefix
			continue
		}
		at := slices.IndexFunc(u.windows, func(o window) bool { return o.kind.Kind == g.Kind && o.kind.Window == g.Window })
		switch {
		case at >= 0:
			u.windows[at].groups = append(u.windows[at].groups, g.Group)
			u.windows[at].drop = max(u.windows[at].drop, w.drop)
		case len(u.windows) == maxWindows:
			u.unknown = true
		default:
			w.plane = (len(u.windows) + 1) * events.NumTiers
			u.windows = append(u.windows, w)
		}
	}
	u.most = u.drop
	for _, w := range u.windows {
		u.most = max(u.most, w.drop)
	}
	if u.drop == 0 && len(u.windows) == 0 && !u.unknown {
		return nil
	}
	return u
}

// cuts reports whether there is anything that makes a prefix shorter.
func (u *reuse) cuts() bool { return u != nil && (u.drop > 0 || len(u.windows) > 0) }

// window is the one that a group belongs to; nil if it belongs to none.
func (r *rank) window(group events.GroupIndex) *window {
	if r.reuse != nil {
		for i := range r.reuse.windows {
			if w := &r.reuse.windows[i]; slices.Contains(w.groups, group) {
				return w
			}
		}
	}
	return nil
}

// learnReuse makes what a rank's groups want known to readers, and marks its windows anew. To readers the rank is gone meanwhile.
func (x *Index) learnReuse(r *rank) {
	u := reuseOf(r.groups, r.block)
	if u == nil && r.reuse == nil {
		return
	}
	x.hidden.Store(hiding | uint64(r.slot())<<8 | (1<<events.NumTiers - 1))
	defer x.hidden.Store(0)
	x.clearWindows(r, 1<<events.NumTiers-1)
	r.reuse = u
	shown := u
	if !u.cuts() {
		shown = nil
	}
	x.publish(func(v *view) {
		v.reuse = append(make([]*reuse, 0, len(v.ids)), v.reuse...)[:len(v.ids)]
		v.reuse[r.slot()] = shown
		v.kinds = kindsOf(v.reuse, v.stride)
		if len(v.kinds) == 0 {
			v.reuse = nil
		}
	})
	x.markWindows(r)
}

// kind is ranks that are limited alike.
type kind struct {
	*reuse
	ranks []uint64 // by slot
}

// kindsOf puts ranks that are limited alike together. Their numbers of groups may differ: they are for people.
func kindsOf(all []*reuse, stride int) (kinds []kind) {
	for slot, u := range all {
		if u == nil {
			continue
		}
		at := slices.IndexFunc(kinds, func(k kind) bool { return k.equal(u) })
		if at < 0 {
			at = len(kinds)
			kinds = append(kinds, kind{u, make([]uint64, stride)})
		}
		kinds[at].ranks[slot>>6] |= 1 << (slot & 63)
	}
	return kinds
}

// equal reports whether two ranks are limited alike.
func (u *reuse) equal(o *reuse) bool {
	return u.drop == o.drop && slices.EqualFunc(u.windows, o.windows, func(a, b window) bool {
		return a.plane == b.plane && a.drop == b.drop && a.size == b.size && a.block == b.block && a.need == b.need
	})
}

// Bounded reports whether an answer's depths of a rank are an upper bound: what one of its groups needs is not known. The writer calls it.
func (x *Index) Bounded(id RankID) bool {
	r := x.rank(id)
	return r.reuse != nil && r.reuse.unknown
}

// spot is a block of which the marks of windows may have to change, and its name, if it has one. In a rank with a ledger the ledger has its names.
type spot struct {
	block uint32
	name  events.BlockHash
	named bool
}

// heldPlace is the block that a rank holds under a name.
func (x *Index) heldPlace(r *rank, name events.BlockHash) (uint32, bool) {
	if r.naming == ledgers {
		if n := r.ledger.names[name]; n != nil {
			return n.block, true
		}
		return 0, false
	}
	t := x.table(r)
	b, _, ok := t.find(uint64(name), t.hash(uint64(name)))
	return b, ok && (r.naming == owning || x.holdsAny(r.slot(), b))
}

// wanted reports whether a block counts for a window in a tier.
func (r *rank) wanted(w *window, tier events.Tier, s spot) bool {
	if r.naming == ledgers {
		return slices.ContainsFunc(r.ledger.at[s.block], func(name events.BlockHash) bool { return r.complete(w, tier, name) })
	}
	return s.named && r.complete(w, tier, s.name)
}

// complete reports whether every group of a window has a copy in a tier under a name.
func (r *rank) complete(w *window, tier events.Tier, name events.BlockHash) bool {
	for _, g := range w.groups {
		if r.sets[copyKey{tier, g, name}] == 0 {
			return false
		}
	}
	return true
}

// settleWindow brings a window's marks at some blocks in one tier in line with what its groups hold. Marks come from the last block of a path to the first and
// go from the first to the last, as those of the prefix do.
func (x *Index) settleWindow(r *rank, w *window, tier events.Tier, spots []spot) {
	plane := w.plane + int(tier) - 1
	on, off := x.marksOn[:0], x.marksOff[:0]
	for _, s := range spots {
		id, n := x.where(s.block)
		has := x.v.masks[plane] != nil && x.v.holds(id, s.block-n.start, plane, r.slot())
		if want := r.wanted(w, tier, s); want == has {
			continue
		} else if want {
			on = append(on, uint64(n.depth)<<32|uint64(s.block))
		} else {
			off = append(off, uint64(n.depth)<<32|uint64(s.block))
		}
	}
	x.marksOn, x.marksOff = on, off
	if len(on) > 0 {
		x.useTier(int(tier) - 1) // what is only in windows there makes prefixes longer too
		x.useTier(plane)
		slices.Sort(on)
		on = slices.Compact(on)
		for end := len(on); end > 0; {
			id, lo, hi := x.run(on, end, -1)
			x.begin(id)
			x.mark(id, lo, hi, r, plane, nil)
			x.end(id)
			end -= int(hi - lo)
		}
	}
	slices.Sort(off)
	off = slices.Compact(off)
	for at := 0; at < len(off); {
		id, lo, hi := x.run(off, at, 1)
		x.begin(id)
		x.unmark(id, lo, hi, r, plane)
		x.end(id)
		at += int(hi - lo)
	}
}

// run is the longest run of consecutive blocks of one node in a sorted list: the one that ends before position at (step -1), or begins there (1).
func (x *Index) run(list []uint64, at, step int) (id, lo, hi uint32) {
	if step < 0 {
		at--
	}
	id, n := x.where(uint32(list[at]))
	lo = uint32(list[at]) - n.start
	hi = lo + 1
	for step < 0 && lo > 0 && at > 0 && list[at-1] == list[at]-1 {
		lo, at = lo-1, at-1
	}
	for step > 0 && hi < n.len && at+1 < len(list) && list[at+1] == list[at]+1 {
		hi, at = hi+1, at+1
	}
	return id, lo, hi
}

// settleWindows does so for all windows, in every tier.
func (x *Index) settleWindows(r *rank, spots []spot) {
	for i := range r.reuse.windows {
		for t := events.Device; t <= events.External; t++ {
			x.settleWindow(r, &r.reuse.windows[i], t, spots)
		}
	}
}

// settlePlaced settles the windows of the first n blocks of the event in hand, which have just been placed.
func (x *Index) settlePlaced(r *rank, e *events.Event, cancelled []bool, n int) {
	if r.reuse == nil || len(r.reuse.windows) == 0 || len(r.sets) == 0 {
		return
	}
	x.spots = x.spots[:0]
	for si := range x.segs {
		s := &x.segs[si]
		for j := range s.n {
			if i := s.first + int(j); i < n && (cancelled == nil || !cancelled[i]) {
				x.spots = append(x.spots, spot{s.block + j, e.Blocks[i], true})
			}
		}
	}
	x.settleWindows(r, x.spots)
}

// storedBeside adds the copies of an event whose group is no part of the prefix.
func (x *Index) storedBeside(r *rank, e *events.Event, c *Counts) {
	if r.sets == nil {
		r.sets = map[copyKey]uint32{}
	}
	w := r.window(e.Group)
	x.spots = x.spots[:0]
	for _, name := range e.Blocks {
		k := copyKey{e.Tier, e.Group, name}
		n := r.sets[k]
		r.sets[k] = n + 1
		if n == 0 && w != nil {
			if block, ok := x.heldPlace(r, name); ok {
				x.spots = append(x.spots, spot{block, name, true})
			}
		}
	}
	c.OtherStored += uint64(len(e.Blocks))
	if len(x.spots) > 0 {
		x.settleWindow(r, w, e.Tier, x.spots)
	}
}

// removedBeside takes such copies away.
func (x *Index) removedBeside(r *rank, e *events.Event, c *Counts) {
	w := r.window(e.Group)
	x.spots = x.spots[:0]
	for _, name := range e.Blocks {
		k := copyKey{e.Tier, e.Group, name}
		switch n := r.sets[k]; n {
		case 0:
			c.UnknownRemovals++
			continue
		case 1:
			delete(r.sets, k)
			if w == nil {
				break
			}
			if block, ok := x.heldPlace(r, name); ok {
				x.spots = append(x.spots, spot{block, name, true})
			}
		default:
			r.sets[k] = n - 1
		}
		c.OtherRemoved++
	}
	if len(x.spots) > 0 {
		x.settleWindow(r, w, e.Tier, x.spots)
	}
}

// markWindows marks all windows of a rank that has no marks of them.
func (x *Index) markWindows(r *rank) {
	if r.reuse == nil {
		return
	}
	for i := range r.reuse.windows {
		w := &r.reuse.windows[i]
		var spots [events.NumTiers][]spot
		for k := range r.sets {
			if k.group == w.groups[0] {
				if block, ok := x.heldPlace(r, k.name); ok {
					spots[k.tier-1] = append(spots[k.tier-1], spot{block, k.name, true})
				}
			}
		}
		for t, list := range spots {
			x.settleWindow(r, w, events.Tier(t+1), list)
		}
	}
}

// clearWindows takes the marks of a rank's windows away that a clear of some tiers ends: all in those tiers, and in others those of names that are held
// in none of these. Readers must not see the rank in those tiers.
func (x *Index) clearWindows(r *rank, tiers TierSet) {
	if r.reuse == nil || len(r.reuse.windows) == 0 {
		return
	}
	for _, id := range slices.Clone(r.nodes) {
		for i := range r.reuse.windows {
			for t := range events.NumTiers {
				plane := r.reuse.windows[i].plane + t
				if x.v.masks[plane] == nil || !x.v.any(id, plane, r.slot()) {
					continue
				}
				x.begin(id)
				for off := range x.v.nodes[id].len {
					if x.v.holds(id, off, plane, r.slot()) && (tiers>>t&1 != 0 || !x.outlives(r, &r.reuse.windows[i], events.Tier(t+1), id, off, tiers)) {
						x.unmark(id, off, off+1, r, plane)
					}
				}
				x.end(id)
			}
		}
	}
}

// outlives reports whether a block that counts for a window in a tier still does when others are cleared: whether its name is held in yet another.
func (x *Index) outlives(r *rank, w *window, tier events.Tier, id, off uint32, tiers TierSet) bool {
	if r.naming == ledgers {
		return slices.ContainsFunc(r.ledger.at[x.v.nodes[id].start+off], func(name events.BlockHash) bool {
			return r.complete(w, tier, name) && slices.ContainsFunc(r.ledger.names[name].copies, func(c tierCopies) bool { return !tiers.Has(c.tier) })
		})
	}
	for t := range events.NumTiers {
		if tiers>>t&1 == 0 && x.v.masks[t] != nil && x.v.holds(id, off, t, r.slot()) {
			return true
		}
	}
	return false
}

// any reports whether a rank has marks of a node in a plane.
func (v *view) any(id uint32, plane int, slot uint32) bool {
	return v.full(id, plane, slot) || v.part(id, keyOf(slot, plane)) != nil
}

// Readers from here on.

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

// cutRank shortens what one rank holds, tier by tier: up to each tier there are so many blocks that every window has what it needs in the tiers so far.
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

// limited is the longest prefix of a rank, which holds so many blocks in device up to a stop, that all its windows have what they need of.
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

// leaveLimited ends the prefix in device, of held blocks, of ranks of one word that are limited alike: each window in turn shortens it, until all agree.
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

// shorten finds for ranks of one word the longest prefixes that one window has all of, and leaves them in todo. It goes back along the way, the
// ranks together as long as they have all of a node, or nothing.
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
		if s.lo <= win.from(s.n) || s.set == 0 {
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
		if plane, slot := int(key&planeMask)-events.NumTiers, key>>planeBits; plane >= 0 && plane < planes && int(slot) < w.v.stride*64 {
			sp.some[plane*w.v.stride+int(slot>>6)] |= 1 << (slot & 63)
			sp.parts[int(slot)*planes+plane] = uint64(sp.stamp)<<32 | uint64(i)
		}
	}
	return sp
}

// part is what a rank has of a stop in one plane of a window, if it is not all of it.
func (w *walk) part(at int, slot uint32, plane int) (p part, ok bool) {
	sp := w.spread(at)
	if i := int(slot)*(w.v.planes-events.NumTiers) + plane - events.NumTiers; i < len(sp.parts) && uint32(sp.parts[i]>>32) == sp.stamp {
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
		// Every prefix from here down to the missing block needs that block, and the next shorter ones the last block before it that is there.
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

// last looks at blocks from hi-1 down to lo for one that the window has, or has not, and returns its number plus one; 0 if there is none.
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
