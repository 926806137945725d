package radix

import "github.com/kvatlas/kvatlas/pkg/events"

// RankStats has the holdings of a rank. A node's list of workers has it for every rank. It is cheap, except for a rank
// with several main groups.
type RankStats struct {
	Holdings   [events.NumTiers]int64 // blocks held by every main group, by tier, device first
	Copies     int64                  // copies beyond the first of a block in a tier
	Pending    int64                  // pending blocks
	Tombstones int64                  // tombstones
	SetBlocks  int64                  // (tier, group, block) of groups outside of the prefix
}

// RankStats returns the holdings of a rank. The writer calls it.
func (x *Index) RankStats(id RankID) (s RankStats) {
	r := x.rank(id)
	s.Pending, s.Tombstones, s.SetBlocks = int64(r.pending.blocks), int64(r.tombstones.len()), int64(len(r.sets))
	if r.naming != namesExact {
		s.Holdings = r.held
		for t := range r.extra {
			s.Copies += int64(r.extra[t].total)
		}
		return s
	}
	for _, n := range r.exact.held {
		s.Copies += int64(n) - 1
	}
	x.eachHeld(r, func(_ uint32, tiers TierSet) {
		tiers.each(func(t int) { s.Holdings[t]++ })
	})
	return s
}

// DeviceMemory returns how many blocks a rank holds in device memory, and the most that it held after a message that
// removed some there. This is its capacity as far as events show it; 0: it has removed none. With several main groups a
// block counts if one of them has it. The writer calls it.
func (x *Index) DeviceMemory(id RankID) (held, full int64) {
	r := x.rank(id)
	return r.held[device], r.full
}
