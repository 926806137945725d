package snapshot

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// resum sets the right checksum of a chunk.
func resum(data []byte) []byte {
	end := len(data) - trailerSize
	binary.LittleEndian.PutUint64(data[end:], xxh3.Hash(data[:end]))
	return data
}

// TestChunkErrors: inconsistent chunks with a right checksum are rejected.
func TestChunkErrors(t *testing.T) {
	good := func() []byte { return seal(kindState, make([]byte, 1000), make([]byte, 80)) }
	if u, err := open(good(), new(scratch)); err != nil || len(u.fields) != 1000 || len(u.words) != 80 ||
		len(good()) > 200 {
		t.Fatalf("%+v, %v", u, err)
	}
	for says, change := range map[string]func(b []byte) []byte{
		"not a chunk":       func(b []byte) []byte { b[0] = 'x'; return b },
		"unknown kind 0":    func(b []byte) []byte { b[6] = 0; return b },
		"unknown kind 6":    func(b []byte) []byte { b[6] = 6; return b },
		"version 0":         func(b []byte) []byte { b[4] = 0; return b },
		"unknown packing 2": func(b []byte) []byte { b[7] = 2; return b },
		"bytes instead of":  func(b []byte) []byte { b[7] = 0; return b },
		"columns of":        func(b []byte) []byte { b[8]++; return b },
		"too long":          func(b []byte) []byte { return append(b, make([]byte, maxChunk)...) },
		"too short":         func(b []byte) []byte { return b[:20] },
		"fields: ":          func(b []byte) []byte { b[12]++; return b },             // more than the unpacked size
		"limit":             func(b []byte) []byte { b[12], b[13] = 1, 0; return b }, // less
		// words with a size that is no multiple of 8
		"1081 unpacked":       func(b []byte) []byte { b[20]++; return b },
		"(900000+80 unpacked": func(b []byte) []byte { binary.LittleEndian.PutUint32(b[12:], 900_000); return b },
	} {
		b := change(good())
		if len(b) > headerSize+trailerSize {
			b = resum(b)
		}
		_, err := open(b, new(scratch))
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
			t.Errorf("%s: %v", says, err)
		}
		if says != "limit" && says != "1081 unpacked" && !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// TestLongRun: runs of any length and the holdings fit into chunks.
func TestLongRun(t *testing.T) {
	testkit.Sequential(t)
	const n = 2*pieceBlocks + 17
	long := events.Run{ID: 9, Space: 1, Parent: events.NoRun, Offset: 0}
	var whole, sparse, holes events.Holding
	whole = events.Holding{Rank: 0, Tier: events.Device, Lead: n}
	sparse = events.Holding{Rank: 1, Tier: events.Host, Lead: 5, Bits: make([]uint64, (n+63)/64)}
	holes = events.Holding{Rank: 1, Tier: events.Disk, Bits: make([]uint64, (n+63)/64)}
	for i := range n {
		h := mix(uint64(i))
		long.Locals = append(long.Locals, events.LocalHash(h))
		name := events.BlockHash(h + 1)
		if i%7 == 0 {
			name = 0
		}
		long.Names = append(long.Names, name)
		if h%3 == 0 && i >= 5 {
			sparse.Bits[i/64] |= 1 << (i % 64)
			sparse.Copies = append(sparse.Copies, events.BlockCount{Block: uint32(i), Count: uint32(h>>33) + 2})
			sparse.Names = append(sparse.Names, events.BlockName{Block: uint32(i), Name: events.BlockHash(h)})
			sparse.Also = append(sparse.Also, events.NamedCount{Block: uint32(i), Name: 1, Count: 1},
				events.NamedCount{Block: uint32(i), Name: 2, Count: 7})
		}
		if h%500 != 0 && i != 0 {
			holes.Bits[i/64] |= 1 << (i % 64)
		}
	}
	long.Holdings = []events.Holding{whole, sparse, holes}
	short := events.Run{ID: 8, Space: 1, Parent: 9, Offset: n, Locals: []events.LocalHash{1},
		Names: []events.BlockHash{2}}
	im := &image{ranks: []RankState{{Instance: "a"}, {Instance: "b"}}, runs: []events.Run{short, long},
		states: []events.RankImage{{}, {}}}
	for i := range 60_000 {
		im.states[0].Tombstones = append(im.states[0].Tombstones,
			events.Tombstone{Name: events.BlockHash(mix(uint64(i))), Run: events.RunID(i % 7)})
		if i%10 == 0 {
			im.states[1].Pending = append(im.states[1].Pending,
				events.Pending{Since: 1, Event: events.Event{Kind: events.Stored,
					Blocks: []events.BlockHash{events.BlockHash(mix(uint64(i)))}}})
		}
	}
	set := events.GroupSet{Tier: events.Device, Group: 4}
	for i := range 10_000 {
		set.Blocks, set.Counts = append(set.Blocks, events.BlockHash(mix(uint64(i)))), append(set.Counts, uint32(i))
	}
	im.states[1].Sets = []events.GroupSet{set, set}

	s := newStore()
	s.write(t, im, 1)
	got, index := s.read(t)
	if !got.equal(im) {
		t.Fatal("the restored image differs")
	}
	s.index = index
	if s.write(t, im, 1); s.wrote != 0 {
		t.Errorf("%d chunks were written for an unchanged image", s.wrote)
	}
	im.runs[1].Names[n-1]++
	if s.write(t, im, 2); s.wrote < 1 || s.wrote > 4 {
		t.Errorf("%d chunks were written for a long run", s.wrote)
	}
	if got, _ := s.read(t); !got.equal(im) {
		t.Fatal("the restored image differs")
	}
	im.runs = im.runs[:0]
	s.write(t, im, 3)
	if got, _ := s.read(t); len(got.runs) != 0 {
		t.Fatal("the restored image has a removed run")
	}
}

// TestImageErrors: the Writer rejects inconsistent images.
func TestImageErrors(t *testing.T) {
	locals, names := []events.LocalHash{1, 2, 3}, []events.BlockHash{1, 2, 3}
	run := func(h ...events.Holding) *events.Run {
		return &events.Run{ID: 1, Parent: events.NoRun, Locals: locals, Names: names, Holdings: h}
	}
	for says, r := range map[string]*events.Run{
		"no id":                   {ID: events.NoRun},
		"3 local hashes, 1 names": {ID: 1, Locals: locals, Names: names[:1]},
		"rank 2 of 2":             run(events.Holding{Rank: 2, Tier: events.Host}),
		"unknown tier 0":          run(events.Holding{}),
		"a lead of 4":             run(events.Holding{Tier: events.Host, Lead: 4}),
		"2 words of bits":         run(events.Holding{Tier: events.Host, Bits: make([]uint64, 2)}),
		"block 0 is in the lead":  run(events.Holding{Tier: events.Host, Lead: 1, Bits: []uint64{1}}),
		"holds block 3":           run(events.Holding{Tier: events.Host, Bits: []uint64{8}}),
		"1 copies of block 0": run(events.Holding{Tier: events.Host,
			Copies: []events.BlockCount{{Block: 0, Count: 1}}}),
		"copies of block 3": run(events.Holding{Tier: events.Host,
			Copies: []events.BlockCount{{Block: 3, Count: 2}}}),
		"copies of block 1": run(events.Holding{Tier: events.Host,
			Copies: []events.BlockCount{{Block: 1, Count: 2}, {Block: 1, Count: 2}}}),
		"own name of block 0": run(events.Holding{Tier: events.Host, Names: []events.BlockName{{Block: 1},
			{Block: 0}}}),
		"further name of block 0": run(events.Holding{Tier: events.Host,
			Also: []events.NamedCount{{Block: 1, Count: 1}, {Block: 0, Count: 1}}}),
		"no copy of block 0": run(events.Holding{Tier: events.Host, Also: []events.NamedCount{{Block: 0}}}),
		"two holdings of rank 0 in ti": run(events.Holding{Tier: events.Host, Lead: 1},
			events.Holding{Tier: events.Disk}, events.Holding{Tier: events.Host}),
	} {
		w := newTestWriter(t, &image{ranks: []RankState{{Instance: "a"}, {Instance: "b"}}})
		if err := w.Run(r); !errors.Is(err, ErrImage) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	w := newTestWriter(t, &image{ranks: []RankState{{Instance: "a"}}})
	if err := w.Run(run()); err != nil {
		t.Error(err)
	}
	if err := w.Run(run()); !errors.Is(err, ErrImage) || !strings.Contains(err.Error(), "twice") {
		t.Error(err)
	}
	for says, img := range map[string]*events.RankImage{
		"1 blocks and 0 counts": {Sets: []events.GroupSet{{Blocks: make([]events.BlockHash, 1)}}},
		"1 blocks, 2 local": {Pending: []events.Pending{{Event: events.Event{Blocks: make([]events.BlockHash, 1),
			Locals: make([]events.LocalHash, 2)}}}},
		"cancelled copy of block": {Pending: []events.Pending{{Cancelled: []uint32{0}}}},
		"at most 4096": {Pending: []events.Pending{{Event: events.Event{Blocks: make([]events.BlockHash,
			100_000)}}}},
	} {
		w := newTestWriter(t, &image{ranks: []RankState{{Instance: "a"}}})
		if err := w.Rank(0, img); !errors.Is(err, ErrImage) || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
		if err := w.Rank(1, new(events.RankImage)); !errors.Is(err, ErrImage) {
			t.Error(err)
		}
		if err := w.Rank(0, new(events.RankImage)); !errors.Is(err, ErrImage) {
			t.Error(err)
		}
	}
	plan := &WritePlan{Generation: 1}
	if _, err := NewWriter(Config{Ranks: []RankState{{Instance: "a"}, {Instance: "a"}}}, plan, nil,
		nil); !errors.Is(err, ErrImage) {
		t.Error(err)
	}
	if _, err := NewWriter(Config{Ranks: []RankState{{Instance: Text(strings.Repeat("a", 5000))}}}, plan, nil,
		nil); !errors.Is(err, ErrImage) {
		t.Error(err)
	}
	if _, err := NewWriter(Config{Stream: "\xff"}, plan, nil, nil); !errors.Is(err, ErrImage) {
		t.Error(err)
	}
	full := errors.New("bucket is full")
	w, err := NewWriter(Config{}, plan, nil, func(string, []byte) error { return full })
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Run(run()); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Close(); !errors.Is(err, full) {
		t.Error(err)
	}
}

func newTestWriter(t *testing.T, im *image) *Writer {
	w, err := NewWriter(config(im, 1), &WritePlan{Partition: 3, Generation: 1}, nil,
		func(string, []byte) error { return nil })
	if err != nil {
		t.Fatal(err)
	}
	return w
}
