package radix

import (
	"cmp"
	"slices"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Apply applies events of a rank that reached the log at now. If now goes back, the clock stands still. Apply keeps
// none of the slices. evs ends with the last event of an engine's message. The removals of these events stay remembered
// until all of them are applied, also beyond MaxTombstones.
func (x *Index) Apply(id RankID, now events.Millis, evs []events.Event) (c Counts) {
	x.naming.Lock()
	defer x.naming.Unlock()
	r, last := x.rank(id), len(evs)
	for last > 0 && evs[last-1].Kind != events.Stored {
		last--
	}
	x.change(r, now, evs[:last], &c)
	x.trims = true // no later event of the message can refer to a removal from here on
	x.change(r, now, evs[last:], &c)
	x.trims = false
	if r.evicts {
		r.evicts, r.full = false, max(r.full, r.held[device])
	}
	x.trim(r)
	x.resolveEnds(mostQueued)
	return c
}

// ApplyPart is Apply for events of a message that continues in another call. A list in parts, with the same times and
// with Apply for the last part, has the same result as the whole list.
func (x *Index) ApplyPart(id RankID, now events.Millis, evs []events.Event) (c Counts) {
	x.naming.Lock()
	defer x.naming.Unlock()
	x.change(x.rank(id), now, evs, &c)
	x.resolveEnds(mostQueued)
	return c
}

// trim deletes the oldest tombstones beyond MaxTombstones, and frees their memory. rememberLost bounds the tombstones
// within an event that ends a message.
func (x *Index) trim(r *rank) {
	if over := r.tombstones.len() - x.cfg.MaxTombstones; over > 0 {
		x.touchRank(r)
		x.forgetOldest(r, uint32(over))
	}
	r.tombstones.shrink(&x.spare, x.cfg.MaxTombstones)
}

// forgetOldest deletes the oldest tombstones of a rank.
func (x *Index) forgetOldest(r *rank, n uint32) {
	m, u, sum := &r.tombstones, unpins{x: x}, uint32(0)
	for i := range n {
		if i%group == 0 { // lets the processor prefetch the slabs together
			for j := i; j < min(i+group, n); j++ {
				sum += x.slabs.s[m.at(m.first+j-i).block/slabBlocks].pins
			}
		}
		u.add(m.shift().block)
	}
	x.touched = uint64(sum)
	u.done()
}

// change is Apply without the update of unknown ends.
func (x *Index) change(r *rank, now events.Millis, evs []events.Event, c *Counts) {
	x.touchRank(r)
	r.clock = max(r.clock, now)
	x.expire(r, c)
	for i := range evs {
		x.passing.letPass()
		e := &evs[i]
		switch {
		case e.Kind == events.Stored && e.Tier.Valid() && wellFormed(e):
			x.stored(r, e, c)
		case e.Kind == events.Removed && e.Tier.Valid():
			x.removed(r, e, c)
		case e.Kind == events.Cleared && (e.Tier == events.AllTiers || e.Tier.Valid()):
			x.clear(r, e.Tier, c)
		default:
			c.Malformed++
		}
	}
}

// wellFormed reports whether the numbers of a stored event's names and local hashes match.
func wellFormed(e *events.Event) bool {
	if e.Own {
		return len(e.Blocks) == 1 && len(e.Locals) > 0 && len(e.Locals) == int(e.Chunk)
	}
	return len(e.Locals) == 0 || len(e.Locals) == len(e.Blocks)
}

// expire drops expired pending events and tombstones.
func (x *Index) expire(r *rank, c *Counts) {
	if x.cfg.PendingFor > 0 {
		for w := r.pending.oldest(); w != nil && w.since+x.cfg.PendingFor <= r.clock; w = r.pending.oldest() {
			c.Expired += uint64(w.left)
			r.pending.remove(w)
		}
	}
	for r.tombstones.len() > 0 && r.tombstones.at(r.tombstones.first).since+x.cfg.TombstoneFor <= r.clock {
		x.unpin(r.tombstones.shift().block)
	}
}

// recordGroup records the kind of a group. accepted reports whether the event may be applied, main whether the group is
// a main group.
func (x *Index) recordGroup(r *rank, e *events.Event, c *Counts) (accepted, main bool) {
	i, ok := slices.BinarySearchFunc(r.groups, e.Group, func(g events.GroupKind, to events.GroupIndex) int {
		return int(int64(g.Group) - int64(to))
	})
	if !ok {
		r.groups = slices.Insert(r.groups, i, events.GroupKind{Group: e.Group, Kind: e.Attention, Window: e.Window,
			Drops: e.Drops})
		if e.Attention.Main() {
			x.mainGroup(r, e.Group)
		}
		if e.Drops || e.Window > 0 || !e.Attention.Main() {
			x.learnReuse(r)
		}
		return true, e.Attention.Main()
	}
	g := &r.groups[i]
	switch {
	case e.Attention == events.AttentionUnknown:
	case e.Attention.Main() != g.Kind.Main():
		c.KindConflicts += uint64(len(e.Blocks))
		return false, false
	case g.Kind == events.AttentionUnknown:
		g.Kind = e.Attention
	}
	if e.Window > 0 && g.Window == 0 || e.Drops && !g.Drops {
		g.Window, g.Drops = cmp.Or(g.Window, e.Window), g.Drops || e.Drops
		x.learnReuse(r)
	}
	return true, g.Kind.Main()
}

// mainGroup records a further main group of a rank. A rank with two or more main groups needs exact counts.
func (x *Index) mainGroup(r *rank, g events.GroupIndex) {
	switch {
	case !r.hasGroup:
		r.group, r.hasGroup = g, true
	case g == r.group && r.naming != namesExact:
	case r.naming != namesExact:
		x.countExactly(r)
	}
	if r.naming == namesExact {
		x.showAll(r)
	}
}

// main reports whether a group is part of the prefix. An unknown group is.
func (r *rank) main(group events.GroupIndex) bool {
	for _, g := range r.groups {
		if g.Group == group {
			return g.Kind.Main()
		}
	}
	return true
}

func (x *Index) stored(r *rank, e *events.Event, c *Counts) {
	if e.Attention == events.AttentionUnknown && len(e.Locals) == 0 && !e.Own && !r.announced(e.Group) {
		x.waitForKind(r, e, c)
		return
	}
	known := len(r.groups)
	accepted, main := x.recordGroup(r, e, c)
	if len(r.groups) > known && r.pending.len() > 0 {
		x.kindLearned(r, e.Group, main, c)
	}
	switch {
	case !accepted:
		return
	case !main:
		x.storedBeside(r, e, c)
		return
	case len(e.Blocks) == 0:
		return
	}
	if len(e.Blocks) <= few && r.naming != namesExact { // prefetch during the search for the place
		x.names.prefetch(x.hashAll(r.owner(), e.Blocks))
	}
	switch {
	case e.Own:
		x.storedOwn(r, e, c)
	case len(e.Locals) == 0:
		for i := range e.Blocks {
			one := *e
			one.Blocks, one.HasParent, one.Parent = e.Blocks[i:i+1], false, 0
			x.placeOrWait(r, &one, c)
		}
	default:
		x.placeOrWait(r, e, c)
	}
	for r.pending.len() > 0 {
		w := r.pending.nextReady(func(e *events.Event) bool {
			if e.Own {
				_, _, ok := x.ownPlace(r, e)
				return ok
			}
			_, ok := x.known(r, wants(e))
			return ok && r.announced(e.Group)
		})
		if w == nil {
			break
		}
		c.Attached += uint64(w.left)
		if w.event.Own {
			block, byContent, _ := x.ownPlace(r, &w.event)
			x.placeOwn(r, &w.event, block, byContent, c)
			continue
		}
		block, _ := x.known(r, wants(&w.event))
		x.place(r, &w.event, block, w.cancelled, c)
	}
}

func (x *Index) placeOrWait(r *rank, e *events.Event, c *Counts) {
	if len(e.Locals) > 0 && !e.HasParent {
		x.place(r, e, 0, nil, c)
		return
	}
	if block, ok := x.known(r, wants(e)); ok {
		x.place(r, e, block, nil, c)
		return
	}
	x.wait(r, e, c)
}

// wait adds an event to the pending events.
func (x *Index) wait(r *rank, e *events.Event, c *Counts) {
	r.pending.add(r.clock, e, nil)
	c.Pending += uint64(len(e.Blocks))
	x.boundPending(r, c)
}

// announced reports whether a stored event has announced a group's kind, or that it is a main group.
func (r *rank) announced(group events.GroupIndex) bool {
	return slices.ContainsFunc(r.groups, func(g events.GroupKind) bool { return g.Group == group })
}

// waitForKind keeps names of a group pending until another event announces the group's kind. Engines announce copies in
// host memory by name alone. Such an event must not make a state group a main group, because each block would then need
// a copy in the group.
func (x *Index) waitForKind(r *rank, e *events.Event, c *Counts) {
	for i := range e.Blocks {
		one := *e
		one.Blocks, one.HasParent, one.Parent = e.Blocks[i:i+1], false, 0
		x.wait(r, &one, c)
	}
}

// kindLearned places the pending events of a group with a known kind.
func (x *Index) kindLearned(r *rank, group events.GroupIndex, main bool, c *Counts) {
	for _, w := range r.pending.all() {
		switch {
		case w.event.Group != group:
		case main:
			r.pending.named(wants(&w.event))
		default:
			r.pending.remove(w)
			c.Attached++
			x.storedBeside(r, &w.event, c)
		}
	}
}

// boundPending drops the oldest pending events of a rank beyond the limits.
func (x *Index) boundPending(r *rank, c *Counts) {
	for r.pending.blocks > x.cfg.MaxPending || r.pending.bytes() > x.cfg.MaxPendingBytes {
		w := r.pending.oldest()
		c.Overflowed += uint64(w.left)
		r.pending.remove(w)
	}
}

// seg is a range of an event's blocks within a node.
type seg struct {
	node, off, n uint32
	block        uint32 // position of the blocks in the arena
	first        int    // position of the first block in the event
	fresh        bool   // walk created the blocks
	grows        bool   // the blocks are appended to the node after the event
}

// place adds the blocks of an event with a known place to the rank, except the cancelled blocks. at is the parent block
// (0: the blocks start a prompt), or the block itself if the event has no local hashes.
//
// The function first finds or creates all places and enters all names. It then marks the rank as a holder, from the
// last node to the first. A reader goes from the first to the last, so a reader sees the whole event or nothing of it.
func (x *Index) place(r *rank, e *events.Event, at uint32, cancelled []bool, c *Counts) {
	n, taken, v := len(e.Blocks), 0, named
	x.useTier(int(e.Tier) - 1)
	for again := true; again; {
		if len(e.Locals) == 0 {
			id, nd := x.where(at)
			x.segs = append(x.segs[:0], seg{node: id, off: at - nd.start, n: 1, block: at})
		} else {
			x.walk(r.space, r.slot(), 0, at, e.Locals)
		}
		taken, v = x.enterNames(r, e, cancelled, c)
		if again = v >= diverged; again {
			x.abandon()
			x.contradict(r, v)
		}
	}
	if v == conflicted {
		for i := taken; i < n; i++ {
			if cancelled == nil || !cancelled[i] {
				c.Conflicts++
			}
		}
	}
	if r.naming == namesExact {
		x.showBlocks(r, taken)
	} else {
		x.markStored(r, e, cancelled, taken, c)
	}
	x.settlePlaced(r, e, cancelled, taken)
	if r.pending.len() > 0 {
		for i, name := range e.Blocks[:taken] {
			if cancelled == nil || !cancelled[i] {
				r.pending.named(name)
			}
		}
		if len(r.pending.content) > 0 && e.Places() {
			r.pending.announced(e.Locals[:taken])
		}
	}
	if e.Chunk > 0 && taken > 0 {
		x.learnLoading(r, e, at, e.Own)
	}
	if last := x.segs[len(x.segs)-1]; v == conflicted || cancelled != nil {
		x.reclaim(last.node)
	}
}

// enterNames enters the names of an event's blocks in x.segs. It stops at the first block with copies at another place
// and returns the number of blocks before. If the rank needs another naming, it undoes the changes.
func (x *Index) enterNames(r *rank, e *events.Event, cancelled []bool, c *Counts) (n int, v verdict) {
	if r.naming == namesExact {
		return x.enter(r, e, cancelled, c)
	}
	if n, v = x.nameBlocks(r, e, cancelled); v >= diverged {
		x.unnameBlocks(r, e, cancelled, n)
	}
	return n, v
}

// contradict switches a rank to the naming that a verdict requires.
func (x *Index) contradict(r *rank, v verdict) {
	if v == diverged {
		x.diverge(r)
	} else {
		x.countExactly(r)
	}
}

// markStored marks a rank without exact counts as a holder of an event's first n blocks.
func (x *Index) markStored(r *rank, e *events.Event, cancelled []bool, n int, c *Counts) {
	tier := int(e.Tier) - 1
	stored := uint32(0)
	again := func(block uint32) {
		x.again(r, tier, block, 1)
		c.Duplicates++
	}
	for si := len(x.segs) - 1; si >= 0; si-- {
		s := &x.segs[si]
		take := uint32(min(max(0, n-s.first), int(s.n)))
		if s.grows && take < s.n {
			x.unclaim(s, take)
		}
		if take == 0 {
			continue
		}
		x.lock(s.node)
		switch {
		case s.grows && cancelled == nil && x.v.full(s.node, tier, r.slot()):
			x.extend(s.node, take, r, tier)
			stored += take
		default:
			if s.grows {
				x.extend(s.node, take, nil, 0)
			}
			if cancelled == nil {
				stored += x.mark(s.node, s.off, s.off+take, r, tier, again)
				break
			}
			for j := uint32(0); j < take; j++ {
				if !cancelled[s.first+int(j)] {
					stored += x.mark(s.node, s.off+j, s.off+j+1, r, tier, again)
				}
			}
		}
		x.unlock(s.node)
	}
	c.Stored += uint64(stored)
	r.held[tier] += int64(stored)
}

// noSlot is a slot without a rank.
const noSlot = 1<<32 - 1

// walk finds the places of blocks after block at (0: start of a prompt), creates missing places, and stores them in
// x.segs. A leaf grows in place only if slot is the only rank that holds all of it. wish is the preferred id of the
// first new node.
func (x *Index) walk(space, slot, wish, at uint32, blocks []events.LocalHash) {
	x.segs = x.segs[:0]
	locals := unsafe.Slice((*uint64)(unsafe.SliceData(blocks)), len(blocks))
	id, off := x.v.root(space), uint32(0)
	if at != 0 {
		var n *node
		id, n = x.where(at)
		off = at - n.start + 1
	}
	for i := 0; i < len(locals); {
		n := &x.v.nodes[id]
		rest := uint32(len(locals) - i)
		if off < n.len {
			k := uint32(sameRun(x.v.locals[n.start+off:n.start+n.len], locals[i:i+int(min(rest, n.len-off))]))
			if k > 0 {
				x.segs = append(x.segs, seg{node: id, off: off, n: k, block: n.start + off, first: i})
				i, off = i+int(k), off+k
			}
			if i < len(locals) && off < n.len {
				head := x.split(id, off)
				if k > 0 {
					x.segs[len(x.segs)-1].node = head
				}
				id = head
			}
			continue
		}
		if n.children > 0 {
			if _, c := x.v.edge(id, locals[i]); c != 0 {
				id, off = c, 0
				continue
			}
		} else if n.parent != 0 && slot != noSlot && x.onlyHolder(id, slot) && x.claim(id, rest) {
			n = &x.v.nodes[id]
			s := seg{node: id, off: n.len, n: rest, block: n.start + n.len, first: i, fresh: true, grows: true}
			x.write(s.block, locals[i:])
			x.segs = append(x.segs, s)
			return
		}
		first, slabs := x.allocate((rest + slabBlocks - 1) / slabBlocks)
		k := min(rest, slabs*slabBlocks)
		child := x.newNode(wish, node{parent: id, start: first * slabBlocks, len: k,
			depth: x.v.nodes[id].depth + x.v.nodes[id].len})
		for g := first; g < first+slabs; g++ {
			x.slabs.s[g].node = child
		}
		x.write(first*slabBlocks, locals[i:i+int(k)])
		x.lock(id)
		x.link(id, child)
		x.unlock(id)
		x.segs = append(x.segs, seg{node: child, n: k, block: first * slabBlocks, first: i, fresh: true})
		id, off, i, wish = child, k, i+int(k), 0
	}
}

func (x *Index) write(block uint32, locals []uint64) {
	to := x.v.locals[block : int(block)+len(locals)]
	for i, l := range locals {
		put64(&to[i], l)
	}
}

// unclaim returns the unused part of a growing range. The first take blocks stay.
func (x *Index) unclaim(s *seg, take uint32) {
	x.freeSlabs((s.block+take+slabBlocks-1)/slabBlocks, (s.block+s.n+slabBlocks-1)/slabBlocks)
}

// abandon undoes walk for an event that will be walked again.
func (x *Index) abandon() {
	for si := len(x.segs) - 1; si >= 0; si-- {
		s := &x.segs[si]
		if s.grows {
			x.unclaim(s, 0)
		}
		if s.fresh {
			x.reclaim(s.node)
		}
	}
}

// clear clears a tier or all tiers. With all tiers, the rank becomes new, except for the clock.
func (x *Index) clear(r *rank, tier events.Tier, c *Counts) {
	tiers := TierSet(1<<events.NumTiers - 1)
	if tier != events.AllTiers {
		tiers = 1 << (tier - 1)
	}
	x.hidden.Store(hiding | uint64(r.slot())<<8 | uint64(tiers))
	x.forgetRank(r)
	x.clearWindows(r, tiers)
	if r.naming == namesExact {
		x.clearExact(r, tiers, c)
	} else {
		x.clearMarks(r, tiers, c)
	}
	x.showRank(r)
	x.hidden.Store(0)
	for k, n := range r.sets {
		if tiers.Has(k.tier) {
			c.OtherRemoved += uint64(n)
			delete(r.sets, k)
		}
	}
	for _, w := range r.pending.all() {
		if tiers.Has(w.event.Tier) {
			c.ClearedWaiting += uint64(w.left)
			r.pending.remove(w)
		}
	}
	if tier == events.AllTiers {
		for r.tombstones.len() > 0 {
			x.unpin(r.tombstones.shift().block)
		}
		x.fresh(r)
	}
	x.tidy(r)
}

// fresh resets an empty rank, except for the clock. A rank with its own names keeps them, because it probably uses them
// again.
func (x *Index) fresh(r *rank) {
	r.groups = nil
	x.learnReuse(r)
	x.setLoading(r, events.Loading{})
	*r = rank{id: r.id, space: r.space, block: r.block, clock: r.clock, naming: r.naming}
	if r.naming == namesExact {
		x.exactRanks--
		r.naming = namesOwn
	}
}

// clearMarks clears tiers of a rank without exact counts.
func (x *Index) clearMarks(r *rank, tiers TierSet, c *Counts) {
	x.tidy(r)
	all := true
	tiers.each(func(t int) {
		c.Cleared += uint64(r.held[t]) + r.extra[t].total
	})
	for t := range r.held {
		all = all && (tiers>>t&1 != 0 || r.held[t] == 0)
	}
	nodes := slices.Clone(r.nodes)
	for _, id := range nodes {
		x.lock(id)
		tiers.each(func(t int) {
			if x.v.masks[t] != nil {
				x.unmarkAll(r, id, t)
			}
		})
		x.unlock(id)
	}
	if r.naming == namesOwn {
		x.dropOwn(r, nodes, all)
	}
	tiers.each(func(t int) { r.held[t], r.extra[t] = 0, countMap{} })
	for _, id := range nodes {
		x.reclaim(id)
	}
}

// unmarkAll removes all that a rank holds of an open node in a tier.
func (x *Index) unmarkAll(r *rank, id uint32, tier int) {
	n := x.v.nodes[id]
	if x.v.full(id, tier, r.slot()) {
		x.setFull(id, tier, r.slot(), false)
		if r.naming == namesShared {
			x.forget(id, 0, n.len)
		}
		return
	}
	if p := x.v.part(id, keyOf(r.slot(), tier)); p != nil {
		far := p.lead
		if p.bits != 0 {
			far = min(n.len, p.words<<6)
		}
		x.dropPart(id, p)
		if r.naming == namesShared {
			x.forget(id, 0, far)
		}
	}
}
