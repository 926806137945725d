package server

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// joint is a run of the joined tree: consecutive blocks on all nodes with the blocks, with the length of the shortest
// run.
type joint struct {
	parent   *joint
	blocks   uint32
	hashes   []uint64 // known hashes of the first blocks
	children map[uint64]*joint
	parts    []partRun

	holders int
	tiers   [events.NumTiers]uint64
	workers []api.RankPlace
	depth   uint32
	at      int // position in the tree; -1: none yet
}

// partRun is a node's run with the blocks of a joint, after a number of other blocks.
type partRun struct {
	run *api.PrefixRun
	off uint32
}

// joinTrees joins the trees of nodes with different partitions to a tree with at most limit runs. A run of a node that
// branches within another node's run splits the run. A run without hashes continues the only child.
func joinTrees(parts []*api.PrefixTree, limit int) *api.PrefixTree {
	root := &joint{children: map[uint64]*joint{}}
	tree := &api.PrefixTree{Runs: []api.PrefixRun{}, Partitions: []events.Partition{}}
	for _, p := range parts {
		tree.Ranks += p.Ranks
		tree.Partitions = append(tree.Partitions, p.Partitions...)
		tree.TotalRuns += p.TotalRuns - int64(len(p.Runs))
		tree.TotalBlocks += p.TotalBlocks
		ends := make([]*joint, len(p.Runs))
		for i := range p.Runs {
			r := &p.Runs[i]
			tree.TotalBlocks -= int64(r.Blocks)
			above := root
			if r.Parent >= 0 && r.Parent < i {
				above = ends[r.Parent]
			}
			ends[i] = above.insert(r)
		}
	}
	slices.Sort(tree.Partitions)
	var all []*joint
	root.each(func(j *joint) {
		all = append(all, j)
		tree.TotalRuns++
		tree.TotalBlocks += int64(j.blocks)
	})
	slices.SortStableFunc(all, func(a, b *joint) int {
		return cmp.Compare(uint64(b.blocks)*uint64(b.holders), uint64(a.blocks)*uint64(a.holders))
	})
	for _, j := range all {
		var way []*joint // the joints on the way to a joint with a position
		for up := j; up != root && up.at < 0; up = up.parent {
			way = append(way, up)
		}
		if len(tree.Runs)+len(way) > limit {
			continue
		}
		for _, j := range slices.Backward(way) {
			j.at = len(tree.Runs)
			run := api.PrefixRun{Parent: -1, Depth: j.depth, Blocks: j.blocks, Hash: j.name(), Holders: j.holders,
				Workers: j.workers, Tiers: api.TierCounts{Device: j.tiers[0], Host: j.tiers[1], Disk: j.tiers[2],
					External: j.tiers[3]}}
			if j.parent != root {
				run.Parent = j.parent.at
			}
			tree.Runs = append(tree.Runs, run)
		}
	}
	return tree
}

// insert adds a node's run below a joint, and returns the joint at the end.
func (above *joint) insert(r *api.PrefixRun) *joint {
	for off := uint32(0); ; {
		known := r.Hashes[min(int(off), len(r.Hashes)):]
		next := above.next(known)
		if next == nil {
			next = &joint{parent: above, blocks: r.Blocks - off, hashes: known, children: map[uint64]*joint{}, at: -1}
			above.children[next.first()] = next
		}
		n := min(next.blocks, r.Blocks-off)
		for i := range min(int(n), len(known), len(next.hashes)) {
			if known[i] != next.hashes[i] {
				n = uint32(i)
				break
			}
		}
		if int(n) >= len(next.hashes) && len(next.hashes) < len(known) {
			next.hashes = known[:min(int(next.blocks), len(known))]
		}
		if n = max(n, 1); n < next.blocks {
			next = next.cut(n)
		}
		next.parts = append(next.parts, partRun{r, off})
		if above, off = next, off+n; off >= r.Blocks {
			return above
		}
	}
}

// next returns the child with the first of the given hashes; without hashes, the only child.
func (above *joint) next(known []uint64) *joint {
	if len(known) > 0 {
		if j := above.children[known[0]]; j != nil {
			return j
		}
		j := above.children[0] // a child without known hashes
		if j != nil && len(j.hashes) == 0 && len(above.children) == 1 {
			delete(above.children, 0)
			above.children[known[0]] = j
			return j
		}
		return nil
	}
	if len(above.children) == 1 {
		for _, j := range above.children {
			return j
		}
	}
	return above.children[0]
}

// first returns the joint's key among the parent's children; 0: unknown.
func (j *joint) first() uint64 {
	if len(j.hashes) == 0 {
		return 0
	}
	return j.hashes[0]
}

func (j *joint) name() string { return fmt.Sprintf("%016x", j.first()) }

// cut splits off the first n blocks as a new joint, and returns the joint.
func (j *joint) cut(n uint32) *joint {
	head := &joint{parent: j.parent, blocks: n, hashes: j.hashes[:min(int(n), len(j.hashes))],
		parts: slices.Clone(j.parts), children: map[uint64]*joint{}, at: -1}
	j.parent.children[j.first()] = head
	j.parent, j.blocks, j.hashes = head, j.blocks-n, j.hashes[len(head.hashes):]
	for i := range j.parts {
		j.parts[i].off += n
	}
	head.children[j.first()] = j
	return head
}

// each counts the holders of the joints below, and calls f for held joints, parents first.
func (j *joint) each(f func(*joint)) {
	children := make([]*joint, 0, len(j.children))
	for _, c := range j.children {
		children = append(children, c)
	}
	slices.SortFunc(children, func(a, b *joint) int { return cmp.Compare(a.first(), b.first()) })
	for _, c := range children {
		c.depth = j.depth + j.blocks
		if c.count(); c.holders > 0 {
			f(c)
			c.each(f)
		}
	}
}

// count counts the holders of a joint. The nodes' parts have different ranks.
func (j *joint) count() {
	for _, p := range j.parts {
		here := map[api.RankPlace]bool{} // by rank with some of the run: whether the rank has any of these blocks
		some := map[placeTier]bool{}     // the same by tier
		for i := range p.run.Partly {
			h := &p.run.Partly[i]
			k := placeTier{api.RankPlace{Instance: h.Instance, Rank: h.Rank}, h.Tier}
			inside := h.From < p.off+j.blocks && h.To > p.off
			here[k.RankPlace] = here[k.RankPlace] || inside || h.Whole
			some[k] = some[k] || inside
		}
		of := p.run.Tiers
		tiers := map[string]uint64{events.Device.String(): of.Device, events.Host.String(): of.Host,
			events.Disk.String(): of.Disk, events.External.String(): of.External}
		for k, inside := range some {
			if !inside {
				tiers[k.tier]--
			}
		}
		for t := range j.tiers {
			j.tiers[t] += tiers[events.Tier(t+1).String()]
		}
		j.holders += p.run.Holders
		for _, inside := range here {
			if !inside {
				j.holders--
			}
		}
		for _, w := range p.run.Workers {
			if inside, partly := here[w]; inside || !partly {
				j.workers = append(j.workers, w)
			}
		}
	}
	slices.SortFunc(j.workers, api.RankPlace.Compare)
	j.workers = j.workers[:min(len(j.workers), radix.OutlineNames)]
}

type placeTier struct {
	api.RankPlace
	tier string
}
