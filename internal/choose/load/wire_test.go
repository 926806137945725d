package load

import (
	"bytes"
	"math"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// anyEvent returns a request with random fields.
func anyEvent(r *rand.Rand) *event {
	e := &event{model: Model{Name: "m", Group: []string{"", "g"}[r.IntN(2)]}}
	e.left = time.Duration(r.IntN(1000)) * time.Millisecond
	e.key, e.id, e.rank = Key{Owner: r.Uint64(), Seq: uint64(1 + r.IntN(1000))}, "id", rankKey(r.IntN(4))
	e.private, e.tokens, e.expected = uint32(r.IntN(10)), int64(r.IntN(1000)), uint32(r.IntN(10))
	for range r.IntN(5) {
		e.hashes = append(e.hashes, events.SeqHash(r.Uint64()))
	}
	e.done, e.gone = r.IntN(2) == 0, r.IntN(2) == 0
	for i := range uint64(r.IntN(3)) {
		e.outs = append(e.outs, outCount{origin: 10 * (i + 1), n: uint32(1 + r.IntN(9))})
	}
	if len(e.outs) > 0 && r.IntN(2) == 0 {
		e.mark = mark{after: 1, origin: r.Uint64(), weight: uint64(r.IntN(one))}
		e.runs = []run{{0, 5}, {3, one}}[:r.IntN(3)]
		if len(e.runs) == 0 {
			e.runs = nil
		}
	}
	return e
}

func reader(data []byte) *shared.Reader { return &shared.Reader{Reader: msgp.Reader{Data: data}} }

// TestWireRoundTrip encodes and decodes whole requests and states. The decoder rejects truncated requests.
func TestWireRoundTrip(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 7))
	for range 200 {
		e := anyEvent(r)
		for _, whole := range []bool{false, true} {
			data := appendRecord(nil, e.model, &e.record, e.left, whole)
			want := *e
			if !whole {
				want = event{left: e.left, record: record{key: e.key, state: e.state}}
			}
			back := reader(data)
			got, hash := readEvent(back, e.key, whole)
			if back.Bad || back.Left() > 0 || !reflect.DeepEqual(got, want) {
				t.Fatalf("%+v is read as %+v", want, got)
			}
			if (&Table{}).digestOf(&e.record) != hash {
				t.Fatal("the hash differs from the table's")
			}
			for n := range data {
				short := reader(data[:n])
				if readEvent(short, e.key, whole); !short.Bad {
					t.Fatalf("%d bytes of %x are read", n, data)
				}
			}
		}
	}
}

// FuzzDecode decodes random bytes as a request and as a past request. A decoded request survives another round trip. A
// table with the request keeps the invariants.
func FuzzDecode(f *testing.F) {
	r := rand.New(rand.NewPCG(1, 7))
	for range 20 {
		e := anyEvent(r)
		f.Add(appendRecord(nil, e.model, &e.record, e.left, true))
		f.Add(appendPast(nil, e.model, &Request{Key: e.key, Rank: e.rank, Hashes: e.hashes}))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		past := reader(data)
		if model, q := readPast(past); !past.Bad {
			again := reader(appendPast(nil, model, &q))
			if _, back := readPast(again); again.Bad || !reflect.DeepEqual(q, back) {
				t.Fatalf("%+v is read again as %+v", q, back)
			}
		}
		in := reader(data)
		k := Key{Owner: 7, Seq: 1}
		e, hash := readEvent(in, k, true)
		if in.Bad {
			return
		}
		back := reader(appendRecord(nil, e.model, &e.record, e.left, true))
		if got, again := readEvent(back, k, true); back.Bad || again != hash || !reflect.DeepEqual(e, got) {
			t.Fatalf("%+v is read again as %+v", e, got)
		}
		table := NewTable(1, Limits{})
		for i := range 3 {
			_ = table.Book(0, Booking{ID: string(rune('a' + i)), Rank: rankKey(i)})
		}
		for range 2 {
			table.put(time.Second, &e)
			if err := table.Check(); err != nil {
				t.Fatal(err)
			}
		}
		table.drop(time.Second, k)
		if err := table.Check(); err != nil || table.Len() != 3 {
			t.Fatal(err, table.Len())
		}
	})
}

// TestWireStays compares an encoded request with fixed bytes. Later versions decode requests of this version.
func TestWireStays(t *testing.T) {
	e := event{left: time.Second, model: Model{Name: "m"}}
	e.id, e.rank, e.tokens = "r", events.RankKey{Instance: "w", Rank: 2}, 5
	e.hashes = []events.SeqHash{math.MaxUint64}
	want := []byte("\xcd\x03\xe8\x96\xc2\xc2\x00\x90\xc0\x90\xa1m\xa0\xa1r\xa1w\x02\x00\x05\x00\xc4\x08" +
		"\xff\xff\xff\xff\xff\xff\xff\xff")
	if got := appendRecord(nil, e.model, &e.record, e.left, true); !bytes.Equal(got, want) {
		t.Errorf("%x, want %x", got, want)
	}
}
