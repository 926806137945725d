package radix

import "github.com/kvatlas/kvatlas/pkg/events"

// RankStats says what one rank holds. A node's list of workers shows it for every rank, so it should cost no more than a visit to
// what is counted anyway.
type RankStats struct {
	Holdings   [events.NumTiers]int64 // blocks held by every main group, by tier, device first
	Parked     int64                  // blocks that wait
	Remembered int64                  // removals
	SetBlocks  int64                  // (tier, group, block) of groups that are no part of the prefix
}

// RankStats counts what a rank holds. The writer calls it.
func (x *Index) RankStats(id RankID) (s RankStats) {
	r := x.rank(id)
	if r == nil {
		return s
	}
	seen := map[heldKey]bool{}
	for k := range r.held {
		at := heldKey{tier: k.tier, block: k.block}
		if !seen[at] {
			seen[at] = true
			if r.holds(k.tier, k.block) {
				s.Holdings[k.tier-1]++
			}
		}
	}
	s.Parked, s.Remembered, s.SetBlocks = int64(r.parked.blocks), int64(r.gone.len()), int64(len(r.sets))
	return s
}
