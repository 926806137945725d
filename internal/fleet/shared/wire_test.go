package shared

import (
	"bytes"
	"fmt"
	"maps"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// samples returns messages of all kinds from a history.
func samples() [][]byte {
	w := newWorld(5, 3, time.Minute)
	w.Loss, w.Keep = 0.3, true
	for range 300 {
		w.op()
		w.Run(20 * time.Millisecond)
	}
	w.Nodes[1].memory = []string{"one", "two"}
	w.start(0)
	w.Run(2 * time.Second)
	w.Nodes[2].Group = 1
	w.Run(3 * time.Second)
	for range 50 {
		w.op()
	}
	w.heal()
	w.Run(3 * time.Second)
	return w.Sent
}

func reading() *Machine[state] {
	w := newWorld(1, 1, time.Minute)
	return w.Nodes[0].Machine
}

// again encodes a decoded message.
func again(x *message[state]) []byte {
	b := appendHead(nil, x.kind, x.from)
	switch x.kind {
	case kindPublished, kindProposed:
		b = msgp.AppendArrayHead(b, len(x.changes))
		for _, c := range x.changes {
			b = msgp.AppendUint(msgp.AppendUint(msgp.AppendUint(b, c.kind), c.key.Owner), c.key.Seq)
			if c.kind != changeEnd {
				b = c.state.append(msgp.AppendUint(b, uint64(c.state.left)))
			}
			if c.kind == changeWhole {
				b = msgp.AppendStr(b, c.state.name)
			}
		}
	case kindBeat:
		b = appendBeat(b, &x.beat)
	case kindAsk:
		b = msgp.AppendBool(msgp.AppendUint(msgp.AppendUint(b, x.owner), x.id), x.bodies)
	case kindSummary:
		b = appendSummary(b, &x.summary)
	case kindWant:
		b = appendNumbers(msgp.AppendUint(b, x.owner), x.wants)
	case kindRecall:
		b = msgp.AppendUint(b, x.id)
	case kindMemory:
		b = msgp.AppendArrayHead(appendPart(b, x.id, x.part, x.parts), 2*len(x.items))
		for _, it := range x.items {
			b = append(msgp.AppendBinHead(msgp.AppendUint(b, uint64(it.memory)), len(it.data)), it.data...)
		}
	}
	return b
}

func TestWireRoundTrip(t *testing.T) {
	m := reading()
	kinds := map[uint64]int{}
	for _, data := range samples() {
		x, err := m.decode(data)
		if err != nil {
			t.Fatalf("%x: %v", data, err)
		}
		kinds[x.kind]++
		if back := again(x); !bytes.Equal(back, data) {
			t.Fatalf("%x is written %x", data, back)
		}
		for _, cut := range []int{0, 1, len(data) / 2, len(data) - 1} {
			if _, err := m.decode(data[:cut]); err != errMalformed {
				t.Fatalf("%d bytes of %x: %v", cut, data, err)
			}
		}
		if _, err := m.decode(append(bytes.Clone(data), 0)); err != errMalformed {
			t.Fatalf("one byte more: %v", err)
		}
	}
	if len(kinds) != kindMemory {
		t.Errorf("kinds %v", kinds)
	}
	if _, err := m.decode([]byte{2, 1, 1}); err != errVersion {
		t.Errorf("another version: %v", err)
	}
	if _, err := m.decode(make([]byte, maxMessage+1)); err != errMalformed {
		t.Errorf("a message of %d bytes: %v", maxMessage+1, err)
	}
}

// TestWireStays: later versions decode messages of this version.
func TestWireStays(t *testing.T) {
	s := appendSummary(appendHead(nil, kindSummary, 9), &summary{owner: 9, id: 1, parts: 1, first: 1, last: maxSeq, top: 7,
		live: []live{{2, 5}, {4, 6}}, holes: spans{{5, 6}}})
	b := appendBeat(appendHead(nil, kindBeat, 9), &beat{ready: true, owners: []digest{{9, 7, 2, 2, 11}}})
	for got, want := range map[string]string{
		string(s): "\x01\x05\x09\x09\x01\x00\x01\x01\xcf\x40\x00\x00\x00\x00\x00\x00\x00\x07\x94\x02\x05\x02\x06\x92\x05\x01",
		string(b): "\x01\x03\x09\xc3\xc2\xc2\xc2\x91\x95\x09\x07\x02\x02\x0b",
	} {
		if got != want {
			t.Errorf("%x, want %x", got, want)
		}
	}
}

// FuzzReceive passes any bytes to a machine. A decoded message survives encoding. No message violates an invariant, and
// a machine does not grow beyond the size of a message received three times.
func FuzzReceive(f *testing.F) {
	for i, data := range samples() {
		if i%20 == 0 {
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		w := newWorld(1, 1, time.Minute)
		n := w.Nodes[0]
		n.Alone()
		for range 3 {
			w.create(n)
		}
		n.Step(n.now())
		x, err := n.decode(data)
		if err == nil && x.from != n.Origin() {
			if back, err := n.decode(again(x)); err != nil || !bytes.Equal(again(back), again(x)) {
				t.Fatalf("%+v is read again as %+v, %v", x, back, err)
			}
		}
		for range 3 {
			w.Now += time.Second
			n.Receive(n.now(), data)
			n.Step(n.now())
			if err := n.Check(); err != nil {
				t.Fatal(err)
			}
		}
		if n.size > 3+len(data) || len(n.owners) > 1+len(data) || len(n.peers) > 1 || n.bytes > 0 {
			t.Fatalf("%d bytes make %d entries of %d owners", len(data), n.size, len(n.owners))
		}
	})
}

// TestSpansAgainstTwin compares spans with a set of numbers.
func TestSpansAgainstTwin(t *testing.T) {
	w := newWorld(*seed, 1, time.Minute)
	list := func(s spans) (set map[uint64]bool) {
		set = map[uint64]bool{}
		for i, p := range s {
			if p.first == 0 || p.first > p.last || i > 0 && s[i-1].last+1 >= p.first {
				t.Fatalf("spans %v", s)
			}
			for n := p.first; n <= p.last; n++ {
				set[n] = true
			}
		}
		return set
	}
	for range 200 {
		var a, b spans
		twin := map[uint64]bool{}
		for range 40 {
			first := uint64(1 + w.IntN(60))
			last := first + uint64(w.IntN(8))
			adds := w.IntN(2) == 0
			if adds {
				a.add(first, last)
			} else {
				a.cut(first, last)
			}
			for n := first; n <= last; n++ {
				if twin[n] = adds; !adds {
					delete(twin, n)
				}
			}
			if !maps.Equal(list(a), twin) || a.size() != uint64(len(twin)) {
				t.Fatalf("%v, want %v", a, slices.Sorted(maps.Keys(twin)))
			}
			for n := range uint64(70) {
				if a.has(n) != twin[n] {
					t.Fatalf("%v has %d: %v", a, n, a.has(n))
				}
			}
			b.add(uint64(1+w.IntN(60)), uint64(61))
			both := map[uint64]bool{}
			for n := range list(b) {
				if twin[n] {
					both[n] = true
				}
			}
			if !maps.Equal(list(a.intersect(b)), both) {
				t.Fatalf("%v and %v are %v", a, b, a.intersect(b))
			}
			b.cut(uint64(1+w.IntN(60)), math.MaxUint64)
		}
	}
}

// TestPartsOfASummary: parts are consecutive, cover all numbers, and have bounded size.
func TestPartsOfASummary(t *testing.T) {
	w := newWorld(*seed, 1, time.Minute)
	for range 20 {
		var all []live
		var holes spans
		for n, most := uint64(1), uint64(4*partPoints+w.IntN(8*partPoints)); n < most; n++ {
			switch w.IntN(4) {
			case 0:
				all = append(all, live{n, w.Uint64()})
			case 1:
				holes.add(n, n)
			}
		}
		next := uint64(1)
		var gotAll []live
		var gotHoles spans
		for _, p := range summaryParts(all, holes) {
			if p.first != next || len(p.live) > partPoints || len(p.holes) > partPoints {
				t.Fatalf("a part from %d, want %d, of %d entries and %d holes", p.first, next, len(p.live), len(p.holes))
			}
			gotAll = append(gotAll, p.live...)
			for _, h := range p.holes {
				gotHoles.add(h.first, h.last)
			}
			next = p.last + 1
		}
		if next != maxSeq+1 || !slices.Equal(all, gotAll) || !slices.Equal(holes, gotHoles) {
			t.Fatal(fmt.Sprint("parts end at ", next-1))
		}
	}
}
