package dump

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// blocksPerEvent is how many blocks one dumped event has at most.
const blocksPerEvent = 1024

// Image is a partition's image, kept whole. It is a snapshot.Sink.
type Image struct {
	runs  map[events.RunID]*events.Run
	held  map[uint32][]heldRun // by rank
	ranks map[int]events.RankImage
}

// heldRun is a run of which a rank holds something.
type heldRun struct {
	run      events.RunID
	holdings []events.Holding
}

// NewImage returns an empty image.
func NewImage() *Image {
	return &Image{runs: map[events.RunID]*events.Run{}, held: map[uint32][]heldRun{}, ranks: map[int]events.RankImage{}}
}

func (im *Image) Run(r *events.Run) error {
	im.runs[r.ID] = &events.Run{ID: r.ID, Parent: r.Parent, Offset: r.Offset, Locals: slices.Clone(r.Locals),
		Names: slices.Clone(r.Names)}
	for _, h := range r.Holdings {
		h.Bits, h.Copies, h.Names, h.Also = slices.Clone(h.Bits), slices.Clone(h.Copies), slices.Clone(h.Names),
			slices.Clone(h.Also)
		list := im.held[h.Rank]
		if n := len(list); n == 0 || list[n-1].run != r.ID {
			list = append(list, heldRun{run: r.ID})
		}
		last := &list[len(list)-1]
		last.holdings = append(last.holdings, h)
		im.held[h.Rank] = list
	}
	return nil
}

func (im *Image) Rank(i int, img *events.RankImage) error {
	im.ranks[i] = *img
	return nil
}

// copies is how often a block is held in a tier under a name.
type copies struct {
	tier  events.Tier
	name  events.BlockHash
	count uint32
}

// each calls f for every block of a run that a holding has, with its copies.
func each(run *events.Run, h *events.Holding, f func(block uint32, c copies)) {
	names, counts, also := h.Names, h.Copies, h.Also
	for b := range uint32(len(run.Locals)) {
		if b >= h.Lead && (int(b/64) >= len(h.Bits) || h.Bits[b/64]>>(b%64)&1 == 0) {
			continue
		}
		c := copies{h.Tier, run.Names[b], 1}
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

// path is how much of a run a rank's events must name: up to the last block that it holds, or that another run follows.
type path struct {
	run   *events.Run
	depth int // runs above it
	need  uint32
	names []events.BlockHash // as dumped; 0..need
	held  [][]copies
}

// Events gives what a rank holds as events, a parent before its children. What emit gets is good until it returns. A
// cleared event comes first, with what the groups serve and what those hold that are no part of the prefix, if that
// matters. pending are the blocks that wait for their parents, which are left out.
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
	paths, used := im.paths(rank, mains)
	list := make([]*path, 0, len(paths))
	for _, p := range paths {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *path) int {
		return cmp.Or(cmp.Compare(a.depth, b.depth), cmp.Compare(a.run.ID, b.run.ID))
	})
	var made []events.BlockHash
	next := events.BlockHash(1) << 63
	for _, p := range list {
		if w.err != nil {
			break
		}
		parent, hasParent := events.BlockHash(0), false
		if up, at, ok := im.above(p.run); ok {
			parent, hasParent = paths[up.ID].names[at], true
		}
		for b := range p.need {
			var c copies
			if len(p.held[b]) > 0 {
				c = p.held[b][0]
			} else { // nothing there: a name of ours, to be removed at the end
				for used[next] {
					next++
				}
				c = copies{events.Device, next, 1}
				made = append(made, next)
				next++
			}
			p.names = append(p.names, c.name)
			w.store(c.tier, hasParent, parent, c.name, p.run.Locals[b])
			parent, hasParent = c.name, true
		}
		w.flush()
		// The other copies: all parents are known by now.
		for b := range p.need {
			parent, hasParent := events.BlockHash(0), false
			if b > 0 {
				parent, hasParent = p.names[b-1], true
			} else if up, at, ok := im.above(p.run); ok {
				parent, hasParent = paths[up.ID].names[at], true
			}
			for i, c := range p.held[b] {
				for n := range c.count {
					if i > 0 || n > 0 {
						w.store(c.tier, hasParent, parent, c.name, p.run.Locals[b])
					}
				}
			}
		}
		w.flush()
	}
	for part := range slices.Chunk(made, blocksPerEvent) {
		w.write(&events.Event{Kind: events.Removed, Tier: events.Device, Group: main, Blocks: part})
	}
	return pending, w.err
}

// groupsOf is what a rank's groups serve and what those hold that are no part of the prefix, as stored events: none if
// there is but one main group that wants nothing more. mains counts the main groups; main is the first, which stands
// for all.
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

// paths finds the runs that a rank's events must name, and the names that it has. mains is how many main groups the
// rank has.
func (im *Image) paths(rank, mains int) (paths map[events.RunID]*path, used map[events.BlockHash]bool) {
	paths, used = map[events.RunID]*path{}, map[events.BlockHash]bool{}
	open := func(run *events.Run) *path {
		p := paths[run.ID]
		if p == nil {
			p = &path{run: run, held: make([][]copies, len(run.Locals))}
			paths[run.ID] = p
		}
		return p
	}
	for _, h := range im.held[uint32(rank)] {
		p := open(im.runs[h.run])
		byGroups := map[[2]uint32]map[events.GroupIndex]bool{} // (block, tier) → groups
		for i := range h.holdings {
			each(p.run, &h.holdings[i], func(b uint32, c copies) {
				used[c.name] = true
				if mains > 1 {
					at := [2]uint32{b, uint32(c.tier)}
					if byGroups[at] == nil {
						byGroups[at] = map[events.GroupIndex]bool{}
					}
					byGroups[at][h.holdings[i].Group] = true
					if len(byGroups[at]) < mains ||
						slices.ContainsFunc(p.held[b], func(o copies) bool { return o.tier == c.tier }) {
						return
					}
					c.count = 1
				}
				p.held[b] = append(p.held[b], c)
				p.need = max(p.need, b+1)
			})
		}
	}
	for _, h := range im.held[uint32(rank)] {
		if paths[h.run].need == 0 {
			continue
		}
		for run := im.runs[h.run]; ; {
			up, at, ok := im.above(run)
			if !ok {
				break
			}
			p := open(up)
			p.need = max(p.need, at+1)
			run = up
		}
	}
	for id, p := range paths {
		if p.need == 0 {
			delete(paths, id)
			continue
		}
		for run := p.run; ; p.depth++ {
			up, _, ok := im.above(run)
			if !ok {
				break
			}
			run = up
		}
	}
	return paths, used
}

// above is the block before a run's first: a run and a position in it. It reports false at the start of a prompt.
func (im *Image) above(run *events.Run) (up *events.Run, at uint32, ok bool) {
	for run.Parent != events.NoRun {
		offset := run.Offset
		if run = im.runs[run.Parent]; offset > 0 {
			return run, offset - 1, true
		}
	}
	return nil, 0, false
}

// writer joins blocks that follow each other in one tier into events. After an error it writes nothing more.
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
