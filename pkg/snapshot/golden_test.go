package snapshot

import (
	"errors"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var writeGolden = flag.Bool("snapshot.golden", false, "write testdata for this version of the format")

// goldenImage has a sample of all features. testdata/v1 has the files of version 1: add a new image in place of a
// change.
func goldenImage() *image {
	locals := func(salt uint64, n int) (l []events.LocalHash) {
		for i := range n {
			l = append(l, events.LocalHash(mix(salt+uint64(i))))
		}
		return l
	}
	names := func(salt uint64, n int, dead ...int) (l []events.BlockHash) {
		for i := range n {
			name := events.BlockHash(mix(salt ^ uint64(i)<<32))
			if slices.Contains(dead, i) {
				name = 0
			}
			l = append(l, name)
		}
		return l
	}
	return &image{
		ranks: []RankState{
			{Instance: "worker-b", Model: "llama", BlockSize: 16, Incarnation: 1763712000000000001, LastID: 99,
				LastSeen: 1763712001000, Stored: 1000, Removed: 1,
				Cursor:   CursorOf(events.Cursor{Known: true, Seq: 1 << 60, Digest: 0xfedcba9876543210, Partial: 3}),
				Checksum: 0x123},
			{Instance: "worker-a", Rank: 1, Model: "llama", BlockSize: 16, Closed: true},
			{Instance: "worker-a", Rank: 0, Model: "llama", BlockSize: 32, Refused: "block size 32, the model has 16"},
			{Instance: "\xff odd", Model: "q\"w\x80"},
		},
		runs: []events.Run{
			{ID: 0, Space: 1, Parent: events.NoRun, Locals: locals(1, 100), Names: names(1, 100),
				Holdings: []events.Holding{
					{Rank: 0, Tier: events.Device, Lead: 100, Copies: []events.BlockCount{{Block: 0, Count: 2},
						{Block: 99, Count: 1 << 31}}},
					{Rank: 1, Tier: events.Device, Lead: 3, Bits: []uint64{0xfffffffffffffe00, 0xfffffffff}},
					{Rank: 1, Tier: events.Disk, Group: 2, Bits: []uint64{0, 1 << 7},
						Names: []events.BlockName{{Block: 71, Name: 5}}},
					{Rank: 3, Tier: events.External, Bits: []uint64{0xaaaaaaaaaaaaaaaa, 0x555555555},
						Also: []events.NamedCount{{Block: 1, Name: 2, Count: 3}, {Block: 1, Name: 3, Count: 1}}},
				}},
			{ID: 70000, Space: 1, Parent: 0, Offset: 64, Locals: locals(2, 9), Names: names(2, 9, 0, 8),
				Holdings: []events.Holding{
					{Rank: 0, Tier: events.Host, Lead: 0, Bits: []uint64{0xfe}}}},
			{ID: 5, Space: 2, Parent: 70000, Offset: 9, Locals: locals(3, 2), Names: names(3, 2, 0, 1)},
			{ID: 6, Space: 2, Parent: events.NoRun, Locals: locals(4, 1), Names: names(4, 1)},
		},
		states: []events.RankImage{
			{Clock: 1763712000123, Groups: []events.GroupKind{{Group: 0, Kind: events.AttentionFull},
				{Group: 3, Kind: events.AttentionMamba}},
				Pending: []events.Pending{{Since: 1763712000000, Cancelled: []uint32{1},
					Event: events.Event{Kind: events.Stored, Tier: events.Host, Group: 3,
						HasParent: true, Parent: 77, Blocks: []events.BlockHash{1, 2}, Locals: []events.LocalHash{3,
							4}}}},
				Tombstones: []events.Tombstone{{Name: 8, Run: 70000, Block: 8, Since: 1763712000001},
					{Name: 9, Run: 0, Block: 7, Since: 1763712000000}},
				Sets: []events.GroupSet{{Tier: events.Device, Group: 3, Blocks: []events.BlockHash{10, 11},
					Counts: []uint32{1, 2}}}},
			{}, {}, {},
		},
	}
}

// goldenWindows is goldenImage with groups of hybrid models and draft models.
func goldenWindows() *image {
	im := goldenImage()
	im.states[0].Groups = append(im.states[0].Groups, events.GroupKind{Group: 4, Kind: events.AttentionSlidingWindow,
		Window: 1024},
		events.GroupKind{Group: 5, Kind: events.AttentionChunkedLocal, Window: 8192, Drops: true},
		events.GroupKind{Group: 6, Kind: events.AttentionMLA, Drops: true},
		events.GroupKind{Group: 7, Kind: events.AttentionFull, Window: 1})
	return im
}

// goldenWideWindows is goldenImage with windows of 2^20 tokens and more.
func goldenWideWindows() *image {
	im := goldenImage()
	im.states[0].Groups = append(im.states[0].Groups,
		events.GroupKind{Group: 4, Kind: events.AttentionSlidingWindow, Window: 1<<20 - 1},
		events.GroupKind{Group: 5, Kind: events.AttentionSlidingWindow, Window: 1 << 20},
		events.GroupKind{Group: 6, Kind: events.AttentionChunkedLocal, Window: 10_000_000, Drops: true},
		events.GroupKind{Group: maxWindowGroup, Kind: events.AttentionSlidingWindow, Window: 1<<32 - 1})
	return im
}

// goldenChunks is goldenImage with ranks of engines that load chunks.
func goldenChunks() *image {
	im := goldenImage()
	im.states[0].Loading = events.Loading{Blocks: 16, Told: true, Own: true}
	im.states[0].Pending = append(im.states[0].Pending, events.Pending{Since: 1763712000007,
		Event: events.Event{Kind: events.Stored, Tier: events.Host, HasParent: true, Parent: 776, Chunk: 3, Own: true,
			Blocks: []events.BlockHash{777}, Locals: []events.LocalHash{1, 2, 3}}},
		events.Pending{Since: 1763712000008, Event: events.Event{Kind: events.Stored, Tier: events.Disk,
			Chunk: events.ChunkSizeUnknown, Blocks: []events.BlockHash{778}}})
	return im
}

// golden is a directory of testdata.
type golden struct {
	dir         string
	inlineRanks int
	image       func() *image
}

var goldens = []golden{{"v1", 0, goldenImage}, {"v1-ranks-apart", 500, goldenImage}, {"v1-windows", 0, goldenWindows},
	{"v1-wide-windows", 0, goldenWideWindows}, {"v1-chunks", 0, goldenChunks}}

// store returns the store of the golden image, after a first snapshot of a different image.
func (g *golden) store(t *testing.T) *store {
	s := newStore()
	s.inlineRanks = g.inlineRanks
	before := g.image()
	before.runs[3].Locals[0]++
	before.runs = append(before.runs, events.Run{ID: 7, Parent: events.NoRun, Locals: []events.LocalHash{1},
		Names: []events.BlockHash{1}})
	s.write(t, before, 41)
	s.write(t, g.image(), 42)
	return s
}

// TestOldVersions reads the snapshots of all versions of the format.
func TestOldVersions(t *testing.T) {
	for _, g := range goldens {
		dir, path := g.dir, filepath.Join("testdata", g.dir)
		if *writeGolden {
			if err := os.MkdirAll(path, 0o755); err != nil {
				t.Fatal(err)
			}
			for k, v := range g.store(t).values {
				if err := os.WriteFile(filepath.Join(path, k), v, 0o644); err != nil {
					t.Fatal(err)
				}
			}
		}
		s := newStore()
		files, err := os.ReadDir(path)
		if err != nil {
			t.Fatal(err)
		}
		kinds := map[Kind]bool{}
		for _, f := range files {
			if s.values[f.Name()], err = os.ReadFile(filepath.Join(path, f.Name())); err != nil {
				t.Fatal(err)
			}
		}
		choice := Choose(s.bucket(), s.log)
		if len(choice.Usable) != 2 || choice.Rejected != nil {
			t.Fatalf("%s: %+v", dir, choice)
		}
		for _, ref := range choice.Usable[0].Chunks {
			kinds[ref.Kind] = true
		}
		if kinds[kindRanks] != (g.inlineRanks > 0) || !kinds[kindDead] || !kinds[kindHoldings] || !kinds[kindRuns] ||
			!kinds[kindState] {
			t.Errorf("%s has the kinds %v", dir, kinds)
		}
		got, _ := s.read(t)
		if want := g.image(); !got.equal(want) {
			t.Errorf("%s: want\n%s\ngot\n%s", dir, want.text(), got.text())
		}
	}
}

// TestBytesAreTheSame: this build writes the same chunks as before, as long as zstd compresses equally. If zstd
// changes, keep the old files and add a new directory. Manifests may get more fields.
func TestBytesAreTheSame(t *testing.T) {
	for _, g := range goldens {
		for k, v := range g.store(t).values {
			if key, _ := ParseKey(k); key.Type != ChunkKey {
				continue
			}
			want, err := os.ReadFile(filepath.Join("testdata", g.dir, k))
			if err != nil || string(v) != string(want) {
				t.Errorf("%s: %s is written differently: %v", g.dir, k, err)
			}
		}
	}
}

// TestEveryByteCounts: the reader detects a change of any byte, and restores the older generation.
func TestEveryByteCounts(t *testing.T) {
	testkit.Sequential(t)
	s := goldens[1].store(t)
	want := goldenImage().text()
	whole, _ := s.read(t)
	if whole.text() != want {
		t.Fatal("cannot restore the intact snapshot")
	}
	older := map[string]bool{} // chunks of the older generation only
	newest := Choose(s.bucket(), s.log).Usable[0]
	for k := range s.values {
		older[k] = k != ManifestKey(3) &&
			!slices.ContainsFunc(newest.Chunks, func(c ChunkRef) bool { return c.Key == k })
	}
	read := func() error {
		choice := Choose(s.bucket(), s.log)
		if choice.Usable[0].Generation != newest.Generation {
			return choice.Rejected[0].Err
		}
		_, err := Read(choice.Usable[0], s.fetch, func([]RankState) (Sink, error) { return new(image), nil })
		return err
	}
	for k, v := range s.values {
		if older[k] {
			continue
		}
		for i := range v {
			bad := slices.Clone(v)
			s.values[k] = bad
			bad[i] ^= 1 << (i % 8)
			if err := read(); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s, byte %d: %v", k, i, err)
			}
			if key, _ := ParseKey(k); key.Type == ChunkKey {
				// The checksum in the chunk detects the change without the manifest.
				for _, flip := range []byte{1, 2, 4, 8, 16, 32, 64, 128, 0xff, v[i]} {
					bad[i] = v[i] ^ flip
					if _, err := open(bad, new(scratch)); (flip != 0) != errors.Is(err, ErrCorrupt) {
						t.Fatalf("%s alone, byte %d flipped by %#x: %v", k, i, flip, err)
					}
				}
			}
		}
		for _, n := range []int{0, 1, len(v) / 2, len(v) - 1} {
			s.values[k] = v[:n]
			if err := read(); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%s cut to %d bytes: %v", k, n, err)
			}
		}
		delete(s.values, k)
		if k != ManifestKey(3) {
			if c := Choose(s.bucket(), s.log); len(c.Rejected) == 0 || c.Rejected[0].Generation != newest.Generation ||
				c.Rejected[0].Reason != MissingChunk {
				t.Fatalf("without %s: %+v", k, c.Rejected)
			}
		}
		s.values[k] = v
	}
}

// TestFutureChunk: a chunk of a later version returns ErrVersion for any content.
func TestFutureChunk(t *testing.T) {
	data := seal(kindRuns, []byte{1, 2, 3}, nil)
	data[4] = 9
	if _, err := open(resum(data), new(scratch)); !errors.Is(err, ErrVersion) {
		t.Error(err)
	}
}
