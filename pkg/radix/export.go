package radix

import (
	"cmp"
	"maps"
	"math/bits"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Sink receives an image. The arguments are valid until the method returns.
type Sink interface {
	Run(run *events.Run) error
	Rank(i int, image *events.RankImage) error // i is a position in the list of ranks of StartExport
}

// Export writes an image of some ranks as they were at the start. A node or a rank that is about to change before its
// turn is copied first.
type Export struct {
	x        *Index
	position []int32  // position of a slot in the list of ranks; -1: not in the list
	mask     []uint64 // the slots in the list
	ranks    []rankCut

	todo   idSet        // nodes of the image that are not yet written
	copied []events.Run // copied before their turn

	// To find the run of a remembered block: by slab, the deepest run in the slab, plus one.
	runAt []uint32
	cuts  []runCut
	byID  map[uint32]uint32  // position in cuts
	alias map[uint32][]alias // by slot, for ranks with their own names: aliases by block

	nextRank int
}

type rankCut struct {
	id         RankID
	taken      bool
	image      events.RankImage
	tombstones []tombstone // as in the index: with blocks of the arena
}

// runCut is the place of a run at the start of the export.
type runCut struct {
	start, len, parent uint32 // parent: a node
	id                 events.RunID
}

// StartExport begins an image of some ranks. The writer calls StartExport and all methods of the export, and may apply
// events before the image is complete. The caller must close an unfinished export.
func (x *Index) StartExport(ranks []RankID) *Export {
	e := &Export{x: x, position: make([]int32, len(x.slots)), mask: make([]uint64, len(x.sharedMask)),
		runAt: make([]uint32, x.slabEnd), byID: map[uint32]uint32{}, alias: map[uint32][]alias{}}
	for i := range e.position {
		e.position[i] = -1
	}
	need := func(id uint32) {
		for ; id != 0 && x.v.nodes[id].parent != 0 && !e.todo.has(id); id = x.v.nodes[id].parent {
			e.todo.add(id)
		}
	}
	for i, id := range ranks {
		r := x.rank(id)
		e.position[id.Slot()] = int32(i)
		e.mask[id.Slot()>>6] |= 1 << (id.Slot() & 63)
		e.ranks = append(e.ranks, rankCut{id: id})
		for _, n := range r.nodes {
			if x.v.nodes[n].parent != 0 && x.present(n, r.slot()) {
				need(n)
			}
		}
		for n := r.tombstones.first; n != r.tombstones.next; n++ {
			id, _ := x.where(r.tombstones.at(n).block)
			need(id)
		}
		if r.naming == namesExact {
			for block := range r.exact.at {
				id, _ := x.where(block)
				need(id)
			}
		}
	}
	x.exports = append(x.exports, e)
	return e
}

// before copies a node that is about to change.
func (e *Export) before(id uint32) {
	if e.todo.remove(id) {
		e.copied = append(e.copied, e.run(id))
	}
}

// touchRank announces a change of a rank's state besides runs.
func (x *Index) touchRank(r *rank) {
	for _, e := range x.exports {
		if slot := int(r.slot()); slot < len(e.position) && e.position[slot] >= 0 {
			e.rank(r)
		}
	}
}

// rank copies the state of a rank besides runs, unless it was copied before.
func (e *Export) rank(r *rank) {
	c := &e.ranks[e.position[r.slot()]]
	if c.taken || c.id != r.id {
		return
	}
	c.taken = true
	c.image = events.RankImage{Clock: r.clock, Groups: slices.Clone(r.groups), Loading: r.loading,
		Sets: groupSets(r.sets)}
	for _, w := range r.pending.all() {
		p := events.Pending{Since: w.since, Event: w.event}
		for i, gone := range w.cancelled {
			if gone {
				p.Cancelled = append(p.Cancelled, uint32(i))
			}
		}
		c.image.Pending = append(c.image.Pending, p)
	}
	for n := r.tombstones.first; n != r.tombstones.next; n++ {
		c.tombstones = append(c.tombstones, *r.tombstones.at(n))
	}
}

// groupSets returns the sets by tier, group and name.
func groupSets(all map[copyKey]uint32) (sets []events.GroupSet) {
	keys := slices.SortedFunc(maps.Keys(all), func(a, b copyKey) int {
		return cmp.Or(cmp.Compare(a.tier, b.tier), cmp.Compare(a.group, b.group), cmp.Compare(a.name, b.name))
	})
	for _, k := range keys {
		if n := len(sets); n == 0 || sets[n-1].Tier != k.tier || sets[n-1].Group != k.group {
			sets = append(sets, events.GroupSet{Tier: k.tier, Group: k.group})
		}
		s := &sets[len(sets)-1]
		s.Blocks, s.Counts = append(s.Blocks, k.name), append(s.Counts, all[k])
	}
	return sets
}

// run returns the node as a run of an image.
func (e *Export) run(id uint32) events.Run {
	x := e.x
	n := x.v.nodes[id]
	run := events.Run{ID: events.RunID(id), Parent: events.NoRun, Locals: make([]events.LocalHash, n.len),
		Names: make([]events.BlockHash, n.len)}
	for up := n.parent; ; up = x.v.nodes[up].parent {
		if x.v.nodes[up].parent == 0 {
			run.Space = x.spaceOf(up)
			break
		}
	}
	if above := x.v.nodes[n.parent]; above.parent != 0 {
		run.Parent, run.Offset = events.RunID(n.parent), above.len
		if cut, ok := e.byID[n.parent]; ok { // the parent may have been split since
			run.Offset = e.cuts[cut].len
		}
	}
	for i := range n.len {
		run.Locals[i] = events.LocalHash(x.v.locals[n.start+i])
		if g := &x.slabs.s[(n.start+i)/slabBlocks]; g.named>>((n.start+i)%slabBlocks)&1 != 0 {
			run.Names[i] = events.BlockHash(x.engines.s[n.start+i])
		}
	}
	e.byID[id] = uint32(len(e.cuts))
	e.cuts = append(e.cuts, runCut{n.start, n.len, n.parent, run.ID})
	for g := n.start / slabBlocks; g <= (n.start+n.len-1)/slabBlocks; g++ {
		if at := e.runAt[g]; at == 0 || e.cuts[at-1].start < n.start {
			e.runAt[g] = uint32(len(e.cuts))
		}
	}
	for t, m := range x.v.masks[:events.NumTiers] {
		if m == nil {
			continue
		}
		for w, word := range m[int(id)*x.v.stride : (int(id)+1)*x.v.stride] {
			if w >= len(e.mask) {
				break
			}
			for word &= e.mask[w]; word != 0; word &= word - 1 {
				e.holding(&run, &n, uint32(w<<6+bits.TrailingZeros64(word)), t, nil)
			}
		}
	}
	for _, p := range x.v.parts[n.parts : n.parts+n.nparts] {
		if slot, t := slotOf(p.key), planeOf(p.key); t < events.NumTiers && int(slot) < len(e.position) &&
			e.position[slot] >= 0 {
			e.holding(&run, &n, slot, t, &p)
		}
	}
	for i := 0; i < len(e.ranks) && x.exactRanks > 0; i++ {
		if r := x.slots[e.ranks[i].id.Slot()]; r != nil && r.id == e.ranks[i].id && r.naming == namesExact {
			e.exact(&run, &n, r, uint32(i))
		}
	}
	slices.SortFunc(run.Holdings, func(a, b events.Holding) int {
		return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Tier, b.Tier), cmp.Compare(a.Group, b.Group))
	})
	return run
}

func (x *Index) spaceOf(root uint32) uint32 {
	for _, r := range x.v.roots {
		if r.node == root {
			return r.space
		}
	}
	return 0
}

// holding appends a rank's holding of a run in a tier, for a rank without exact counts. nil means all blocks.
func (e *Export) holding(run *events.Run, n *node, slot uint32, tier int, p *part) {
	x := e.x
	r := x.slots[slot]
	if r.naming == namesExact {
		return
	}
	h := events.Holding{Rank: uint32(e.position[slot]), Tier: events.Tier(tier + 1), Group: r.group, Lead: n.len}
	if p != nil {
		h.Lead = p.lead
		if p.bits != 0 {
			h.Bits = make([]uint64, (n.len+63)/64)
			for w := range h.Bits {
				if uint32(w) < p.words {
					h.Bits[w] = x.v.bits[p.bits+uint32(w)] &^ rangeMask(uint32(w), 0, h.Lead)
				}
			}
		}
	}
	extra := &r.extra[tier]
	if r.naming == namesOwn || extra.n > 0 || len(x.sharedElse) > 0 {
		for i := range n.len {
			if p != nil && !x.v.partHas(p, i) {
				continue
			}
			block := n.start + i
			if k := extra.get(block); k > 0 {
				h.Copies = append(h.Copies, events.BlockCount{Block: i, Count: k + 1})
			}
			if name := e.name(r, block, uint64(run.Names[i])); name != uint64(run.Names[i]) {
				h.Names = append(h.Names, events.BlockName{Block: i, Name: events.BlockHash(name)})
			}
		}
	}
	run.Holdings = append(run.Holdings, h)
}

// name returns the name of a held block, for a rank without exact counts. first is the name in the arena.
func (e *Export) name(r *rank, block uint32, first uint64) uint64 {
	x := e.x
	if r.naming == namesShared {
		name, _, _ := x.sharedName(block)
		return name
	}
	if x.slabs.s[block/slabBlocks].names(block%slabBlocks, r.owner()) {
		return first
	}
	list, ok := e.alias[r.slot()]
	if !ok {
		x.names.aliases.each(r.owner(), func(_ uint32, a alias) { list = append(list, a) })
		slices.SortFunc(list, func(a, b alias) int { return cmp.Compare(a.block, b.block) })
		e.alias[r.slot()] = list
	}
	if i, ok := slices.BinarySearchFunc(list, block, func(a alias, b uint32) int { return cmp.Compare(a.block, b) }); ok {
		return list[i].name
	}
	return first
}

// exact appends the holdings of a run, for a rank with exact counts.
func (e *Export) exact(run *events.Run, n *node, r *rank, position uint32) {
	type kind struct {
		tier  events.Tier
		group events.GroupIndex
	}
	all := map[kind]*events.Holding{}
	for i := range n.len {
		for _, name := range r.exact.at[n.start+i] {
			for _, c := range r.exact.names[name].copies {
				k := kind{c.tier, c.group}
				h := all[k]
				if h == nil {
					h = &events.Holding{Rank: position, Tier: c.tier, Group: c.group,
						Bits: make([]uint64, (n.len+63)/64)}
					all[k] = h
				}
				if h.Bits[i/64]>>(i%64)&1 != 0 {
					h.Also = append(h.Also, events.NamedCount{Block: i, Name: name, Count: c.n})
					continue
				}
				h.Bits[i/64] |= 1 << (i % 64)
				if c.n > 1 {
					h.Copies = append(h.Copies, events.BlockCount{Block: i, Count: c.n})
				}
				if run.Names[i] != name {
					h.Names = append(h.Names, events.BlockName{Block: i, Name: name})
				}
			}
		}
	}
	for _, h := range all {
		for h.Lead < n.len && h.Bits[h.Lead/64]>>(h.Lead%64)&1 != 0 {
			h.Lead++
		}
		for w := range h.Bits {
			h.Bits[w] &^= rangeMask(uint32(w), 0, h.Lead)
		}
		run.Holdings = append(run.Holdings, *h)
	}
}

// Step writes about budget more blocks to the sink, and at least a run or a rank. Runs come first, then ranks in order.
// An error of the sink is returned unchanged and closes the export.
func (e *Export) Step(budget int, sink Sink) (done bool, err error) {
	for first := true; ; first = false {
		if budget <= 0 && !first {
			return false, nil
		}
		n, more, err := e.one(sink)
		if err != nil || !more {
			e.Close()
			return err == nil, err
		}
		budget -= n
	}
}

// one writes a run or a rank to the sink and returns its size.
func (e *Export) one(sink Sink) (size int, more bool, err error) {
	if n := len(e.copied); n > 0 {
		run := e.copied[n-1]
		e.copied = e.copied[:n-1]
		return len(run.Locals), true, sink.Run(&run)
	}
	if e.todo.n > 0 {
		id := e.todo.lowest()
		e.todo.remove(id)
		run := e.run(id)
		return len(run.Locals), true, sink.Run(&run)
	}
	if e.nextRank == len(e.ranks) {
		return 0, false, nil
	}
	c := &e.ranks[e.nextRank]
	if !c.taken {
		e.rank(e.x.slots[c.id.Slot()])
	}
	for _, g := range c.tombstones {
		cut := e.cuts[e.runAt[g.block/slabBlocks]-1]
		for g.block < cut.start {
			cut = e.cuts[e.byID[cut.parent]]
		}
		c.image.Tombstones = append(c.image.Tombstones, events.Tombstone{Name: g.name, Run: cut.id,
			Block: g.block - cut.start, Since: g.since})
	}
	e.nextRank++
	size = len(c.tombstones) + len(c.image.Pending)
	err = sink.Rank(e.nextRank-1, &c.image)
	c.image, c.tombstones = events.RankImage{}, nil
	return size, true, err
}

// Close ends an export early. It is harmless after the end and a second time.
func (e *Export) Close() {
	if e.x != nil {
		e.x.exports = slices.DeleteFunc(e.x.exports, func(o *Export) bool { return o == e })
		*e = Export{}
	}
}
