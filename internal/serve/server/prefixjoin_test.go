package server

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// site is a node's index with the owners of ranks.
type site struct {
	index *radix.Index
	names map[radix.RankID]api.RankPlace
}

// tree returns the node's own tree.
func (s *site) tree(most, hashes int) *api.PrefixTree {
	o := s.index.Outline(radix.OutlineQuery{Space: 1, Most: most, Hashes: hashes})
	t := &api.PrefixTree{TotalRuns: o.TotalRuns, TotalBlocks: o.TotalBlocks, Ranks: len(s.names)}
	for _, r := range o.Runs {
		run := api.PrefixRun{Parent: r.Parent, Depth: r.Depth, Blocks: r.Blocks, Holders: r.Holders,
			Tiers: api.TierCounts{Device: uint64(r.Tiers[0]), Host: uint64(r.Tiers[1]), Disk: uint64(r.Tiers[2]),
				External: uint64(r.Tiers[3])}}
		for _, id := range r.Ranks {
			run.Workers = append(run.Workers, s.names[id])
		}
		for _, h := range r.Locals {
			run.Hashes = append(run.Hashes, uint64(h))
		}
		for _, p := range r.Partly {
			run.Partly = append(run.Partly, api.PrefixPart{Instance: s.names[p.Rank].Instance, Tier: p.Tier.String(),
				From: p.From, To: p.To, Whole: p.Whole})
		}
		t.Runs = append(t.Runs, run)
	}
	return t
}

// TestJoinTrees checks that the trees of nodes with different workers join to the whole tree, run by run, compared with
// a map of all holdings.
func TestJoinTrees(t *testing.T) {
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 7))
		// a few documents: a document continues from some block of the document before
		docs := [][]events.LocalHash{}
		next := events.LocalHash(1)
		for range 2 + rng.IntN(8) {
			var doc []events.LocalHash
			if len(docs) > 0 && rng.IntN(4) > 0 {
				from := docs[rng.IntN(len(docs))]
				doc = slices.Clone(from[:rng.IntN(len(from)+1)])
			}
			for range 1 + rng.IntN(90) {
				doc = append(doc, next)
				next++
			}
			docs = append(docs, doc)
		}
		held := map[string]map[api.RankPlace][events.NumTiers]bool{} // by path
		var parts []*api.PrefixTree
		for n := range 3 {
			s := &site{radix.New(radix.Config{}), map[radix.RankID]api.RankPlace{}}
			for w := range rng.IntN(6) {
				id, place := s.index.AddRank(1, 16), api.RankPlace{Instance: events.WorkerID(fmt.Sprintf("n%d-w%d", n, w))}
				s.names[id] = place
				for i := range 1 + rng.IntN(4) {
					doc := docs[rng.IntN(len(docs))]
					doc = doc[:1+rng.IntN(len(doc))]
					e := events.Event{Kind: events.Stored, Tier: events.Tier(1 + rng.IntN(2)), Locals: doc}
					for b := range doc { // a block has the same name in all events
						e.Blocks = append(e.Blocks, events.BlockHash(doc[b]))
					}
					list := []events.Event{e}
					gone := map[int]bool{}
					if i == 0 && rng.IntN(2) == 0 { // holes
						at := rng.IntN(len(doc))
						gone[at] = true
						list = append(list, events.Event{Kind: events.Removed, Tier: e.Tier, Blocks: e.Blocks[at : at+1]})
					}
					s.index.Apply(id, 0, list)
					for b := range doc {
						path := fmt.Sprint(doc[:b+1])
						if held[path] == nil {
							held[path] = map[api.RankPlace][events.NumTiers]bool{}
						}
						tiers := held[path][place]
						tiers[e.Tier-1] = tiers[e.Tier-1] || !gone[b]
						if gone[b] {
							tiers[e.Tier-1] = false
						}
						held[path][place] = tiers
					}
				}
			}
			parts = append(parts, s.tree(1000, 100_000))
		}
		tree := joinTrees(parts, 1000)
		hashes := map[string][]events.LocalHash{} // documents by the last hash
		for _, d := range docs {
			for b := range d {
				hashes[fmt.Sprintf("%016x", uint64(d[b]))] = d[:b+1]
			}
		}
		covered := map[string]bool{}
		for i, r := range tree.Runs {
			first := hashes[r.Hash]
			if len(first) != int(r.Depth)+1 || r.Parent >= i {
				t.Fatalf("seed %d: run %+v", seed, r)
			}
			// the run's blocks from any document, because no document branches within a held run
			var doc []events.LocalHash
			for _, d := range docs {
				if len(d) >= int(r.Depth+r.Blocks) && slices.Equal(d[:len(first)], first) &&
					held[fmt.Sprint(d[:r.Depth+r.Blocks])] != nil {
					doc = d[:r.Depth+r.Blocks]
				}
			}
			if doc == nil {
				t.Fatalf("seed %d: run %+v is in no document", seed, r)
			}
			any := map[api.RankPlace]bool{}
			tiers := [events.NumTiers]map[api.RankPlace]bool{{}, {}, {}, {}}
			for b := int(r.Depth); b < len(doc); b++ {
				path := fmt.Sprint(doc[:b+1])
				covered[path] = true
				for w, of := range held[path] {
					for t, is := range of {
						if is {
							any[w], tiers[t][w] = true, true
						}
					}
				}
			}
			if len(any) != r.Holders || len(r.Workers) != len(any) || r.Tiers != (api.TierCounts{
				Device: uint64(len(tiers[0])), Host: uint64(len(tiers[1]))}) {
				t.Errorf("seed %d: run %+v, want %d holders, %d and %d in tiers", seed, r, len(any), len(tiers[0]), len(tiers[1]))
			}
			for _, w := range r.Workers {
				if !any[w] {
					t.Errorf("seed %d: run %+v names %v", seed, r, w)
				}
			}
		}
		if tree.TotalRuns != int64(len(tree.Runs)) {
			t.Errorf("seed %d: %d of %d runs", seed, len(tree.Runs), tree.TotalRuns)
		}
		for path, by := range held {
			for w, of := range by {
				if of != ([events.NumTiers]bool{}) && !covered[path] {
					t.Errorf("seed %d: the held %v %.40s… is not shown", seed, w, path)
				}
			}
		}
		// with few hashes and few runs the result is still a tree within the limit
		for _, p := range parts {
			for i := range p.Runs {
				p.Runs[i].Hashes = p.Runs[i].Hashes[:min(len(p.Runs[i].Hashes), 1+rng.IntN(3))]
			}
		}
		small := joinTrees(parts, 5)
		depth := uint32(0)
		for i, r := range small.Runs {
			if depth = 0; r.Parent >= 0 {
				depth = small.Runs[r.Parent].Depth + small.Runs[r.Parent].Blocks
			}
			if r.Parent >= i || r.Depth != depth || r.Blocks == 0 || r.Holders == 0 {
				t.Errorf("seed %d: %+v", seed, r)
			}
		}
		if len(small.Runs) > 5 || small.TotalRuns < int64(len(small.Runs)) {
			t.Errorf("seed %d: %d runs of %d", seed, len(small.Runs), small.TotalRuns)
		}
	}
}
