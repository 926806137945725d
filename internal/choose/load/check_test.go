package load

import (
	"fmt"
	"slices"
)

// Check recomputes the table from the records and verifies the invariants.
func (t *Table) Check() error {
	var sum Digest
	blocks, owned := 0, map[*node]map[uint32][]uint64{}
	weights := map[*row]uint64{}
	loads := make([]Load, len(t.rows))
	for i, r := range t.rows {
		if r.index != i || t.places[r.id] != int32(i) || t.byRank[r.key] != r || t.loads[i].Rank != r.key {
			return fmt.Errorf("row %d of %v has the index %d", i, r.key, r.index)
		}
		loads[i].Rank = r.key
	}
	if len(t.byRank) != len(t.rows) || len(t.loads) != len(t.rows) || len(t.queue) != len(t.records) {
		return fmt.Errorf("%d rows, %d by rank, %d loads; %d records, %d queued", len(t.rows), len(t.byRank),
			len(t.loads), len(t.records), len(t.queue))
	}
	byID := map[string]int{}
	for key, r := range t.records {
		if r.key != key || t.queue[r.due] != r {
			return fmt.Errorf("record %v of %q is out of place", key, r.id)
		}
		if r.due > 0 && t.queue[(r.due-1)/2].deadline > r.deadline {
			return fmt.Errorf("the queue is out of order at %d", r.due)
		}
		byID[r.id]++
		blocks += r.blocks()
		if t.digestOf(r) != r.digest {
			return fmt.Errorf("the digest of %v is outdated", key)
		}
		sum.add(r, r.digest)
		if uint64(r.mark.after) > r.outputs() {
			return fmt.Errorf("%v has %d outputs and a decay after %d", key, r.outputs(), r.mark.after)
		}
		if r.gone != (r.row == nil) {
			return fmt.Errorf("%v is gone: %v, and has a row: %v", key, r.gone, r.row != nil)
		}
		if r.gone {
			continue
		}
		if r.row.key != r.rank || r.row.records[r.pos] != r || t.rows[r.row.index] != r.row {
			return fmt.Errorf("%v is not in its row", key)
		}
		load := &loads[r.row.index]
		if load.PrefillTokens += r.pending(); r.pending() > 0 {
			load.Prefilling++
		}
		load.Requests++
		weights[r.row] += r.unsharedWeight(r.private)
		end := len(r.hashes)
		for n := r.tail; n != &t.prompts.Root; n = n.Parent {
			if n == nil || n.End() != end || !slices.Equal(n.Edge, r.hashes[n.Start:end]) {
				return fmt.Errorf("the path of %v is broken at %d", key, end)
			}
			end = n.Start
			if owned[n] == nil {
				owned[n] = map[uint32][]uint64{}
			}
			copies := owned[n][r.row.id]
			w := weightAt(r.runs, n.Start)
			for i := n.Start; i < n.End(); i++ {
				if weightAt(r.runs, i) != w {
					return fmt.Errorf("the weights of %v change within a node at %d", key, i)
				}
			}
			owned[n][r.row.id] = append(copies, w)
		}
		if end != 0 {
			return fmt.Errorf("the path of %v ends at %d", key, end)
		}
	}
	nodes := 0
	var walk func(n *node) error
	walk = func(n *node) error {
		for kid := range n.Kids {
			nodes++
			if len(kid.Slots) != len(owned[kid]) {
				return fmt.Errorf("node at %d, %d slots, want %d", kid.Start, len(kid.Slots), len(owned[kid]))
			}
			for _, slot := range kid.Slots {
				s, copies := slot.Share, owned[kid][slot.ID]
				if int(s.n) != len(copies) || s.weight != slices.Max(copies) || !s.mixed && slices.Min(copies) != s.weight {
					return fmt.Errorf("slot %+v, copies %v", slot, copies)
				}
				weights[t.rows[t.places[slot.ID]]] += s.weight * uint64(len(kid.Edge))
			}
			if err := walk(kid); err != nil {
				return err
			}
		}
		return nil
	}
	if err := walk(&t.prompts.Root); err != nil {
		return err
	}
	if nodes != len(owned) {
		return fmt.Errorf("%d nodes, want %d", nodes, len(owned))
	}
	for i, r := range t.rows {
		if weights[r] != r.weight {
			return fmt.Errorf("row %v weighs %d, want %d", r.key, r.weight, weights[r])
		}
		loads[i].Blocks = int64((r.weight + half + slack) / one)
		if loads[i] != t.loads[i] || int(loads[i].Requests) != len(r.records) {
			return fmt.Errorf("load %+v, want %+v", t.loads[i], loads[i])
		}
	}
	for id, head := range t.ids {
		n := 0
		for r := head; r != nil; r = r.rival {
			if n++; r.id != id || t.records[r.key] != r || r.rival != nil && r.key.Compare(r.rival.key) >= 0 {
				return fmt.Errorf("id %q has record %v", id, r.key)
			}
		}
		if _, rivals := t.rivals[id]; n != byID[id] || rivals != (n > 1) {
			return fmt.Errorf("id %q has %d records, want %d; in rivals: %v", id, n, byID[id], rivals)
		}
	}
	if len(t.ids) != len(byID) || blocks != t.blocks || sum != t.sum {
		return fmt.Errorf("%d ids, want %d; %d blocks, want %d; digest %+v, want %+v", len(t.ids), len(byID), t.blocks,
			blocks, t.sum, sum)
	}
	return nil
}
