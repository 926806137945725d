package server

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// joint is a run of the joined tree: blocks that follow each other on every node that has them, and no more of them
// than on the node with the shortest run.
type joint struct {
	parent   *joint
	blocks   uint32
	hashes   []uint64 // of the first blocks, as far as they are known
	children map[uint64]*joint
	parts    []partRun

	holders int
	tiers   [events.NumTiers]uint64
	workers []api.RankPlace
	depth   uint32
	at      int // its place in the tree; -1: none yet
}

// partRun is a node's run that has the blocks of a joint, after some of its own.
type partRun struct {
	run *api.PrefixRun
	off uint32
}

// joinTrees makes one tree of those that nodes have of different partitions, with so many runs at most. A run of one
// node that leaves another's amid its blocks cuts it in two. Where a node has told no hash, it is taken to go on as the
// only other.
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
		var way []*joint // to what has a place
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

// insert puts a node's run behind a joint, and returns where it ends.
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

// next is the child that begins with the first of these hashes; without any, the only one.
func (above *joint) next(known []uint64) *joint {
	if len(known) > 0 {
		if j := above.children[known[0]]; j != nil {
			return j
		}
		j := above.children[0] // of which nothing is known
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

// first is the hash by which the joint is among its parent's children; 0: it is not known.
func (j *joint) first() uint64 {
	if len(j.hashes) == 0 {
		return 0
	}
	return j.hashes[0]
}

func (j *joint) name() string { return fmt.Sprintf("%016x", j.first()) }

// cut gives the first n blocks a joint of their own, which it returns.
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

// each counts who holds the joints behind this one, and calls f with those that somebody holds, parents first.
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

// count says who holds any of a joint. Nodes' parts are of different ranks.
func (j *joint) count() {
	for _, p := range j.parts {
		here := map[api.RankPlace]bool{} // of those who hold some of the run: whether they hold any of these blocks
		some := map[placeTier]bool{}     // the same of their tiers
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
