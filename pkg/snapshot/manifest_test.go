package snapshot

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// sealed appends a manifest's last line to any text.
func sealed(text string) []byte {
	return []byte(text + sealBefore + hashOf([]byte(text)).String() + sealAfter)
}

// fill sets all fields of v to values other than zero.
func fill(v reflect.Value, n *int64) {
	*n++
	switch {
	case v.Type() == reflect.TypeFor[time.Time]():
		v.Set(reflect.ValueOf(epoch.Add(time.Duration(*n) * time.Hour)))
	case v.Kind() == reflect.Struct:
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case v.Kind() == reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case v.Kind() == reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), n)
		fill(v.Index(1), n)
	case v.Kind() == reflect.String:
		v.SetString(fmt.Sprint("text ", *n))
	case v.Kind() == reflect.Bool:
		v.SetBool(true)
	case v.CanInt():
		v.SetInt(*n)
	default:
		v.SetUint(uint64(*n))
	}
}

// TestManifestRoundTrip: all fields of a manifest, also new fields, survive a round trip.
func TestManifestRoundTrip(t *testing.T) {
	m := new(Manifest)
	n := int64(1)
	fill(reflect.ValueOf(m).Elem(), &n)
	m.Format, m.Generation, m.Partition = 1, 42, 3
	m.Counts.Ranks = 2
	m.Chunks = []ChunkRef{
		{Key: Key{3, ChunkKey, 41, Hash{1, 2}}.String(), Kind: kindHoldings, Bytes: 100},
		{Key: Key{3, ChunkKey, 42, Hash{3, 4}}.String(), Kind: kindRuns, Bytes: maxChunk},
	}
	m.Counts.Bytes = 100 + maxChunk
	data, err := m.Encode()
	if err != nil {
		t.Fatal(err)
	}
	got, err := ParseManifest(data)
	if err != nil {
		t.Fatalf("%v\n%s", err, data)
	}
	if !reflect.DeepEqual(got, m) {
		t.Errorf("wrote %+v\nread %+v", m, got)
	}
	for i := range data {
		bad := append([]byte(nil), data...)
		for _, flip := range []byte{1, 0x80, 0xff} {
			bad[i] = data[i] ^ flip
			if _, err := ParseManifest(bad); !errors.Is(err, ErrCorrupt) {
				t.Fatalf("byte %d, flipped by %#x: %v", i, flip, err)
			}
		}
	}
	for i := range data {
		if _, err := ParseManifest(data[:i]); !errors.Is(err, ErrCorrupt) {
			t.Fatalf("cut at %d: %v", i, err)
		}
	}
}

func TestManifestErrors(t *testing.T) {
	chunk := func(kind string) string {
		return fmt.Sprintf(`{"key":"p0.c1.%s","kind":%q,"bytes":100}`, Hash{1, 2}, kind)
	}
	for _, c := range []struct {
		text string
		want error
		says string
	}{
		{`{"format": 1, "generation": 1,`, nil, ""},
		{`{"format": 1, "generation": 1, "something": "new",`, nil, ""},
		{`{"format": 2, "generation": {"of": "another shape"},`, ErrVersion,
			"manifest of version 2, this build reads 1 to 1"},
		{`{"format": 0, "generation": 1,`, ErrCorrupt, "format 0"},
		{`{"format": 1, "generation": 0,`, ErrCorrupt, "no generation"},
		{`{"format": 1, "generation": -1,`, ErrCorrupt, "generation"},
		{`{"format": 1, "generation": 1, "ranks": [{"instance": "a"}],`, ErrCorrupt,
			"1 ranks in the manifest, 0 in all"},
		{`{"format": 1, "generation": 1, "counts": {"ranks": 2}, "ranks": [{"instance": "a"}, {"instance": "a"}],`,
			ErrCorrupt, "a/0 is there twice"},
		{`{"format": 1, "generation": 1, "chunks": [{"key": "p1.c1.00"}],`, ErrCorrupt, `key "p1.c1.00"`},
		{`{"format": 1, "generation": 1, "counts": {"bytes": 200}, "chunks": [` + chunk("runs") + "," +
			chunk("holdings") + `],`, ErrCorrupt, "holdings after runs"},
		{`{"format": 1, "generation": 1, "counts": {"bytes": 100}, "chunks": [` + chunk("odd") + `],`, ErrCorrupt,
			`unknown kind of chunk "odd"`},
		{`{"format": 1, "generation": 1, "counts": {"bytes": 100}, "chunks": [` + chunk("ranks") + `],`, ErrCorrupt,
			"first rank"},
		{`{"format": 1, "generation": 1, "counts": {"bytes": 1}, "chunks": [` + chunk("runs") + `],`, ErrCorrupt,
			"100 bytes and not 1"},
		{`["format"`, ErrCorrupt, "invalid"},
		{``, ErrCorrupt, "invalid"},
	} {
		_, err := ParseManifest(sealed(c.text))
		if !errors.Is(err, c.want) || c.want != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v", c.text, err)
		}
	}
	if _, err := ParseManifest(make([]byte, maxChunk+1)); !errors.Is(err, ErrCorrupt) {
		t.Errorf("too long: %v", err)
	}
}

// TestManyRanks: with many ranks the manifest stays short, and FindRank needs a single fetch.
func TestManyRanks(t *testing.T) {
	testkit.Sequential(t)
	const workers = 1000
	im := new(image)
	for i := range workers {
		for rank := range events.Rank(2) {
			im.ranks = append(im.ranks, RankState{Instance: Text(fmt.Sprintf("worker-%x", mix(uint64(i)))), Rank: rank,
				Model: "model", BlockSize: 16,
				Incarnation: events.Incarnation(i), Cursor: CursorOf(events.Cursor{Known: true, Seq: 7,
					Digest: mix(uint64(i))})})
		}
	}
	s := newStore()
	m := s.write(t, im, 9)
	if m.Ranks != nil {
		t.Fatal("ranks in the manifest")
	}
	if n := len(s.values[ManifestKey(3)]); n > 10_000 {
		t.Errorf("the manifest has %d bytes", n)
	}
	if got, _ := s.read(t); !got.equal(im) {
		t.Error("the restored ranks differ")
	}
	fetches := 0
	fetch := func(key string) ([]byte, error) { fetches++; return s.fetch(key) }
	for i := 0; i < len(im.ranks); i += 37 {
		fetches = 0
		want := im.ranks[i]
		got, ok, err := FindRank(m, want.Key(), fetch)
		if err != nil || !ok || !reflect.DeepEqual(got, want) || fetches != 1 {
			t.Fatalf("rank %s: %+v, %v, %v after %d fetches", want.Key(), got, ok, err, fetches)
		}
	}
	for _, name := range []events.WorkerID{"", "a", "worker-", "zzz"} {
		if _, ok, err := FindRank(m, events.RankKey{Instance: name}, fetch); ok || err != nil {
			t.Errorf("rank %q: %v, %v", name, ok, err)
		}
	}
	// An unchanged table writes no chunk. A changed cursor writes a single chunk.
	s.write(t, im, 9)
	if s.wrote != 0 {
		t.Errorf("%d chunks were written for an unchanged table", s.wrote)
	}
	im.ranks[5].LastID++
	s.write(t, im, 10)
	if s.wrote != 1 {
		t.Errorf("%d chunks were written for a changed cursor", s.wrote)
	}
}

func TestFindRankInline(t *testing.T) {
	im := &image{ranks: []RankState{{Instance: "b"}, {Instance: "a", Rank: 1, LastID: 5}, {Instance: "a"}}}
	m := newStore().write(t, im, 1)
	got, ok, err := FindRank(m, events.RankKey{Instance: "a", Rank: 1}, nil)
	if err != nil || !ok || got.LastID != 5 || got.Cursor.Cursor() != (events.Cursor{}) {
		t.Errorf("%+v, %v, %v", got, ok, err)
	}
	if _, ok, _ := FindRank(m, events.RankKey{Instance: "c"}, nil); ok {
		t.Error("found a missing rank")
	}
}

func TestKeys(t *testing.T) {
	h := xxh3.Hash128([]byte("chunk"))
	for _, k := range []Key{{Partition: 0, Type: currentKey}, {Partition: 1<<32 - 1, Type: currentKey},
		{3, EarlierKey, 41, Hash{}}, {3, ChunkKey, 42, Hash{h.Hi, h.Lo}}, {3, ChunkKey, 42, Hash{}}} {
		if got, ok := ParseKey(k.String()); !ok || got != k {
			t.Errorf("%s: %+v, %v", k, got, ok)
		}
		if !strings.HasPrefix(k.String(), KeyPrefix(k.Partition)) {
			t.Errorf("%s does not begin with %s", k, KeyPrefix(k.Partition))
		}
	}
	for _, s := range []string{"", "p", "p.", "p3", "p3.", "p3.manifests", "p03.manifest", "p4294967296.manifest",
		"q3.manifest", "p3.g", "p3.g-1", "p3.g041", "p3.g18446744073709551615",
		"p3.c42", "p3.c42.", "p3.c42.00", "p3.c42." + strings.ToUpper(Hash{1 << 60, 0xabc}.String()), "p3.x1"} {
		if k, ok := ParseKey(s); ok {
			t.Errorf("%q is parsed as %+v", s, k)
		}
	}
}
