package dump

import (
	"runtime"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestImagesTakeLittleMemory: an image needs little more memory than its hashes, even while a rank with holes in its
// blocks is written.
func TestImagesTakeLittleMemory(t *testing.T) {
	const runs, length, mostPerBlock = 5000, 64, 40
	heap := func() int {
		var s runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&s)
		return int(s.HeapAlloc)
	}
	before := heap()
	image := NewImage()
	r := events.Run{Locals: make([]events.LocalHash, length), Names: make([]events.BlockHash, length)}
	for id := range events.RunID(runs) {
		r.ID, r.Parent, r.Offset = id, events.NoRun, 0
		if id%8 > 0 { // attached after the first blocks of the previous run
			r.Parent, r.Offset = id-1, length/2
		}
		for i := range r.Locals {
			r.Locals[i], r.Names[i] = events.LocalHash(int(id)*length+i), events.BlockHash(int(id)*length+i+1)
		}
		r.Holdings = []events.Holding{{Rank: 0, Tier: events.Device, Bits: []uint64{0xfeff_ffff_ffff_ffff}}}
		if err := image.Run(&r); err != nil {
			t.Fatal(err)
		}
	}
	if err := image.Rank(0, &events.RankImage{}); err != nil {
		t.Fatal(err)
	}
	grown, blocks, removed, at := 0, 0, 0, 0
	if _, err := image.Events(0, func(e *events.Event, _ ...events.Event) error {
		if e.Kind == events.Stored {
			blocks += len(e.Blocks)
		} else {
			removed += len(e.Blocks)
		}
		if at++; at%500 == 1 {
			grown = max(grown, heap()-before)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if blocks != runs*length || removed != runs {
		t.Errorf("%d blocks are stored, and %d generated names removed", blocks, removed)
	}
	if per := grown / (runs * length); per > mostPerBlock {
		t.Errorf("%d bytes a block", per)
	} else {
		t.Logf("%d bytes a block", per)
	}
	runtime.KeepAlive(image)
}

// TestGeneratedNamesAreUnused: generated names differ from all names of the rank.
func TestGeneratedNamesAreUnused(t *testing.T) {
	const from = events.BlockHash(1) << 63
	for _, c := range []struct {
		used []events.BlockHash
		want events.BlockHash
	}{
		{[]events.BlockHash{1, 1<<64 - 1}, from}, {[]events.BlockHash{from}, from + madeRange},
		{[]events.BlockHash{from + 2*madeRange - 1, from + 5, from + 2*madeRange}, from + 3*madeRange},
	} {
		held := &run{locals: make([]events.LocalHash, len(c.used)), names: c.used}
		m := nameMaker{held: []heldRun{{held, events.Holding{Tier: events.Device, Lead: uint32(len(c.used))}}}}
		first, second := m.next(), m.next()
		if first != c.want || second != c.want+1 {
			t.Errorf("beside %x: %x and %x, want %x", c.used, first, second, c.want)
		}
		if again := m.again(5); len(again) != 2 || again[0] != first || again[1] != second || m.count != 0 {
			t.Errorf("made again: %x", again)
		}
	}
}
