package load

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"reflect"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// again encodes a message anew.
func again(m *message) []byte {
	b := appendHead(nil, m.kind, m.from)
	switch m.kind {
	case kindEvents:
		var list []byte
		for i := range m.events {
			list = appendEvent(list, m.events[i].kind, &m.events[i].record, m.events[i].left)
		}
		return appendEvents(appendModel(b, m.model), m.number, len(m.events), list)
	case kindBeat:
		return appendBeat(b, &m.beat)
	case kindRecall:
		return msgp.AppendUint(msgp.AppendUint(appendModel(b, m.model), m.to), m.id)
	case kindVersions:
		return appendVersions(appendModel(b, m.model), m.to, m.id, m.versions)
	case kindPast:
		b = msgp.AppendArrayHead(appendPart(appendModel(b, m.model), m.to, m.id, m.part, m.parts), len(m.past))
		for i := range m.past {
			b = appendPast(b, &m.past[i])
		}
		return b
	}
	return appendSummary(appendModel(b, m.model), &m.summary)
}

// samples are messages of all kinds that a history publishes.
func samples() [][]byte {
	w := newWorld(5, 3, Limits{})
	w.loss, w.record = 0.3, true
	for range 300 {
		w.op()
		w.run(20 * time.Millisecond)
	}
	w.start(0)
	w.run(2 * time.Second)
	return w.published
}

func TestWireRoundTrip(t *testing.T) {
	kinds := map[uint64]int{}
	for _, data := range samples() {
		m, err := decode(data, 0)
		if err != nil {
			t.Fatalf("%x: %v", data, err)
		}
		kinds[m.kind]++
		if back := again(m); !bytes.Equal(back, data) {
			t.Fatalf("%x is written %x", data, back)
		}
		for _, cut := range []int{0, 1, len(data) / 2, len(data) - 1} {
			if _, err := decode(data[:cut], 0); !errors.Is(err, errMalformed) {
				t.Fatalf("%d bytes of %x: %v", cut, data, err)
			}
		}
		if _, err := decode(append(bytes.Clone(data), 0), 0); !errors.Is(err, errMalformed) {
			t.Fatalf("one byte more: %v", err)
		}
	}
	if len(kinds) != 6 {
		t.Errorf("kinds %v", kinds)
	}
	if _, err := decode([]byte{2, 1, 1}, 0); !errors.Is(err, errVersion) {
		t.Errorf("another version: %v", err)
	}
	if _, err := decode(make([]byte, maxMessage+1), 0); !errors.Is(err, errMalformed) {
		t.Errorf("a message of %d bytes: %v", maxMessage+1, err)
	}
}

// FuzzDecode reads anything: what is read is written in a form that is read alike, and does no harm to tables.
func FuzzDecode(f *testing.F) {
	for i, data := range samples() {
		if i%10 == 0 {
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m, err := decode(data, 0)
		if err != nil || m.from == 0 {
			return
		}
		back, err := decode(again(m), 0)
		if err != nil || !reflect.DeepEqual(m, back) {
			t.Fatalf("%+v is read again as %+v, %v", m, back, err)
		}
		r := NewReplica(0, ReplicaConfig{Origin: 3, Models: 2, Recall: func(Model, *Request) {},
			Past: func(Model, func(*Request) bool) {}})
		r.ready = true
		model := Model{}
		if m.kind != kindBeat {
			model = m.model
		}
		for i := range 3 {
			_ = r.Book(0, model, Booking{ID: string(rune('a' + i)), Rank: rankKey(i)})
		}
		m.to = r.cfg.Origin
		for range 2 {
			if err := r.Receive(time.Second, again(m)); err != nil {
				t.Fatal(err)
			}
			r.Step(time.Second)
			for _, m := range r.models {
				if err := m.table.Check(); err != nil {
					t.Fatal(err)
				}
			}
		}
	})
}

// TestSummaryOfMany has a table of many requests, and gaps in what it has seen, with parts that are full in all places.
func TestSummaryOfMany(t *testing.T) {
	r := rand.New(rand.NewPCG(*seed, 6))
	for round := range 4 {
		t1 := NewTable(1, Limits{})
		most := uint64(3*partPoints + r.IntN(3*partPoints))
		for _, origin := range []uint64{1, 7, 9} {
			p := r.Float64()
			for seq := range most {
				if r.Float64() > p {
					continue
				}
				key := Key{origin, seq + 1}
				t1.insert(0, &record{key: key, id: string(rune(seq)) + string(rune(origin)), rank: rankKey(0),
					deadline: time.Hour})
				if r.IntN(3) == 0 {
					t1.drop(0, key)
				}
			}
		}
		type fact struct{ seen, live bool }
		got := map[Key]fact{}
		last := map[uint64]uint64{}
		parts := t1.summary()
		for i := range parts {
			p := &parts[i]
			p.parts = uint64(len(parts))
			p.part = uint64(i)
			back, err := decode(appendSummary(appendModel(appendHead(nil, kindSummary, 1), Model{}), p), 0)
			if err != nil {
				t.Fatal(err)
			}
			if i == 0 && len(back.origins) != 3 {
				t.Fatalf("origins %v", back.origins)
			}
			for _, h := range back.shares {
				if h.first != last[h.origin]+1 {
					t.Fatalf("a share from %d after one to %d", h.first, last[h.origin])
				}
				last[h.origin] = h.last
				for _, s := range h.spans {
					for n := s.first; n <= s.last; n++ {
						got[Key{h.origin, n}] = fact{seen: true}
					}
				}
				for _, l := range h.live {
					got[Key{h.origin, l.seq}] = fact{true, true}
				}
			}
		}
		for _, origin := range []uint64{1, 7, 9} {
			if last[origin]+1 != 0 {
				t.Fatalf("round %d: the shares of %d end at %d", round, origin, last[origin])
			}
			for seq := range most {
				key := Key{origin, seq + 1}
				if want := (fact{t1.seen[origin].has(key.Seq), t1.records[key] != nil}); got[key] != want {
					t.Fatalf("round %d: %v: %+v, want %+v", round, key, got[key], want)
				}
			}
		}
	}
}
