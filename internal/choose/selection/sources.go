package selection

import (
	"cmp"
	"math/rand/v2"
	"slices"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// Sources configures KV sources: workers that can send further leading blocks of the prompt to the chosen worker.
type Sources struct {
	// MinTokens is the least number of tokens that a source has beyond the prefix of the chosen worker. 0 disables the
	// search.
	MinTokens uint32

	// Tiers are the tiers from which workers send blocks to each other. Blocks in other tiers do not count for a source.
	Tiers api.Tiers

	// Mark writes the states of engines and shims into an answer, as [registry.Registry.MarkAnswer] does. nil: all
	// engines are connected.
	Mark func(*api.Answer)
}

// within returns the sets of tiers to look up for sources; nil without a search.
func (s *Sources) within() []api.Tiers {
	if s.MinTokens == 0 {
		return nil
	}
	return []api.Tiers{s.Tiers}
}

// source returns the KV source for a chosen rank; nil without a source. The answer must have the depths within
// [Sources.Tiers].
//
// The source has the longest prefix, then the fewest requests. The choice among equal ranks is random, so that they
// share the transfers. The chosen worker's own prefix is in any tier: also blocks that it would load from the shared
// store, and guesses, because it computes or loads these blocks anyway.
func (s *Sources) source(
	a *api.Answer, of *candidates, list []routing.Candidate, chosen int, allowed *api.SelectRequest, rng *rand.Rand,
) *api.KVSource {
	if s.MinTokens == 0 {
		return nil
	}
	own := &list[chosen]
	has := own.Device + own.Host + own.Disk + own.WouldLoad
	least := has + (s.MinTokens+of.blockSize-1)/of.blockSize
	if s.Mark != nil {
		s.Mark(a)
	}
	best, depth, ties := -1, least, 0
	for i := range a.Workers {
		o := &a.Workers[i]
		if len(o.Within) != 1 || o.Within[0] < depth {
			continue
		}
		at, ok := of.place(o)
		if !ok || !of.sends(at, chosen, a, o, allowed) {
			continue
		}
		order := -1 // of the best one; negative: the new one is better
		if best >= 0 && o.Within[0] == depth {
			order = cmp.Compare(list[at].ActiveRequests, list[best].ActiveRequests)
		}
		switch {
		case order > 0:
			continue
		case order < 0:
			ties = 0
		}
		if ties++; order < 0 || rng.IntN(ties) == 0 {
			best, depth = at, o.Within[0]
		}
	}
	if best < 0 {
		return nil
	}
	r := &of.ranks[best]
	return &api.KVSource{Worker: r.Instance, Rank: r.Rank, Endpoint: r.Record.Endpoint, Blocks: depth,
		Tokens: uint64(depth-has) * uint64(of.blockSize)}
}

// sends reports whether a rank can be the source for a chosen rank: it is a permitted worker in service with an address
// of its own, its engine is connected, and its depths are those of the present.
func (of *candidates) sends(at, chosen int, a *api.Answer, o *api.Overlap, allowed *api.SelectRequest) bool {
	r := &of.ranks[at]
	return r.Record.State == api.WorkerSchedulable && r.Record.Endpoint != "" &&
		r.Record.Endpoint != of.ranks[chosen].Record.Endpoint &&
		a.Present(o, r.Partition) && permits(allowed, r)
}

// permits reports whether a request permits a rank's worker.
func permits(q *api.SelectRequest, r *registry.PoolRank) bool {
	return (q.Workers == nil || slices.Contains(q.Workers, r.Instance)) &&
		(q.Endpoints == nil || slices.Contains(q.Endpoints, r.Record.Endpoint))
}
