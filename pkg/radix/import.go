package radix

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// errImage is the error of an import of inconsistent runs or ranks. The caller must finish the import all the same, and
// drop the ranks.
var errImage = errors.New("inconsistent image")

// Import restores an image.
type Import struct {
	x       *Index
	ranks   []RankID
	left    int // expected blocks
	runs    map[events.RunID][]span
	pending map[events.RunID][]*events.Run // by missing parent
}

// span is the place of some blocks of a run in the arena. The blocks are pinned until the end of the import.
type span struct{ first, block, n uint32 }

// StartImport begins to restore an image. Position i of the image's list of ranks becomes ranks[i]. The ranks must be
// added and empty; the index may have other ranks. Apply no events to the ranks before Finish. The writer calls
// StartImport and all methods of the import. After an error, the caller must call Finish and drop the ranks.
func (x *Index) StartImport(ranks []RankID) *Import {
	return &Import{x: x, ranks: slices.Clone(ranks), runs: map[events.RunID][]span{},
		pending: map[events.RunID][]*events.Run{}}
}

// Expect announces the approximate number of blocks in the image. The table of names then grows in fewer, larger steps.
// If the index has all blocks already, the table may have four times the required size.
func (m *Import) Expect(blocks int) {
	m.x.naming.Lock()
	defer m.x.naming.Unlock()
	m.expect(max(0, min(blocks, 1<<28)))
}

func (m *Import) expect(blocks int) {
	m.x.names.coming += blocks - m.left
	m.left = blocks
}

// Run imports a run, in any order. It keeps nothing of the run.
func (m *Import) Run(run *events.Run) error {
	m.x.naming.Lock()
	defer m.x.naming.Unlock()
	if run.Parent != events.NoRun && m.runs[run.Parent] == nil {
		own := *run
		own.Locals, own.Names, own.Holdings = slices.Clone(run.Locals), slices.Clone(run.Names), nil
		for _, h := range run.Holdings {
			h.Bits, h.Copies, h.Names, h.Also = slices.Clone(h.Bits), slices.Clone(h.Copies), slices.Clone(h.Names),
				slices.Clone(h.Also)
			own.Holdings = append(own.Holdings, h)
		}
		m.pending[run.Parent] = append(m.pending[run.Parent], &own)
		return nil
	}
	for todo := []*events.Run{run}; len(todo) > 0; {
		r := todo[len(todo)-1]
		todo = append(todo[:len(todo)-1], m.pending[r.ID]...)
		delete(m.pending, r.ID)
		if err := m.run(r); err != nil {
			return fmt.Errorf("run %d: %w", r.ID, err)
		}
	}
	return nil
}

// run imports a run with a present parent.
func (m *Import) run(run *events.Run) error {
	x := m.x
	n := uint32(len(run.Locals))
	switch {
	case n == 0 || len(run.Names) != len(run.Locals):
		return fmt.Errorf("%d locals, %d names: %w", n, len(run.Names), errImage)
	case m.runs[run.ID] != nil:
		return fmt.Errorf("duplicate: %w", errImage)
	case x.v.root(run.Space) == 0:
		return fmt.Errorf("no rank of space %d: %w", run.Space, errImage)
	}
	at := uint32(0)
	if run.Parent != events.NoRun {
		var ok bool
		if at, ok = m.block(run.Parent, run.Offset-1); !ok || x.spaceOf(x.rootOf(at)) != run.Space {
			return fmt.Errorf("parent block %d of run %d is missing: %w", run.Offset, run.Parent, errImage)
		}
	}
	wish := uint32(run.ID)
	if run.ID == events.NoRun {
		wish = 0
	}
	x.walk(run.Space, noSlot, wish, at, run.Locals)
	spans := make([]span, len(x.segs))
	fresh := true
	for i, s := range x.segs {
		fresh = fresh && s.fresh
		spans[i] = span{uint32(s.first), s.block, s.n}
		spans[i].each(x.pin)
	}
	m.runs[run.ID] = spans
	m.expect(max(0, m.left-len(run.Locals)))
	for i := range run.Holdings {
		h := &run.Holdings[i]
		if err := m.holding(run, h, spans, fresh && i == 0); err != nil {
			return fmt.Errorf("rank %d, %v: %w", h.Rank, h.Tier, err)
		}
	}
	return nil
}

// each calls f for a block in each slab of a span.
func (s span) each(f func(block uint32)) {
	for g := s.block / slabBlocks; g <= (s.block+s.n-1)/slabBlocks; g++ {
		f(max(g*slabBlocks, s.block))
	}
}

// block returns the place of a run's block.
func (m *Import) block(run events.RunID, i uint32) (uint32, bool) {
	for _, s := range m.runs[run] {
		if i >= s.first && i-s.first < s.n {
			return s.block + i - s.first, true
		}
	}
	return 0, false
}

func (x *Index) rootOf(block uint32) uint32 {
	id, _ := x.where(block)
	for x.v.nodes[id].parent != 0 {
		id = x.v.nodes[id].parent
	}
	return id
}

// holding adds a rank's holding of a run in a tier for a group. fresh means that no block has a name yet.
func (m *Import) holding(run *events.Run, h *events.Holding, spans []span, fresh bool) error {
	x := m.x
	n := uint32(len(run.Locals))
	if int(h.Rank) >= len(m.ranks) || !h.Tier.Valid() || h.Lead > n || len(h.Bits) > int(n+63)/64 {
		return errImage
	}
	r := x.rank(m.ranks[h.Rank])
	if r.space != run.Space {
		return fmt.Errorf("the rank has another space: %w", errImage)
	}
	var c Counts
	e := events.Event{Kind: events.Stored, Tier: h.Tier, Group: h.Group}
	if _, main := x.recordGroup(r, &e, &c); !main {
		return fmt.Errorf("group %d is not a main group: %w", h.Group, errImage)
	}
	names := run.Names
	if len(h.Names) > 0 {
		names = slices.Clone(names)
		for _, o := range h.Names {
			if o.Block >= n {
				return fmt.Errorf("name of block %d: %w", o.Block, errImage)
			}
			names[o.Block] = o.Name
		}
	}
	held := func(i uint32) bool {
		return i < h.Lead || int(i/64) < len(h.Bits) && h.Bits[i/64]>>(i%64)&1 != 0
	}
	x.useTier(int(h.Tier) - 1)
	for lo := uint32(0); lo < n; {
		if !held(lo) {
			lo++
			continue
		}
		hi := max(lo+1, h.Lead)
		for hi < n && held(hi) {
			hi++
		}
		e.Blocks = names[lo:hi]
		if err := m.stretch(r, &e, spans, lo, fresh); err != nil {
			return err
		}
		lo = hi
	}
	for _, k := range h.Copies {
		block, ok := m.block(run.ID, k.Block)
		if !ok || k.Count < 2 || !held(k.Block) {
			return fmt.Errorf("copies of block %d: %w", k.Block, errImage)
		}
		if r.naming == namesExact {
			x.addExact(r, block, names[k.Block], h.Tier, h.Group, k.Count-1)
		} else {
			x.again(r, int(h.Tier)-1, block, k.Count-1)
		}
	}
	for _, a := range h.Also {
		block, ok := m.block(run.ID, a.Block)
		if !ok || a.Count == 0 {
			return fmt.Errorf("further name of block %d: %w", a.Block, errImage)
		}
		if r.naming != namesExact {
			x.countExactly(r)
		}
		if known := r.exact.names[a.Name]; known != nil && known.block != block {
			return fmt.Errorf("name %#x belongs to another block: %w", uint64(a.Name), errImage)
		}
		x.addExact(r, block, a.Name, h.Tier, h.Group, a.Count)
		id, nd := x.where(block)
		x.show(r, id, block-nd.start)
	}
	return nil
}

// stretch adds consecutive blocks of a run from block lo on to a rank, with the names in e.
func (m *Import) stretch(r *rank, e *events.Event, spans []span, lo uint32, fresh bool) error {
	x := m.x
	hi := lo + uint32(len(e.Blocks))
	x.segs = x.segs[:0]
	for _, s := range spans {
		for from, to := max(lo, s.first), min(hi, s.first+s.n); from < to; {
			block := s.block + from - s.first
			id, n := x.where(block)
			k := min(to-from, n.start+n.len-block)
			x.segs = append(x.segs, seg{node: id, off: block - n.start, n: k, block: block, first: int(from - lo),
				fresh: fresh})
			from += k
		}
	}
	var c Counts
	taken, v := x.enterNames(r, e, nil, &c)
	for v >= diverged {
		x.contradict(r, v)
		taken, v = x.enterNames(r, e, nil, &c)
	}
	if r.naming == namesExact {
		x.showBlocks(r, taken)
	} else {
		x.markStored(r, e, nil, taken, &c)
	}
	if v == conflicted {
		return fmt.Errorf("name %#x belongs to another block: %w", uint64(e.Blocks[taken]), errImage)
	}
	if c.Duplicates > 0 {
		return fmt.Errorf("duplicate: %w", errImage)
	}
	return nil
}

// Rank imports the state of rank i besides runs. Import all runs with remembered blocks of the rank before.
func (m *Import) Rank(i int, img *events.RankImage) error {
	m.x.naming.Lock()
	defer m.x.naming.Unlock()
	if i < 0 || i >= len(m.ranks) {
		return fmt.Errorf("rank %d of %d: %w", i, len(m.ranks), errImage)
	}
	x := m.x
	r := x.rank(m.ranks[i])
	learned := r.groups
	r.clock, r.groups = img.Clock, nil
	x.learnReuse(r)
	var c Counts
	for _, g := range img.Groups {
		x.recordGroup(r, &events.Event{Kind: events.Stored, Group: g.Group, Attention: g.Kind, Window: g.Window,
			Drops: g.Drops}, &c)
	}
	for _, g := range learned {
		if !slices.ContainsFunc(r.groups, func(o events.GroupKind) bool {
			return o.Group == g.Group &&
				o.Kind.Main()
		}) {
			return fmt.Errorf("rank %d: holdings of group %d, which is not a main group: %w", i, g.Group,
				errImage)
		}
	}
	x.setLoading(r, img.Loading)
	for j := range img.Pending {
		p := &img.Pending[j]
		e := &p.Event
		if e.Kind != events.Stored || !e.Tier.Valid() || len(e.Blocks) == 0 || !wellFormed(e) ||
			!e.Places() && len(e.Blocks) != 1 {
			return fmt.Errorf("rank %d: pending event %d is invalid: %w", i, j, errImage)
		}
		if w := r.pending.add(p.Since, e, p.Cancelled); w.left == 0 {
			r.pending.remove(w)
		}
	}
	x.boundPending(r, &c)
	for _, g := range img.Tombstones {
		block, ok := m.block(g.Run, g.Block)
		if !ok {
			return fmt.Errorf("rank %d: tombstone of missing block %d of run %d: %w", i, g.Block, g.Run, errImage)
		}
		x.pin(block)
		x.remember(r, g.Since, g.Name, block)
	}
	for _, s := range img.Sets {
		if len(s.Blocks) != len(s.Counts) || !s.Tier.Valid() {
			return fmt.Errorf("rank %d: set of group %d: %w", i, s.Group, errImage)
		}
		if r.sets == nil {
			r.sets = map[copyKey]uint32{}
		}
		for j, name := range s.Blocks {
			if s.Counts[j] > 0 {
				r.sets[copyKey{s.Tier, s.Group, name}] = s.Counts[j]
			}
		}
	}
	x.markWindows(r)
	x.resolveEnds(math.MaxInt)
	return nil
}

// Finish ends the import.
func (m *Import) Finish() (err error) {
	m.x.naming.Lock()
	defer m.x.naming.Unlock()
	for parent, runs := range m.pending {
		err = fmt.Errorf("run %d: parent %d is missing: %w", runs[0].ID, parent, errImage)
	}
	for _, spans := range m.runs {
		for _, s := range spans {
			s.each(m.x.unpin)
		}
	}
	m.runs, m.pending = nil, nil
	m.expect(0)
	return err
}
