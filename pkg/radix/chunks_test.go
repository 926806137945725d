package radix

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// numbered returns n hashes from first on.
func numbered[H ~uint64](first, n int) (all []H) {
	for i := range n {
		all = append(all, H(mix(uint64(first+i))))
	}
	return all
}

// TestRemovalsOfAMessageAreRemembered: all removals of a message are remembered until its last event, for any number of
// removals and parts. Then their memory is freed.
func TestRemovalsOfAMessageAreRemembered(t *testing.T) {
	const n = 9 * DefaultMaxTombstones
	names, locals := numbered[events.BlockHash](1, n), numbered[events.LocalHash](1<<32, n)
	stored := []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: names, Locals: locals}}
	removed := []events.Event{{Kind: events.Removed, Tier: events.Device, Blocks: names}}
	copies := []events.Event{{Kind: events.Stored, Tier: events.Host, Blocks: names}}
	for name, c := range map[string]struct {
		apply func(x *Index, id RankID)
		host  uint32
	}{
		"one part":      {func(x *Index, id RankID) { x.Apply(id, 1, slices.Concat(removed, copies)) }, n},
		"two parts":     {func(x *Index, id RankID) { x.ApplyPart(id, 1, removed); x.Apply(id, 1, copies) }, n},
		"removals last": {func(x *Index, id RankID) { x.Apply(id, 1, slices.Concat(removed, copies, stored, removed)) }, n},
		// only the last removals are remembered, and the rest of the chunk does not start the prompt
		"two messages": {func(x *Index, id RankID) { x.Apply(id, 1, removed); x.Apply(id, 1, copies) }, 0},
	} {
		x := New(Config{})
		id := x.AddRank(1, 16)
		x.Apply(id, 1, stored)
		c.apply(x, id)
		var a Answer
		x.Match(1, locals, nil, &a)
		host := uint32(0)
		for _, o := range a.Ranks {
			host = o.Depth[1]
		}
		if tombstones := x.Stats().Tombstones; host != c.host || tombstones > DefaultMaxTombstones {
			t.Errorf("%s: %d blocks in host, want %d; %d tombstones", name, host, c.host, tombstones)
		}
		if ring := len(x.rank(id).tombstones.ring); ring > 4*DefaultMaxTombstones {
			t.Errorf("%s: memory for %d tombstones remains", name, ring)
		}
		if err := x.Check(); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestChunks checks the blocks that count in chunks of three blocks, besides device blocks.
func TestChunks(t *testing.T) {
	const n = 9
	names, locals := numbered[events.BlockHash](1, n), numbered[events.LocalHash](1<<32, n)
	own := func(i int) events.BlockHash { return names[i] ^ 1 }
	placeholder := func(i int) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Host, Chunk: events.ChunkSizeUnknown, Blocks: names[i : i+1]}
	}
	described := func(i int) events.Event {
		return events.Event{Kind: events.Stored, Tier: events.Host, Chunk: 3, Blocks: names[i : i+3]}
	}
	lmcache := func(i int) events.Event {
		e := events.Event{Kind: events.Stored, Tier: events.Host, Chunk: 3, Own: true,
			Blocks: []events.BlockHash{own(i + 2)}, Locals: locals[i : i+3]}
		if i > 0 {
			e.HasParent, e.Parent = true, own(i-1)
		}
		return e
	}
	unparented := func(i int) events.Event {
		e := lmcache(i)
		e.HasParent, e.Parent = true, 0
		return e
	}
	device := func(from int) events.Event {
		return events.Event{Kind: events.Removed, Tier: events.Device, Blocks: names[from:]}
	}
	for name, c := range map[string]struct {
		events []events.Event
		query  int
		want   [2]uint32
	}{
		"whole chunks":             {[]events.Event{placeholder(2), placeholder(5), device(0)}, 9, [2]uint32{0, 6}},
		"a part of a chunk":        {[]events.Event{placeholder(2), placeholder(5), device(0)}, 5, [2]uint32{0, 3}},
		"described block by block": {[]events.Event{described(0), described(3), device(0)}, 5, [2]uint32{0, 3}},
		"behind one block":         {[]events.Event{placeholder(2), device(1)}, 9, [2]uint32{1, 0}},
		"two chunks after a block": {[]events.Event{placeholder(2), placeholder(5), device(1)}, 9, [2]uint32{1, 5}},
		"LMCache after a block":    {[]events.Event{lmcache(0), device(1)}, 9, [2]uint32{1, 2}},
		"LMCache's second alone": {[]events.Event{lmcache(0), lmcache(3),
			{Kind: events.Removed, Tier: events.Host, Blocks: []events.BlockHash{own(2)}}, device(0)}, 9, [2]uint32{}},
		"LMCache without parents": {[]events.Event{lmcache(0), unparented(3), unparented(6), device(0)}, 9, [2]uint32{0, 9}},
		"LMCache after evictions": {[]events.Event{device(0), lmcache(0), lmcache(3)}, 9, [2]uint32{0, 6}},
	} {
		x := New(Config{})
		id := x.AddRank(1, 16)
		x.Apply(id, 1, []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: names, Locals: locals}})
		x.Apply(id, 1, c.events)
		var a Answer
		x.Match(1, locals[:c.query], nil, &a)
		got := [2]uint32{}
		for _, o := range a.Ranks {
			got = [2]uint32{o.Depth[0], o.Depth[1]}
		}
		if got != c.want {
			t.Errorf("%s: %v blocks in device and host, want %v", name, got, c.want)
		}
		for i, p := range x.Explain(1, locals[:c.query], nil).Ranks {
			if name == "a part of a chunk" && p.Stop != stopChunk && p.Stop != StopAbsent {
				t.Errorf("%s: rank %d stops because of %v", name, i, p.Stop)
			}
		}
	}
	// A chunk of another engine counts after the device has announced its blocks, in the same order.
	x := New(Config{})
	id := x.AddRank(1, 16)
	x.Apply(id, 1, []events.Event{lmcache(0), lmcache(3)})
	for i := range 6 {
		e := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: names[i : i+1], Locals: locals[i : i+1]}
		if i > 0 {
			e.HasParent, e.Parent = true, names[i-1]
		}
		x.Apply(id, 1, []events.Event{e})
	}
	x.Apply(id, 1, []events.Event{{Kind: events.Removed, Tier: events.Device, Blocks: names[:6]}})
	var a Answer
	if x.Match(1, locals, nil, &a); len(a.Ranks) != 1 || a.Ranks[0].Depth[1] != 6 {
		t.Errorf("of another engine: %+v", a.Ranks)
	}
	if err := x.Check(); err != nil {
		t.Error(err)
	}
}
