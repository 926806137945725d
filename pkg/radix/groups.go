package radix

import "github.com/kvatlas/kvatlas/pkg/events"

// Group is a set of ranks that hold equally much.
type Group struct {
	Depth [events.NumTiers]uint32
	Ranks []RankID
}

// Groups is an answer by depth. It is reused: fields are valid until it is passed again.
type Groups struct {
	Groups []Group // in no order

	answer Answer
	table  []int32 // by hash of the depth: position in Groups, plus one
}

// MatchGroups is Match with ranks of equal depth together.
func (x *Index) MatchGroups(space uint32, locals []events.LocalHash, allowed *RankSet, out *Groups) {
	x.Match(space, locals, allowed, &out.answer)
	out.Groups = out.Groups[:0]
	size := 16
	for size < 2*len(out.answer.Ranks) {
		size *= 2
	}
	if len(out.table) < size {
		out.table = make([]int32, size)
	}
	clear(out.table)
	mask := uint32(len(out.table) - 1)
	for i := range out.answer.Ranks {
		o := &out.answer.Ranks[i]
		d := o.Depth
		h := (d[0]*0x9e3779b1 ^ d[1]*0x85ebca6b ^ d[2]*0xc2b2ae35 ^ d[3]*0x27d4eb2f)
		h = (h ^ h>>15) & mask
		for out.table[h] != 0 && out.Groups[out.table[h]-1].Depth != d {
			h = (h + 1) & mask
		}
		if out.table[h] == 0 {
			out.add(d)
			out.table[h] = int32(len(out.Groups))
		}
		g := &out.Groups[out.table[h]-1]
		g.Ranks = append(g.Ranks, o.Rank)
	}
}

// add appends a group without ranks, in the memory of an earlier one if it can.
func (g *Groups) add(depth [events.NumTiers]uint32) {
	if n := len(g.Groups); n < cap(g.Groups) {
		g.Groups = g.Groups[:n+1]
		g.Groups[n].Depth, g.Groups[n].Ranks = depth, g.Groups[n].Ranks[:0]
		return
	}
	g.Groups = append(g.Groups, Group{Depth: depth})
}
