package radix

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Apply takes events of one rank that reached the log at now; time that goes back is taken to stand still. It keeps none of
// the slices. Applying a list in parts, with the same times, comes to the same.
func (x *Index) Apply(id RankID, now events.Millis, evs []events.Event) (c Counts) {
	x.mu.Lock()
	defer x.mu.Unlock()
	r := x.rank(id)
	r.clock = max(r.clock, now)
	x.expire(r, &c)
	for i := range evs {
		e := &evs[i]
		switch {
		case e.Kind == events.Stored && e.Tier.Valid() && (len(e.Locals) == 0 || len(e.Locals) == len(e.Blocks)):
			x.stored(r, e, &c)
		case e.Kind == events.Removed && e.Tier.Valid():
			x.removed(r, e, &c)
		case e.Kind == events.Cleared && (e.Tier == events.AllTiers || e.Tier.Valid()):
			x.clear(r, e.Tier, &c)
		default:
			c.Malformed++
		}
	}
	return c
}

// expire drops what is too old to wait or to be remembered.
func (x *Index) expire(r *rank, c *Counts) {
	for w := r.parked.oldest(); w != nil && w.since+x.cfg.ParkFor <= r.clock; w = r.parked.oldest() {
		c.Expired += uint64(w.left)
		r.parked.remove(w)
	}
	for r.gone.len() > 0 && r.gone.at(r.gone.first).since+x.cfg.RememberFor <= r.clock {
		x.unref(r.gone.shift().block)
	}
}

// learn notes what kind a group is. It reports whether the event may be taken, and whether its group is a main one.
func (r *rank) learn(e *events.Event, c *Counts) (take, main bool) {
	i, ok := slices.BinarySearchFunc(r.groups, e.Group, func(g events.GroupKind, to events.GroupIndex) int {
		return int(int64(g.Group) - int64(to))
	})
	if !ok {
		r.groups = slices.Insert(r.groups, i, events.GroupKind{Group: e.Group, Kind: e.Attention})
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
	return true, g.Kind.Main()
}

// main reports whether a group makes up the prefix; one never seen does.
func (r *rank) main(group events.GroupIndex) bool {
	for _, g := range r.groups {
		if g.Group == group {
			return g.Kind.Main()
		}
	}
	return true
}

func (x *Index) stored(r *rank, e *events.Event, c *Counts) {
	take, main := r.learn(e, c)
	switch {
	case !take:
		return
	case !main:
		for _, name := range e.Blocks {
			r.sets[copyKey{e.Tier, e.Group, name}]++
		}
		c.OtherStored += uint64(len(e.Blocks))
		return
	case len(e.Blocks) == 0:
		return
	case len(e.Locals) == 0:
		for i := range e.Blocks {
			one := *e
			one.Blocks, one.HasParent, one.Parent = e.Blocks[i:i+1], false, 0
			x.placeOrPark(r, &one, c)
		}
	default:
		x.placeOrPark(r, e, c)
	}
	for r.parked.len() > 0 {
		w := r.parked.nextReady(func(name events.BlockHash) bool {
			_, ok := r.known(name)
			return ok
		})
		if w == nil {
			break
		}
		c.Attached += uint64(w.left)
		x.place(r, &w.event, w.cancelled, c)
	}
}

// known is the block of a name: one that has copies, or else the one that it left last.
func (r *rank) known(name events.BlockHash) (uint32, bool) {
	if n := r.names[name]; n != nil {
		return n.block, true
	}
	return r.gone.find(name)
}

func (x *Index) placeOrPark(r *rank, e *events.Event, c *Counts) {
	if len(e.Locals) > 0 && !e.HasParent {
		x.place(r, e, nil, c)
		return
	}
	if _, ok := r.known(wants(e)); ok {
		x.place(r, e, nil, c)
		return
	}
	r.parked.add(r.clock, e, nil)
	c.Parked += uint64(len(e.Blocks))
	for r.parked.blocks > x.cfg.MaxParked {
		w := r.parked.oldest()
		c.Overflowed += uint64(w.left)
		r.parked.remove(w)
	}
}

// place gives the blocks of an event whose place is known, but for those cancelled, to the rank.
func (x *Index) place(r *rank, e *events.Event, cancelled []bool, c *Counts) {
	if len(e.Locals) == 0 {
		b, _ := r.known(e.Blocks[0])
		x.hold(r, b, e, e.Blocks[0], c)
		return
	}
	var b uint32
	if e.HasParent {
		b, _ = r.known(e.Parent)
	}
	for i, name := range e.Blocks {
		b = x.child(r.space, b, e.Locals[i])
		if cancelled != nil && cancelled[i] {
			continue
		}
		if n := r.names[name]; n != nil && n.block != b {
			for j := i; j < len(e.Blocks); j++ {
				if cancelled == nil || !cancelled[j] {
					c.Conflicts++
				}
			}
			x.prune(b)
			return
		}
		x.hold(r, b, e, name, c)
	}
	x.prune(b)
}

func (x *Index) hold(r *rank, b uint32, e *events.Event, name events.BlockHash, c *Counts) {
	n := r.names[name]
	if n == nil {
		n = &named{block: b}
		r.names[name] = n
		x.blocks[b].refs++
	}
	i := slices.IndexFunc(n.copies, func(t tierCopies) bool { return t.tier == e.Tier && t.group == e.Group })
	if i < 0 {
		n.copies = append(n.copies, tierCopies{e.Tier, e.Group, 1})
		c.Stored++
	} else {
		n.copies[i].n++
		c.Duplicates++
	}
	r.held[heldKey{e.Tier, e.Group, b}]++
	r.copies[e.Tier-1]++
	if r.parked.len() > 0 {
		r.parked.named(name)
	}
}

func (x *Index) removed(r *rank, e *events.Event, c *Counts) {
	main := r.main(e.Group)
	for _, name := range e.Blocks {
		switch k := (copyKey{e.Tier, e.Group, name}); {
		case !main && r.sets[k] > 0:
			if r.sets[k]--; r.sets[k] == 0 {
				delete(r.sets, k)
			}
			c.OtherRemoved++
		case main && x.release(r, k, 1):
			c.Removed++
		case main && r.parked.cancel(k):
			c.Cancelled++
		default:
			c.UnknownRemovals++
		}
	}
}

// release takes a copy away and remembers the place of a name that has none left. It reports false if there is no copy.
func (x *Index) release(r *rank, k copyKey, n uint32) bool {
	m := r.names[k.name]
	if m == nil {
		return false
	}
	i := slices.IndexFunc(m.copies, func(t tierCopies) bool { return t.tier == k.tier && t.group == k.group })
	if i < 0 {
		return false
	}
	x.take(r, m, i, n)
	if len(m.copies) == 0 {
		delete(r.names, k.name)
		if x.cfg.MaxRemembered > 0 {
			if r.gone.len() == x.cfg.MaxRemembered {
				x.unref(r.gone.shift().block)
			}
			x.blocks[m.block].refs++
			r.gone.push(removal{name: k.name, since: r.clock, block: m.block})
		}
		x.unref(m.block)
	}
	return true
}

// take takes n copies of one kind of a name away.
func (x *Index) take(r *rank, m *named, i int, n uint32) {
	t := m.copies[i]
	h := heldKey{t.tier, t.group, m.block}
	if r.held[h] -= n; r.held[h] == 0 {
		delete(r.held, h)
	}
	r.copies[t.tier-1] -= uint64(n)
	if m.copies[i].n -= n; m.copies[i].n == 0 {
		m.copies = slices.Delete(m.copies, i, i+1)
	}
}

// clear empties a tier, or all of them; then the rank is as it was when it was added, but for its clock.
func (x *Index) clear(r *rank, tier events.Tier, c *Counts) {
	spared := func(t events.Tier) bool { return tier != events.AllTiers && tier != t }
	for name, m := range r.names {
		for i := len(m.copies) - 1; i >= 0; i-- {
			if !spared(m.copies[i].tier) {
				c.Cleared += uint64(m.copies[i].n)
				x.take(r, m, i, m.copies[i].n)
			}
		}
		if len(m.copies) == 0 {
			delete(r.names, name)
			x.unref(m.block)
		}
	}
	for k, n := range r.sets {
		if !spared(k.tier) {
			c.OtherRemoved += uint64(n)
			delete(r.sets, k)
		}
	}
	for _, w := range r.parked.all() {
		if !spared(w.event.Tier) {
			c.ClearedWaiting += uint64(w.left)
			r.parked.remove(w)
		}
	}
	if tier == events.AllTiers {
		for r.gone.len() > 0 {
			x.unref(r.gone.shift().block)
		}
		r.reset()
	}
}
