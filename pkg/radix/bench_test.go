package radix

import (
	"cmp"
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// fleetOf returns an index with ranks that hold the first blocks of a long prompt, each rank a little less than the
// previous rank.
func fleetOf(ranks, blocks int) (*Index, []RankID, []events.LocalHash, []events.BlockHash) {
	x := New(Config{})
	locals, names := chain(1, blocks)
	var ids []RankID
	for i := range ranks {
		id := x.AddRank(0, 16)
		ids = append(ids, id)
		for at := 0; at < blocks-i; at += events.MaxBlocksPerEvent {
			to := min(at+events.MaxBlocksPerEvent, blocks-i)
			e := stored(locals[at:to], names[at:to])
			if at > 0 {
				e.HasParent, e.Parent = true, names[at-1]
			}
			x.Apply(id, 0, []events.Event{e})
		}
	}
	return x, ids, locals, names
}

// windowed is a group besides the prefix, with the number of required blocks.
type windowed struct {
	kind   events.Attention
	tokens uint32
	need   int
}

var (
	sliding = windowed{events.AttentionSlidingWindow, 1024, 64}
	longer  = windowed{events.AttentionSlidingWindow, 4096, 256}
	chunked = windowed{events.AttentionChunkedLocal, 2048, 128}
	mamba   = windowed{events.AttentionMamba, 0, 1}
)

// keepers return the blocks that a group still has of a rank's n blocks, as pairs of start and end.
var keepers = map[string]func(n, need int) []int{
	"all":     func(n, _ int) []int { return []int{0, n} },
	"end":     func(n, need int) []int { return []int{max(0, n-need), n} },
	"middle":  func(n, need int) []int { return []int{max(0, n/2-need), n / 2} },
	"nothing": func(int, int) []int { return nil },
	"hole": func(n, _ int) []int { // all blocks except one near the end
		return []int{0, n - 40, n - 39, n}
	},
	"holes": func(n, _ int) (kept []int) { // every other block of the second half
		kept = append(kept, 0, n/2)
		for i := n/2 + 1; i < n; i += 2 {
			kept = append(kept, i, i+1)
		}
		return kept
	},
	"turns": func(n, need int) (kept []int) { // ends of prompts, as after a conversation
		for end := n / 8; end <= n; end += n / 8 {
			kept = append(kept, max(0, end-need), end)
		}
		return kept
	},
}

// hybrid adds groups besides the prefix to each rank of a fleet.
func hybrid(x *Index, ids []RankID, names []events.BlockHash, groups []windowed, keeps string) {
	for i, id := range ids {
		for g, w := range groups {
			e := events.Event{
				Kind: events.Stored, Tier: events.Device, Group: events.GroupIndex(g + 1), Attention: w.kind, Window: w.tokens,
			}
			x.Apply(id, 0, []events.Event{e}) // announces the group, even without blocks
			kept := keepers[keeps](len(names)-i, w.need)
			for k := 0; k < len(kept); k += 2 {
				for at := kept[k]; at < kept[k+1]; at += events.MaxBlocksPerEvent {
					e.Blocks = names[at:min(kept[k+1], at+events.MaxBlocksPerEvent)]
					x.Apply(id, 0, []events.Event{e})
				}
			}
		}
	}
}

// branch divides a fleet's run into many nodes: another rank leaves the run after every few blocks.
func branch(x *Index, names []events.BlockHash, every int) {
	id := x.AddRank(0, 16)
	locals, _ := chain(1, len(names))
	for at := 0; at < len(names); at += events.MaxBlocksPerEvent {
		to := min(at+events.MaxBlocksPerEvent, len(names))
		e := stored(locals[at:to], names[at:to])
		e.HasParent, e.Parent = at > 0, names[max(0, at-1)]
		x.Apply(id, 0, []events.Event{e})
	}
	for at := every; at < len(names); at += every {
		locals, other := chain(uint64(1000+at), 1)
		x.Apply(id, 0, []events.Event{stored(locals, other, names[at-1])})
	}
	x.DropRank(id)
}

// hybridCase is a fleet of ranks with groups besides the prefix. A query may cost at most twice the cost without
// these groups.
type hybridCase struct {
	ranks, blocks, nodes int
	query                int // blocks; 0: all
	groups               []windowed
	keeps                string
}

func (c hybridCase) String() string {
	kinds := ""
	for _, g := range c.groups {
		kinds += fmt.Sprintf("_%v%d", g.kind, g.tokens)
	}
	return fmt.Sprintf("%dx%d_%dnodes_%dasked%s_%s", c.ranks, c.blocks, c.nodes, cmp.Or(c.query, c.blocks), kinds,
		cmp.Or(c.keeps, "full"))
}

func (c hybridCase) build() (*Index, []events.LocalHash) {
	x, ids, locals, names := fleetOf(c.ranks, c.blocks)
	hybrid(x, ids, names, c.groups, c.keeps)
	if c.nodes > 1 {
		branch(x, names, c.blocks/c.nodes)
	}
	return x, locals[:cmp.Or(c.query, c.blocks)]
}

func hybridCases() (all []hybridCase) {
	for _, c := range []hybridCase{{ranks: 64, blocks: 500}, {ranks: 256, blocks: 500},
		{ranks: 256, blocks: 500, query: 240}, {ranks: 256, blocks: 15000}} {
		c.nodes = 1
		all = append(all, c)
		c.groups = []windowed{sliding}
		for _, c.keeps = range []string{"all", "end", "middle", "nothing", "hole", "holes", "turns"} {
			all = append(all, c)
		}
		for _, c.groups = range [][]windowed{{mamba}, {chunked}, {sliding, longer}, {sliding, mamba}} {
			for _, c.keeps = range []string{"all", "end", "middle", "turns"} {
				all = append(all, c)
			}
		}
	}
	for _, c := range []hybridCase{{ranks: 64, blocks: 1000, nodes: 20}, {ranks: 256, blocks: 1000, nodes: 20},
		{ranks: 256, blocks: 1000, nodes: 20, query: 725}} {
		all = append(all, c)
		for _, c.groups = range [][]windowed{{sliding}, {mamba}, {sliding, longer}} {
			for _, c.keeps = range []string{"all", "end", "middle", "turns"} {
				all = append(all, c)
			}
		}
	}
	return all
}

// BenchmarkHybrid measures queries to fleets with windows, each after the same fleet without windows.
func BenchmarkHybrid(b *testing.B) {
	for _, c := range hybridCases() {
		b.Run(c.String(), func(b *testing.B) {
			x, locals := c.build()
			var a Answer
			b.ReportAllocs()
			for b.Loop() {
				x.Match(0, locals, nil, &a)
			}
		})
	}
}

// BenchmarkHybridTiers measures fleets with blocks in host: blocks of another rank's prompt, the blocks of device, or
// these and the blocks that device has lost.
func BenchmarkHybridTiers(b *testing.B) {
	for _, host := range []string{"elsewhere", "same", "more"} {
		for _, c := range hybridCases() {
			if c.ranks != 64 || c.blocks != 1000 {
				continue
			}
			b.Run(c.String()+"_"+host, func(b *testing.B) {
				x, ids, locals, names := fleetOf(c.ranks, c.blocks)
				hybrid(x, ids, names, c.groups, c.keeps)
				for i, id := range ids {
					n := len(names) - i
					if host == "more" {
						x.Apply(id, 0, []events.Event{removed(names[c.blocks/2-i : n]...)})
					}
					if host != "elsewhere" {
						e := stored(locals[:n], names[:n])
						e.Tier = events.Host
						x.Apply(id, 0, []events.Event{e})
						for g, w := range c.groups {
							x.Apply(id, 0, []events.Event{{Kind: events.Stored, Tier: events.Host, Group: events.GroupIndex(g + 1),
								Attention: w.kind, Window: w.tokens, Blocks: names[:n]}})
						}
					}
				}
				other, otherNames := chain(2, 3)
				e := stored(other, otherNames)
				e.Tier = events.Host
				x.Apply(x.AddRank(0, 16), 0, []events.Event{e})
				branch(x, names, c.blocks/c.nodes)
				var a Answer
				for b.Loop() {
					x.Match(0, locals[:cmp.Or(c.query, c.blocks)], nil, &a)
				}
			})
		}
	}
}

func BenchmarkMatch(b *testing.B) {
	for _, c := range []struct {
		name          string
		ranks, blocks int
	}{
		{"64ranks_500blocks", 64, 500},
		{"256ranks_500blocks", 256, 500},
		{"256ranks_15000blocks", 256, 15000}, // 240,000 tokens
		{"4000ranks_500blocks", 4000, 4500},
	} {
		x, _, locals, _ := fleetOf(c.ranks, c.blocks)
		locals = locals[:c.blocks]
		b.Run(c.name, func(b *testing.B) {
			var a Answer
			b.ReportAllocs()
			for b.Loop() {
				x.Match(0, locals, nil, &a)
			}
		})
	}
}

// BenchmarkMatchNames measures queries by engine hashes, for ranks that share names and for ranks that do not.
func BenchmarkMatchNames(b *testing.B) {
	for _, own := range []bool{false, true} {
		b.Run(fmt.Sprintf("own=%v", own), func(b *testing.B) {
			const n = 512
			x := New(Config{})
			locals, names := chain(1, n)
			for range 64 {
				x.Apply(x.AddRank(0, 16), 0, []events.Event{stored(locals, names)})
				if own {
					_, others := chain(uint64(2+len(x.slots)), n)
					x.Apply(x.AddRank(0, 16), 0, []events.Event{stored(locals, others)})
				}
			}
			var a Named
			b.ReportAllocs()
			for b.Loop() {
				x.MatchNames(0, names, nil, &a)
			}
			if len(a.Ranks) != 64 {
				b.Fatal(len(a.Ranks))
			}
		})
	}
}

// BenchmarkApply stores and removes blocks that other ranks also hold, and then blocks of no other rank. The time is
// per block.
func BenchmarkApply(b *testing.B) {
	const n = 500
	for _, c := range []struct {
		name  string
		salt  uint64
		alone bool
	}{{"shared", 1, false}, {"alone", 2, true}} {
		b.Run(c.name, func(b *testing.B) {
			x, ids, _, _ := fleetOf(64, n+64)
			locals, names := chain(c.salt, n)
			back := make([]events.BlockHash, n)
			for i := range back {
				back[i] = names[n-1-i]
			}
			evs := []events.Event{removed(back...), stored(locals, names)}
			if c.alone {
				x.Apply(ids[0], 0, evs[1:])
			}
			b.ReportAllocs()
			b.ResetTimer()
			for i := 0; i < b.N; i += 2 * n {
				x.Apply(ids[0], 0, evs)
			}
		})
	}
	b.Run("block_by_block", func(b *testing.B) {
		x := New(Config{})
		id := x.AddRank(0, 16)
		locals, names := chain(1, 60000)
		b.ReportAllocs()
		b.ResetTimer()
		var evs [1]events.Event
		for i := range b.N {
			k := i % len(names)
			if k == 0 {
				evs[0] = events.Event{Kind: events.Cleared}
				x.Apply(id, 0, evs[:])
			}
			evs[0] = stored(locals[k:k+1], names[k:k+1])
			if k > 0 {
				evs[0].HasParent, evs[0].Parent = true, names[k-1]
			}
			x.Apply(id, 0, evs[:])
		}
	})
}
