package radix

import (
	"runtime"
	"sync/atomic"
	"unsafe"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Stop is the rule that ended a rank's prefix.
type Stop uint8

// The rules.
const (
	StopEnd     Stop = 1 // the query ends here
	StopUnknown Stop = 2 // nobody holds or remembers this block, or what follows it
	StopAbsent  Stop = 3 // the rank holds the block in no tier
	StopEarlier Stop = 4 // the rank holds the block, but only in tiers before the one the prefix has come to
	StopGroup   Stop = 5 // a group beside the main ones does not have what it needs of any longer prefix
	StopDraft   Stop = 6 // the engine computes the last block that it holds anew, for its draft model
	StopChunk   Stop = 7 // the engine loads a chunk of several blocks only as a whole, and not all of it counts
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

// RankPath is a rank's way along a query.
type RankPath struct {
	Overlap
	Stop   Stop
	Group  events.GroupKind // with StopGroup: the group that stopped it
	Blocks []TierSet        // for each known block of the query, the tiers in which the rank holds it
	Behind uint32           // how many blocks behind the end of its prefix the rank holds in some tier
}

// Explanation says why an answer is what it is.
type Explanation struct {
	// how many leading blocks of the query the index knows: anybody holds or remembers them, or what follows them
	Known uint32
	Ranks []RankPath // every rank that holds any of them
}

// explainTries is after how many walks in vain Explain has the writer wait: a walk takes milliseconds where many ranks
// hold a long prompt, and the root changes with each new prompt.
const explainTries = 8

// Explain is Match with reasons, for people. It allocates. Any goroutine may call it at any time; beside a writer that
// never rests it has the writer wait for one walk.
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
			if p.Stop == StopEarlier && w.loading(uint32(slot)).Chunked() {
				p.Stop = StopChunk
			}
			if u := w.limit(uint32(slot)); u != nil {
				w.explainCut(&p, u, usable[id])
			}
			ex.Ranks = append(ex.Ranks, p)
		}
	}
	return ex
}

// explainCut says why an engine can use less than the rank holds, if it does.
func (w *walk) explainCut(p *RankPath, u *reuse, usable [events.NumTiers]uint32) {
	held := p.Overlap.Blocks()
	p.Depth = usable
	n := p.Overlap.Blocks()
	if n >= held || int(held) > len(p.Blocks) { // more than was seen is half written: the walk is not valid
		return
	}
	slot := uint32(p.Rank.Slot())
	p.Stop = StopDraft
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

// explain fills in Stop and Behind.
func (p *RankPath) explain(query int) {
	end := int(p.Overlap.Blocks())
	switch {
	case end >= query:
		p.Stop = StopEnd
	case end >= len(p.Blocks):
		p.Stop = StopUnknown
		return
	case p.Blocks[end] == 0:
		p.Stop = StopAbsent
	default:
		p.Stop = StopEarlier
	}
	for _, s := range p.Blocks[min(end, len(p.Blocks)):] {
		if s != 0 {
			p.Behind++
		}
	}
}
