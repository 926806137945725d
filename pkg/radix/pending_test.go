package radix

import (
	"runtime"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// waiting is an event with blocks first, first+1, … after a parent.
func waiting(parent, first events.BlockHash, n int) events.Event {
	e := events.Event{Kind: events.Stored, Tier: events.Device, HasParent: true, Parent: parent}
	for i := range n {
		name := first + events.BlockHash(i)
		e.Blocks, e.Locals = append(e.Blocks, name), append(e.Locals, events.LocalHash(name))
	}
	return e
}

// TestPendingBlocksWaitForever: blocks get credit after any delay of the parent. The limits drop the oldest events
// first.
func TestPendingBlocksWaitForever(t *testing.T) {
	const day = events.Millis(24 * 60 * 60 * 1000)
	for name, c := range map[string]struct {
		cfg     Config
		events  []events.Event // an hour apart
		counts  Counts
		waiting int64
	}{
		"parents a day late": {Config{}, []events.Event{waiting(2, 3, 2), waiting(9, 10, 1), waiting(4, 5, 1)},
			Counts{Pending: 4}, 4},
		"by number": {Config{MaxPending: 4}, []events.Event{waiting(90, 91, 2), waiting(2, 3, 2), waiting(4, 5, 1)},
			Counts{Pending: 5, Overflowed: 2}, 3},
		"by bytes": {Config{MaxPendingBytes: 2*pendingEventBytes + 4*pendingBlockBytes},
			[]events.Event{waiting(90, 91, 2), waiting(2, 3, 2), waiting(4, 5, 1)}, Counts{Pending: 5, Overflowed: 2}, 3},
		"by age": {Config{PendingFor: day / 16},
			[]events.Event{waiting(90, 91, 2), waiting(92, 93, 1), waiting(2, 3, 2), waiting(4, 5, 1)},
			Counts{Pending: 6, Expired: 3}, 3},
		"none": {Config{MaxPending: -1}, []events.Event{waiting(2, 3, 2)}, Counts{Pending: 2, Overflowed: 2}, 0},
	} {
		x := New(c.cfg)
		id := x.AddRank(0, 16)
		var counts Counts
		now := events.Millis(0)
		for _, e := range c.events {
			counts.Add(x.Apply(id, now, []events.Event{e}))
			now += day / 24
		}
		if s := x.Stats(); counts != c.counts || s.Pending != c.waiting || s.Bytes.Ranks < c.waiting*pendingBlockBytes {
			t.Errorf("%s: %+v, want %+v; %d pending, want %d", name, counts, c.counts, s.Pending, c.waiting)
		}
		if c.cfg.PendingFor == 0 {
			now += day
		}
		root := waiting(0, 1, 2)
		root.HasParent = false
		counts = x.Apply(id, now-day/24, []events.Event{root})
		attached := min(uint64(c.waiting), 3)
		if counts.Attached != attached || counts.Stored != 2+attached {
			t.Errorf("%s: counts of the parents: %+v", name, counts)
		}
		if err := x.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestPendingMemory compares the memory of MaxPendingBytes with the heap, for events of any size.
func TestPendingMemory(t *testing.T) {
	for _, n := range []int{1, 4, 64, DefaultMaxPending} {
		const ranks = 20
		x := New(Config{})
		before := liveHeap()
		counted := 0
		for range ranks {
			id := x.AddRank(0, 16)
			for first := 1; first <= DefaultMaxPending; first += n {
				x.Apply(id, 0, []events.Event{waiting(events.BlockHash(1<<40+first), events.BlockHash(first), n)})
			}
			counted += x.slots[id.Slot()].pending.bytes()
		}
		grown := int(liveHeap() - before)
		t.Logf("events of %d blocks: %d bytes a block, %d counted", n, grown/(ranks*DefaultMaxPending),
			counted/(ranks*DefaultMaxPending))
		if grown > counted*9/8 || grown < counted/2 { // the race detector pads objects
			t.Errorf("events of %d blocks: %d bytes, counted %d", n, grown, counted)
		}
		if s := x.Stats(); s.Pending != ranks*DefaultMaxPending {
			t.Errorf("%d blocks wait", s.Pending)
		}
	}
}

// liveHeap returns the number of bytes in live objects.
func liveHeap() uint64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // finalizers of the first collection have run
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestNamesWaitForTheKindOfTheirGroup: an event with only names does not define the kind of its group. The blocks count
// after an event with the kind.
func TestNamesWaitForTheKindOfTheirGroup(t *testing.T) {
	prompt := []events.LocalHash{3, 4}
	for name, c := range map[string]struct {
		kind    events.Attention // kind of group 1
		pending bool             // the names come before the device's blocks
		device  uint32
		host    uint32
		beside  int64
	}{
		"state group, names first":   {events.AttentionMamba, true, 2, 0, 2},
		"state group, blocks first":  {events.AttentionMamba, false, 2, 0, 2},
		"second main group":          {events.AttentionFull, true, 2, 0, 0},
		"second main group, at last": {events.AttentionFull, false, 2, 0, 0},
	} {
		x := New(Config{})
		id := x.AddRank(0, 16)
		full := waiting(0, 3, 2)
		full.HasParent, full.Attention = false, events.AttentionFull
		names := events.Event{Kind: events.Stored, Tier: events.Host, Group: 1, Blocks: []events.BlockHash{4}}
		list := []events.Event{full, names}
		if c.pending {
			list = []events.Event{names, full}
		}
		x.Apply(id, 1, list)
		depth := func() (d [events.NumTiers]uint32) {
			var a Answer
			x.Match(0, prompt, nil, &a)
			for _, o := range a.Ranks {
				d = o.Depth
			}
			return d
		}
		if d := depth(); d[0] != 2 || x.Stats().Pending != 1 {
			t.Errorf("%s: before the kind: %v, %d pending", name, d, x.Stats().Pending)
		}
		second := full
		second.Group, second.Attention = 1, c.kind
		if !c.kind.Main() {
			second.Blocks, second.Locals = []events.BlockHash{4}, nil
		}
		x.Apply(id, 2, []events.Event{second})
		if d, s := depth(), x.Stats(); d[0] != c.device || d[1] != c.host || s.Pending != 0 || s.SetBlocks != c.beside {
			t.Errorf("%s: %v, %+v", name, d, s)
		}
		if err := x.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}
