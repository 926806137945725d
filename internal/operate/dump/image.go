package dump

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// blocksPerEvent bounds the blocks of a dumped event.
const blocksPerEvent = 1024

// Image is the complete image of a partition: 16 bytes per block, and 200 bytes per run and per rank with holdings in
// the run. It implements snapshot.Sink.
type Image struct {
	runs  map[events.RunID]*run
	held  map[uint32][]heldRun // by rank; the holdings of a run are contiguous
	ranks map[int]events.RankImage
}

type run struct {
	id, parent events.RunID
	offset     uint32
	locals     []events.LocalHash
	names      []events.BlockHash
}

// heldRun is a rank's holding in a run, for one tier and group.
type heldRun struct {
	run     *run
	holding events.Holding
}

// NewImage returns an empty image.
func NewImage() *Image {
	return &Image{runs: map[events.RunID]*run{}, held: map[uint32][]heldRun{}, ranks: map[int]events.RankImage{}}
}

func (im *Image) Run(r *events.Run) error {
	kept := &run{id: r.ID, parent: r.Parent, offset: r.Offset, locals: slices.Clone(r.Locals),
		names: slices.Clone(r.Names)}
	im.runs[r.ID] = kept
	for _, h := range r.Holdings {
		h.Bits, h.Copies, h.Names, h.Also = slices.Clone(h.Bits), slices.Clone(h.Copies), slices.Clone(h.Names),
			slices.Clone(h.Also)
		im.held[h.Rank] = append(im.held[h.Rank], heldRun{kept, h})
	}
	return nil
}

func (im *Image) Rank(i int, img *events.RankImage) error {
	im.ranks[i] = *img
	return nil
}

// copies is the number of copies of a block in a tier under a name.
type copies struct {
	tier  events.Tier
	name  events.BlockHash
	count uint32
}

// each calls f for the blocks of a holding, with the copies.
func each(run *run, h *events.Holding, f func(block uint32, c copies)) {
	names, counts, also := h.Names, h.Copies, h.Also
	for b := range uint32(len(run.locals)) {
		if b >= h.Lead && (int(b/64) >= len(h.Bits) || h.Bits[b/64]>>(b%64)&1 == 0) {
			continue
		}
		c := copies{h.Tier, run.names[b], 1}
		if len(names) > 0 && names[0].Block == b {
			c.name, names = names[0].Name, names[1:]
		}
		if len(counts) > 0 && counts[0].Block == b {
			c.count, counts = counts[0].Count, counts[1:]
		}
		f(b, c)
		for len(also) > 0 && also[0].Block == b {
			f(b, copies{h.Tier, also[0].Name, also[0].Count})
			also = also[1:]
		}
	}
}

// path is the part of a run that a rank's events must name: up to the last held block, or to the last child run.
type path struct {
	run    *run
	held   []heldRun // the rank's holdings in the run
	depth  int       // number of runs above it
	need   uint32
	parent events.BlockHash // name in the dump of the block before the run, if the run has a parent
	up     *path            // path and position of this block
	at     uint32
}

// runCopies contains a rank's copies of the blocks of a run.
type runCopies struct {
	of    [][]copies
	mains int // number of main groups; with several, a block counts if all main groups hold it
}

// read reads the copies of a run's blocks. need is the number of blocks up to the last held block.
func (rc *runCopies) read(run *run, held []heldRun) (need uint32) {
	rc.of = slices.Grow(rc.of[:0], len(run.locals))[:len(run.locals)]
	for b := range rc.of {
		rc.of[b] = rc.of[b][:0]
	}
	byGroups := map[[2]uint32]map[events.GroupIndex]bool{} // groups by block and tier
	for i := range held {
		each(run, &held[i].holding, func(b uint32, c copies) {
			if rc.mains > 1 {
				at := [2]uint32{b, uint32(c.tier)}
				if byGroups[at] == nil {
					byGroups[at] = map[events.GroupIndex]bool{}
				}
				byGroups[at][held[i].holding.Group] = true
				if len(byGroups[at]) < rc.mains ||
					slices.ContainsFunc(rc.of[b], func(o copies) bool { return o.tier == c.tier }) {
					return
				}
				c.count = 1
			}
			rc.of[b] = append(rc.of[b], c)
			need = max(need, b+1)
		})
	}
	return need
}

// Events calls emit with the rank's holdings as events, a parent before its children. The event is valid until emit
// returns. If the rank has other groups, a cleared event comes first, with the specifications and the blocks of these
// groups. pending is the number of omitted blocks without a known parent.
func (im *Image) Events(rank int, emit func(e *events.Event, groups ...events.Event) error) (pending int, err error) {
	img := im.ranks[rank]
	for _, p := range img.Pending {
		pending += len(p.Event.Blocks) - len(p.Cancelled)
	}
	groups, mains, main := groupsOf(&img)
	w := writer{emit: emit, group: main}
	if len(groups) > 0 {
		w.write(&events.Event{Kind: events.Cleared, Reason: events.ReasonEngine}, groups...)
	}
	list := im.paths(rank, mains)
	made := nameMaker{held: im.held[uint32(rank)]}
	held := runCopies{mains: mains}
	var names []events.BlockHash // names in the dump, of the current run
	children := slices.DeleteFunc(slices.Clone(list), func(p *path) bool { return p.up == nil })
	slices.SortFunc(children, func(a, b *path) int { return cmp.Compare(a.up.run.id, b.up.run.id) })
	for _, p := range list {
		if w.err != nil {
			break
		}
		held.read(p.run, p.held)
		parent, hasParent := p.parent, p.up != nil
		names = names[:0]
		for b := range p.need {
			var c copies
			if len(held.of[b]) > 0 {
				c = held.of[b][0]
			} else { // a missing block gets a new name, which is removed at the end
				c = copies{events.Device, made.next(), 1}
			}
			names = append(names, c.name)
			w.store(c.tier, hasParent, parent, c.name, p.run.locals[b])
			parent, hasParent = c.name, true
		}
		w.flush()
		// The other copies. All parents have been named.
		for b := range p.need {
			parent, hasParent := p.parent, p.up != nil
			if b > 0 {
				parent, hasParent = names[b-1], true
			}
			for i, c := range held.of[b] {
				for n := range c.count {
					if i > 0 || n > 0 {
						w.store(c.tier, hasParent, parent, c.name, p.run.locals[b])
					}
				}
			}
		}
		w.flush()
		at, _ := slices.BinarySearchFunc(children, p.run.id, func(c *path, id events.RunID) int {
			return cmp.Compare(c.up.run.id, id)
		})
		for ; at < len(children) && children[at].up == p; at++ {
			children[at].parent = names[children[at].at]
		}
	}
	for made.count > 0 && w.err == nil {
		w.write(&events.Event{Kind: events.Removed, Tier: events.Device, Group: main, Blocks: made.again(blocksPerEvent)})
	}
	return pending, w.err
}

// nameMaker generates consecutive names that the rank does not use.
type nameMaker struct {
	held  []heldRun
	first events.BlockHash // 0: not chosen yet
	count int
}

// madeRange is the distance between possible first names.
const madeRange = 1 << 32

func (m *nameMaker) next() events.BlockHash {
	if m.first == 0 {
		m.first = m.free()
	}
	m.count++
	return m.first + events.BlockHash(m.count) - 1
}

// free returns the first of madeRange names that the rank does not use.
func (m *nameMaker) free() events.BlockHash {
	const at = 1 << 16 // ranges examined in one pass
	for first := events.BlockHash(1) << 63; ; first += at * madeRange {
		var used [at]bool
		for i := range m.held {
			each(m.held[i].run, &m.held[i].holding, func(_ uint32, c copies) {
				if r := (c.name - first) / madeRange; r < at {
					used[r] = true
				}
			})
		}
		if i := slices.Index(used[:], false); i >= 0 {
			return first + events.BlockHash(i)*madeRange
		}
	}
}

// again returns the next generated names, at most the given number. It returns a name only once.
func (m *nameMaker) again(most int) (names []events.BlockHash) {
	for m.count > 0 && len(names) < most {
		names = append(names, m.first)
		m.first++
		m.count--
	}
	return names
}

// groupsOf returns the rank's groups, with their blocks outside the prefix, as stored events. It returns no events for
// a single main group without further needs. mains counts the main groups; main is the first, which represents all.
func groupsOf(img *events.RankImage) (groups []events.Event, mains int, main events.GroupIndex) {
	all := events.Event{Kind: events.Stored, Tier: events.Device}
	kinds := map[events.GroupIndex]events.Attention{}
	for _, g := range img.Groups {
		if kinds[g.Group] = g.Kind; !g.Kind.Main() {
			groups = append(groups, events.Event{
				Kind: events.Stored, Tier: events.Device, Group: g.Group, Attention: g.Kind, Window: g.Window,
				Drops: g.Drops,
			})
			continue
		}
		if mains++; mains == 1 {
			all.Group, all.Attention = g.Group, g.Kind
		}
		all.Window, all.Drops = max(all.Window, g.Window), all.Drops || g.Drops
	}
	if mains > 0 && (len(groups) > 0 || all.Window > 0 || all.Drops) {
		groups = append(groups, all)
	}
	for _, set := range img.Sets {
		e := events.Event{Kind: events.Stored, Tier: set.Tier, Group: set.Group, Attention: kinds[set.Group]}
		for i, name := range set.Blocks {
			for range set.Counts[i] {
				e.Blocks = append(e.Blocks, name)
			}
		}
		groups = append(groups, e)
	}
	return groups, mains, all.Group
}

// paths returns the runs for a rank's events, a parent before its children. mains is the number of main groups.
func (im *Image) paths(rank, mains int) (list []*path) {
	paths := map[events.RunID]*path{}
	open := func(run *run) *path {
		p := paths[run.id]
		if p == nil {
			p = &path{run: run}
			paths[run.id] = p
		}
		return p
	}
	copies := runCopies{mains: mains}
	for held := im.held[uint32(rank)]; len(held) > 0; {
		n := 1
		for n < len(held) && held[n].run == held[0].run {
			n++
		}
		p := open(held[0].run)
		p.held = held[:n]
		p.need = max(p.need, copies.read(p.run, p.held))
		held = held[n:]
		if p.need == 0 {
			continue
		}
		for run := p.run; ; {
			up, at, ok := im.above(run)
			if !ok {
				break
			}
			q := open(up)
			q.need = max(q.need, at+1)
			run = up
		}
	}
	for _, p := range paths {
		if p.need == 0 {
			continue
		}
		list = append(list, p)
		if up, at, ok := im.above(p.run); ok {
			p.up, p.at = paths[up.id], at
		}
		for run := p.run; ; p.depth++ {
			up, _, ok := im.above(run)
			if !ok {
				break
			}
			run = up
		}
	}
	slices.SortFunc(list, func(a, b *path) int {
		return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.run.id, b.run.id))
	})
	return list
}

// above returns the run and position of the block before a run. ok is false at the start of a prompt.
func (im *Image) above(run *run) (up *run, at uint32, ok bool) {
	for run.parent != events.NoRun {
		offset := run.offset
		if run = im.runs[run.parent]; offset > 0 {
			return run, offset - 1, true
		}
	}
	return nil, 0, false
}

// writer combines consecutive blocks of one tier into events. It stops after an error.
type writer struct {
	emit  func(*events.Event, ...events.Event) error
	group events.GroupIndex
	event events.Event
	err   error
}

func (w *writer) write(e *events.Event, groups ...events.Event) {
	if w.err == nil {
		w.err = w.emit(e, groups...)
	}
}

func (w *writer) store(tier events.Tier, hasParent bool, parent, name events.BlockHash, local events.LocalHash) {
	e := &w.event
	if n := len(e.Blocks); n == 0 || n == blocksPerEvent || e.Tier != tier || !hasParent || e.Blocks[n-1] != parent {
		w.flush()
		*e = events.Event{
			Kind: events.Stored, Tier: tier, Group: w.group, HasParent: hasParent, Parent: parent,
			Blocks: e.Blocks[:0], Locals: e.Locals[:0],
		}
	}
	e.Blocks, e.Locals = append(e.Blocks, name), append(e.Locals, local)
}

func (w *writer) flush() {
	if len(w.event.Blocks) > 0 {
		w.write(&w.event)
	}
	w.event.Blocks, w.event.Locals = w.event.Blocks[:0], w.event.Locals[:0]
}
