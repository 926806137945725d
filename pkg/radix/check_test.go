package radix

import (
	"fmt"
	"maps"
	"math/bits"
	"reflect"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Check verifies the invariants of the tree, of holders, of names, and of the state of each rank. The writer calls it,
// without an active import.
func (x *Index) Check() error {
	c := &checker{x: x, pins: map[uint32]uint32{}, named: map[uint32]uint32{},
		sharedHeld: map[uint32]bool{}}
	for _, f := range []func() error{c.tree, c.arena, c.holders, c.ranks, c.ends, c.names, c.slabs, c.leaves} {
		if err := f(); err != nil {
			return err
		}
	}
	return nil
}

type checker struct {
	x          *Index
	pins       map[uint32]uint32 // by slab
	named      map[uint32]uint32 // owners of the names in the arena, by block, from the tables
	sharedHeld map[uint32]bool   // blocks of sharing ranks
	partSpace  int64
	bitSpace   int64
}

// tree verifies nodes and edges.
func (c *checker) tree() error {
	x, v := c.x, c.x.v
	if v != x.view.Load() {
		return fmt.Errorf("readers have another view")
	}
	used, edges := 0, 0
	children := map[uint32]uint32{}
	roots := map[uint32]bool{}
	for _, r := range v.roots {
		roots[r.node] = true
	}
	for i := range v.nodes {
		id, n := uint32(i), &v.nodes[i]
		free := id < firstNode && !roots[id] || id >= x.nodeEnd || x.freeNodes.has(id)
		switch {
		case n.version&1 != 0:
			return fmt.Errorf("node %d is open", id)
		case free && (n.parent != 0 || n.len != 0 || n.nparts != 0):
			return fmt.Errorf("node %d is free and not empty: %+v", id, n)
		case free:
			continue
		case n.parent == 0 && (!roots[id] || n.len != 0):
			return fmt.Errorf("node %d is lost: %+v", id, n)
		}
		used++
		if n.parent == 0 {
			continue
		}
		edges++
		children[n.parent]++
		p := &v.nodes[n.parent]
		if _, to := v.edge(n.parent, v.locals[n.start]); to != id || n.len == 0 || n.depth != p.depth+p.len {
			return fmt.Errorf("node %d %+v below %+v: edge to %d", id, n, p, to)
		}
	}
	for i := range v.nodes {
		if v.nodes[i].children != children[uint32(i)] {
			return fmt.Errorf("node %d has %d children, not %d", i, children[uint32(i)], v.nodes[i].children)
		}
	}
	seen := 0
	for i, e := range v.edges {
		if e == 0 || e == edgeGone {
			continue
		}
		seen++
		if v.starts[i] != v.nodes[uint32(e)].start {
			return fmt.Errorf("the edge to node %d has the start %d", uint32(e), v.starts[i])
		}
	}
	if used != x.nodes || edges != x.edgeCount || seen != edges {
		return fmt.Errorf("%d nodes, counted %d; %d edges, counted %d, in the table %d", used, x.nodes, edges,
			x.edgeCount, seen)
	}
	return nil
}

// arena verifies that every block belongs to its node.
func (c *checker) arena() error {
	x := c.x
	owned := map[uint32]bool{}
	for i := range x.v.nodes {
		n := &x.v.nodes[i]
		for b := n.start; b < n.start+n.len; b++ {
			if id, _ := x.where(b); id != uint32(i) {
				return fmt.Errorf("block %d of node %d is found in node %d", b, i, id)
			}
			owned[b/slabBlocks] = true
		}
	}
	for g := uint32(1); g < x.slabEnd; g++ {
		if owned[g] == x.freeSlab.has(g) {
			return fmt.Errorf("slab %d: owned %v, free %v", g, owned[g], x.freeSlab.has(g))
		}
	}
	return nil
}

// holders verifies masks and parts.
func (c *checker) holders() error {
	x, v := c.x, c.x.v
	for i := range v.nodes {
		n := &v.nodes[i]
		for t, m := range v.masks[:v.planes] {
			if m == nil {
				continue
			}
			for w, word := range m[i*v.stride : (i+1)*v.stride] {
				for ; word != 0; word &= word - 1 {
					slot := w<<6 + bits.TrailingZeros64(word)
					if n.len == 0 || slot >= len(x.slots) || x.slots[slot] == nil {
						return fmt.Errorf("node %d %+v: slot %d holds all in tier %d", i, n, slot, t)
					}
				}
			}
		}
		if n.nparts > 0 {
			c.partSpace += int64(1) << bits.Len32(n.nparts-1)
		}
		list := v.parts[n.parts : n.parts+n.nparts]
		for k, p := range list {
			slot, tier := slotOf(p.key), planeOf(p.key)
			count, lead := uint32(0), uint32(0)
			if tier == planeKnown {
				c.bitSpace += int64(p.words)
				if !v.any(uint32(i), device, slot) || v.full(uint32(i), tier, slot) {
					return fmt.Errorf("node %d: part %+v", i, p)
				}
				continue
			}
			fit, from := x.fitOf(&p, n, n.len)
			if tier == device {
				fit, from = p.fit, p.from // see ends
			}
			for b := range n.len {
				if v.partHas(&p, b) {
					count++
					if lead == b {
						lead++
					}
				}
			}
			if p.bits != 0 {
				c.bitSpace += int64(p.words)
				for b := n.len; b < p.words<<6; b++ {
					if v.partHas(&p, b) {
						return fmt.Errorf("node %d: part %+v beyond %d blocks", i, p, n.len)
					}
				}
			}
			if k > 0 && list[k-1].key >= p.key || int(slot) >= len(x.slots) || x.slots[slot] == nil ||
				v.masks[tier] == nil || v.full(uint32(i), tier, slot) || p.count != count || p.lead != lead ||
				count == 0 || count == n.len || (p.bits == 0) != (count == lead) || p.fit != fit || p.from != from {
				return fmt.Errorf("node %d %+v: part %+v: %d held, lead %d", i, n, p, count, lead)
			}
		}
	}
	for i := range v.ends {
		c.bitSpace += int64(v.ends[i].words)
	}
	if c.partSpace != x.partSpace.used || c.bitSpace != x.bitSpace.used {
		return fmt.Errorf("space for %d parts and %d words, %d and %d given out", c.partSpace, c.bitSpace, x.partSpace.used,
			x.bitSpace.used)
	}
	return nil
}

// ranks verifies the state of each rank.
func (c *checker) ranks() error {
	x, v := c.x, c.x.v
	exactRanks := 0
	for slot, r := range x.slots {
		shares := x.sharedMask[slot>>6]>>(slot&63)&1 != 0
		if r == nil {
			if shares {
				return fmt.Errorf("slot %d is empty and shares names", slot)
			}
			continue
		}
		if r.slot() != uint32(slot) || v.ids[slot] != uint32(r.id) || shares != (r.naming == namesShared) {
			return fmt.Errorf("slot %d: rank %#x, naming %d, shares %v", slot, uint32(r.id), r.naming, shares)
		}
		listed := map[uint32]bool{}
		for _, id := range r.nodes {
			listed[id] = true
		}
		var held [events.NumTiers]int64
		for i := range v.nodes {
			id, n := uint32(i), &v.nodes[i]
			if !x.present(id, r.slot()) {
				continue
			}
			if !listed[id] || x.rootOf(n.start) != v.root(r.space) {
				return fmt.Errorf("rank %d is in node %d, listed %v", slot, id, listed[id])
			}
			for b := range n.len {
				any := false
				for t := range events.NumTiers {
					if v.masks[t] != nil && v.holds(id, b, t, r.slot()) {
						held[t]++
						any = true
					} else if r.extra[t].get(n.start+b) > 0 {
						return fmt.Errorf("rank %d has copies of block %d in tier %d", slot, n.start+b, t)
					}
				}
				if any && r.naming == namesShared {
					c.sharedHeld[n.start+b] = true
				}
			}
		}
		if err := c.windows(r); err != nil {
			return fmt.Errorf("rank %d: %w", slot, err)
		}
		if r.naming == namesExact {
			exactRanks++
			if err := c.exact(r); err != nil {
				return fmt.Errorf("rank %d: %w", slot, err)
			}
		} else if held != r.held {
			return fmt.Errorf("rank %d holds %v, counted %v", slot, held, r.held)
		}
		for t := range r.extra {
			n, total := 0, uint64(0)
			for _, s := range r.extra[t].slots {
				if s.count > 0 {
					if x.slabs.s[s.block/slabBlocks].twice>>(s.block%slabBlocks)&1 == 0 {
						return fmt.Errorf("rank %d: the slab of block %d has no bit for copies", slot, s.block)
					}
					n++
					total += uint64(s.count)
				}
			}
			if n != r.extra[t].n || total != r.extra[t].total || r.naming == namesExact && n > 0 {
				return fmt.Errorf("rank %d: copies of %d blocks, counted %d", slot, n, r.extra[t].n)
			}
		}
		for n := r.tombstones.first; n != r.tombstones.next; n++ {
			block := r.tombstones.at(n).block
			c.pins[block/slabBlocks]++
			if id, nd := x.where(block); block-nd.start >= nd.len || x.rootOf(block) != v.root(r.space) {
				return fmt.Errorf("rank %d has a tombstone of block %d, which is not in node %d", slot, block, id)
			}
		}
		waiting := 0
		for _, w := range r.pending.all() {
			waiting += len(w.event.Blocks)
		}
		if r.tombstones.len() > x.cfg.MaxTombstones || r.pending.blocks > x.cfg.MaxPending ||
			r.pending.bytes() > x.cfg.MaxPendingBytes || waiting != r.pending.blocks {
			return fmt.Errorf("rank %d: %d removals, %d pending, counted %d", slot, r.tombstones.len(), waiting,
				r.pending.blocks)
		}
	}
	if exactRanks != x.exactRanks {
		return fmt.Errorf("%d ranks with exact counts, counted %d", exactRanks, x.exactRanks)
	}
	return nil
}

// ends verifies the known ends, and that changes will reach them.
func (c *checker) ends() error {
	x, v := c.x, c.x.v
	for i := range v.nodes {
		id, n := uint32(i), &v.nodes[i]
		count, before := uint32(0), uint32(0)
		for k := x.kin[id].child; k != 0 && n.len+n.children > 0; k = x.kin[k].next {
			if count++; v.nodes[k].parent != id || x.kin[k].before != before || count > n.children {
				return fmt.Errorf("node %d is not a child of %d", k, id)
			}
			before = k
		}
		if count != n.children {
			return fmt.Errorf("node %d lists %d children of %d", id, count, n.children)
		}
		for slot, r := range x.slots {
			steps := slices.Clone(x.knownEnd(id, uint32(slot)))
			if len(steps) == 0 {
				continue
			}
			if r == nil || !r.reuse.cuts() {
				return fmt.Errorf("node %d: slot %d has no windows, but a known end", id, slot)
			}
			held, full := n.depth+n.len, v.full(id, device, uint32(slot))
			if p := v.part(id, keyOf(uint32(slot), device)); p != nil {
				held = n.depth + p.lead
				if p.fit+p.from > 0 && (usable{p.fit - 1, p.from}) != steps[0] {
					return fmt.Errorf("node %d: slot %d: part %+v of steps %v", id, slot, p, steps)
				}
			} else if !full {
				return fmt.Errorf("node %d: slot %d has no end there, but a known end", id, slot)
			}
			lowest := n.depth + 1 - min(n.depth+1, r.reuse.most)
			for n, i := held-min(held, r.reuse.most), 0; i < len(steps); n-- {
				for i < len(steps)-1 && n < steps[i].least {
					i++
				}
				got, _ := x.usable(r, id, n, -1)
				if n >= steps[i].least && steps[i].blocks != unknown && got != steps[i].limit(n) {
					return fmt.Errorf("node %d: slot %d: of %d blocks %d can be used, but %v", id, slot, n, got, steps)
				}
				if n == 0 || n <= steps[i].least {
					if s := steps[i]; s.blocks != unknown && (s.least > s.blocks || s.least < min(s.blocks, lowest)) {
						return fmt.Errorf("node %d: slot %d: %v depend on more than ends above", id, slot, steps)
					}
					i++
				}
			}
			for at := id; v.nodes[at].depth > r.reuse.first(steps[len(steps)-1]); at = v.nodes[at].parent {
				if !v.full(at, planeWatch, uint32(slot)) {
					return fmt.Errorf("node %d: slot %d: node %d has no watch bit", id, slot, at)
				}
			}
		}
	}
	return nil
}

// windows verifies that the marks of a rank's windows are exactly at the blocks that count.
func (c *checker) windows(r *rank) error {
	x := c.x
	names := map[uint32]events.BlockHash{}
	switch r.naming {
	case namesShared:
		x.eachHeld(r, func(block uint32, _ TierSet) {
			name, _, _ := x.sharedName(block)
			names[block] = events.BlockHash(name)
		})
	case namesOwn:
		x.tidy(r)
		x.eachOwn(r, r.nodes, func(name uint64, block, _ uint32) { names[block] = events.BlockHash(name) })
	}
	if got, want := r.reuse, reuseOf(r.groups, r.block); !reflect.DeepEqual(got, want) {
		return fmt.Errorf("needs %+v, by the groups %+v", got, want)
	}
	if shown := int(r.slot()) < len(x.v.reuse) && x.v.reuse[r.slot()] != nil; shown != r.reuse.cuts() {
		return fmt.Errorf("readers see the needs: %v", shown)
	}
	for i := range x.v.nodes {
		id, n := uint32(i), &x.v.nodes[i]
		for plane := events.NumTiers; plane < x.v.planes; plane++ {
			if x.v.masks[plane] == nil {
				continue
			}
			var w *window
			if r.reuse != nil && plane/events.NumTiers <= len(r.reuse.windows) {
				w = &r.reuse.windows[plane/events.NumTiers-1]
			}
			for off := range n.len {
				name, named := names[n.start+off]
				want := w != nil && r.wanted(w, events.Tier(plane%events.NumTiers+1), spot{n.start + off, name, named})
				if got := x.v.holds(id, off, plane, r.slot()); got != want {
					return fmt.Errorf("node %d, block %d, plane %d: marked %v, want %v", id, n.start+off, plane, got,
						want)
				}
			}
		}
	}
	return nil
}

// exact verifies that a rank's exact counts agree with each other and with the marks.
func (c *checker) exact(r *rank) error {
	x, l := c.x, r.exact
	held := map[heldKey]uint32{}
	for name, n := range l.names {
		c.pins[n.block/slabBlocks]++
		if len(n.copies) == 0 {
			return fmt.Errorf("name %#x without copies", uint64(name))
		}
		for _, t := range n.copies {
			held[heldKey{t.tier, t.group, n.block}] += t.n
		}
	}
	names := 0
	for block, at := range l.at {
		for _, name := range at {
			if names++; l.names[name] == nil || l.names[name].block != block {
				return fmt.Errorf("name %#x is not of block %d", uint64(name), block)
			}
		}
	}
	if len(held) != len(l.held) || names != len(l.names) {
		return fmt.Errorf("%d held, counted %d; %d names, by block %d", len(held), len(l.held), len(l.names), names)
	}
	var count [events.NumTiers]int64
	for k := range l.totals() {
		count[k.tier-1]++
	}
	if count != r.held {
		return fmt.Errorf("held %v, counted %v", count, r.held)
	}
	for k, n := range held {
		if l.held[k] != n {
			return fmt.Errorf("%v: %d copies, counted %d", k, n, l.held[k])
		}
		want := true
		for _, g := range r.groups {
			want = want && (!g.Kind.Main() || l.held[heldKey{k.tier, g.Group, k.block}] > 0)
		}
		id, nd := x.where(k.block)
		if x.v.holds(id, k.block-nd.start, int(k.tier)-1, r.slot()) != want {
			return fmt.Errorf("%v: shown %v", k, !want)
		}
	}
	return nil
}

// names verifies that the table is sorted and has exactly the names of all owners.
func (c *checker) names() error {
	x, t := c.x, &c.x.names
	n, last, lastAt := 0, uint64(0), -1
	own := map[uint32]map[uint32]bool{} // blocks with a name, by owner
	aliases := map[uint32]int{}         // by owner
	for i, v := range t.slots.s {
		if v == 0 {
			continue
		}
		block, name, owner := t.at(uint32(v))
		hash := v >> 32
		if at, _, ok := t.find(name, t.hash(name, owner), owner); !ok || at != uint32(v) || hash < last ||
			uint64(i) < t.home(hash) || lastAt != i-1 && t.home(hash) != uint64(i) {
			return fmt.Errorf("slot %d: name %#x of owner %d for block %d, found %v %d", i, name, owner, block, ok, at)
		}
		n, last, lastAt = n+1, hash, i
		if ref := uint32(v); ref&aliasBit != 0 {
			aliases[owner]++
		} else if _, other := c.named[ref]; other {
			return fmt.Errorf("block %d: duplicate name", ref)
		} else {
			c.named[ref] = owner
		}
		if own[owner] == nil {
			own[owner] = map[uint32]bool{}
		}
		if own[owner][block] {
			return fmt.Errorf("block %d has two names of owner %d", block, owner)
		}
		own[owner][block] = true
		if got, at, ok := x.sharedName(block); owner == sharedOwner && (!ok || got != name || at != uint32(v)) {
			return fmt.Errorf("shared name %#x of block %d, which is called %#x", name, block, got)
		}
	}
	if n != t.n {
		return fmt.Errorf("%d names, counted %d", n, t.n)
	}
	if !maps.Equal(own[sharedOwner], c.sharedHeld) && len(own[sharedOwner])+len(c.sharedHeld) > 0 {
		return fmt.Errorf("shared names of blocks %v, held are %v", own[sharedOwner], c.sharedHeld)
	}
	delete(own, sharedOwner)
	for slot, r := range x.slots {
		if r == nil || r.naming != namesOwn {
			continue
		}
		held := map[uint32]bool{}
		x.eachHeld(r, func(block uint32, _ TierSet) { held[block] = true })
		if got := own[r.owner()]; len(got)+len(held) > 0 && !maps.Equal(got, held) {
			return fmt.Errorf("rank %d holds blocks %v, has names for %v", slot, held, got)
		}
		delete(own, r.owner())
	}
	if len(own) > 0 {
		return fmt.Errorf("names of unknown owners: %v", own)
	}
	return c.aliases(aliases)
}

// aliases verifies that each page has at most one owner, and that each place is used or free.
func (c *checker) aliases(want map[uint32]int) error {
	l := &c.x.names.aliases
	pages := map[uint32]bool{0: true}
	take := func(list []uint32) error {
		for _, p := range list {
			if pages[p] {
				return fmt.Errorf("page %d of aliases has two owners", p)
			}
			pages[p] = true
		}
		return nil
	}
	if err := take(l.spare); err != nil {
		return err
	}
	for owner, own := range l.owners {
		if err := take(own.pages); err != nil {
			return err
		}
		used, free := 0, 0
		l.each(uint32(owner), func(uint32, alias) { used++ })
		for i := own.free; i != 0 && free <= len(own.pages)*aliasPage; i = uint32(l.all.s[i].name) {
			free++
		}
		if used != own.n || used != want[uint32(owner)] || used+free != len(own.pages)*aliasPage ||
			used == 0 && free > 0 {
			return fmt.Errorf("owner %d: %d aliases, %d free, %+v, in the table %d", owner, used, free, own,
				want[uint32(owner)])
		}
	}
	if len(l.all.s) > 0 && len(pages) != len(l.all.s)/aliasPage {
		return fmt.Errorf("%d pages of aliases, %d in lists", len(l.all.s)/aliasPage, len(pages))
	}
	return nil
}

// slabs verifies bits and pins.
func (c *checker) slabs() error {
	for i := range c.x.slabs.s {
		g := &c.x.slabs.s[i]
		var named uint16
		for b := range uint32(slabBlocks) {
			owner, ok := c.named[uint32(i)*slabBlocks+b]
			if !ok {
				continue
			}
			if named |= 1 << b; owner != g.owner {
				return fmt.Errorf("slab %d: %+v, want a name of owner %d at %d", i, g, owner, b)
			}
		}
		if g.named != named || g.pins != c.pins[uint32(i)] {
			return fmt.Errorf("slab %d: %+v, want named %#x, %d pins", i, g, named, c.pins[uint32(i)])
		}
	}
	return nil
}

// leaves verifies that no path ends with dead blocks.
func (c *checker) leaves() error {
	x := c.x
	for i := range x.v.nodes {
		n := &x.v.nodes[i]
		if n.parent == 0 || n.children > 0 || x.extent(uint32(i)) == n.len {
			continue
		}
		if x.slabs.s[(n.start+n.len-1)/slabBlocks].pins == 0 {
			return fmt.Errorf("node %d %+v ends with dead blocks without tombstones", i, n)
		}
	}
	return nil
}
