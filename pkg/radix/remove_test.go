package radix

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestRemovalOpensEachNodeOnce: an event that alternates between nodes, also between nodes of the same depth, opens
// each of them once. So a reader never sees a half-done removal.
func TestRemovalOpensEachNodeOnce(t *testing.T) {
	x := New(Config{})
	id := x.AddRank(0, 16)
	a, namesA := chain(1, 40)
	b, namesB := chain(2, 40)
	x.Apply(id, 0, []events.Event{stored(a, namesA), stored(b, namesB)})
	before := map[uint32]uint32{}
	for i := range x.v.nodes {
		before[uint32(i)] = x.v.nodes[i].version
	}
	gone := events.Event{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{
		namesA[39], namesA[38], namesB[20], namesA[7], namesA[8], namesB[19], namesA[37], 12345, namesB[3], namesA[7]}}
	if c := x.Apply(id, 0, []events.Event{gone}); c.Removed != 8 || c.UnknownRemovals != 2 {
		t.Errorf("%+v", c)
	}
	opened := 0
	for i := range x.v.nodes {
		switch x.v.nodes[i].version - before[uint32(i)] {
		case 0:
		case 2:
			opened++
		default:
			t.Errorf("node %d was opened more than once", i)
		}
	}
	if opened != 2 {
		t.Errorf("%d nodes were opened, not two", opened)
	}
	healthy(t, x)
}
