package node

import (
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// Limits of an explanation: the number of ranks, which is smaller for long prompts, and the total number of block runs.
const (
	maxPaths      = 256
	minPaths      = 16
	maxPathBlocks = 1 << 20 // ranks times blocks
	maxPathRuns   = 8192
	minPathRuns   = 8 // for each rank
)

// explain adds a path along the prompt to the first ranks of an answer, in the answer's order: the held blocks and the
// rule that ended the prefix. The depths of the ranks are replaced, so that depths and path are of the same moment.
func (f *finding) explain() error {
	n, s, served, answer := f.n, f.s, f.served, f.answer
	api.SortOverlaps(answer.Workers)
	some := answer.Workers[:min(len(answer.Workers), max(minPaths, min(maxPaths, maxPathBlocks/max(1, answer.Blocks))))]
	runs := max(minPathRuns, maxPathRuns/max(1, len(some)))
	for _, lookahead := range f.lookaheads {
		if err := s.hash(f.q, served.BlockSize, lookahead); err != nil {
			return err
		}
		sets := make([]radix.RankSet, len(n.shards))
		of := map[*RankOfView]*api.Overlap{}
		for i := range some {
			key := events.RankKey{Instance: some[i].Instance, Rank: some[i].Rank}
			r := served.rank(key)
			if r == nil || f.perRank && r.Lookahead != lookahead {
				continue
			}
			sets[r.Shard].Add(r.ID)
			of[r] = &some[i]
		}
		known, parts := uint32(0), make([]*radix.Explanation, len(n.shards))
		for _, shard := range served.Shards {
			parts[shard] = n.shards[shard].index.Explain(served.Space, s.locals, &sets[shard])
			known = max(known, parts[shard].Known)
		}
		for _, o := range of {
			o.Device, o.Host, o.Disk, o.External = 0, 0, 0, 0
			o.Path = &api.Path{Stop: stopped(radix.StopUnknown, 0, known)}
		}
		for _, shard := range served.Shards {
			for i := range parts[shard].Ranks {
				p := &parts[shard].Ranks[i]
				if o := of[f.view.Rank(shard, p.Rank)]; o != nil {
					o.Device, o.Host, o.Disk, o.External = p.Depth[0], p.Depth[1], p.Depth[2], p.Depth[3]
					o.Path = pathOf(p, stopped(p.Stop, parts[shard].Known, known), runs)
				}
			}
		}
	}
	return nil
}

// stopped returns the name of a rule. A block may be unknown in a shard and present in a second; inAny is the greatest
// number of known blocks over all shards.
func stopped(by radix.Stop, inShard, inAny uint32) string {
	if by == radix.StopUnknown && inShard < inAny {
		by = radix.StopAbsent
	}
	return by.String()
}

// pathOf returns the path of a rank, with stop as the rule at the end. Successive equal blocks form a run, and the path
// has at most most runs.
func pathOf(p *radix.RankPath, stop string, most int) *api.Path {
	path := &api.Path{Stop: stop, Behind: p.Behind}
	if p.Stop == radix.StopGroup {
		path.Group = &api.PathGroup{Index: p.Group.Group, Kind: p.Group.Kind.String(), Window: p.Group.Window}
	}
	for at := 0; at < len(p.Blocks); {
		end := at + 1
		for end < len(p.Blocks) && p.Blocks[end] == p.Blocks[at] {
			end++
		}
		if set := p.Blocks[at]; set != 0 {
			if len(path.Held) == most {
				path.More = true
				break
			}
			run := api.HeldRun{From: uint32(at), To: uint32(end)}
			for t := events.Device; t <= events.External; t++ {
				if set.Has(t) {
					run.Tiers = append(run.Tiers, t.String())
				}
			}
			path.Held = append(path.Held, run)
		}
		at = end
	}
	return path
}
