package radix

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// exact counts the copies of a rank separately by name, tier and group. Ranks with several main groups, or with two
// names for a block, need exact counts. A holding costs some 100 bytes and a microsecond, in place of 20 bytes and a
// hundredth of a microsecond.
type exact struct {
	names map[events.BlockHash]*exactName
	at    map[uint32][]events.BlockHash // names by block, in order of arrival
	held  map[heldKey]uint32            // the same copies, by place
}

type heldKey struct {
	tier  events.Tier
	group events.GroupIndex
	block uint32
}

// exactName has the place and the copies of a name. The block is pinned.
type exactName struct {
	block  uint32
	copies []tierCopies
}

type tierCopies struct {
	tier  events.Tier
	group events.GroupIndex
	n     uint32
}

func (l *exact) tierHeld(block uint32, tier events.Tier, groups []events.GroupKind) bool {
	for _, g := range groups {
		if g.Kind.Main() && l.held[heldKey{tier, g.Group, block}] > 0 {
			return true
		}
	}
	return false
}

// name returns the name of a block's copy in the first tier; of several names, the oldest.
func (l *exact) name(block uint32) (first events.BlockHash, ok bool) {
	least := events.Tier(events.NumTiers + 1)
	for _, name := range l.at[block] {
		for _, c := range l.names[name].copies {
			if c.n > 0 && c.tier < least {
				first, least = name, c.tier
			}
		}
	}
	return first, least <= events.NumTiers
}

// totals returns the copies of each block in each tier, over all groups.
func (l *exact) totals() map[heldKey]uint32 {
	total := map[heldKey]uint32{}
	for k, n := range l.held {
		total[heldKey{tier: k.tier, block: k.block}] += n
	}
	return total
}

// countExactly switches a rank to exact counts.
func (x *Index) countExactly(r *rank) {
	l := &exact{names: map[events.BlockHash]*exactName{}, at: map[uint32][]events.BlockHash{},
		held: map[heldKey]uint32{}}
	slot := r.slot()
	var own map[uint32]uint64
	if r.naming == namesOwn {
		own = map[uint32]uint64{}
		x.tidy(r)
		x.eachOwn(r, r.nodes, func(name uint64, block, _ uint32) { own[block] = name })
	} else {
		x.sharedMask[slot>>6] &^= 1 << (slot & 63)
	}
	x.eachHeld(r, func(block uint32, tiers TierSet) {
		name, ok := own[block]
		if !ok {
			var ref uint32
			name, ref, _ = x.sharedName(block)
			if !x.sharedHolder(block) {
				x.drop(x.names.hash(name, sharedOwner), ref)
			}
		}
		n := &exactName{block: block}
		x.pin(block)
		l.names[events.BlockHash(name)] = n
		l.at[block] = []events.BlockHash{events.BlockHash(name)}
		tiers.each(func(t int) {
			copies := 1 + r.extra[t].get(block)
			n.copies = append(n.copies, tierCopies{events.Tier(t + 1), r.group, copies})
			l.held[heldKey{events.Tier(t + 1), r.group, block}] = copies
		})
	})
	x.dropNow()
	if r.naming == namesOwn {
		x.dropOwn(r, r.nodes, true)
	}
	x.exactRanks++
	r.naming, r.exact, r.extra = namesExact, l, [events.NumTiers]countMap{}
}

// enter enters the blocks of an event into a rank's exact counts, up to the first name with copies at another
// place.
func (x *Index) enter(r *rank, e *events.Event, cancelled []bool, c *Counts) (n int, v verdict) {
	l := r.exact
	if s := &x.segs[len(x.segs)-1]; s.grows {
		x.lock(s.node)
		x.extend(s.node, s.n, nil, 0)
		x.unlock(s.node)
		s.grows = false
	}
	for si := range x.segs {
		s := &x.segs[si]
		x.touch(s.node)
		for j := range s.n {
			i := s.first + int(j)
			if cancelled != nil && cancelled[i] {
				continue
			}
			if m := l.names[e.Blocks[i]]; m != nil && m.block != s.block+j {
				return i, conflicted
			}
			if x.addExact(r, s.block+j, e.Blocks[i], e.Tier, e.Group, 1) {
				c.Stored++
			} else {
				c.Duplicates++
			}
		}
	}
	return len(e.Blocks), named
}

// addExact adds copies of a name without copies at another place. It reports whether they are the first of their kind.
func (x *Index) addExact(r *rank, block uint32, name events.BlockHash, tier events.Tier, group events.GroupIndex,
	copies uint32) bool {
	l := r.exact
	n := l.names[name]
	if n == nil {
		n = &exactName{block: block}
		l.names[name] = n
		l.at[block] = append(l.at[block], name)
		x.pin(block)
	}
	if !l.tierHeld(block, tier, r.groups) {
		r.held[tier-1]++
	}
	l.held[heldKey{tier, group, block}] += copies
	if i := slices.IndexFunc(n.copies, func(t tierCopies) bool { return t.tier == tier && t.group == group }); i >= 0 {
		n.copies[i].n += copies
		return false
	}
	n.copies = append(n.copies, tierCopies{tier, group, copies})
	return true
}

// subExact subtracts copies of a kind from a name, and deletes a name without copies.
func (x *Index) subExact(r *rank, name events.BlockHash, n *exactName, i int, copies uint32) {
	l, t := r.exact, n.copies[i]
	k := heldKey{t.tier, t.group, n.block}
	if l.held[k] -= copies; l.held[k] == 0 {
		delete(l.held, k)
	}
	if !l.tierHeld(n.block, t.tier, r.groups) {
		r.held[t.tier-1]--
	}
	if n.copies[i].n -= copies; n.copies[i].n == 0 {
		n.copies = slices.Delete(n.copies, i, i+1)
	}
	if len(n.copies) == 0 {
		delete(l.names, name)
		at := l.at[n.block]
		if at = slices.DeleteFunc(at, func(o events.BlockHash) bool { return o == name }); len(at) > 0 {
			l.at[n.block] = at
		} else {
			delete(l.at, n.block)
		}
	}
}

// removeExact removes copies. The marks of the blocks go from the first of a path to the last.
func (x *Index) removeExact(r *rank, e *events.Event, c *Counts) {
	type left struct {
		name  events.BlockHash
		block uint32
		depth uint32
		gone  bool // the name has no copies left
	}
	var q []left
	for _, name := range e.Blocks {
		n := r.exact.names[name]
		i := -1
		if n != nil {
			i = slices.IndexFunc(n.copies, func(t tierCopies) bool { return t.tier == e.Tier && t.group == e.Group })
		}
		if i < 0 {
			r.notHeld(e, name, c)
			continue
		}
		id, nd := x.where(n.block)
		x.touch(id)
		x.subExact(r, name, n, i, 1)
		c.Removed++
		q = append(q, left{name, n.block, nd.depth + n.block - nd.start, len(n.copies) == 0})
	}
	byDepth := slices.Clone(q)
	slices.SortFunc(byDepth, func(a, b left) int { return cmp.Compare(a.depth, b.depth) })
	for _, l := range byDepth {
		id, nd := x.where(l.block)
		x.show(r, id, l.block-nd.start)
	}
	if r.reuse != nil {
		x.spots = x.spots[:0]
		for _, l := range q {
			if l.gone {
				x.spots = append(x.spots, spot{block: l.block})
			}
		}
		x.settleWindows(r, x.spots)
	}
	for _, l := range q {
		if l.gone {
			x.remember(r, r.clock, l.name, l.block) // the block stays pinned for the name
		}
	}
}

// show updates the marks of a block from a rank's exact counts. A block is held in a tier if every main group holds it.
func (x *Index) show(r *rank, id, off uint32) {
	block := x.v.nodes[id].start + off
	for t := range events.NumTiers {
		if x.v.masks[t] == nil {
			continue
		}
		want := false
		for _, g := range r.groups {
			if g.Kind.Main() {
				if want = r.exact.held[heldKey{events.Tier(t + 1), g.Group, block}] > 0; !want {
					break
				}
			}
		}
		if want == x.v.holds(id, off, t, r.slot()) {
			continue
		}
		x.lock(id)
		if want {
			x.mark(id, off, off+1, r, t, nil)
		} else {
			x.unmark(id, off, off+1, r, t)
		}
		x.unlock(id)
	}
}

// showBlocks calls show for the first n blocks of the current event, last block first.
func (x *Index) showBlocks(r *rank, n int) {
	for si := len(x.segs) - 1; si >= 0; si-- {
		s := &x.segs[si]
		for j := int(s.n) - 1; j >= 0; j-- {
			if s.first+j < n {
				x.show(r, s.node, s.off+uint32(j))
			}
		}
	}
}

// showAll calls show for all blocks of a rank with exact counts. Readers do not see the rank meanwhile.
func (x *Index) showAll(r *rank) {
	x.hidden.Store(hiding | uint64(r.slot())<<8 | (1<<events.NumTiers - 1))
	defer x.hidden.Store(0)
	for _, n := range r.exact.names {
		id, nd := x.where(n.block)
		x.show(r, id, n.block-nd.start)
	}
}

// clearExact clears tiers of a rank with exact counts.
func (x *Index) clearExact(r *rank, tiers TierSet, c *Counts) {
	for name, n := range r.exact.names {
		id, nd := x.where(n.block)
		x.touch(id)
		for i := len(n.copies) - 1; i >= 0; i-- {
			if tiers.Has(n.copies[i].tier) {
				c.Cleared += uint64(n.copies[i].n)
				x.subExact(r, name, n, i, n.copies[i].n)
			}
		}
		x.show(r, id, n.block-nd.start)
		if len(n.copies) == 0 {
			x.unpin(n.block)
		}
	}
}
