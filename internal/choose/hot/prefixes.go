package hot

import (
	"cmp"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Prefix is a prefix that further copies would help. Rates are means of the recent time.
type Prefix struct {
	Hash, Above events.SeqHash // of the last block, and of the next shorter counted prefix of the same prompts
	Depth       uint32         // in blocks
	Locals      []events.LocalHash

	PerSecond  float64 // requests
	Recomputed float64 // tokens of the prefix per second that workers without it computed
	Waited     float64 // milliseconds per second that requests waited longer than at the least busy worker
	Saves      float64 // milliseconds per second that a copy on one more worker would save
	Helped     float64 // recent requests that such a copy would have helped; older ones count less
}

// Listed is a good limit of [Tracker.Prefixes] for a [Merge].
const Listed = 256

// Prefixes returns the prefixes of this tracker with the largest savings, at most limit. A prefix and its shorter
// prefixes are all in the list; [Merge] keeps one of them.
func (t *Tracker) Prefixes(now time.Duration, limit int) []Prefix {
	s := t.sketch
	s.tick(now)
	list := make([]Prefix, 0, len(s.heap))
	for _, e := range s.heap {
		if saves := s.rate(now, e, e.weight-e.excess); saves > 0 {
			list = append(list, Prefix{Hash: e.hash, Above: e.above, Depth: e.depth, Locals: e.locals,
				PerSecond: s.rate(now, e, e.sums.requests), Recomputed: s.rate(now, e, e.sums.recomputed),
				Waited: s.rate(now, e, e.sums.waited), Saves: saves, Helped: e.sums.helped / s.unit})
		}
	}
	slices.SortFunc(list, bySaving)
	return list[:min(limit, len(list))]
}

// bySaving orders prefixes: the largest saving first, then the shorter prefix.
func bySaving(a, b Prefix) int {
	return cmp.Or(cmp.Compare(b.Saves, a.Saves), cmp.Compare(a.Depth, b.Depth), cmp.Compare(a.Hash, b.Hash))
}

// Merge adds the prefixes of several trackers, and returns the ones with the largest savings, at most limit. Of a
// prefix and its longer and shorter prefixes, only the one with the largest saving stays.
func Merge(limit int, lists ...[]Prefix) []Prefix {
	byHash := map[events.SeqHash]*Prefix{}
	var all []*Prefix
	for _, list := range lists {
		for _, p := range list {
			known := byHash[p.Hash]
			if known == nil {
				known = &Prefix{Hash: p.Hash, Depth: p.Depth}
				byHash[p.Hash] = known
				all = append(all, known)
			}
			if known.Locals == nil {
				known.Locals = p.Locals
			}
			known.Above = p.Above
			known.PerSecond, known.Recomputed = known.PerSecond+p.PerSecond, known.Recomputed+p.Recomputed
			known.Waited, known.Saves, known.Helped = known.Waited+p.Waited, known.Saves+p.Saves, known.Helped+p.Helped
		}
	}
	slices.SortFunc(all, func(a, b *Prefix) int { return bySaving(*a, *b) })
	taken, within := map[events.SeqHash]bool{}, map[events.SeqHash]bool{}
	out := []Prefix{}
	for _, p := range all {
		related := within[p.Hash]
		eachAbove(byHash, p, func(a *Prefix) { related = related || taken[a.Hash] })
		if related {
			continue
		}
		if len(out) == limit {
			break
		}
		out = append(out, *p)
		taken[p.Hash] = true
		eachAbove(byHash, p, func(a *Prefix) { within[a.Hash] = true })
	}
	return out
}

// eachAbove calls f with the listed shorter prefixes of p. Depths decrease, so invalid links of other nodes end too.
func eachAbove(byHash map[events.SeqHash]*Prefix, p *Prefix, f func(*Prefix)) {
	for a := byHash[p.Above]; a != nil && a.Depth < p.Depth; p, a = a, byHash[a.Above] {
		f(a)
	}
}

// Target returns the worker on which a copy of a prefix costs least, as an index in ranks, and the cost in milliseconds
// of all requests. The request is the prefix alone. The index is -1 if all workers hold or compute the prefix. holders
// are the ranks with the prefix.
func Target(r *routing.Request, ranks []routing.Candidate) (best int, cost float64, holders []int) {
	costs := routing.ComputeCosts(nil, r, ranks)
	best = -1
	least := 0.0
	for i := range ranks {
		c := &ranks[i]
		switch {
		case uint64(held(c)) >= r.Blocks:
			holders = append(holders, i)
		case c.HasLoad && c.NewBlocks == 0: // a request under way computes it
		case c.Worker.State != routing.Schedulable && c.Worker.State != "" || c.Penalty != nil ||
			c.Worker.Role == routing.Decode:
		default:
			if sum := costs[i] + routing.Waiting(c); best < 0 || sum < least {
				best, least, cost = i, sum, costs[i]
			}
		}
	}
	return best, cost, holders
}
