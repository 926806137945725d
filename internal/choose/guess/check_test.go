package guess

import (
	"fmt"
)

// Check verifies the invariants.
func (t *Table) Check() error {
	sizes, slots, leases := map[*rank]int{}, map[*slot]bool{}, map[*node]map[*rank]int{}
	for q := range t.requestsOfRanks() {
		if t.requests[q.key] != q {
			return fmt.Errorf("request %v of %v is not in the table", q.key, q.rank.key)
		}
		sizes[q.rank] += q.beside
		for n := q.tail; n != &t.prompts.Root; n = n.Parent {
			if n == nil {
				return fmt.Errorf("the path of %v is broken", q.key)
			}
			if leases[n] == nil {
				leases[n] = map[*rank]int{}
			}
			leases[n][q.rank]++
		}
	}
	var walk func(n *node) error
	walk = func(n *node) error {
		for i, r := range n.Slots {
			s := r.Share
			switch {
			case i > 0 && n.Slots[i-1].ID >= r.ID, s.node != n, t.ranks[r.ID] != s.rank:
				return fmt.Errorf("slot %d of the node at %d is out of place", i, n.Start)
			case s.leases != leases[n][s.rank]:
				return fmt.Errorf("%v at %d has %d leases, want %d", s.rank.key, n.Start, s.leases, leases[n][s.rank])
			case (s.at < 0) != (s.leases > 0):
				return fmt.Errorf("%v at %d has %d leases and is queued at %d", s.rank.key, n.Start, s.leases, s.at)
			}
			slots[s] = true
			sizes[s.rank] += len(n.Edge)
			if n.Parent == &t.prompts.Root {
				continue
			}
			j, ok := n.Parent.Find(r.ID)
			if !ok {
				return fmt.Errorf("%v has a hole before %d", s.rank.key, n.Start)
			}
			if up := n.Parent.Slots[j].Share; up.used < s.used || up.leases < s.leases {
				return fmt.Errorf("%v at %d: used %v, leases %d, before it %v, %d", s.rank.key, n.Start, s.used, s.leases,
					up.used, up.leases)
			}
		}
		for kid := range n.Kids {
			if len(kid.Slots) == 0 {
				return fmt.Errorf("the node at %d has no slots", kid.Start)
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
	total := 0
	for id, k := range t.ranks {
		if k == nil {
			continue
		}
		if int(k.id) != id || t.byKey[k.key] != k {
			return fmt.Errorf("rank %v has id %d, is at %d", k.key, k.id, id)
		}
		for i, s := range k.queue {
			if s.at != i || s.rank != k || i > 0 && k.queue.Less(i, (i-1)/2) {
				return fmt.Errorf("the queue of %v is out of order at %d", k.key, i)
			}
			if s.node == nil {
				sizes[k] += s.blocks
			} else if !slots[s] {
				return fmt.Errorf("the queue of %v has a slot of no node", k.key)
			}
			delete(slots, s)
		}
		if k.size != sizes[k] {
			return fmt.Errorf("%v has %d blocks, want %d", k.key, k.size, sizes[k])
		}
		total += k.size
	}
	for s := range slots {
		if s.leases == 0 {
			return fmt.Errorf("a slot of %v is not queued", s.rank.key)
		}
	}
	if total != t.size {
		return fmt.Errorf("the table has %d blocks, want %d", t.size, total)
	}
	return nil
}

// requestsOfRanks returns the leased requests in the ranks' own sets.
func (t *Table) requestsOfRanks() map[*request]bool {
	all := map[*request]bool{}
	for _, k := range t.ranks {
		if k == nil {
			continue
		}
		for q := range k.running {
			all[q] = true
		}
	}
	return all
}
