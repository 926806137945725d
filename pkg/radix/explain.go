package radix

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Stop is the rule that ended a rank's prefix. String returns query_ends, unknown_block, not_held,
// held_in_earlier_tier, group_lacks_blocks, draft_model or part_of_chunk.
type Stop uint8

// The rules.
const (
	stopEnd     Stop = 1 // the end of the query
	StopUnknown Stop = 2 // no rank holds or remembers the block, or blocks after it
	StopAbsent  Stop = 3 // the rank holds the block in no tier
	stopEarlier Stop = 4 // the rank holds the block only in tiers before the current tier of the prefix
	StopGroup   Stop = 5 // a group besides the main groups lacks blocks that any longer prefix needs
	stopDraft   Stop = 6 // the engine computes the last held block again, for a draft model
	stopChunk   Stop = 7 // the engine loads a chunk of several blocks only as a whole, and blocks are missing
)

var stopNames = [...]string{"none", "query_ends", "unknown_block", "not_held", "held_in_earlier_tier",
	"group_lacks_blocks", "draft_model", "part_of_chunk"}

func (s Stop) String() string {
	if int(s) < len(stopNames) {
		return stopNames[s]
	}
	return "unknown"
}

// TierSet is a set of tiers: bit 0 is the device.
type TierSet uint8

// Has reports whether a tier is in the set.
func (s TierSet) Has(t events.Tier) bool { return t.Valid() && s>>(t-1)&1 != 0 }

// RankPath has the path of a rank along a query.
type RankPath struct {
	Overlap
	Stop   Stop
	Group  events.GroupKind // with StopGroup: the group that ended the prefix
	Blocks []TierSet        // for each known block of the query: the tiers in which the rank holds the block
	Behind uint32           // number of blocks after the end of the prefix that the rank holds in any tier
}

// Explanation has the reasons for an answer.
type Explanation struct {
	// the number of leading blocks of the query in the index: a rank holds or remembers them or blocks after them
	Known uint32
	Ranks []RankPath // all ranks that hold any of the blocks
}

// explainTries is the number of failed walks after which Explain blocks the writer. A walk takes milliseconds if many
// ranks hold a long prompt, and every new prompt changes the root.
const explainTries = 8

// Explain is Match with reasons, for operators. It allocates memory. It is safe for concurrent use. After several
// failed walks, it blocks the writer for a walk.
func (x *Index) Explain(space uint32, locals []events.LocalHash, allowed *RankSet) *Explanation {
	q := unsafe.Slice((*uint64)(unsafe.SliceData(locals)), len(locals))
	for tries := 0; ; tries++ {
		if tries == explainTries {
			x.naming.RLock()
			defer x.naming.RUnlock()
		}
		var a Answer
		w := &a.walk
		w.v, w.hidden, w.tries = x.view.Load(), x.hidden.Load(), 1
		if w.device(space, q, allowed, &a, further) {
			if ex := w.explain(len(locals), allowed, &a); x.validate(w) {
				runtime.KeepAlive(x)
				return ex
			}
		}
		runtime.Gosched()
	}
}

func (w *walk) explain(query int, allowed *RankSet, a *Answer) *Explanation {
	w.others(allowed, a)
	depths := map[RankID][events.NumTiers]uint32{}
	for _, o := range a.Ranks {
		depths[o.Rank] = o.Depth
	}
	w.cut(a)
	usable := map[RankID][events.NumTiers]uint32{}
	for _, o := range a.Ranks {
		usable[o.Rank] = o.Depth
	}
	ex := &Explanation{}
	for i := range w.path {
		ex.Known += w.path[i].match
	}
	for slot := range w.v.ids {
		id := RankID(atomic.LoadUint32(&w.v.ids[slot]))
		if allowed != nil && !allowed.Has(id) {
			continue
		}
		p := RankPath{Overlap: Overlap{id, depths[id]}, Blocks: make([]TierSet, 0, ex.Known)}
		any := TierSet(0)
		for i := range w.path {
			s := &w.path[i]
			for off := range s.match {
				var set TierSet
				for t := range events.NumTiers {
					if w.v.masks[t] == nil || w.hidden&hiding != 0 && w.hidden>>t&1 != 0 &&
						w.hidden&^hiding>>8 == uint64(slot) {
						continue
					}
					if w.run(s, off, t, uint32(slot)) > 0 {
						set |= 1 << t
					}
				}
				p.Blocks = append(p.Blocks, set)
				any |= set
			}
		}
		if any != 0 {
			p.explain(query)
			if p.Stop == stopEarlier && w.loading(uint32(slot)).Chunked() {
				p.Stop = stopChunk
			}
			if u := w.limit(uint32(slot)); u != nil {
				w.explainCut(&p, u, usable[id])
			}
			ex.Ranks = append(ex.Ranks, p)
		}
	}
	return ex
}

// explainCut sets the reason if an engine can use less than the rank holds.
func (w *walk) explainCut(p *RankPath, u *reuse, usable [events.NumTiers]uint32) {
	held := p.Overlap.Blocks()
	p.Depth = usable
	n := p.Overlap.Blocks()
	if n >= held || int(held) > len(p.Blocks) { // more blocks than seen: a change is half written, and the walk is invalid
		return
	}
	slot := uint32(p.Rank.Slot())
	p.Stop = stopDraft
	most := held - min(held, u.most)
	for least, i := most, 0; i < len(u.windows); i++ {
		if m := w.fit(&u.windows[i], slot, w.seen(slot), len(w.path)-1, most); m < least {
			least, p.Stop, p.Group = m, StopGroup, u.windows[i].kind
		}
	}
	for _, s := range p.Blocks[n:held] {
		if s != 0 {
			p.Behind++
		}
	}
}

// explain sets Stop and Behind.
func (p *RankPath) explain(query int) {
	end := int(p.Overlap.Blocks())
	switch {
	case end >= query:
		p.Stop = stopEnd
	case end >= len(p.Blocks):
		p.Stop = StopUnknown
		return
	case p.Blocks[end] == 0:
		p.Stop = StopAbsent
	default:
		p.Stop = stopEarlier
	}
	for _, s := range p.Blocks[min(end, len(p.Blocks)):] {
		if s != 0 {
			p.Behind++
		}
	}
}
