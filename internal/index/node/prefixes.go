package node

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// maxPrefixHashes bounds the hashes of all runs in an answer for a join.
const maxPrefixHashes = 40_000

// Prefixes returns the largest part of the prefix tree held by the ranks of a model on this node: one tree per shard
// with ranks of the model, at least one. Several trees, and trees for a request that names partitions, include the
// hashes for a join. Any goroutine may call Prefixes. Writers do not wait for Prefixes.
func (n *Node) Prefixes(q *api.PrefixesRequest) ([]*api.PrefixTree, error) {
	var missing []events.Partition
	if len(q.Partitions) > 0 {
		missing = (&scratch{reflected: n.progress(nil)}).recordServing(q.Partitions)
	}
	view := n.view()
	served, failure := view.serving(&api.Query{Model: q.Model, BlockSize: q.BlockSize}, n.registered(q.Model))
	none := &api.PrefixTree{Node: n.cfg.ID, Model: q.Model, Complete: len(missing) == 0, Missing: missing,
		Runs: []api.PrefixRun{}, Partitions: []events.Partition{}}
	switch {
	case failure == nil:
		none.BlockSize = served.BlockSize
	case len(q.Partitions) > 0 && (failure.Code == api.CodeUnknownModel || q.BlockSize != 0):
		return []*api.PrefixTree{none}, nil // further partitions have workers of the model
	default:
		return nil, failure
	}
	query := radix.OutlineQuery{Space: served.Space, Most: cmp.Or(int(q.Limit), api.UsualPrefixes)}
	if len(q.Partitions) > 0 || len(served.Shards) > 1 {
		query.Hashes = maxPrefixHashes
	}
	among := len(q.Partitions) > 0 || len(view.Hidden) > 0 // otherwise the index has no further ranks of the space
	var trees []*api.PrefixTree
	for _, shard := range served.Shards {
		tree := *none
		var ranks radix.RankSet
		for _, r := range served.Ranks {
			if r.Shard != shard || slices.Contains(missing, r.Partition) ||
				len(q.Partitions) > 0 && !slices.Contains(q.Partitions, r.Partition) {
				continue
			}
			tree.Ranks++
			tree.Partitions = include(tree.Partitions, r.Partition)
			ranks.Add(r.ID)
		}
		if among {
			query.Among = &ranks
		}
		if tree.Ranks > 0 {
			outline(&tree, view, shard, n.shards[shard].index.Outline(query))
			trees = append(trees, &tree)
		}
	}
	if len(trees) == 0 {
		trees = append(trees, none)
	}
	return trees, nil
}

// outline copies an index's outline into a tree.
func outline(tree *api.PrefixTree, view *View, shard int, of *radix.Outline) {
	tree.TotalRuns, tree.TotalBlocks, tree.Runs = of.TotalRuns, of.TotalBlocks, make([]api.PrefixRun, 0, len(of.Runs))
	for i := range of.Runs {
		r := &of.Runs[i]
		run := api.PrefixRun{Parent: r.Parent, Depth: r.Depth, Blocks: r.Blocks, Hash: fmt.Sprintf("%016x", uint64(r.First)),
			Holders: r.Holders, Workers: places(view, shard, r.Ranks), Tiers: api.TierCounts{Device: uint64(r.Tiers[0]),
				Host: uint64(r.Tiers[1]), Disk: uint64(r.Tiers[2]), External: uint64(r.Tiers[3])}}
		for _, h := range r.Locals {
			run.Hashes = append(run.Hashes, uint64(h))
		}
		for _, p := range r.Partly {
			if rank := view.Rank(shard, p.Rank); rank != nil {
				run.Partly = append(run.Partly, api.PrefixPart{Instance: rank.Key.Instance, Rank: rank.Key.Rank,
					Tier: p.Tier.String(), From: p.From, To: p.To, Whole: p.Whole})
			}
		}
		tree.Runs = append(tree.Runs, run)
	}
}

// places returns the keys of ranks. Ranks that started or ended since the view are skipped.
func places(view *View, shard int, ids []radix.RankID) []api.RankPlace {
	list := make([]api.RankPlace, 0, len(ids))
	for _, id := range ids {
		if r := view.Rank(shard, id); r != nil {
			list = append(list, api.RankPlace{Instance: r.Key.Instance, Rank: r.Key.Rank})
		}
	}
	return list
}
