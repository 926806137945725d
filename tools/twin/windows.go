package twin

import "github.com/kvatlas/kvatlas/pkg/events"

// prefix is a prompt with the rank's names of the blocks.
type prefix struct {
	*Rank
	names  [][]events.BlockHash // by block
	groups [][]events.GroupIndex
}

func (r *Rank) prefix(locals []events.LocalHash) *prefix {
	p := &prefix{Rank: r, groups: r.equalGroups()}
	at := map[events.SeqHash]int{}
	var seq events.SeqHash
	for i, l := range locals {
		seq = Next(seq, i == 0, l)
		at[seq] = i
	}
	p.names = make([][]events.BlockHash, len(locals))
	for name, seq := range r.place {
		if i, ok := at[seq]; ok {
			p.names[i] = append(p.names[i], name)
		}
	}
	return p
}

// usable returns the longest prefix of at most most blocks that the engine can continue with the copies in some tiers.
// Every group must have its required blocks.
func (p *prefix) usable(most int, tiers []events.Tier) int {
	for n := most; n > 0; n-- {
		all := true
		for _, equal := range p.groups {
			all = all && p.serves(equal, n, most, func(i int) bool { return p.has(equal, i, tiers) })
		}
		if all {
			return n
		}
	}
	return 0
}

// has reports whether all given groups have a copy of a block under the same name, in the same of the given tiers.
func (p *prefix) has(groups []events.GroupIndex, block int, tiers []events.Tier) bool {
	for _, tier := range tiers {
		for _, name := range p.names[block] {
			if p.allHave(groups, tier, name) {
				return true
			}
		}
	}
	return false
}

// bounded reports whether windows or drops limit the length of a prefix.
func (r *Rank) bounded() bool {
	for g, kind := range r.kinds {
		if kind.Bounds() || r.drops[g] {
			return true
		}
	}
	return false
}

// equalGroups returns sets of groups with the same kind of attention and the same window. All main groups form a single
// set.
func (r *Rank) equalGroups() (all [][]events.GroupIndex) {
next:
	for g := range r.kinds {
		for i, equal := range all {
			o := equal[0]
			if r.kinds[o].Main() && r.kinds[g].Main() || r.kinds[o] == r.kinds[g] && r.window[o] == r.window[g] {
				all[i] = append(equal, g)
				continue next
			}
		}
		all = append(all, []events.GroupIndex{g})
	}
	return all
}

// allHave reports whether all given groups have a copy in a tier.
func (r *Rank) allHave(groups []events.GroupIndex, tier events.Tier, name events.BlockHash) bool {
	for _, g := range groups {
		if r.sets[copyOf{tier, g, name}] == 0 {
			return false
		}
	}
	return true
}

// serves reports whether equal groups have the required blocks for a prefix of n blocks, of at most most held blocks.
// has reports the blocks with copies.
func (r *Rank) serves(groups []events.GroupIndex, n, most int, has func(i int) bool) bool {
	drop := 0
	for _, g := range groups {
		if r.drops[g] {
			drop = 1
		}
	}
	kind, window, block := r.kinds[groups[0]], int(r.window[groups[0]]), int(r.block)
	from := n
	switch {
	case kind.Main():
		return n+drop <= most
	case kind == events.AttentionMamba:
		from, drop = n-1, 0
	case window == 0: // unknown or irrelevant
		return true
	case kind == events.AttentionChunkedLocal:
		from = n * block / window * window / block
	case kind.Windowed():
		from = max(0, n-max(1, (window-1+block-1)/block))
	default:
		return true
	}
	if n+drop > most {
		return false
	}
	for i := from; i < n+drop; i++ {
		if !has(i) {
			return false
		}
	}
	return true
}
