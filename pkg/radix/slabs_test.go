package radix

import "testing"

// TestAllocateFarAway has free slabs only outside of the search distance. The slabs are still allocated in a row: a row
// is a node, and a node costs a reader three cache misses.
func TestAllocateFarAway(t *testing.T) {
	x := New(Config{})
	x.slabEnd = 128 << 6
	x.growBlocks()
	for g := uint32(64); g < 1100; g++ {
		x.freeSlab.add(g)
	}
	x.freeSlab.add(x.slabEnd - 1)
	x.freeSlab.remove(x.slabEnd - 1)
	x.slabHand = 30
	if first, n := x.allocate(40); first != 64 || n != 40 {
		t.Errorf("%d slabs from %d on, want 40 from 64 on", n, first)
	}
	if first, n := x.allocate(40); first != 104 || n != 40 {
		t.Errorf("then %d slabs from %d on, want 40 from 104 on", n, first)
	}
}
