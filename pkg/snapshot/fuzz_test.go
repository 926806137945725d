package snapshot

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// seeds passes the golden files to a fuzzer.
func seeds(f *testing.F, add func(key Key, data []byte)) {
	files, err := filepath.Glob(filepath.Join("testdata", "v*", "p3.*"))
	if err != nil || len(files) == 0 {
		f.Fatal("no golden files: ", err)
	}
	for _, name := range files {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		key, ok := ParseKey(filepath.Base(name))
		if !ok {
			f.Fatal(name)
		}
		add(key, data)
	}
}

func refused(t *testing.T, err error) {
	if err != nil && !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrVersion) {
		t.Fatalf("neither ErrCorrupt nor ErrVersion: %v", err)
	}
}

// FuzzChunk: any bytes as a chunk are decoded or rejected, without a panic.
func FuzzChunk(f *testing.F) {
	seeds(f, func(key Key, data []byte) {
		if key.Type == ChunkKey {
			f.Add(data)
		}
	})
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := open(data, new(scratch))
		refused(t, err)
		if len(data) >= headerSize+trailerSize {
			_, err = open(resum(data), new(scratch))
			refused(t, err)
			_, err = decodeRanks(data)
			refused(t, err)
		}
	})
}

// FuzzContent reads snapshots of three chunks with arbitrary content and right checksums. An accepted snapshot can be
// written again, with the same result.
func FuzzContent(f *testing.F) {
	im := goldenImage()
	s := newStore()
	s.write(f, im, 1)
	var parts [][]byte
	for _, kind := range []Kind{kindHoldings, kindRuns, kindState} {
		for _, ref := range s.m.chunksOf(kind, kind) {
			u, err := open(s.values[ref.Key], new(scratch))
			if err != nil {
				f.Fatal(err)
			}
			parts = append(parts, u.fields, u.words)
		}
	}
	f.Add([]byte{}, []byte{}, parts[0], parts[1], parts[2], parts[3], parts[4], parts[5])
	f.Add([]byte{1, 1}, make([]byte, 16), parts[0], parts[1], parts[2], parts[3], parts[4], parts[5])
	f.Add([]byte{}, []byte{}, []byte{}, []byte{}, parts[2], parts[3], []byte{}, []byte{})
	f.Fuzz(func(t *testing.T, deadF, deadW, holdF, holdW, runF, runW, stateF, stateW []byte) {
		m := &Manifest{Format: formatVersion, Generation: 1, Partition: 3, Counts: Counts{Ranks: len(im.ranks)},
			Ranks: im.canonical().ranks}
		values := map[string][]byte{}
		add := func(kind Kind, fields, words []byte) Hash {
			words = words[:len(words)/8*8]
			if len(fields)+len(words) > maxRaw || len(fields)+len(words) == 0 {
				return Hash{}
			}
			data := seal(kind, fields, words)
			key := Key{3, ChunkKey, 1, hashOf(data)}
			values[key.String()] = data
			m.Chunks = append(m.Chunks, ChunkRef{Key: key.String(), Kind: kind, Bytes: len(data)})
			return key.Hash
		}
		hash := add(kindRuns, runF, runW)
		m.Chunks = m.Chunks[:0]
		if len(deadF) > 0 && len(deadW) >= 16 { // usually for the existing chunk
			deadW = littleendian.Append(nil, []uint64{hash.Hi, hash.Lo})
		}
		add(kindDead, deadF, deadW)
		add(kindHoldings, holdF, holdW)
		add(kindRuns, runF, runW)
		add(kindState, stateF, stateW)
		got := &image{ranks: m.Ranks}
		r := NewReader(m, m.Ranks, got)
		for _, ref := range m.Restore() {
			if err := r.Chunk(ref.Key, values[ref.Key]); err != nil {
				refused(t, err)
				return
			}
		}
		m.Counts.Runs, m.Counts.Blocks, m.Counts.Holdings = r.counts.Runs, r.counts.Blocks, r.counts.Holdings
		if _, err := r.Close(); err != nil {
			refused(t, err)
			return
		}
		s := newStore()
		s.write(t, got, 1)
		if again, _ := s.read(t); !again.equal(got) {
			t.Fatalf("accepted\n%s\nrestored\n%s", got.text(), again.text())
		}
	})
}

// FuzzManifest reads any bytes as a manifest, with and without a right checksum.
func FuzzManifest(f *testing.F) {
	seeds(f, func(key Key, data []byte) {
		if key.Type != ChunkKey {
			f.Add(data[:len(data)-sealLength])
		}
	})
	f.Fuzz(func(t *testing.T, data []byte) {
		_, err := ParseManifest(data)
		refused(t, err)
		m, err := ParseManifest(sealed(string(data)))
		if refused(t, err); err != nil {
			return
		}
		again, err := m.Encode()
		if err != nil {
			if !errors.Is(err, ErrImage) {
				t.Fatal(err)
			}
			return
		}
		if _, err := ParseManifest(again); err != nil {
			t.Fatalf("accepted %s\nwritten again: %v\n%s", data, err, again)
		}
		FindRank(m, events.RankKey{Instance: "a"}, func(string) ([]byte, error) { return nil, ErrMissing })
		Choose(Bucket{Partition: m.Partition, Manifests: map[string][]byte{ManifestKey(m.Partition): again}}, Log{})
	})
}

// FuzzKey: ParseKey accepts only the canonical form of a key.
func FuzzKey(f *testing.F) {
	seeds(f, func(key Key, _ []byte) { f.Add(key.String()) })
	f.Fuzz(func(t *testing.T, s string) {
		if k, ok := ParseKey(s); ok && k.String() != s {
			t.Fatalf("%q is parsed as %q", s, k)
		}
	})
}
