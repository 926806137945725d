package node

import (
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// Prefixes returns the largest part of the tree of prefixes that the ranks of a model hold here. Any goroutine may call
// it; the writer does not wait for it.
func (n *Node) Prefixes(q *api.PrefixesRequest) (*api.PrefixTree, error) {
	view := n.machine.View()
	served, failure := view.serving(&api.Query{Model: q.Model, BlockSize: q.BlockSize})
	if failure != nil {
		return nil, failure
	}
	limit := int(q.Limit)
	if limit == 0 {
		limit = api.UsualPrefixes
	}
	outline := n.index.Outline(served.Space, limit)
	tree := &api.PrefixTree{Node: n.cfg.ID, Model: q.Model, BlockSize: served.BlockSize, Ranks: len(served.Ranks),
		Partitions: served.Partitions, TotalRuns: outline.TotalRuns, TotalBlocks: outline.TotalBlocks,
		Runs: make([]api.PrefixRun, 0, len(outline.Runs))}
	for i := range outline.Runs {
		r := &outline.Runs[i]
		run := api.PrefixRun{Parent: r.Parent, Depth: r.Depth, Blocks: r.Blocks, Hash: fmt.Sprintf("%016x", uint64(r.First)),
			Holders: r.Holders, Workers: places(view, r.Ranks), Tiers: api.TierCounts{Device: uint64(r.Tiers[0]),
				Host: uint64(r.Tiers[1]), Disk: uint64(r.Tiers[2]), External: uint64(r.Tiers[3])}}
		tree.Runs = append(tree.Runs, run)
	}
	return tree, nil
}

// places are the ranks by their names, but for those that came or went since the view was made.
func places(view *View, ids []radix.RankID) []api.RankPlace {
	list := make([]api.RankPlace, 0, len(ids))
	for _, id := range ids {
		if r := view.Rank(id); r != nil {
			list = append(list, api.RankPlace{Instance: r.Key.Instance, Rank: r.Key.Rank})
		}
	}
	return list
}
