package radix

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestMatchNames: ranks with equal names share them, also after a rank has dropped its blocks. A rank with different
// names matches only by its own names. Names at a wrong place match nothing.
func TestMatchNames(t *testing.T) {
	x := New(Config{})
	locals, names := chain(1, 100)
	_, others := chain(2, 100)
	ids := []RankID{x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(0, 16), x.AddRank(1, 16)}
	x.Apply(ids[0], 0, []events.Event{stored(locals, names)})
	x.Apply(ids[1], 0, []events.Event{stored(locals[:60], names[:60])})
	x.Apply(ids[2], 0, []events.Event{stored(locals[:80], others[:80])}) // contradicts the shared names
	two := stored(locals[:10], names[:10])
	two.Group = 1
	x.Apply(ids[3], 0, []events.Event{stored(locals[:50], names[:50]), two}) // with two main groups
	x.Apply(ids[4], 0, []events.Event{stored(locals[:5], names[:5])})        // in another space
	expect := func(what string, space uint32, names []events.BlockHash, want map[RankID]uint32) {
		t.Helper()
		var a Named
		x.MatchNames(space, names, nil, &a)
		got := map[RankID]uint32{}
		for _, o := range a.Ranks {
			got[o.Rank] = o.Depth[0]
		}
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("%s: %v, want %v", what, got, want)
		}
	}
	expect("all", 0, names, map[RankID]uint32{ids[0]: 100, ids[1]: 60, ids[3]: 10})
	expect("another's names", 0, others, map[RankID]uint32{ids[2]: 80})
	expect("names of both", 0, append(append([]events.BlockHash{}, others[:20]...), names[20:]...),
		map[RankID]uint32{ids[2]: 20})
	expect("another space", 1, names, map[RankID]uint32{ids[4]: 5})
	expect("a missing space", 9, names, nil)
	expect("not from the first block", 0, names[1:], nil)
	expect("a name is left out", 0, append(append([]events.BlockHash{}, names[:7]...), names[8:]...),
		map[RankID]uint32{ids[0]: 7, ids[1]: 7, ids[3]: 7})
	expect("none", 0, nil, nil)
	x.Apply(ids[0], 0, []events.Event{removed(names[30:40]...)})
	expect("a hole", 0, names, map[RankID]uint32{ids[0]: 30, ids[1]: 60, ids[3]: 10})
	x.Apply(ids[0], 0, []events.Event{{Kind: events.Cleared}})
	expect("one is cleared", 0, names, map[RankID]uint32{ids[1]: 60, ids[3]: 10})
	x.Apply(ids[1], 0, []events.Event{removed(names[50:60]...)})
	expect("an eviction", 0, names, map[RankID]uint32{ids[1]: 50, ids[3]: 10})
}
