package node

import (
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// Prefixes returns the largest part of the tree of prefixes that the ranks of a model hold here. Any goroutine may call
// it; the writer does not wait for it.
func (n *Node) Prefixes(q *api.PrefixesRequest) (*api.PrefixTree, error) {
	var missing []events.Partition
	if len(q.Partitions) > 0 {
		missing = (&scratch{reflected: n.progress(nil)}).look(q.Partitions)
	}
	view := n.machine.View()
	served, failure := view.serving(&api.Query{Model: q.Model, BlockSize: q.BlockSize})
	tree := &api.PrefixTree{Node: n.cfg.ID, Model: q.Model, Complete: len(missing) == 0, Missing: missing,
		Runs: []api.PrefixRun{}, Partitions: []events.Partition{}}
	switch {
	case failure == nil:
	case len(q.Partitions) > 0 && (failure.Code == api.CodeUnknownModel || q.BlockSize != 0):
		return tree, nil // others have such workers
	default:
		return nil, failure
	}
	limit := int(q.Limit)
	if limit == 0 {
		limit = api.UsualPrefixes
	}
	query := radix.OutlineQuery{Space: served.Space, Most: limit}
	tree.BlockSize, tree.Ranks, tree.Partitions = served.BlockSize, len(served.Ranks), served.Partitions
	if len(q.Partitions) > 0 {
		query.Hashes, query.Among = api.MaxPrefixHashes, &radix.RankSet{}
		tree.Ranks, tree.Partitions = 0, slices.DeleteFunc(slices.Clone(served.Partitions),
			func(p events.Partition) bool { return !slices.Contains(q.Partitions, p) || slices.Contains(missing, p) })
		for _, r := range served.Ranks {
			if slices.Contains(tree.Partitions, r.Partition) {
				query.Among.Add(r.ID)
				tree.Ranks++
			}
		}
	}
	outline := n.index.Outline(query)
	tree.TotalRuns, tree.TotalBlocks = outline.TotalRuns, outline.TotalBlocks
	for i := range outline.Runs {
		r := &outline.Runs[i]
		run := api.PrefixRun{Parent: r.Parent, Depth: r.Depth, Blocks: r.Blocks, Hash: fmt.Sprintf("%016x", uint64(r.First)),
			Holders: r.Holders, Workers: places(view, r.Ranks), Tiers: api.TierCounts{Device: uint64(r.Tiers[0]),
				Host: uint64(r.Tiers[1]), Disk: uint64(r.Tiers[2]), External: uint64(r.Tiers[3])}}
		for _, h := range r.Locals {
			run.Hashes = append(run.Hashes, uint64(h))
		}
		for _, p := range r.Partly {
			if rank := view.Rank(p.Rank); rank != nil {
				run.Partly = append(run.Partly, api.PrefixPart{Instance: rank.Key.Instance, Rank: rank.Key.Rank,
					Tier: p.Tier.String(), From: p.From, To: p.To, Whole: p.Whole})
			}
		}
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
