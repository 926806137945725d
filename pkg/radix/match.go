package radix

import (
	"math/bits"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Answer is what the ranks hold of a query. It is reused: fields are valid until it is passed again.
type Answer struct {
	Ranks []Overlap // every rank that holds the first block in some tier; in no order

	path []uint32
}

// Group is a set of ranks that hold equally much.
type Group struct {
	Depth [events.NumTiers]uint32
	Ranks []RankID
}

// Groups is an answer by depth. It is reused: fields are valid until it is passed again.
type Groups struct {
	Groups []Group // in no order

	answer Answer
}

// Match finds what every rank of a space holds of a prefix; allowed, if not nil, restricts it to some. Any goroutine may
// call it at any time. A reused Answer is not allocated again.
func (x *Index) Match(space uint32, locals []events.LocalHash, allowed *RankSet, out *Answer) {
	x.mu.RLock()
	defer x.mu.RUnlock()
	x.match(space, locals, allowed, out)
}

func (x *Index) match(space uint32, locals []events.LocalHash, allowed *RankSet, out *Answer) {
	out.Ranks, out.path = out.Ranks[:0], out.path[:0]
	at := uint32(0)
	for i, l := range locals {
		if i == 0 {
			at = x.roots[rootKey{space, l}]
		} else {
			at = x.blocks[at].children[l]
		}
		if at == 0 {
			break
		}
		out.path = append(out.path, at)
	}
	for _, r := range x.slots {
		if r == nil || r.space != space || allowed != nil && !allowed.Has(r.id) {
			continue
		}
		o := Overlap{Rank: r.id}
		tier := events.Device
		for _, b := range out.path {
			for tier <= events.External && !r.holds(tier, b) {
				tier++
			}
			if tier > events.External {
				break
			}
			o.Depth[tier-1]++
		}
		if o.Depth != [events.NumTiers]uint32{} {
			out.Ranks = append(out.Ranks, o)
		}
	}
}

// holds reports whether every main group that the rank has announced holds the block.
func (r *rank) holds(tier events.Tier, b uint32) bool {
	main := false
	for _, g := range r.groups {
		if g.Kind.Main() {
			main = true
			if r.held[heldKey{tier, g.Group, b}] == 0 {
				return false
			}
		}
	}
	return main
}

// MatchGroups is Match with ranks of equal depth together.
func (x *Index) MatchGroups(space uint32, locals []events.LocalHash, allowed *RankSet, out *Groups) {
	x.Match(space, locals, allowed, &out.answer)
	out.Groups = out.Groups[:0]
next:
	for _, o := range out.answer.Ranks {
		for i := range out.Groups {
			if out.Groups[i].Depth == o.Depth {
				out.Groups[i].Ranks = append(out.Groups[i].Ranks, o.Rank)
				continue next
			}
		}
		if n := len(out.Groups); n < cap(out.Groups) {
			out.Groups = out.Groups[:n+1]
			out.Groups[n].Depth, out.Groups[n].Ranks = o.Depth, append(out.Groups[n].Ranks[:0], o.Rank)
		} else {
			out.Groups = append(out.Groups, Group{o.Depth, []RankID{o.Rank}})
		}
	}
}

// Stop is the rule that ended a rank's prefix.
type Stop uint8

// The rules.
const (
	StopEnd     Stop = 1 // the query ends here
	StopUnknown Stop = 2 // nobody holds or remembers this block, or what follows it
	StopAbsent  Stop = 3 // the rank holds the block in no tier
	StopEarlier Stop = 4 // the rank holds the block, but only in tiers before the one the prefix has come to
)

var stopNames = [...]string{"none", "query_ends", "unknown_block", "not_held", "held_in_earlier_tier"}

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
	Blocks []TierSet // for each known block of the query, the tiers in which the rank holds it
	Behind uint32    // how many blocks behind the end of its prefix the rank holds in some tier
}

// Explanation says why an answer is what it is.
type Explanation struct {
	Known uint32     // how many leading blocks of the query anybody holds or remembers
	Ranks []RankPath // every rank that holds any of them
}

// Explain is Match with reasons, for people. It allocates.
func (x *Index) Explain(space uint32, locals []events.LocalHash, allowed *RankSet) *Explanation {
	x.mu.RLock()
	defer x.mu.RUnlock()
	var a Answer
	x.match(space, locals, allowed, &a)
	depths := map[RankID][events.NumTiers]uint32{}
	for _, o := range a.Ranks {
		depths[o.Rank] = o.Depth
	}
	ex := &Explanation{Known: uint32(len(a.path))}
	for _, r := range x.slots {
		if r == nil || r.space != space || allowed != nil && !allowed.Has(r.id) {
			continue
		}
		p := RankPath{Overlap: Overlap{r.id, depths[r.id]}, Blocks: make([]TierSet, len(a.path))}
		any := false
		for i, b := range a.path {
			for t := events.Device; t <= events.External; t++ {
				if r.holds(t, b) {
					p.Blocks[i] |= 1 << (t - 1)
					any = true
				}
			}
		}
		if any {
			p.explain(len(locals))
			ex.Ranks = append(ex.Ranks, p)
		}
	}
	return ex
}

// explain fills in Stop and Behind.
func (p *RankPath) explain(query int) {
	end := int(p.Overlap.Blocks())
	switch {
	case end == query:
		p.Stop = StopEnd
	case end == len(p.Blocks):
		p.Stop = StopUnknown
	case p.Blocks[end] == 0:
		p.Stop = StopAbsent
	default:
		p.Stop = StopEarlier
	}
	for _, s := range p.Blocks[end:] {
		if bits.OnesCount8(uint8(s)) > 0 {
			p.Behind++
		}
	}
}
