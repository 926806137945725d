package radix

import (
	"math/bits"
	"unsafe"
)

// Stats returns the size of the index. It visits every node. The writer calls it.
func (x *Index) Stats() Stats {
	var c Census
	s, _ := x.Count(&c, len(x.v.nodes))
	return s
}

// Census is a count in steps, for an index that is too large for a single visit. The zero value is a new count.
type Census struct {
	next int   // the first node that was not visited
	sum  Stats // sum over the visited nodes
}

// Count visits up to n more nodes. After the last node, it returns the result of [Index.Stats] and true, and starts
// again. Changes between the steps may be missing or counted twice. The writer calls it.
func (x *Index) Count(c *Census, n int) (s Stats, done bool) {
	end := min(c.next+n, len(x.v.nodes))
	for ; c.next < end; c.next++ {
		n := &x.v.nodes[c.next]
		if n.parent == 0 {
			continue
		}
		c.sum.Nodes++
		c.sum.Blocks += int64(n.len)
		c.sum.Dead += int64(n.len) - int64(x.alive(uint32(c.next)))
	}
	if c.next < len(x.v.nodes) {
		return s, false
	}
	s = c.sum
	*c = Census{}
	x.complete(&s)
	return s, true
}

// complete adds the counts that need no visit to each node.
func (x *Index) complete(s *Stats) {
	s.Splits = x.splits
	s.Bytes.Ranks += int64(len(x.spare)) * 24
	exact := int64(0)
	for _, r := range x.slots {
		if r == nil {
			continue
		}
		s.Ranks++
		for t, n := range r.held {
			s.Holdings[t] += n
			s.Bytes.Holes += int64(len(r.extra[t].slots)) * 8
		}
		s.Pending += int64(r.pending.blocks)
		s.Tombstones += int64(r.tombstones.len())
		s.SetBlocks += int64(len(r.sets))
		s.Bytes.Ranks += 512 + int64(r.pending.bytes()) + r.tombstones.bytes() + int64(len(r.sets))*40 + int64(
			cap(r.nodes))*4
		if r.exact != nil {
			exact += int64(len(r.exact.names)) * 200
		}
	}
	v := x.v
	s.Bytes.Blocks = x.locals.bytes() + x.engines.bytes() + x.slabs.bytes() + int64(len(x.freeSlab.words))*8
	s.Bytes.Names = exact + x.names.bytes() + int64(len(x.sharedElse))*40
	s.Bytes.Nodes = int64(len(v.nodes))*(32+16) + int64(len(v.edges))*12 + int64(len(v.ends))*28
	for _, m := range v.masks {
		s.Bytes.Nodes += int64(len(m)) * 8
	}
	s.Bytes.Holes += int64(len(v.parts))*int64(unsafe.Sizeof(part{})) + int64(len(v.bits))*8
	s.Bytes.Total = s.Bytes.Blocks + s.Bytes.Names + s.Bytes.Nodes + s.Bytes.Holes + s.Bytes.Ranks
}

func (t *names) bytes() int64 { return t.slots.bytes() + t.aliases.bytes() }

// alive returns the number of a node's blocks with a holder.
func (x *Index) alive(id uint32) uint32 {
	v := x.v
	n := &v.nodes[id]
	if v.heldWhole(id) {
		return n.len
	}
	lead := uint32(0)
	list := v.heldParts(n)
	for i := range list {
		lead = max(lead, list[i].lead)
	}
	count := lead
	for w := lead >> 6; w<<6 < n.len; w++ {
		word := uint64(0)
		for i := range list {
			if p := &list[i]; p.bits != 0 && w < p.words {
				word |= v.bits[p.bits+w]
			}
		}
		count += uint32(bits.OnesCount64(word &^ rangeMask(w, 0, lead)))
	}
	return count
}
