package radix

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Needs of an engine besides the blocks of a prefix. A window has the needs of groups with equal kind and size: a block
// counts for it in a tier if all of these groups have a copy in the tier under a name of the block. These blocks have
// marks, like the blocks of the prefix: each window of a rank has a plane of marks for each tier, after the planes of
// the tiers.

// Planes of marks. The first NumTiers are the tiers, the next are the tiers of each rank's first window, and so on.
const (
	maxPlanes  = 32
	planeKnown = maxPlanes // see ends.go
	planeWatch = maxPlanes + 1
	maxWindows = maxPlanes/events.NumTiers - 1
)

// reuse determines the usable part of a rank's prefix. It is immutable after publication.
type reuse struct {
	// required blocks after the end of a prefix: 1 if a draft model drops the last block
	drop    uint32
	most    uint32 // the largest drop of the main groups and all windows
	windows []window
	unknown bool // some group has unknown needs: the usable prefix may be shorter
}

// window has the equal needs of some groups.
type window struct {
	kind   events.GroupKind    // the first group, for operators
	groups []events.GroupIndex // all groups
	plane  int                 // plane of the marks in device; the other tiers follow
	drop   uint32              // as in reuse
	size   uint32              // tokens of a chunk, or 0
	block  uint32              // tokens of a block
	chunk  uint32              // blocks of a chunk, if a chunk has whole blocks and drop is 0; otherwise 0
	need   uint32              // required blocks before the end of a prefix, without chunks
}

// from returns the first block that a prefix of n blocks needs.
func (w *window) from(n uint32) uint32 {
	if w.chunk > 0 {
		return n - n%w.chunk
	}
	if w.size > 0 {
		return uint32(uint64(n) * uint64(w.block) / uint64(w.size) * uint64(w.size) / uint64(w.block))
	}
	return n - min(n, w.need)
}

// reuseOf returns the needs of groups, or nil.
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
			w.need, w.drop = 1, 0 // the state exists at the very end, or not
		case g.Kind.Windowed() && g.Window == 0, g.Kind == events.AttentionOther:
			u.unknown = true
			continue
		case g.Kind == events.AttentionChunkedLocal:
			w.size = g.Window
		case g.Kind.Windowed():
			w.need = max(1, uint32((uint64(g.Window)+uint64(w.block)-2)/uint64(w.block)))
		default: // encoder groups do not affect the prefix
			continue
		}
		at := slices.IndexFunc(u.windows, func(o window) bool {
			return o.kind.Kind == g.Kind &&
				o.kind.Window == g.Window
		})
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
	for i := range u.windows {
		w := &u.windows[i]
		u.most = max(u.most, w.drop)
		if w.drop == 0 && w.size%w.block == 0 {
			w.chunk = w.size / w.block
		}
	}
	if u.drop == 0 && len(u.windows) == 0 && !u.unknown {
		return nil
	}
	return u
}

// cuts reports whether any rule shortens a prefix.
func (u *reuse) cuts() bool { return u != nil && (u.drop > 0 || len(u.windows) > 0) }

// chunk returns the number of blocks in a chunk if a prefix needs only its last chunk, or 0.
func (u *reuse) chunk() uint32 {
	if u.most == 0 && len(u.windows) == 1 {
		return u.windows[0].chunk
	}
	return 0
}

// window returns the window of a group, or nil.
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

// learnReuse publishes the needs of a rank's groups and marks its windows again. Readers do not see the rank meanwhile.
func (x *Index) learnReuse(r *rank) {
	u := reuseOf(r.groups, r.block)
	if u == nil && r.reuse == nil {
		return
	}
	x.hidden.Store(hiding | uint64(r.slot())<<8 | (1<<events.NumTiers - 1))
	defer x.hidden.Store(0)
	x.forgetRank(r)
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
		} else if v.ends == nil {
			v.ends = make([]part, len(v.nodes))
			v.masks[planeKnown] = make([]uint64, len(v.nodes)*v.stride)
			v.masks[planeWatch] = make([]uint64, len(v.nodes)*v.stride)
		}
	})
	x.markWindows(r)
	x.showRank(r)
}

// kind has the ranks with equal limits.
type kind struct {
	*reuse
	ranks []uint64 // by slot
}

// kindsOf groups ranks with equal limits. Their group numbers may differ, because they are only for operators.
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

// equal reports whether two ranks have equal limits.
func (u *reuse) equal(o *reuse) bool {
	return u.drop == o.drop && slices.EqualFunc(u.windows, o.windows, func(a, b window) bool {
		return a.plane == b.plane && a.drop == b.drop && a.size == b.size && a.block == b.block && a.need == b.need
	})
}

// Bounded reports whether the depths of a rank are upper bounds, because a group has unknown needs. The writer calls
// it.
func (x *Index) Bounded(id RankID) bool {
	r := x.rank(id)
	return r.reuse != nil && r.reuse.unknown
}

// spot is a block whose window marks may have to change, with an optional name. A rank with exact counts has its names
// there.
type spot struct {
	block uint32
	name  events.BlockHash
	named bool
}

// heldPlace returns the block that a rank holds under a name.
func (x *Index) heldPlace(r *rank, name events.BlockHash) (uint32, bool) {
	if r.naming == namesExact {
		if n := r.exact.names[name]; n != nil {
			return n.block, true
		}
		return 0, false
	}
	ref, _, ok := x.names.find(uint64(name), x.names.hash(uint64(name), r.owner()), r.owner())
	b, _, _ := x.names.at(ref)
	return b, ok && (r.naming == namesOwn || x.holdsAny(r.slot(), b))
}

// wanted reports whether a block counts for a window in a tier.
func (r *rank) wanted(w *window, tier events.Tier, s spot) bool {
	if r.naming == namesExact {
		return slices.ContainsFunc(r.exact.at[s.block],
			func(name events.BlockHash) bool { return r.complete(w, tier, name) })
	}
	return s.named && r.complete(w, tier, s.name)
}

// complete reports whether all groups of a window have a copy in a tier under a name.
func (r *rank) complete(w *window, tier events.Tier, name events.BlockHash) bool {
	for _, g := range w.groups {
		if r.sets[copyKey{tier, g, name}] == 0 {
			return false
		}
	}
	return true
}

// settleWindow updates a window's marks at some blocks in a tier. Marks appear from the last block of a path to the
// first, and disappear from the first to the last, like the marks of the prefix.
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
		x.useTier(int(tier) - 1) // blocks that only windows have in the tier also make prefixes longer
		x.useTier(plane)
		slices.Sort(on)
		on = slices.Compact(on)
		for end := len(on); end > 0; {
			id, lo, hi := x.run(on, end, -1)
			x.lock(id)
			x.mark(id, lo, hi, r, plane, nil)
			x.unlock(id)
			end -= int(hi - lo)
		}
	}
	slices.Sort(off)
	off = slices.Compact(off)
	for at := 0; at < len(off); {
		id, lo, hi := x.run(off, at, 1)
		x.lock(id)
		x.unmark(id, lo, hi, r, plane)
		x.unlock(id)
		at += int(hi - lo)
	}
}

// windowOf returns the window of a part's plane. It returns nil without a window and for a window with chunks.
func (x *Index) windowOf(p *part) *window {
	if plane := planeOf(p.key); plane >= events.NumTiers {
		if w := &x.slots[slotOf(p.key)].reuse.windows[plane/events.NumTiers-1]; w.size == 0 {
			return w
		}
	}
	return nil
}

// fitOf returns the values fit and from of a part, for the blocks below top.
func (x *Index) fitOf(p *part, n *node, top uint32) (fit, from uint32) {
	if w := x.windowOf(p); w != nil {
		return x.v.fitBelow([]*part{p}, w, n.depth, top)
	}
	return 0, 0
}

// fitAdded updates fit and from after the addition of blocks from lo on to a part.
func (x *Index) fitAdded(p *part, n *node, lo uint32) {
	w := x.windowOf(p)
	if w == nil {
		return
	}
	end := lo + x.v.run(p, lo, n.len)
	switch {
	case end < p.fit+w.drop:
	case p.fit > 0 && lo >= p.from && lo <= p.fit+w.drop: // the run has become longer
		put32(&p.fit, end-w.drop)
	default:
		if fit, from := x.v.fitBelow([]*part{p}, w, n.depth, end); fit >= p.fit {
			put32(&p.fit, fit)
			put32(&p.from, from)
		}
	}
}

// fitRemoved updates them after the removal of blocks from lo up to hi.
func (x *Index) fitRemoved(p *part, n *node, lo, hi uint32) {
	w := x.windowOf(p)
	switch {
	case w == nil || lo >= p.fit+w.drop || hi <= p.from:
	case hi <= w.from(n.depth+p.fit)-n.depth:
		put32(&p.from, hi)
	default:
		fit, from := x.fitOf(p, n, lo)
		put32(&p.fit, fit)
		put32(&p.from, from)
	}
}

// run returns the longest run of consecutive blocks of a node in a sorted list. The run ends before position at (step
// -1) or begins there (step 1).
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

// settleWindows updates all windows, in every tier.
func (x *Index) settleWindows(r *rank, spots []spot) {
	for i := range r.reuse.windows {
		for t := events.Device; t <= events.External; t++ {
			x.settleWindow(r, &r.reuse.windows[i], t, spots)
		}
	}
}

// settlePlaced updates the windows at the first n blocks of the current event, which were just placed.
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

// storedBeside adds the copies of an event with a group outside of the prefix.
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

// removedBeside removes such copies.
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

// markWindows marks all windows of a rank without marks.
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

// clearWindows removes the marks of a rank's windows for a clear of some tiers: all marks in these tiers, and in other
// tiers the marks of names that the rank holds only in cleared tiers. Readers must not see the rank in these tiers.
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
				x.lock(id)
				for off := range x.v.nodes[id].len {
					if x.v.holds(id, off, plane, r.slot()) &&
						(tiers>>t&1 != 0 || !x.outlives(r, &r.reuse.windows[i], events.Tier(t+1), id, off, tiers)) {
						x.unmark(id, off, off+1, r, plane)
					}
				}
				x.unlock(id)
			}
		}
	}
}

// outlives reports whether a block still counts for a window in a tier after a clear of other tiers, because the rank
// holds the name in yet another tier.
func (x *Index) outlives(r *rank, w *window, tier events.Tier, id, off uint32, tiers TierSet) bool {
	if r.naming == namesExact {
		return slices.ContainsFunc(r.exact.at[x.v.nodes[id].start+off], func(name events.BlockHash) bool {
			return r.complete(w, tier, name) &&
				slices.ContainsFunc(r.exact.names[name].copies, func(c tierCopies) bool { return !tiers.Has(c.tier) })
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
