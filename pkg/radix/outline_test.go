package radix

import (
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// store stores a document of a forest of prompts for a rank. The documents begin alike.
func store(x *Index, id RankID, tier events.Tier, first int, locals []events.LocalHash) {
	e := events.Event{Kind: events.Stored, Tier: tier, Locals: locals}
	for i := range locals {
		e.Blocks = append(e.Blocks, events.BlockHash(first+i))
	}
	x.Apply(id, 0, []events.Event{e})
}

func sequence(first, n int) (list []events.LocalHash) {
	for i := range n {
		list = append(list, events.LocalHash(first+i))
	}
	return list
}

// TestOutline: an outline has the largest runs, the runs that lead to them, and the holders.
func TestOutline(t *testing.T) {
	x := New(Config{})
	a, b, c, other := x.AddRank(1, 16), x.AddRank(1, 16), x.AddRank(1, 16), x.AddRank(2, 16)
	system := sequence(1, 10)
	store(x, a, events.Device, 1000, append(slices.Clone(system), sequence(100, 20)...))
	store(x, b, events.Device, 2000, append(slices.Clone(system), sequence(200, 5)...))
	store(x, c, events.Host, 3000, system[:4])
	store(x, other, events.Device, 4000, sequence(500, 50))
	text := func(o *Outline) (list []string) {
		for _, r := range o.Runs {
			list = append(list, fmt.Sprintf("%d: %d+%d first %d by %d %v", r.Parent, r.Depth, r.Blocks, r.First, r.Holders,
				r.Tiers))
		}
		return list
	}
	all := x.Outline(OutlineQuery{Space: 1, Most: 100})
	want := []string{"-1: 0+10 first 1 by 3 [2 1 0 0]", "0: 10+20 first 100 by 1 [1 0 0 0]",
		"0: 10+5 first 200 by 1 [1 0 0 0]"}
	if got := text(all); !slices.Equal(got, want) || all.TotalRuns != 3 || all.TotalBlocks != 35 {
		t.Errorf("%q, %d runs, %d blocks", got, all.TotalRuns, all.TotalBlocks)
	}
	if names := all.Runs[0].Ranks; !slices.Equal(names, []RankID{a, b, c}) {
		t.Errorf("holders %v", names)
	}
	if got := text(x.Outline(OutlineQuery{Space: 1, Most: 2})); !slices.Equal(got, want[:2]) {
		t.Errorf("of two: %q", got)
	}
	if got := text(x.Outline(OutlineQuery{Space: 2, Most: 5})); !slices.Equal(got,
		[]string{"-1: 0+50 first 500 by 1 [1 0 0 0]"}) {
		t.Errorf("other space: %q", got)
	}
	if o := x.Outline(OutlineQuery{Space: 3, Most: 5}); len(o.Runs) > 0 || o.TotalRuns > 0 {
		t.Errorf("missing space: %v", o)
	}
	some := &RankSet{}
	some.Add(c)
	part := x.Outline(OutlineQuery{Space: 1, Most: 5, Among: some, Hashes: 100})
	if got := text(part); !slices.Equal(got, []string{"-1: 0+10 first 1 by 1 [0 1 0 0]"}) || part.TotalRuns != 1 ||
		!slices.Equal(part.Runs[0].Locals, system) || !slices.Equal(part.Runs[0].Partly,
		[]OutlinePart{{Rank: c, Tier: events.Host, To: 4}}) {
		t.Errorf("among c: %q %+v", got, part)
	}
	x.Apply(a, 0, []events.Event{{Kind: events.Cleared}})
	if got := text(x.Outline(OutlineQuery{Space: 1, Most: 100})); len(got) != 2 {
		t.Errorf("without a: %q", got)
	}
}

// TestOutlineBesideTheWriter: the outline of a run is true at some moment, for any changes of the writer.
func TestOutlineBesideTheWriter(t *testing.T) {
	x := New(Config{})
	var ranks []RankID
	for range 70 {
		ranks = append(ranks, x.AddRank(1, 16))
	}
	done := make(chan struct{})
	var reader sync.WaitGroup
	reader.Go(func() {
		for ended := false; !ended; {
			select {
			case <-done:
				ended = true
			default:
			}
			o := x.Outline(OutlineQuery{Space: 1, Most: 50, Hashes: 1000})
			for i, r := range o.Runs {
				up := uint32(0)
				if r.Parent >= i {
					t.Errorf("run %d is before its parent %d", i, r.Parent)
				} else if r.Parent >= 0 {
					up = o.Runs[r.Parent].Depth + o.Runs[r.Parent].Blocks
				}
				// the place of a document's blocks determines the hashes: the first hash at a depth is unique
				if len(r.Locals) == 0 || r.Locals[0] != r.First || len(r.Locals) > int(r.Blocks) {
					t.Errorf("hashes %v of %+v", r.Locals, r)
				}
				for _, p := range r.Partly {
					if p.From >= p.To || p.To > r.Blocks {
						t.Errorf("%+v of %+v", p, r)
					}
				}
				if r.Depth != up || r.Blocks == 0 || r.Holders == 0 || int(r.First)%1000 != int(r.Depth) {
					t.Errorf("%+v", r)
				}
			}
		}
	})
	for round := range 300 {
		id, doc := ranks[round%len(ranks)], round%7
		locals := sequence(1_000_000, 8+doc)
		locals = append(locals, sequence(1000*(2+round%13)+len(locals), 30)...)
		store(x, id, events.Tier(1+round%4), 100*round, locals)
		if round%5 == 4 {
			x.Apply(ranks[(round/5)%len(ranks)], 0, []events.Event{{Kind: events.Cleared}})
		}
	}
	close(done)
	reader.Wait()
}

// TestOutlineOfAnEarlierView reads a node with a view from before the arrival of a rank that holds a part of the node.
func TestOutlineOfAnEarlierView(t *testing.T) {
	x := New(Config{})
	doc := sequence(1, 40)
	store(x, x.AddRank(1, 16), events.Device, 1000, doc)
	for range 3 {
		store(x, x.AddRank(1, 16), events.Device, 1000, doc[:20])
	}
	v := x.view.Load()
	store(x, x.AddRank(1, 16), events.Device, 1000, doc[:10])
	_, at := x.v.edge(x.v.root(1), 1)
	o := outliner{x: x, byID: map[uint32]int{}}
	if o.holders(v, &v.nodes[at], at, 0) {
		t.Error("the outline accepted a part of a rank that the view lacks")
	}
}
