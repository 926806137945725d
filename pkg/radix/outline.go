package radix

import (
	"cmp"
	"container/heap"
	"math/bits"
	"runtime"
	"slices"
	"sync/atomic"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Outline is the largest part of a space's tree, for operators. The runs may be from different moments.
type Outline struct {
	Runs []OutlineRun // parents before children

	// Totals of the space: runs with holders, and their blocks.
	TotalRuns, TotalBlocks int64
}

// OutlineRun is a run of consecutive blocks.
type OutlineRun struct {
	Parent  int // position in Runs; -1: the run begins prompts
	Depth   uint32
	Blocks  uint32
	First   events.LocalHash        // hash of the first block
	Holders int                     // ranks that hold any block of the run
	Tiers   [events.NumTiers]uint32 // the same for each tier
	Ranks   []RankID                // some of the holders, at most OutlineNames

	// With OutlineQuery.Hashes: the data to join the run with runs of another index.
	Locals []events.LocalHash // of the first blocks
	Partly []OutlinePart      // of ranks that do not hold all of the run in a tier
}

// OutlinePart is a part of a run that a rank holds in a tier: blocks From up to To.
type OutlinePart struct {
	Rank     RankID
	Tier     events.Tier
	From, To uint32
	Whole    bool // the rank holds all of the run in another tier
}

// Limits of an outline.
const (
	OutlineNames = 32 // holders of a run with names
	outlineParts = 64 // parts of a run; a rank with more counts as a holder of the whole run
	outlineLeast = 16 // minimum number of hashes of a run, beyond the limit
)

// OutlineQuery selects an outline.
type OutlineQuery struct {
	Space uint32
	Most  int      // runs
	Among *RankSet // ranks to count; nil: all ranks

	// Hashes limits the number of local hashes of all runs together. A run without room gets only its first few
	// hashes. 0: no hashes.
	Hashes int
}

// Outline returns the runs of a space that are largest by blocks times holders, at most Most, with all runs that lead
// to them. It visits every run of the index and allocates the result. It is safe for concurrent use, and never blocks
// the writer.
func (x *Index) Outline(q OutlineQuery) *Outline {
	o := outliner{x: x, space: q.Space, most: q.Most, among: q.Among, hashes: q.Hashes, byID: map[uint32]int{}}
	for id := uint32(firstNode); ; id++ {
		v := x.view.Load()
		if int(id) >= len(v.nodes) {
			break
		}
		if s, ok := o.read(id); ok && s.holders > 0 && o.inSpace(id) {
			o.out.TotalRuns++
			o.out.TotalBlocks += int64(s.blocks)
			o.offer(s)
		}
	}
	slices.SortFunc(o.largest, func(a, b sight) int { return cmp.Compare(b.size(), a.size()) })
	for _, s := range o.largest {
		o.place(s.id)
	}
	runtime.KeepAlive(x)
	return &o.out
}

// sight is a run as it was at a moment.
type sight struct {
	id, parent, depth, blocks uint32
	first                     uint64
	holders                   int
}

func (s *sight) size() uint64 { return uint64(s.blocks) * uint64(s.holders) }

// sights is a heap with the smallest run on top.
type sights []sight

func (h sights) Len() int           { return len(h) }
func (h sights) Less(i, j int) bool { return h[i].size() < h[j].size() }
func (h sights) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *sights) Push(s any)        { *h = append(*h, s.(sight)) }
func (h *sights) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

type outliner struct {
	x       *Index
	space   uint32
	most    int
	among   *RankSet
	hashes  int // remaining number of hashes
	largest sights
	out     Outline
	byID    map[uint32]int // position in out.Runs; -1: no place

	// Of the current run: by tier and in total, the ranks that hold any block.
	tiers [events.NumTiers][]uint64
	any   []uint64
	ids   []uint32

	// If maxHashes > 0: the hashes of the run, at most maxHashes, and the ranks with parts.
	maxHashes int
	locals    []events.LocalHash
	parts     []OutlinePart
}

// read reads a run. It returns false without a run, or after many changes by the writer.
func (o *outliner) read(id uint32) (s sight, ok bool) {
	for range 64 {
		v, hidden := o.x.view.Load(), o.x.hidden.Load()
		if int(id) >= len(v.nodes) {
			return s, false
		}
		n := &v.nodes[id]
		version := atomic.LoadUint32(&n.version)
		if version&1 != 0 {
			runtime.Gosched()
			continue
		}
		s = sight{id: id, parent: atomic.LoadUint32(&n.parent), depth: atomic.LoadUint32(&n.depth),
			blocks: atomic.LoadUint32(&n.len)}
		start := atomic.LoadUint32(&n.start)
		ok = s.parent != 0 && s.blocks > 0 && int(start) < len(v.locals)
		if ok {
			s.first = atomic.LoadUint64(&v.locals[start])
			ok = o.holders(v, n, id, hidden)
			for _, word := range o.any {
				s.holders += bits.OnesCount64(word)
			}
			o.locals = nil
			for i := start; i < start+min(s.blocks, uint32(o.maxHashes)) && int(i) < len(v.locals); i++ {
				o.locals = append(o.locals, events.LocalHash(atomic.LoadUint64(&v.locals[i])))
			}
		}
		if atomic.LoadUint32(&n.version) == version && o.x.view.Load() == v && o.x.hidden.Load() == hidden {
			return s, ok
		}
	}
	return s, false
}

// holders reads the holders of a run. It returns false for half-written data.
func (o *outliner) holders(v *view, n *node, id uint32, hidden uint64) bool {
	o.any = append(o.any[:0], make([]uint64, v.stride)...)
	o.ids, o.parts = v.ids, nil
	parts, count := atomic.LoadUint32(&n.parts), atomic.LoadUint32(&n.nparts)
	if uint64(parts)+uint64(count) > uint64(len(v.parts)) {
		return false
	}
	for t := range o.tiers {
		o.tiers[t] = append(o.tiers[t][:0], make([]uint64, v.stride)...)
		if m := v.masks[t]; m != nil {
			for i := range v.stride {
				o.tiers[t][i] = atomic.LoadUint64(&m[int(id)*v.stride+i])
				o.any[i] |= o.tiers[t][i] // the whole run, so far
			}
		}
	}
	for i := range count {
		key := atomic.LoadUint32(&v.parts[parts+i].key)
		slot, t := slotOf(key), planeOf(key)
		if t >= events.NumTiers {
			break
		}
		if int(slot>>6) >= v.stride || int(slot) >= len(v.ids) { // a rank after this view
			return false
		}
		o.tiers[t][slot>>6] |= 1 << (slot & 63)
		rank := RankID(atomic.LoadUint32(&v.ids[slot]))
		if o.maxHashes > 0 && (o.among == nil || o.among.Has(rank)) && !isHidden(hidden, slot, t) {
			part := OutlinePart{Rank: rank, Tier: events.Tier(t + 1), Whole: o.any[slot>>6]>>(slot&63)&1 != 0}
			if !o.ranges(v, &v.parts[parts+i], atomic.LoadUint32(&n.len), part) {
				return false
			}
		}
	}
	for t := range o.tiers {
		if slot := uint32(hidden &^ hiding >> 8); isHidden(hidden, slot, t) && int(slot>>6) < v.stride {
			o.tiers[t][slot>>6] &^= 1 << (slot & 63)
		}
		for i := range o.tiers[t] {
			if o.among != nil {
				o.tiers[t][i] &= o.among.word(i)
			}
			if t == 0 {
				o.any[i] = 0
			}
			o.any[i] |= o.tiers[t][i]
		}
	}
	return true
}

// isHidden reports whether a clear is removing a tier of a rank.
func isHidden(hidden uint64, slot uint32, tier int) bool {
	return hidden&hiding != 0 && hidden>>tier&1 != 0 && uint32(hidden&^hiding>>8) == slot
}

// ranges reads the held ranges of a part of a run with n blocks. It returns false for half-written data.
func (o *outliner) ranges(v *view, p *part, n uint32, held OutlinePart) bool {
	lead, first, words := atomic.LoadUint32(&p.lead), atomic.LoadUint32(&p.bits), atomic.LoadUint32(&p.words)
	if first != 0 && uint64(first)+uint64(words) > uint64(len(v.bits)) {
		return false
	}
	for at := uint32(0); at < n && len(o.parts) <= outlineParts; at++ {
		if at >= lead && (first == 0 || at>>6 >= words || atomic.LoadUint64(&v.bits[first+at>>6])>>(at&63)&1 == 0) {
			continue
		}
		if last := len(o.parts) - 1; held.To != 0 && held.To == at {
			o.parts[last].To = at + 1
		} else {
			held.From = at
			o.parts = append(o.parts, held)
			o.parts[len(o.parts)-1].To = at + 1
		}
		held.To = at + 1
	}
	return true
}

// inSpace reports whether a run is in the requested space.
func (o *outliner) inSpace(id uint32) bool {
	v := o.x.view.Load()
	if len(v.roots) == 1 {
		return v.roots[0].space == o.space
	}
	root := v.root(o.space)
	for range 1 << 20 { // longer than any path; a half-written path may be a circle
		if int(id) >= len(v.nodes) {
			return false
		}
		up := atomic.LoadUint32(&v.nodes[id].parent)
		if up == 0 {
			return root != 0 && id == root
		}
		id = up
	}
	return false
}

// offer keeps a run if it is among the largest.
func (o *outliner) offer(s sight) {
	switch {
	case o.most <= 0:
	case len(o.largest) < o.most:
		heap.Push(&o.largest, s)
	case s.size() > o.largest[0].size():
		o.largest[0] = s
		heap.Fix(&o.largest, 0)
	}
}

// place adds a run to the outline, after the runs that lead to it, if the outline has room for all.
func (o *outliner) place(id uint32) int {
	var way []uint32 // runs without a place, lowest first
	at, depth := -1, uint32(0)
	for up := id; ; {
		if i, there := o.byID[up]; there {
			if i < 0 {
				return -1
			}
			at, depth = i, o.out.Runs[i].Depth+o.out.Runs[i].Blocks
			break
		}
		s, ok := o.read(up)
		if !ok && s.parent == 0 && len(way) > 0 {
			break // the root above
		}
		if !ok || len(way) > o.most {
			return o.cannot(way, up)
		}
		way = append(way, up)
		up = s.parent
	}
	if len(o.out.Runs)+len(way) > o.most {
		return -1
	}
	for _, id := range slices.Backward(way) {
		if o.hashes > 0 {
			o.maxHashes = max(o.hashes-outlineLeast*(o.most-len(o.out.Runs)), outlineLeast)
		}
		s, ok := o.read(id)
		o.maxHashes = 0
		if !ok || s.depth != depth || s.holders == 0 { // the run has changed
			return o.cannot(nil, id)
		}
		run := OutlineRun{Parent: at, Depth: s.depth, Blocks: s.blocks, First: events.LocalHash(s.first),
			Holders: s.holders, Locals: o.locals}
		if o.hashes -= len(o.locals); len(o.parts) <= outlineParts {
			run.Partly = o.parts
		}
		for t, words := range o.tiers {
			for _, word := range words {
				run.Tiers[t] += uint32(bits.OnesCount64(word))
			}
		}
		for i, word := range o.any {
			for ; word != 0 && len(run.Ranks) < OutlineNames; word &= word - 1 {
				slot := i<<6 + bits.TrailingZeros64(word)
				run.Ranks = append(run.Ranks, RankID(atomic.LoadUint32(&o.ids[slot])))
			}
		}
		at, depth = len(o.out.Runs), s.depth+s.blocks
		o.byID[id] = at
		o.out.Runs = append(o.out.Runs, run)
	}
	return at
}

func (o *outliner) cannot(way []uint32, last uint32) int {
	for _, id := range append(way, last) {
		o.byID[id] = -1
	}
	return -1
}
