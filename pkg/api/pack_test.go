package api

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/vmihailenco/msgpack/v5"
)

// some returns a list of up to n elements, nil, or an empty list.
func some[T any](rng *rand.Rand, n int, one func() T) (list []T) {
	switch rng.IntN(4) {
	case 0:
		return nil
	case 1:
		return []T{}
	}
	for range rng.IntN(n + 1) {
		list = append(list, one())
	}
	return list
}

// wide returns numbers of all sizes.
func wide(rng *rand.Rand) uint64 { return rng.Uint64() >> rng.IntN(64) }

func words(rng *rand.Rand) string {
	switch rng.IntN(300) {
	case 0:
		return strings.Repeat("long", 1<<14)
	case 1, 2, 3:
		return strings.Repeat("less", 1<<rng.IntN(14))
	}
	if rng.IntN(3) == 0 {
		return ""
	}
	return strings.Repeat("wörd", 1<<rng.IntN(7))[rng.IntN(2):]
}

func randomQuery(rng *rand.Rand) *Query {
	u32 := func() uint32 { return uint32(wide(rng)) }
	u64 := func() uint64 { return wide(rng) }
	part := func() events.Partition { return events.Partition(u32()) }
	q := &Query{
		Model: words(rng), BlockSize: u32() * rng.Uint32N(2), Tokens: some(rng, 300, u32), Hashes: some(rng, 9000, u64),
		Hashed: some(rng, 20, func() Hashed { return Hashed{u32(), some(rng, 40, u64)} }), LoRA: words(rng),
		CacheSalt: words(rng),
		Workers:   some(rng, 20, func() events.WorkerID { return events.WorkerID(words(rng)) }), Partitions: some(rng,
			20, part),
		MinSeq:  some(rng, 20, func() PartitionSeq { return PartitionSeq{part(), events.StreamSeq(u64())} }),
		Explain: rng.IntN(2) == 0, Idle: rng.IntN(2) == 0, L3: L3Ask(words(rng)), L3TimeoutMS: u32() * rng.Uint32N(2),
	}
	// Reflection omits these fields if empty. Packing by hand sends them, and [Query.Check] refuses them.
	if len(q.Hashed) == 0 {
		q.Hashed = nil
	}
	if len(q.Workers) == 0 {
		q.Workers = nil
	}
	if len(q.Partitions) == 0 {
		q.Partitions = nil
	}
	if rng.IntN(4) == 0 {
		q.Ranks = some(rng, 20, func() RankPlace { return RankPlace{events.WorkerID("w" + words(rng)), events.Rank(u32())} })
	}
	if len(q.Ranks) == 0 {
		q.Ranks = nil
	}
	if rng.IntN(8) == 0 {
		q.Endpoints, q.WithEndpoint = []string{words(rng), "e"}, rng.IntN(2) == 0
	}
	if rng.IntN(4) == 0 {
		q.Within = []Tiers{"device+host", Tiers(words(rng))}[:1+rng.IntN(2)]
	}
	q.WithEngineHashes = rng.IntN(8) == 0
	if rng.IntN(8) == 0 {
		q.EngineHashes = some(rng, 300, u64)
	}
	if rng.IntN(2) == 0 && q.EngineHashes != nil {
		q.Tokens, q.Hashes, q.Hashed = nil, nil, nil
	}
	if rng.IntN(8) == 0 {
		q.Media = []events.MediaItem{{Hash: u64(), Offset: u32(), Length: u32()}, {}}[:1+rng.IntN(2)]
	}
	q.DeadlineMS = u32() * (rng.Uint32N(8) / 7)
	q.ByEndpoint, q.Regions = rng.IntN(8) == 0, rng.IntN(8) == 0
	return q
}

// randomAnswer returns an answer, with explanations if people is set.
func randomAnswer(rng *rand.Rand, people bool) *Answer {
	u32 := func() uint32 { return uint32(wide(rng)) }
	u64 := func() uint64 { return wide(rng) }
	part := func() events.Partition { return events.Partition(u32()) }
	pair := func() [2]uint32 { return [2]uint32{u32(), u32()} }
	a := &Answer{
		Model: words(rng), BlockSize: u32(), Blocks: int(u32()), Lookaheads: some(rng, 20,
			u32), Complete: rng.IntN(2) == 0, Missing: some(rng, 20, part),
		Workers: some(rng, 1<<rng.IntN(7)<<(rng.IntN(100)/99*10), func() Overlap {
			o := Overlap{Instance: events.WorkerID(words(rng)), Rank: events.Rank(u32()), Device: u32(), Host: u32(),
				Disk: u32(), External: u32(), L3: u32(), L3Stop: words(rng)}
			if rng.IntN(4) == 0 {
				o.Bound, o.Engine, o.CatchingUp = Bound(words(rng)), EngineState(words(rng)), rng.IntN(2) == 0
				o.Guessed, o.Endpoint, o.Held, o.Full = u32(), words(rng), u32(), u32()
			}
			if rng.IntN(4) == 0 {
				if o.Within = some(rng, 20, u32); len(o.Within) == 0 {
					o.Within = nil
				}
			}
			if rng.IntN(8) == 0 {
				o.EngineHashes = append(some(rng, 20, u64), 1)
			}
			if people && rng.IntN(2) == 0 {
				o.Path = &Path{Held: some(rng, 3,
					func() HeldRun { return HeldRun{u32(), u32(), some(rng, 3, func() string { return words(rng) })} }),
					Stop: words(rng), Behind: u32(),
					Group: &PathGroup{events.GroupIndex(u32()), words(rng), u32()}}
			}
			return o
		}),
		Partitions: some(rng, 20, func() PartitionStatus {
			at := time.Time{}
			switch rng.IntN(4) {
			case 0:
				at = time.Unix(int64(wide(rng)>>16), 0)
			case 1:
				at = time.Unix(int64(wide(rng)>>16), rng.Int64N(1e9))
			case 2:
				at = time.Unix(-int64(wide(rng)>>32), rng.Int64N(1e9))
			}
			return PartitionStatus{part(), at, events.StreamSeq(wide(rng)), wide(rng) * rng.Uint64N(2),
				rng.IntN(2) == 0}
		}),
		Reason: Reason(words(rng)), UnknownEndpoints: some(rng, 3, func() string { return words(rng) }),
		L3: L3{Status: L3Status(words(rng)), Reason: words(rng), Ranges: some(rng, 20, pair), Total: u32(),
			AgeMS: rng.NormFloat64(), Unknown: some(rng, 20, pair),
			FromStart: u32()},
	}
	if people {
		if rng.IntN(2) == 0 {
			a.ByEndpoint = map[string][]Overlap{words(rng): {{Instance: "w", Device: u32()}}}
		}
		if rng.IntN(2) == 0 {
			price := rng.NormFloat64()
			a.Regions = []RegionPrefix{{Region: words(rng), State: RegionState(words(rng)), Blocks: u32(), PriceMS: &price,
				FalsePositiveRate: rng.Float64()}, {Local: true, Reason: words(rng), Tokens: u64(), HeldBlocks: u64()}}
		}
		a.L3.Broken = some(rng, 3, func() BrokenBlock { return BrokenBlock{u32(), -int(u32()), int(u32())} })
	}
	return a
}

// same compares packing and unpacking by hand with reflection.
func same[T any](t *testing.T, v *T, plain bool, hand func([]byte, *T) bool) {
	t.Helper()
	got, err := Marshal(MsgPack, v)
	if err != nil {
		t.Fatal(err)
	}
	want, err := marshalReflect(v)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Fatalf("%+v is packed as\n%x, by reflection\n%x", v, got, want)
	}
	var back, twin T
	if err := msgpack.Unmarshal(want, &twin); err != nil {
		t.Fatal(err)
	}
	if ok := hand(got, &back); ok != plain {
		t.Fatalf("%+v is unpacked by hand: %v, should be %v", v, ok, plain)
	} else if !ok {
		if err := Unmarshal(MsgPack, got, &back); err != nil {
			t.Fatal(err)
		}
	}
	if !reflect.DeepEqual(back, twin) {
		t.Fatalf("%x is unpacked as\n%+v, by reflection\n%+v", got, back, twin)
	}
}

// unpackedQuery decodes a query by hand, like a query of another node.
func unpackedQuery(data []byte, q *Query) bool { return unpackQuery(data, q, ignoreUnknown) }

func TestPackedAsByReflection(t *testing.T) {
	seeds := uint64(testkit.Rounds(1000))
	if testing.Short() {
		seeds = 200
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 11))
		q := randomQuery(rng)
		same(t, q, q.Endpoints == nil && !q.WithEndpoint && !q.ByEndpoint && !q.Regions && q.DeadlineMS == 0 &&
			q.Media == nil, unpackedQuery)
		same(t, randomAnswer(rng, false), true, unpackAnswer)
		if seed%10 == 0 {
			a := randomAnswer(rng, true)
			plain := len(a.L3.Broken) == 0 && a.ByEndpoint == nil && a.Regions == nil
			for i := range a.Workers {
				plain = plain && a.Workers[i].Path == nil
			}
			same(t, a, plain, unpackAnswer)
		}
	}
}

// TestNoHashesAreNotAnEmptyList: a prompt without a whole block is an empty list, and stays one in both forms.
func TestNoHashesAreNotAnEmptyList(t *testing.T) {
	for _, want := range []Query{
		{Model: "m", Hashes: Hashes{}}, {Model: "m", Tokens: Tokens{}}, {Model: "m"}, {Model: "m",
			Hashed: []Hashed{{Hashes: Hashes{}}}}, {Model: "m", Hashed: []Hashed{{}}},
		{Model: "m", EngineHashes: Hashes{}},
	} {
		for _, contentType := range []string{MsgPack, JSON} {
			body, err := Marshal(contentType, &want)
			if err != nil {
				t.Fatal(err)
			}
			var got Query
			if err := Unmarshal(contentType, body, &got); err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%s %q is read as %#v, %v, want %#v", contentType, body, got, err, want)
			}
		}
	}
}

// TestPackedForm compares the bytes with constants.
func TestPackedForm(t *testing.T) {
	q, err := Marshal(MsgPack, &Query{Model: "m", Hashes: Hashes{1, 1 << 63}, Partitions: []events.Partition{200},
		Idle: true})
	if err != nil {
		t.Fatal(err)
	}
	a, err := Marshal(MsgPack, &Answer{
		Model: "m", BlockSize: 16, Blocks: 2, Complete: true, Workers: []Overlap{{Instance: "w", Device: 300}},
		Partitions: []PartitionStatus{{Partition: 1, Epoch: time.Unix(1, 5).UTC(), Seq: 70000}}, L3: L3{Status: L3OK,
			AgeMS: 1.5},
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, got, want string }{
		{"query", string(q),
			"\x84\xa5model\xa1m\xa6hashes\xc4\x10\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80\xaapartitions\x91\xcc\xc8\xa4idle\xc3"},
		{"answer", string(a),
			"\x87\xa5model\xa1m\xaablock_size\x10\xa6blocks\x02\xa8complete\xc3\xa7workers\x91\x87\xa8instance\xa1w\xa4rank\x00\xa6device\xcd\x01\x2c" +
				"\xa4host\x00\xa4disk\x00\xa8external\x00\xa2l3\x00\xaapartitions\x91\x83\xa9partition\x01\xa5epoch\xd7\xff\x00\x00\x00\x14\x00\x00\x00\x01\xa3seq\xce\x00\x01\x11\x70" +
				"\xa2l3\x84\xa6status\xa2ok\xa5total\x00\xa6age_ms\xcb\x3f\xf8\x00\x00\x00\x00\x00\x00\xaafrom_start\x00"},
	} {
		if c.got != c.want {
			t.Errorf("%s:\n got %s\nwant %s", c.name, hex.EncodeToString([]byte(c.got)),
				hex.EncodeToString([]byte(c.want)))
		}
	}
}

// TestUnpackedWhateverTheWriter decodes fields in another order, numbers of other sizes, and further fields.
func TestUnpackedWhateverTheWriter(t *testing.T) {
	body, err := msgpack.Marshal(map[string]any{
		"zone": map[string]any{"a": []any{1, nil, 2.5, true, time.Unix(5, 0), make([]byte, 300)}}, "idle": true,
		"hashes": []uint64{5, 1 << 63}, "model": "m", "block_size": uint64(16),
	})
	if err != nil {
		t.Fatal(err)
	}
	var q Query
	if err := Unmarshal(MsgPack, body, &q); err != nil ||
		!reflect.DeepEqual(q, Query{Model: "m", BlockSize: 16, Idle: true, Hashes: Hashes{5, 1 << 63}}) {
		t.Fatalf("%+v %v", q, err)
	}
}

// TestLengthsAreNotBelieved: false lengths in a few bytes, and deep nesting, cause no large allocation.
func TestLengthsAreNotBelieved(t *testing.T) {
	for _, body := range []string{
		"\x82\xa5model\xa1m\xa7workers\xdd\xff\xff\xff\xff",
		"\x82\xa5model\xc0\xa7min_seq\xdd\xff\xff\xff\xff",
		"\x82\xa5model\xa1m\xa6hashes\xc6\x7f\xff\xff\xff",
		"\xdf\xff\xff\xff\xff",
		"\x81\xa4deep" + strings.Repeat("\x91", 1<<20),
		"\x81" + strings.Repeat("\x91", 1<<20),
	} {
		var q Query
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		err := Unmarshal(MsgPack, []byte(body), &q)
		runtime.ReadMemStats(&after)
		allocated := after.TotalAlloc - before.TotalAlloc - uint64(len(body))
		if err == nil || allocated > 100_000 {
			t.Errorf("%.40q: %v, with %d bytes allocated", body, err, allocated)
		}
	}
}

// nilTime is an answer with nil as the creation time of a partition's log.
const nilTime = "\x81\xaapartitions\x91\x81\xa5epoch\xc0"

// TestNilIsNoTime: nil in place of a time is an error, without effect on later messages.
func TestNilIsNoTime(t *testing.T) {
	for range 100 { // decoders are reused
		var a Answer
		var refused *Error
		if err := Unmarshal(MsgPack, []byte(nilTime), &a); !errors.As(err, &refused) || refused.Code != CodeMalformed {
			t.Fatalf("%+v, %v", a, err)
		}
		if err := Unmarshal(MsgPack, []byte(nilTime[:13]+"\x81\xa5epoch\xd6\xff\x00\x00\x00\x07"), &a); err != nil ||
			a.Partitions[0].Epoch.Unix() != 7 {
			t.Fatalf("%+v, %v", a, err)
		}
	}
}

// FuzzUnpack: if decoding by hand succeeds, the result equals the result of reflection.
func FuzzUnpack(f *testing.F) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 12))
		q, _ := Marshal(MsgPack, randomQuery(rng))
		a, _ := Marshal(MsgPack, randomAnswer(rng, true))
		for _, b := range [][]byte{q, a} {
			if len(b) < 4000 {
				f.Add(b)
			}
		}
	}
	f.Add([]byte("\x82\xa5model\xa1m\xa5model\xa1n"))
	f.Add([]byte(nilTime))
	f.Fuzz(func(t *testing.T, data []byte) {
		var q, q2 Query
		if unpackQuery(data, &q, ignoreUnknown) {
			if err := msgpack.Unmarshal(data, &q2); err != nil || !reflect.DeepEqual(q, q2) {
				t.Fatalf("by hand %+v, by reflection %+v, %v", q, q2, err)
			}
		}
		var a, a2 Answer
		if unpackAnswer(data, &a) {
			// the age may be NaN
			if err := msgpack.Unmarshal(data, &a2); err != nil || fmt.Sprint(a) != fmt.Sprint(a2) {
				t.Fatalf("by hand %+v, by reflection %+v, %v", a, a2, err)
			}
		}
		if validate(data) == nil {
			_ = unmarshalReflect(data, &Query{}) // must not allocate more than the data
			_ = unmarshalReflect(data, &Answer{})
		}
	})
}

func benchmarked() (*Query, *Answer) {
	q := &Query{Model: "m", Hashes: make(Hashes, 128), Partitions: []events.Partition{1, 2, 3}}
	a := &Answer{Model: "m", BlockSize: 16, Blocks: 128, Complete: true}
	for i := range 32 {
		a.Workers = append(a.Workers, Overlap{Instance: events.WorkerID(fmt.Sprint("w", i)), Device: 128})
	}
	for p := range events.Partition(8) {
		a.Partitions = append(a.Partitions, PartitionStatus{Partition: p, Epoch: time.Unix(1763711000, 123456789),
			Seq: 1000})
	}
	return q, a
}

// BenchmarkPack packs a query of 128 blocks and its answer of 32 workers and 8 partitions, by hand and by reflection.
func BenchmarkPack(b *testing.B) {
	q, a := benchmarked()
	for _, c := range []struct {
		name string
		v    any
		pack func(any) ([]byte, error)
	}{
		{"query", q, func(v any) ([]byte, error) { return Marshal(MsgPack, v) }}, {"query/reflected", q, marshalReflect},
		{"answer", a, func(v any) ([]byte, error) { return Marshal(MsgPack, v) }}, {"answer/reflected", a, marshalReflect},
		{"answer/json", a, func(v any) ([]byte, error) { return Marshal(JSON, v) }},
		{"answer/json/reflected", a, json.Marshal},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := c.pack(c.v); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

func BenchmarkUnpack(b *testing.B) {
	q, a := benchmarked()
	packedQ, _ := Marshal(MsgPack, q)
	packedA, _ := Marshal(MsgPack, a)
	for _, c := range []struct {
		name   string
		unpack func() error
	}{
		{"query", func() error { return Unmarshal(MsgPack, packedQ, &Query{}) }},
		{"query/reflected", func() error { return unmarshalReflect(packedQ, &Query{}) }},
		{"answer", func() error { return Unmarshal(MsgPack, packedA, &Answer{}) }},
		{"answer/reflected", func() error { return unmarshalReflect(packedA, &Answer{}) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if err := c.unpack(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
