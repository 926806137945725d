package radix

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// fleetOf is an index with ranks that all hold the first blocks of one long prompt, each rank a little less than the
// one before.
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

// hybrid gives each rank of a fleet a window of 64 blocks too: of all its blocks, of its last ones, or of ones in the
// middle.
func hybrid(x *Index, ids []RankID, names []events.BlockHash, keeps string) {
	for i, id := range ids {
		n := len(names) - i
		from, to := 0, n
		switch keeps {
		case "end":
			from = n - 64
		case "middle":
			from, to = n/2-64, n/2
		case "nothing":
			from = n
		}
		for at := from; at < to; at += events.MaxBlocksPerEvent {
			x.Apply(id, 0, []events.Event{{Kind: events.Stored, Tier: events.Device, Group: 1,
				Attention: events.AttentionSlidingWindow, Window: 1024,
				Blocks: names[at:min(to, at+events.MaxBlocksPerEvent)]}})
		}
	}
}

// BenchmarkHybrid is BenchmarkMatch with a window beside the prefix.
func BenchmarkHybrid(b *testing.B) {
	for _, c := range []struct{ ranks, blocks int }{{64, 500}, {256, 500}, {256, 15000}} {
		for _, keeps := range []string{"full", "all", "end", "middle"} {
			x, ids, locals, names := fleetOf(c.ranks, c.blocks)
			if keeps != "full" {
				hybrid(x, ids, names, keeps)
			}
			b.Run(fmt.Sprintf("%dranks_%dblocks_%s", c.ranks, c.blocks, keeps), func(b *testing.B) {
				var a Answer
				b.ReportAllocs()
				for b.Loop() {
					x.Match(0, locals, nil, &a)
				}
				if keeps != "nothing" && len(a.Ranks) != c.ranks {
					b.Fatalf("%d ranks", len(a.Ranks))
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
		b.Run(c.name+"/groups", func(b *testing.B) {
			var g Groups
			b.ReportAllocs()
			for b.Loop() {
				x.MatchGroups(0, locals, nil, &g)
			}
		})
	}
}

// BenchmarkApply stores and removes what the other ranks of a fleet hold too, then what nobody else has; the time is
// for one block.
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
