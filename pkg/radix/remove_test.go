package radix

import (
	"math/rand/v2"
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

// TestDeviceMemoryLikeItsTwin: a rank stores and removes random blocks of one prompt, in device and host memory. A set
// counts those in device memory.
func TestDeviceMemoryLikeItsTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 36))
	x := New(Config{})
	id := x.AddRank(0, 16)
	locals, names := chain(3, 200)
	x.Apply(id, 0, []events.Event{stored(locals, names)})
	held, full := map[events.BlockHash]bool{}, 0
	for _, name := range names {
		held[name] = true
	}
	for step := range 3000 {
		name := names[rng.IntN(len(names))]
		e := events.Event{Kind: events.Kind(1 + rng.IntN(2)), Tier: events.Tier(1 + rng.IntN(2)),
			Blocks: []events.BlockHash{name}}
		switch {
		case e.Tier != events.Device:
		case e.Kind == events.Removed:
			delete(held, name)
			full = max(full, len(held))
		case held[name]:
			continue // a second copy would have to be removed twice
		default:
			held[name] = true
		}
		x.Apply(id, 0, []events.Event{e})
		if h, f := x.DeviceMemory(id); h != int64(len(held)) || f != int64(full) {
			t.Fatalf("step %d: %d blocks held, at most %d after a removal; want %d and %d", step, h, f, len(held), full)
		}
	}
	x.Apply(id, 0, []events.Event{{Kind: events.Cleared}})
	if h, f := x.DeviceMemory(id); h != 0 || f != 0 {
		t.Errorf("after the cache was cleared: %d, %d", h, f)
	}
}
