package snapshot

import (
	"flag"
	"math/bits"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func init() { flag.Set("rapid.seed", "1") } // the same cases in every run; `make explore` draws different cases

func ascending(t *rapid.T, n int, label string) []uint32 {
	if n == 0 {
		return nil
	}
	at := rapid.SliceOfNDistinct(rapid.Uint32Range(0, uint32(n-1)), 0, min(n, 5), rapid.ID[uint32]).Draw(t, label)
	slices.Sort(at)
	return at
}

func drawHolding(t *rapid.T, n int, h *events.Holding) {
	u64 := rapid.Uint64()
	h.Lead = uint32(rapid.IntRange(0, n).Draw(t, "lead"))
	if rapid.Bool().Draw(t, "whole") {
		h.Lead = uint32(n)
	}
	if mask := rapid.SampledFrom([]uint64{0, 1 << 40, 0x8000_0000_0000_0001, ^uint64(0), ^uint64(1 << 9),
		0xaaaa_5555_1234_9876}).Draw(t, "mask"); mask != 0 {
		h.Bits = make([]uint64, (n+63)/64)
		for i := range h.Bits {
			h.Bits[i] = bits.RotateLeft64(mask, i)
			if i < int(h.Lead)/64 {
				h.Bits[i] = 0
			} else if i == int(h.Lead)/64 {
				h.Bits[i] &= ^uint64(0) << (h.Lead % 64)
			}
		}
		if n%64 != 0 {
			h.Bits[n/64] &= 1<<(n%64) - 1
		}
	}
	for _, b := range ascending(t, n, "copies") {
		h.Copies = append(h.Copies, events.BlockCount{Block: b, Count: rapid.Uint32Range(2, 1<<32-1).Draw(t, "count")})
	}
	for _, b := range ascending(t, n, "names") {
		h.Names = append(h.Names, events.BlockName{Block: b, Name: events.BlockHash(u64.Draw(t, "name"))})
	}
	for _, b := range ascending(t, n, "also") {
		for range rapid.IntRange(1, 2).Draw(t, "times") {
			h.Also = append(h.Also, events.NamedCount{Block: b, Name: events.BlockHash(u64.Draw(t, "name")),
				Count: rapid.Uint32Range(1, 1<<32-1).Draw(t, "count")})
		}
	}
}

func drawState(t *rapid.T) (s events.RankImage) {
	u64, u32 := rapid.Uint64(), rapid.Uint32()
	s.Clock = events.Millis(rapid.Int64().Draw(t, "clock"))
	for range rapid.IntRange(0, 2).Draw(t, "groups") {
		s.Groups = append(s.Groups, events.GroupKind{Group: events.GroupIndex(u32.Draw(t, "group")),
			Kind: events.Attention(rapid.Uint8Range(0, windowKind-1).Draw(t, "kind"))})
	}
	if rapid.Bool().Draw(t, "windowed") {
		g := events.GroupKind{Group: events.GroupIndex(rapid.Uint32Range(0, maxWindowGroup).Draw(t, "group")),
			Kind: events.AttentionSlidingWindow}
		g.Window, g.Drops = rapid.Uint32().Draw(t, "window"), rapid.Bool().Draw(t, "drops")
		s.Groups = append(slices.DeleteFunc(s.Groups, func(o events.GroupKind) bool { return o.Group == g.Group }), g)
	}
	if rapid.Bool().Draw(t, "loads chunks") {
		s.Loading = events.Loading{Blocks: rapid.Uint32Range(0, maxLoading).Draw(t, "loaded together"),
			Told: rapid.Bool().Draw(t, "told"), Own: rapid.Bool().Draw(t, "own names")}
	}
	for range rapid.IntRange(0, 3).Draw(t, "pending") {
		p := events.Pending{Since: events.Millis(rapid.Int64().Draw(t, "since")),
			Event: events.Event{Kind: events.Stored, Tier: events.Host,
				Group: events.GroupIndex(u32.Draw(t, "group")), HasParent: rapid.Bool().Draw(t,
					"has"), Parent: events.BlockHash(u64.Draw(t, "parent"))}}
		n := rapid.IntRange(0, 70).Draw(t, "blocks")
		for range n {
			p.Event.Blocks = append(p.Event.Blocks, events.BlockHash(u64.Draw(t, "block")))
		}
		if rapid.Bool().Draw(t, "locals") {
			for range n {
				p.Event.Locals = append(p.Event.Locals, events.LocalHash(u64.Draw(t, "local")))
			}
		}
		if len(p.Event.Locals) == 0 || n > 1 {
			if rapid.Bool().Draw(t, "chunk") {
				p.Event.Locals, p.Event.Chunk = nil, rapid.Uint32Range(1, 1<<32-1).Draw(t, "chunk size")
			}
		} else if rapid.Bool().Draw(t, "own") {
			for range rapid.IntRange(0, 20).Draw(t, "more of the chunk") {
				p.Event.Locals = append(p.Event.Locals, events.LocalHash(u64.Draw(t, "local")))
			}
			p.Event.Own, p.Event.Chunk = true, uint32(len(p.Event.Locals))
		}
		p.Cancelled = ascending(t, n, "cancelled")
		s.Pending = append(s.Pending, p)
	}
	for range rapid.IntRange(0, 5).Draw(t, "remembered") {
		s.Tombstones = append(s.Tombstones, events.Tombstone{Name: events.BlockHash(u64.Draw(t, "name")),
			Run:   events.RunID(u32.Draw(t, "run")),
			Block: u32.Draw(t, "block"), Since: events.Millis(rapid.Int64().Draw(t, "since"))})
	}
	for range rapid.IntRange(0, 2).Draw(t, "sets") {
		set := events.GroupSet{Tier: events.Disk, Group: events.GroupIndex(u32.Draw(t, "group"))}
		for range rapid.IntRange(0, 4).Draw(t, "members") {
			set.Blocks = append(set.Blocks, events.BlockHash(u64.Draw(t, "block")))
			set.Counts = append(set.Counts, u32.Draw(t, "count"))
		}
		s.Sets = append(s.Sets, set)
	}
	return s
}

func drawImage(t *rapid.T) *image {
	im := new(image)
	seen := map[events.RankKey]bool{}
	for range rapid.IntRange(0, 6).Draw(t, "ranks") {
		r := RankState{Instance: Text(rapid.SampledFrom([]string{"w1", "w2", "a/b.c *>", "\xff\xfe", "", "長い"}).Draw(t,
			"instance")),
			Rank: events.Rank(rapid.Uint32Range(0, 2).Draw(t, "rank")), Model: Text(rapid.String().Draw(t, "model")),
			BlockSize: rapid.Uint32().Draw(t, "size"), Incarnation: events.Incarnation(rapid.Uint64().Draw(t,
				"incarnation")),
			LastID: events.EventID(rapid.Uint64().Draw(t, "id")), Closed: rapid.Bool().Draw(t,
				"closed"), Checksum: Hex64(rapid.Uint64().Draw(t, "sum"))}
		if rapid.Bool().Draw(t, "known") {
			r.Cursor = CursorOf(events.Cursor{Known: true, Seq: events.EngineSeq(rapid.Uint64().Draw(t, "seq")),
				Digest: rapid.Uint64().Draw(t, "digest"), Partial: rapid.Uint32().Draw(t, "partial")})
		}
		if rapid.Bool().Draw(t, "sessions") {
			r.Sessions, r.SessionsCut = []SessionEnd{}, rapid.Bool().Draw(t, "cut")
			for range rapid.IntRange(0, 3).Draw(t, "n") {
				e := SessionEnd{Session: Hex64(rapid.Uint64().Draw(t, "session")), Last: Hex64(rapid.Uint64().Draw(t, "last"))}
				for range rapid.IntRange(0, 3).Draw(t, "after") {
					e.After = append(e.After, events.LocalHash(rapid.Uint64().Draw(t, "local")))
				}
				if len(e.After) > 0 {
					e.Held, e.Blocks = Hex64(rapid.Uint64().Draw(t, "held")), rapid.Uint32().Draw(t, "before")
				}
				r.Sessions = append(r.Sessions, e)
			}
		}
		if !seen[r.Key()] {
			seen[r.Key()] = true
			im.ranks = append(im.ranks, r)
			im.states = append(im.states, drawState(t))
		}
	}
	ids := rapid.SliceOfNDistinct(rapid.Uint32Range(0, 1<<32-2), 0, 8, rapid.ID[uint32]).Draw(t, "ids")
	for i, id := range ids {
		r := events.Run{ID: events.RunID(id), Space: rapid.Uint32().Draw(t, "space"), Parent: events.NoRun}
		n := rapid.IntRange(0, 200).Draw(t, "n")
		salt := rapid.Uint64().Draw(t, "salt")
		dead := rapid.IntRange(0, 4).Draw(t, "dead")
		for j := range n {
			r.Locals = append(r.Locals, events.LocalHash(mix(salt+uint64(j))))
			name := mix(salt ^ uint64(j))
			if dead == 1 || dead == 2 && name%3 == 0 {
				name = 0
			}
			r.Names = append(r.Names, events.BlockHash(name))
		}
		if rapid.Bool().Draw(t, "child") && i > 0 {
			parent := &im.runs[rapid.IntRange(0, i-1).Draw(t, "parent")]
			r.Parent, r.Offset = parent.ID, rapid.Uint32Range(0, uint32(len(parent.Locals))).Draw(t, "offset")
		}
		for rank := range im.ranks {
			for _, tier := range []events.Tier{events.Device, events.External} {
				for _, group := range []events.GroupIndex{0, 7} {
					if rapid.IntRange(0, 3).Draw(t, "holds") == 0 {
						h := events.Holding{Rank: uint32(rank), Tier: tier, Group: group}
						drawHolding(t, n, &h)
						r.Holdings = append(r.Holdings, h)
					}
				}
			}
		}
		im.runs = append(im.runs, r)
	}
	return im
}

func mix(x uint64) uint64 {
	x += 0x9e3779b97f4a7c15
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb
	return x ^ (x >> 31)
}

// TestRoundTrip restores random images, with and without a run index, and with the run index of a reader.
func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := newStore()
		for seq := range events.StreamSeq(rapid.IntRange(1, 3).Draw(t, "snapshots")) {
			im := drawImage(t)
			s.write(t, im, seq+1)
			got, index := s.read(t)
			if a, b := im.text(), got.text(); a != b {
				t.Fatalf("wrote\n%s\nread\n%s", a, b)
			}
			if rapid.Bool().Draw(t, "restart") {
				s.index = index
			}
			s.write(t, got, seq+1)
			if again, _ := s.read(t); !again.equal(im) {
				t.Fatalf("wrote\n%s\nread the second time\n%s", im.text(), again.text())
			}
		}
	})
}
