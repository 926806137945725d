package events

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/testkit"
)

// decodeParts decodes a message in parts of the given bound, and joins the parts.
func decodeParts(d *Decoder, payload []byte, bound partBound) (m Message, parts int, err error) {
	m, more, err := d.begin(payload, bound)
	part := m.Events
	m.Events = nil
	for parts = 1; ; parts++ {
		for _, e := range part {
			e.Blocks, e.Locals = slices.Clone(e.Blocks), slices.Clone(e.Locals)
			m.Events = append(m.Events, e)
		}
		if !more {
			return m, parts, err
		}
		part, more = d.Continue()
	}
}

// checkParts decodes a message whole and in parts. The results and the decoders' states must be equal.
func checkParts(t *testing.T, whole, inParts *Decoder, payload []byte, bound partBound) (parts int) {
	t.Helper()
	want, wantErr := whole.Decode(payload)
	got, parts, err := decodeParts(inParts, payload, bound)
	if fmt.Sprint(err) != fmt.Sprint(wantErr) || got.Timestamp != want.Timestamp || got.Rank != want.Rank ||
		got.HasRank != want.HasRank || !slices.EqualFunc(got.Events, want.Events, sameEvent) {
		t.Fatalf("%x: %+v, %v\nwant %+v, %v", payload, got, err, want, wantErr)
	}
	gotEngine, gotWhy := inParts.Engine()
	wantEngine, wantWhy := whole.Engine()
	if inParts.Counts() != whole.Counts() || gotEngine != wantEngine || gotWhy != wantWhy ||
		!reflect.DeepEqual(inParts.Diagnosis(), whole.Diagnosis()) || !reflect.DeepEqual(inParts.salts, whole.salts) ||
		inParts.zero != whole.zero || !reflect.DeepEqual(inParts.sizes, whole.sizes) {
		t.Fatalf("%x: %v, %v %q, %v; want %v, %v %q, %v", payload, inParts.Counts(), gotEngine, gotWhy,
			inParts.Diagnosis(), whole.Counts(), wantEngine, wantWhy, whole.Diagnosis())
	}
	if inParts.envelope.r.Data != nil || inParts.raw.data != nil || inParts.removing.names.Data != nil {
		t.Fatalf("%x: the decoder keeps the message", payload)
	}
	return parts
}

// TestPartsTwin: the joined parts of a message equal the result of Decode, for random and captured messages, whole,
// truncated and damaged.
func TestPartsTwin(t *testing.T) {
	parted := 0
	for seed := range uint64(testkit.Rounds(100)) {
		c := chooser{rand.New(rand.NewPCG(17, seed)), 1 + int(seed%4)}
		engine := VLLM + Engine(seed%3)
		whole, inParts := mustDecoder(t, engine, uint32(c.block)), mustDecoder(t, engine, uint32(c.block))
		bound := partBound{1 + c.IntN(3), 1 + c.IntN(8)}
		for range 60 {
			payload := pack(t, c.message())
			switch c.IntN(8) {
			case 0:
				payload = payload[:c.IntN(len(payload))]
			case 1:
				payload[c.IntN(len(payload))] = byte(c.IntN(256))
			}
			if checkParts(t, whole, inParts, payload, bound) > 1 {
				parted++
			}
		}
	}
	if parted == 0 {
		t.Error("no message had several parts")
	}
	for _, path := range capturePaths(t) {
		for _, engine := range []Engine{VLLM, SGLang, AnyEngine} {
			whole, inParts := mustDecoder(t, engine, 16), mustDecoder(t, engine, 16)
			for _, payload := range capturedPayloads(t, path) {
				checkParts(t, whole, inParts, payload, partBound{1, 1})
			}
		}
	}
}

// TestLongRemovalsInParts: a removed event of very many names has the same result in parts, with unreadable names, and
// with the type before or after the names.
func TestLongRemovalsInParts(t *testing.T) {
	testkit.Sequential(t)
	const n = maxEventTokens + 3*MaxBlocksPerEvent + 5
	head := binary.BigEndian.AppendUint32([]byte{0xdd}, n)
	names := append(head, bytes.Repeat([]byte{0xcd, 1, 2}, n)...)
	bad := append(append(slices.Clone(head), bytes.Repeat([]byte{0x07}, n-1)...), msgp.CodeNil)
	for _, names := range [][]byte{names, bad} {
		typeLast := append(msgp.AppendStr([]byte{0x82}, "block_hashes"), names...)
		typeLast = msgp.AppendStr(msgp.AppendStr(typeLast, "type"), "BlockRemoved")
		positional := append(msgp.AppendStr([]byte{0x92}, "BlockRemoved"), names...)
		stored := append(msgp.AppendStr([]byte{0x92}, "BlockStored"), names...)
		payload := slices.Concat([]byte{0x92, 0, 0x94}, typeLast, positional, stored,
			msgp.AppendStr([]byte{0x91}, "AllBlocksCleared"))
		whole, inParts := mustDecoder(t, VLLM, 16), mustDecoder(t, VLLM, 16)
		if parts := checkParts(t, whole, inParts, payload, usualPart); parts < 30 {
			t.Errorf("%d parts", parts)
		}
		m, err := whole.Decode(payload)
		if err != nil || len(m.Events) != 1+2*(n/MaxBlocksPerEvent+1) {
			t.Errorf("%d events, %v", len(m.Events), err)
		}
	}
}

// hostile returns messages of about this size with very many elements of some kind.
func hostile(bytesOf int) map[string][]byte {
	str := func(s string) []byte { return msgp.AppendStr(nil, s) }
	array := func(n int) []byte { return binary.BigEndian.AppendUint32([]byte{0xdd}, uint32(n)) }
	many := func(one []byte, bytesOf int) []byte {
		n := max(1, bytesOf/len(one))
		return append(array(n), bytes.Repeat(one, n)...)
	}
	message := func(list []byte) []byte { return append([]byte{0x93, 0}, append(list, 0)...) }
	event := func(fields ...[]byte) []byte {
		return append([]byte{0x90 | byte(len(fields))}, slices.Concat(fields...)...)
	}
	one := func(e []byte) []byte { return message(append([]byte{0x91}, e...)) }
	null := []byte{msgp.CodeNil}
	sixteen := append([]byte{0x90 | 15}, bytes.Repeat([]byte{1}, 15)...)
	store := func(names, tokens, extra []byte) []byte {
		return event(str("BlockStored"), names, null, tokens, []byte{15}, null, str("GPU"), null, extra)
	}
	list := map[string][]byte{
		"clears":        message(many(event(str("AllBlocksCleared")), bytesOf)),
		"unknown types": message(many(event(str("x")), bytesOf)),
		"no events":     message(many([]byte{0}, bytesOf)),
		"stores":        message(many(store([]byte{0x91, 7}, sixteen, null), bytesOf)),
		"bare stores":   message(many(event(str("BlockStored"), []byte{0x91, 7}), bytesOf)),
		"removals":      message(many(event(str("BlockRemoved"), []byte{0x91, 7}), bytesOf)),
		"one removal":   one(event(str("BlockRemoved"), many([]byte{7}, bytesOf))),
		"one store":     one(store(many([]byte{7}, bytesOf), []byte{0x90}, null)),
		"tokens":        one(store([]byte{0x91, 7}, many([]byte{7}, bytesOf), null)),
		"one extra key": one(store([]byte{0x91, 7}, sixteen, append([]byte{0x91}, many(str(""), bytesOf)...))),
		"extra keys":    one(store([]byte{0x91, 7}, sixteen, many([]byte{0x90}, bytesOf))),
		"a long name":   one(event(str("BlockRemoved"), append([]byte{0x91}, str(string(make([]byte, bytesOf)))...))),
		"a long medium": one(event(str("BlockRemoved"), []byte{0x91, 7}, str(string(bytes.Repeat([]byte("g"), bytesOf))))),
		"depth":         one(append(bytes.Repeat([]byte{0x91}, bytesOf), 0)),
		"lookahead": one(append(slices.Concat([]byte{0x85}, str("type"), str("BlockStored"), str("block_hashes"),
			[]byte{0x91, 7}, str("token_ids"), sixteen, str("block_size"), []byte{15}, str("lookahead_token_ids"),
			[]byte{0x91}), many([]byte{7}, bytesOf)...)),
	}
	groups := array(bytesOf / 30)
	for i := range bytesOf / 30 {
		e := event(str("BlockStored"), []byte{0x91, 7}, null, []byte{0x90}, []byte{15}, null, null, null, null)
		e[0]++
		groups = append(groups, binary.BigEndian.AppendUint32(append(e, 0xce), uint32(i))...)
	}
	list["groups"] = message(groups)
	return list
}

// TestPartsAreBounded: the parts of a message with very many elements of any kind need little memory. Decoded at once,
// a message of clears needs 40 times its size.
func TestPartsAreBounded(t *testing.T) {
	testkit.Sequential(t)
	const size, most, mostAllocated = 8 << 20, 24 << 20, 96 << 20
	for name, payload := range hostile(size) {
		t.Run(name, func(t *testing.T) {
			d := mustDecoder(t, VLLM, 15)
			before, grown, allocated := liveHeap(), 0, totalAllocated()
			m, more, err := d.Begin(payload)
			if err != nil {
				t.Fatal(err)
			}
			for at, part := 0, m.Events; ; at++ {
				if len(part) > usualPart.events+2*maxEventTokens/MaxBlocksPerEvent {
					t.Fatalf("a part of %d events", len(part))
				}
				if at%32 == 0 || !more {
					grown = max(grown, liveHeap()-before)
				}
				if !more {
					break
				}
				part, more = d.Continue()
			}
			if grown > most {
				t.Errorf("a message of %d MiB needs %d MiB", size>>20, grown>>20)
			}
			if allocated = totalAllocated() - allocated; allocated > mostAllocated {
				t.Errorf("a message of %d MiB allocates %d MiB", size>>20, allocated>>20)
			}
			runtime.KeepAlive(d)
			runtime.KeepAlive(payload)
		})
	}
}

func liveHeap() int {
	var s runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&s)
	return int(s.HeapAlloc)
}

func totalAllocated() uint64 {
	var s runtime.MemStats
	runtime.ReadMemStats(&s)
	return s.TotalAlloc
}

// BenchmarkDecodeMany decodes many small events, whole and in parts.
func BenchmarkDecodeMany(b *testing.B) {
	payload := hostile(1 << 20)["stores"]
	for name, bound := range map[string]partBound{"whole": {1 << 62, 1 << 62}, "parts": usualPart} {
		b.Run(name, func(b *testing.B) {
			d := mustDecoder(b, VLLM, 15)
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				_, more, err := d.begin(payload, bound)
				if err != nil {
					b.Fatal(err)
				}
				for more {
					_, more = d.Continue()
				}
			}
		})
	}
}
