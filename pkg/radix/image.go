package radix

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// ErrImage is returned by an import of runs or ranks that contradict themselves or each other. What was imported so far must
// be dropped.
var ErrImage = errors.New("image contradicts itself")

// Sink takes an image. What it is given is valid until it returns.
type Sink interface {
	Run(run *events.Run) error
	Rank(i int, image *events.RankImage) error // i is a position in the list of ranks that the export was started with
}

// Export writes an image of some ranks as they were when it was started.
type Export struct {
	runs  []events.Run
	ranks []events.RankImage
	next  int
}

// StartExport begins an image of some ranks. The writer calls it, and may apply events before the image is complete.
func (x *Index) StartExport(ranks []RankID) *Export {
	x.mu.RLock()
	defer x.mu.RUnlock()
	needed := map[uint32][]uint32{} // block to the children that are needed; 0 is above the roots
	var need func(b uint32)
	need = func(b uint32) {
		if _, ok := needed[b]; ok {
			return
		}
		needed[b] = nil
		if p := x.blocks[b].parent; p != 0 {
			need(p)
			needed[p] = append(needed[p], b)
		} else {
			needed[0] = append(needed[0], b)
		}
	}
	needed[0] = nil
	for _, id := range ranks {
		r := x.rank(id)
		for _, n := range r.names {
			need(n.block)
		}
		for n := r.gone.first; n != r.gone.next; n++ {
			need(r.gone.at(n).block)
		}
	}
	e := &Export{}
	type spot struct{ run, at uint32 }
	spots := map[uint32]spot{}
	for _, b := range slices.Sorted(maps.Keys(needed)) {
		if b == 0 || x.blocks[b].parent != 0 && len(needed[x.blocks[b].parent]) == 1 {
			continue
		}
		run := events.Run{ID: events.RunID(b), Space: x.blocks[b].space, Parent: events.NoRun}
		i := uint32(len(e.runs))
		for at := b; ; at = needed[at][0] {
			spots[at] = spot{i, uint32(len(run.Locals))}
			run.Locals = append(run.Locals, x.blocks[at].local)
			if len(needed[at]) != 1 {
				break
			}
		}
		run.Names = make([]events.BlockHash, len(run.Locals))
		e.runs = append(e.runs, run)
	}
	for i := range e.runs {
		if p := x.blocks[e.runs[i].ID].parent; p != 0 {
			s := spots[p]
			e.runs[i].Parent, e.runs[i].Offset = e.runs[s.run].ID, s.at+1
		}
	}
	named := map[uint32]bool{}
	for i, id := range ranks {
		r := x.rank(id)
		type key struct {
			run   uint32
			tier  events.Tier
			group events.GroupIndex
		}
		holdings := map[key]*events.Holding{}
		taken := map[heldKey]bool{}
		for _, name := range slices.Sorted(maps.Keys(r.names)) {
			n := r.names[name]
			s := spots[n.block]
			run := &e.runs[s.run]
			for _, t := range n.copies {
				k := key{s.run, t.tier, t.group}
				h := holdings[k]
				if h == nil {
					h = &events.Holding{Rank: uint32(i), Tier: t.tier, Group: t.group, Bits: make([]uint64, (len(run.Locals)+63)/64)}
					holdings[k] = h
				}
				if hk := (heldKey{t.tier, t.group, n.block}); taken[hk] {
					h.Also = append(h.Also, events.NamedCount{Block: s.at, Name: name, Count: t.n})
					continue
				} else {
					taken[hk] = true
				}
				h.Bits[s.at/64] |= 1 << (s.at % 64)
				if t.n > 1 {
					h.Copies = append(h.Copies, events.BlockCount{Block: s.at, Count: t.n})
				}
				if !named[n.block] {
					named[n.block] = true
					run.Names[s.at] = name
				} else if run.Names[s.at] != name {
					h.Names = append(h.Names, events.BlockName{Block: s.at, Name: name})
				}
			}
		}
		for k, h := range holdings {
			run := &e.runs[k.run]
			run.Holdings = append(run.Holdings, *h)
		}
		img := events.RankImage{Clock: r.clock, Groups: slices.Clone(r.groups)}
		for _, w := range r.parked.all() {
			p := events.Parked{Since: w.since, Event: w.event}
			for j, c := range w.cancelled {
				if c {
					p.Cancelled = append(p.Cancelled, uint32(j))
				}
			}
			img.Parked = append(img.Parked, p)
		}
		for n := r.gone.first; n != r.gone.next; n++ {
			g := r.gone.at(n)
			s := spots[g.block]
			img.Remembered = append(img.Remembered, events.Remembered{Name: g.name, Run: e.runs[s.run].ID, Block: s.at, Since: g.since})
		}
		img.Sets = r.groupSets()
		e.ranks = append(e.ranks, img)
	}
	for i := range e.runs {
		slices.SortFunc(e.runs[i].Holdings, func(a, b events.Holding) int {
			return cmp.Or(cmp.Compare(a.Rank, b.Rank), cmp.Compare(a.Tier, b.Tier), cmp.Compare(a.Group, b.Group))
		})
		for j := range e.runs[i].Holdings {
			h := &e.runs[i].Holdings[j]
			for h.Lead < uint32(len(e.runs[i].Locals)) && h.Bits[h.Lead/64]>>(h.Lead%64)&1 != 0 {
				h.Lead++
			}
			shiftBits(h)
			slices.SortFunc(h.Copies, func(a, b events.BlockCount) int { return cmp.Compare(a.Block, b.Block) })
			slices.SortFunc(h.Names, func(a, b events.BlockName) int { return cmp.Compare(a.Block, b.Block) })
			slices.SortStableFunc(h.Also, func(a, b events.NamedCount) int { return cmp.Compare(a.Block, b.Block) })
		}
	}
	return e
}

// shiftBits takes the lead out of the bitmap, and the bitmap away if nothing is left.
func shiftBits(h *events.Holding) {
	any := false
	for i := range h.Bits {
		if lo := uint32(i) * 64; lo < h.Lead {
			if n := h.Lead - lo; n >= 64 {
				h.Bits[i] = 0
			} else {
				h.Bits[i] &^= 1<<n - 1
			}
		}
		any = any || h.Bits[i] != 0
	}
	if !any {
		h.Bits = nil
	}
}

// groupSets lists what the rank holds for groups that are no part of the prefix.
func (r *rank) groupSets() (sets []events.GroupSet) {
	keys := slices.SortedFunc(maps.Keys(r.sets), func(a, b copyKey) int {
		return cmp.Or(cmp.Compare(a.tier, b.tier), cmp.Compare(a.group, b.group), cmp.Compare(a.name, b.name))
	})
	for _, k := range keys {
		if n := len(sets); n == 0 || sets[n-1].Tier != k.tier || sets[n-1].Group != k.group {
			sets = append(sets, events.GroupSet{Tier: k.tier, Group: k.group})
		}
		s := &sets[len(sets)-1]
		s.Blocks, s.Counts = append(s.Blocks, k.name), append(s.Counts, r.sets[k])
	}
	return sets
}

// GroupSets lists what a rank holds for the groups that are no part of the prefix. The writer calls it.
func (x *Index) GroupSets(id RankID) []events.GroupSet {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return x.rank(id).groupSets()
}

// Step gives the sink about budget blocks more, and at least one run or rank. Runs come first, then ranks in order. The
// writer calls it. After an error from the sink, which it returns as it is, the export cannot go on.
func (e *Export) Step(budget int, sink Sink) (done bool, err error) {
	for first := true; e.next < len(e.runs)+len(e.ranks); first = false {
		if budget <= 0 && !first {
			return false, nil
		}
		if e.next < len(e.runs) {
			run := &e.runs[e.next]
			budget -= len(run.Locals)
			err = sink.Run(run)
		} else {
			i := e.next - len(e.runs)
			budget -= len(e.ranks[i].Remembered) + len(e.ranks[i].Parked)
			err = sink.Rank(i, &e.ranks[i])
		}
		if err != nil {
			return false, err
		}
		e.next++
	}
	return true, nil
}

// Close ends an export before it is done. Harmless afterwards and the second time.
func (e *Export) Close() { *e = Export{} }

// Import takes an image back.
type Import struct {
	x       *Index
	ranks   []RankID
	runs    map[events.RunID][]uint32
	pending map[events.RunID][]*events.Run // by the parent that is missing
}

// StartImport begins to take an image back. Position i of the image's list of ranks becomes ranks[i], which must be added and
// empty; the index may hold other ranks. No events are applied to these ranks before Finish. The writer calls it and all
// methods of the import.
func (x *Index) StartImport(ranks []RankID) *Import {
	return &Import{x: x, ranks: slices.Clone(ranks), runs: map[events.RunID][]uint32{}, pending: map[events.RunID][]*events.Run{}}
}

// Run takes a run, in any order. It keeps nothing of it.
func (m *Import) Run(run *events.Run) error {
	m.x.mu.Lock()
	defer m.x.mu.Unlock()
	if run.Parent != events.NoRun && m.runs[run.Parent] == nil {
		own := *run
		own.Locals, own.Names, own.Holdings = slices.Clone(run.Locals), slices.Clone(run.Names), nil
		for _, h := range run.Holdings {
			h.Bits, h.Copies, h.Names, h.Also = slices.Clone(h.Bits), slices.Clone(h.Copies), slices.Clone(h.Names), slices.Clone(h.Also)
			own.Holdings = append(own.Holdings, h)
		}
		m.pending[run.Parent] = append(m.pending[run.Parent], &own)
		return nil
	}
	todo := []*events.Run{run}
	for len(todo) > 0 {
		r := todo[0]
		todo = append(todo[1:], m.pending[r.ID]...)
		delete(m.pending, r.ID)
		if err := m.run(r); err != nil {
			return err
		}
	}
	return nil
}

func (m *Import) run(run *events.Run) error {
	x := m.x
	n := uint32(len(run.Locals))
	switch {
	case n == 0 || len(run.Names) != len(run.Locals):
		return fmt.Errorf("run %d: %d locals, %d names: %w", run.ID, n, len(run.Names), ErrImage)
	case m.runs[run.ID] != nil:
		return fmt.Errorf("run %d comes twice: %w", run.ID, ErrImage)
	}
	b := uint32(0)
	if run.Parent != events.NoRun {
		parent := m.runs[run.Parent]
		if run.Offset == 0 || int(run.Offset) > len(parent) || x.blocks[parent[0]].space != run.Space {
			return fmt.Errorf("run %d: offset %d in a parent of %d blocks: %w", run.ID, run.Offset, len(parent), ErrImage)
		}
		b = parent[run.Offset-1]
	}
	path := make([]uint32, n)
	for i, l := range run.Locals {
		b = x.child(run.Space, b, l)
		x.blocks[b].refs++ // until Finish
		path[i] = b
	}
	m.runs[run.ID] = path
	for _, h := range run.Holdings {
		if int(h.Rank) >= len(m.ranks) || !h.Tier.Valid() || h.Lead > n || len(h.Bits) > int(n+63)/64 {
			return fmt.Errorf("run %d: holding of rank %d, %v: %w", run.ID, h.Rank, h.Tier, ErrImage)
		}
		r := x.rank(m.ranks[h.Rank])
		if r.space != run.Space {
			return fmt.Errorf("run %d: rank %d is of another space: %w", run.ID, h.Rank, ErrImage)
		}
		copies, names := map[uint32]uint32{}, map[uint32]events.BlockHash{}
		for _, c := range h.Copies {
			copies[c.Block] = c.Count
		}
		for _, o := range h.Names {
			names[o.Block] = o.Name
		}
		for i := range n {
			if i >= h.Lead && (int(i/64) >= len(h.Bits) || h.Bits[i/64]>>(i%64)&1 == 0) {
				continue
			}
			name, ok := names[i]
			if !ok {
				name = run.Names[i]
			}
			if err := m.hold(r, path[i], h.Tier, h.Group, name, max(1, copies[i])); err != nil {
				return fmt.Errorf("run %d, block %d: %w", run.ID, i, err)
			}
		}
		for _, a := range h.Also {
			if a.Block >= n || a.Count == 0 {
				return fmt.Errorf("run %d: further name of block %d: %w", run.ID, a.Block, ErrImage)
			}
			if err := m.hold(r, path[a.Block], h.Tier, h.Group, a.Name, a.Count); err != nil {
				return fmt.Errorf("run %d, block %d: %w", run.ID, a.Block, err)
			}
		}
	}
	return nil
}

func (m *Import) hold(r *rank, b uint32, tier events.Tier, group events.GroupIndex, name events.BlockHash, n uint32) error {
	at := r.names[name]
	if at == nil {
		at = &named{block: b}
		r.names[name] = at
		m.x.blocks[b].refs++
	} else if at.block != b {
		return fmt.Errorf("name %#x of another block: %w", uint64(name), ErrImage)
	}
	if slices.ContainsFunc(at.copies, func(t tierCopies) bool { return t.tier == tier && t.group == group }) {
		return fmt.Errorf("name %#x twice: %w", uint64(name), ErrImage)
	}
	at.copies = append(at.copies, tierCopies{tier, group, n})
	r.held[heldKey{tier, group, b}] += n
	r.copies[tier-1] += uint64(n)
	return nil
}

// Rank takes what belongs to rank i beside runs; all runs that it remembers blocks of must have been taken before.
func (m *Import) Rank(i int, img *events.RankImage) error {
	m.x.mu.Lock()
	defer m.x.mu.Unlock()
	if i < 0 || i >= len(m.ranks) {
		return fmt.Errorf("rank %d of %d: %w", i, len(m.ranks), ErrImage)
	}
	r := m.x.rank(m.ranks[i])
	r.clock = img.Clock
	r.groups = slices.Clone(img.Groups)
	for j := range img.Parked {
		p := &img.Parked[j]
		e := &p.Event
		if e.Kind != events.Stored || !e.Tier.Valid() || len(e.Blocks) == 0 || len(e.Locals) != 0 && len(e.Locals) != len(e.Blocks) {
			return fmt.Errorf("rank %d: parked event %d is none: %w", i, j, ErrImage)
		}
		r.parked.add(p.Since, e, p.Cancelled)
	}
	for _, g := range img.Remembered {
		path := m.runs[g.Run]
		if int(g.Block) >= len(path) {
			return fmt.Errorf("rank %d: remembers block %d of run %d: %w", i, g.Block, g.Run, ErrImage)
		}
		if m.x.cfg.MaxRemembered == 0 {
			break
		}
		if r.gone.len() == m.x.cfg.MaxRemembered {
			m.x.unref(r.gone.shift().block)
		}
		m.x.blocks[path[g.Block]].refs++
		r.gone.push(removal{name: g.Name, since: g.Since, block: path[g.Block]})
	}
	for _, s := range img.Sets {
		if len(s.Blocks) != len(s.Counts) || !s.Tier.Valid() {
			return fmt.Errorf("rank %d: set of group %d: %w", i, s.Group, ErrImage)
		}
		for j, name := range s.Blocks {
			if s.Counts[j] > 0 {
				r.sets[copyKey{s.Tier, s.Group, name}] = s.Counts[j]
			}
		}
	}
	return nil
}

// Finish ends the import. After an error the ranks must be dropped.
func (m *Import) Finish() error {
	m.x.mu.Lock()
	defer m.x.mu.Unlock()
	for _, path := range m.runs {
		for _, b := range path {
			m.x.unref(b)
		}
	}
	m.runs = nil
	for parent, runs := range m.pending {
		return fmt.Errorf("run %d: its parent %d is missing: %w", runs[0].ID, parent, ErrImage)
	}
	return nil
}
