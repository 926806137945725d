package node

import (
	"slices"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// The bounds of an explanation: how many ranks it has, fewer for long prompts, and how many runs of blocks in all.
const (
	maxPaths      = 256
	minPaths      = 16
	maxPathBlocks = 1 << 20 // ranks times blocks
	maxPathRuns   = 8192
	minPathRuns   = 8 // of one rank
)

// explain gives the first ranks of an answer, in its order, the way along the prompt: where they hold what, and which
// rule ended their prefix. What they hold of the prefix is that of the same moment then.
func (n *Node) explain(s *scratch, q *api.Query, served *Served, answer *api.Answer, lookaheads []uint32,
	own bool) error {
	slices.SortFunc(answer.Workers, api.CompareOverlaps)
	some := answer.Workers[:min(len(answer.Workers), max(minPaths, min(maxPaths, maxPathBlocks/max(1, answer.Blocks))))]
	runs := max(minPathRuns, maxPathRuns/max(1, len(some)))
	for _, lookahead := range lookaheads {
		if err := s.hash(q, served.BlockSize, lookahead); err != nil {
			return err
		}
		var set radix.RankSet
		of := map[radix.RankID]*api.Overlap{}
		for i := range some {
			key := events.RankKey{Instance: some[i].Instance, Rank: some[i].Rank}
			at, found := slices.BinarySearchFunc(served.Ranks, key,
				func(r *RankOfView, key events.RankKey) int { return r.Key.Compare(key) })
			if !found || own && served.Ranks[at].Lookahead != lookahead {
				continue
			}
			set.Add(served.Ranks[at].ID)
			of[served.Ranks[at].ID] = &some[i]
		}
		ex := n.index.Explain(served.Space, s.locals, &set)
		nothing := radix.StopAbsent
		if ex.Known == 0 {
			nothing = radix.StopUnknown
		}
		for _, o := range of {
			o.Device, o.Host, o.Disk, o.External = 0, 0, 0, 0
			o.Path = &api.Path{Stop: nothing.String()}
		}
		for i := range ex.Ranks {
			p := &ex.Ranks[i]
			if o := of[p.Rank]; o != nil {
				o.Device, o.Host, o.Disk, o.External = p.Depth[0], p.Depth[1], p.Depth[2], p.Depth[3]
				o.Path = pathOf(p, runs)
			}
		}
	}
	return nil
}

// pathOf is a rank's way with equal blocks that follow each other as one run, of which there are most at the most.
func pathOf(p *radix.RankPath, most int) *api.Path {
	path := &api.Path{Stop: p.Stop.String(), Behind: p.Behind}
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
