package node

import (
	"maps"
	"math"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// PrefixSet has the prefixes of a model's prompts that single ranks hold, as hashes of their blocks.
type PrefixSet struct {
	Model      string
	BlockSize  uint32
	Lookaheads []uint32         // of the hashes
	Hashes     []events.SeqHash // with a block's hash, the set has the hashes of all blocks before it; may repeat
	Left       uint64           // blocks in the index without room in Hashes
	Bounded    bool             // engines may load fewer blocks: see [radix.Index.Bounded]
}

// PrefixQuery selects prefixes for [Node.PrefixSets].
type PrefixQuery struct {
	Covers func(events.Partition) bool             // the partitions
	Hot    func(model string) [][]events.LocalHash // prompts whose held blocks come first; nil: none
	Most   int                                     // hashes of all sets together
}

// PrefixSets returns the prefixes of the ranks of the serving partitions, and these partitions. A prefix is the
// result of Find for its rank. If there is no room for all hashes, hot prompts come first. Then follow the largest
// runs by blocks times holders, with the runs before them. Models share the room equally, and leave unneeded room to
// the others. Any goroutine may call PrefixSets. It reads the whole index. Writers do not wait for it.
func (n *Node) PrefixSets(q PrefixQuery) (sets []PrefixSet, list []events.Partition) {
	covered := map[events.Partition]bool{}
	for p, state := range n.progress(nil) {
		if p := events.Partition(p); state.whole && q.Covers(p) {
			covered[p] = true
			list = append(list, p)
		}
	}
	view := n.view()
	var parts []*prefixPart
	for _, model := range slices.Sorted(maps.Keys(view.Models)) {
		for _, served := range view.sizesOf(model, n.registered(model)) {
			set, hot := len(sets), [][]events.LocalHash(nil)
			if q.Hot != nil {
				hot = q.Hot(model)
			}
			sets = append(sets, PrefixSet{Model: model, BlockSize: served.BlockSize, Lookaheads: served.Lookaheads})
			for _, shard := range served.Shards {
				p := &prefixPart{index: n.shards[shard].index, space: served.Space, set: set, hot: hot}
				for _, r := range served.Ranks {
					if r.Shard == shard && covered[r.Partition] {
						p.ranks.Add(r.ID)
						p.any = true
						sets[set].Bounded = sets[set].Bounded || r.Bounded
					}
				}
				if p.any {
					p.blocks = int(p.index.Outline(radix.OutlineQuery{Space: p.space, Among: &p.ranks}).TotalBlocks)
					parts = append(parts, p)
				}
			}
		}
	}
	share(parts, q.Most)
	for _, p := range parts {
		s := &sets[p.set]
		left := uint64(0)
		s.Hashes, left = p.appendHashes(s.Hashes)
		s.Left += left
	}
	return slices.DeleteFunc(sets, func(s PrefixSet) bool { return len(s.Hashes) == 0 && s.Left == 0 }), list
}

// prefixPart is the part of a PrefixSet in a shard.
type prefixPart struct {
	index *radix.Index
	space uint32
	ranks radix.RankSet
	any   bool
	set   int
	hot   [][]events.LocalHash

	blocks int // in the index
	room   int // for hashes
}

// share divides the room between parts: each has as many blocks as it needs, or an equal share of the rest.
func share(parts []*prefixPart, most int) {
	order := slices.SortedFunc(slices.Values(parts), func(a, b *prefixPart) int { return a.blocks - b.blocks })
	for i, p := range order {
		p.room = most / (len(order) - i)
		if p.blocks <= p.room && i < len(order)-1 {
			most -= p.blocks
		} else {
			most -= p.room
		}
	}
}

// hashesPerRun is the number of hashes that an outline reserves for each run.
const hashesPerRun = 16

// appendHashes appends the hashes of the part. left is the number of blocks without room.
func (p *prefixPart) appendHashes(dst []events.SeqHash) (_ []events.SeqHash, left uint64) {
	before := len(dst)
	dst, hot := p.appendHot(dst)
	most := min(p.room-len(hot), math.MaxInt32)
	o := p.index.Outline(radix.OutlineQuery{Space: p.space, Among: &p.ranks, Most: most,
		Hashes: most * (1 + hashesPerRun)})
	taken, full := takeRuns(o.Runs, most)
	held := p.heldOf(o.Runs, taken)
	ends := make([]events.SeqHash, len(o.Runs)) // hash of the last block
	var locals []events.LocalHash
	var seqs []events.SeqHash
	for i := range o.Runs {
		r := &o.Runs[i]
		if held[i] == 0 {
			continue
		}
		locals = locals[:0]
		if r.Parent >= 0 {
			locals = append(locals, events.LocalHash(ends[r.Parent])) // the hash of a first block is its local hash
		}
		locals = append(locals, r.Locals[:held[i]]...)
		seqs = events.SeqHashes(seqs[:0], locals)
		ends[i] = seqs[len(seqs)-1]
		for _, h := range seqs[len(seqs)-int(held[i]):] {
			if len(hot) == 0 || !hot[h] {
				dst = append(dst, h)
			}
		}
	}
	if full || o.TotalRuns > int64(most) {
		left = uint64(max(0, o.TotalBlocks-int64(len(dst)-before)))
	}
	return dst, left
}

// appendHot appends the hashes of hot prompts, as far as a rank holds the whole path.
func (p *prefixPart) appendHot(dst []events.SeqHash) ([]events.SeqHash, map[events.SeqHash]bool) {
	hot := map[events.SeqHash]bool{}
	var answer radix.Answer
	for _, prompt := range p.hot {
		for _, h := range events.SeqHashes(nil, prompt[:p.longest(prompt, &answer)]) {
			if len(hot) < p.room && !hot[h] {
				hot[h], dst = true, append(dst, h)
			}
		}
	}
	return dst, hot
}

// longest returns the length of the longest prefix of a prompt that a rank holds.
func (p *prefixPart) longest(prompt []events.LocalHash, answer *radix.Answer) (blocks uint32) {
	p.index.Match(p.space, prompt, &p.ranks, answer)
	for i := range answer.Ranks {
		blocks = max(blocks, answer.Ranks[i].Blocks())
	}
	return blocks
}

// takeRuns returns the number of leading blocks of each run that the room admits. A run without room for all blocks has
// no followers. full reports whether the room was too small.
func takeRuns(runs []radix.OutlineRun, room int) (taken []uint32, full bool) {
	taken = make([]uint32, len(runs))
	for i := range runs {
		r := &runs[i]
		if r.Parent >= 0 && taken[r.Parent] < runs[r.Parent].Blocks {
			continue
		}
		taken[i] = uint32(min(len(r.Locals), room))
		room -= int(taken[i])
		full = full || taken[i] < r.Blocks
	}
	return taken, full
}

// heldOf returns the number of leading blocks of each run up to which a rank holds the whole path.
func (p *prefixPart) heldOf(runs []radix.OutlineRun, taken []uint32) []uint32 {
	held, inner := make([]uint32, len(runs)), make([]bool, len(runs))
	for i := range runs {
		if up := runs[i].Parent; up >= 0 && taken[i] > 0 {
			inner[up] = true
		}
	}
	var path []events.LocalHash
	var answer radix.Answer
	for leaf := range runs {
		if inner[leaf] || taken[leaf] == 0 {
			continue
		}
		end := int(runs[leaf].Depth + taken[leaf])
		path = slices.Grow(path[:0], end)[:end]
		for i := leaf; i >= 0; i = runs[i].Parent {
			copy(path[runs[i].Depth:], runs[i].Locals[:taken[i]])
		}
		longest := p.longest(path, &answer)
		for i := leaf; i >= 0 && held[i] < taken[i]; i = runs[i].Parent {
			if longest > runs[i].Depth {
				held[i] = max(held[i], min(longest-runs[i].Depth, taken[i]))
			}
		}
	}
	return held
}
