package events

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

func init() { flag.Set("rapid.seed", "1") } // equal cases in all runs; `make explore` uses other seeds

var update = flag.Bool("update", false, "write the golden batches that are missing; those that exist never change")

// goldenBatches lie in testdata. Every later version must decode them.
func goldenBatches() map[string]Batch {
	return map[string]Batch{
		"empty": {Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 16},
		"stored": {
			Incarnation: 1795254706123, FirstID: 42, Model: "meta-llama/Llama-3.1-8B-Instruct", BlockSize: 16,
			Cursor: Cursor{Known: true, Seq: 41, Digest: 0xfedcba9876543210},
			Events: []Event{
				{Kind: Stored, Tier: Device, Attention: AttentionFull, Blocks: []BlockHash{15760518052499183552, 2},
					Locals: []LocalHash{11, 22}},
				{Kind: Stored, Tier: Device, Attention: AttentionFull, HasParent: true, Parent: 2,
					Blocks: []BlockHash{3}, Locals: []LocalHash{33}},
			},
		},
		"every-kind": {
			Incarnation: math.MaxUint64, FirstID: math.MaxUint64 - 3, Model: strings.Repeat("ü",
				40), BlockSize: math.MaxUint32,
			Cursor:   Cursor{Known: true, Seq: math.MaxUint64, Digest: math.MaxUint64, Partial: math.MaxUint32},
			Shutdown: true,
			Events: []Event{
				{Kind: Stored, Tier: Host, Group: 3, Attention: AttentionMamba, HasParent: true, Parent: math.MaxUint64,
					Blocks: []BlockHash{0, 1}},
				{Kind: Removed, Tier: Disk, Group: math.MaxUint32, Blocks: []BlockHash{1, 1, math.MaxUint64}},
				{Kind: Cleared, Tier: AllTiers, Reason: ReasonGap},
				{Kind: Cleared, Tier: External, Reason: ReasonEngine},
			},
		},
		"lookahead": {
			Incarnation: 7, FirstID: 1, Model: "m", BlockSize: 16,
			Events: []Event{{Kind: Stored, Tier: Device, Attention: AttentionFull, Blocks: []BlockHash{1},
				Locals: []LocalHash{11}, Lookahead: 1}},
		},
		"window": {
			Incarnation: 7, FirstID: 1, Model: "m", BlockSize: 16,
			Events: []Event{
				{Kind: Stored, Tier: Device, Group: 1, Attention: AttentionSlidingWindow, Blocks: []BlockHash{1},
					Window: 1024},
				{Kind: Stored, Tier: Device, Attention: AttentionFull, Blocks: []BlockHash{1}, Locals: []LocalHash{11},
					Drops: true},
				{Kind: Stored, Tier: Device, Group: 2, Attention: AttentionChunkedLocal, Window: 8192, Drops: true},
			},
		},
		"session": {
			Incarnation: 7, FirstID: 1, Model: "m", BlockSize: 16,
			Events: []Event{
				{Kind: Stored, Tier: Device, Attention: AttentionFull, Blocks: []BlockHash{1}, Locals: []LocalHash{11},
					Session: HashSession("chat-17")},
				{Kind: Stored, Tier: Device, Attention: AttentionFull, HasParent: true, Parent: 1, Blocks: []BlockHash{2},
					Locals: []LocalHash{22}, Lookahead: 1, Window: 1, Session: math.MaxUint64},
			},
		},
		"partial": {
			Incarnation: 7, FirstID: 4097, Model: "m", BlockSize: 64,
			Cursor: Cursor{Partial: 3},
			Events: []Event{{Kind: Removed, Tier: Device, Blocks: make([]BlockHash, MaxBlocksPerEvent)}},
		},
	}
}

func TestGoldenBatches(t *testing.T) {
	for name, want := range goldenBatches() {
		path := filepath.Join("testdata", "batch-v1-"+name+".bin")
		encoded, err := AppendBatch(nil, &want)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) && *update {
			if err := os.WriteFile(path, encoded, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		golden, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(encoded, golden) {
			t.Errorf("%s: writes\n%x, was\n%x", name, encoded, golden)
		}
		var got Batch
		if err := DecodeBatch(golden, &got); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !sameBatch(&got, &want) {
			t.Errorf("%s: reads\n%+v, want\n%+v", name, got, want)
		}
	}
}

func drawEvent(t *rapid.T) Event {
	e := Event{
		Kind:  Kind(rapid.IntRange(1, 3).Draw(t, "kind")),
		Group: GroupIndex(rapid.Uint32().Draw(t, "group")),
	}
	hashes := rapid.SliceOfN(rapid.Uint64(), 0, 40).Draw(t, "hashes")
	if rapid.IntRange(0, 20).Draw(t, "many") == 0 {
		hashes = make([]uint64, rapid.IntRange(1000, MaxBlocksPerEvent).Draw(t, "n"))
		for i := range hashes {
			hashes[i] = uint64(i) * 0x9e3779b97f4a7c15
		}
	}
	e.Tier = Tier(rapid.IntRange(1, NumTiers).Draw(t, "tier"))
	switch e.Kind {
	case Cleared:
		e.Tier %= NumTiers
		e.Reason = Reason(rapid.IntRange(1, 6).Draw(t, "reason"))
		return e
	case Stored:
		e.Attention = Attention(rapid.IntRange(0, 10).Draw(t, "attention"))
		if rapid.Bool().Draw(t, "windowed") {
			e.Window, e.Drops = rapid.Uint32().Draw(t, "window"), rapid.Bool().Draw(t, "drops")
		}
		if e.HasParent = rapid.Bool().Draw(t, "hasParent"); e.HasParent {
			e.Parent = BlockHash(rapid.Uint64().Draw(t, "parent"))
		}
		if rapid.Bool().Draw(t, "locals") {
			for _, h := range hashes {
				e.Locals = append(e.Locals, LocalHash(^h))
			}
			if len(hashes) > 0 && rapid.Bool().Draw(t, "reads ahead") {
				e.Lookahead = uint32(rapid.IntRange(1, MaxBlockSize).Draw(t, "lookahead"))
			}
			if len(hashes) > 0 && rapid.Bool().Draw(t, "of a session") {
				e.Session = SessionHash(rapid.Uint64().Draw(t, "session"))
			}
		}
		if e.Tier != Device && len(e.Locals) == 0 && rapid.Bool().Draw(t, "chunks") {
			e.Chunk = rapid.Uint32().Draw(t, "chunk")
			if len(hashes) > 0 && rapid.Bool().Draw(t, "own") {
				e.Own, e.Chunk = true, uint32(len(hashes))
				for _, h := range hashes {
					e.Locals = append(e.Locals, LocalHash(^h))
				}
				hashes = hashes[:1]
			}
		}
	}
	for _, h := range hashes {
		e.Blocks = append(e.Blocks, BlockHash(h))
	}
	return e
}

func drawBatch(t *rapid.T) Batch {
	b := Batch{
		Incarnation: Incarnation(rapid.Uint64().Draw(t, "incarnation")),
		FirstID:     EventID(rapid.Uint64().Draw(t, "firstID")),
		Model:       rapid.StringN(0, 300, 300).Draw(t, "model"),
		BlockSize:   rapid.Uint32().Draw(t, "blockSize"),
		Cursor: Cursor{
			Known:   rapid.Bool().Draw(t, "known"),
			Seq:     EngineSeq(rapid.Uint64().Draw(t, "seq")),
			Digest:  rapid.Uint64().Draw(t, "digest"),
			Partial: rapid.Uint32().Draw(t, "partial"),
		},
		Shutdown: rapid.Bool().Draw(t, "shutdown"),
	}
	for range rapid.IntRange(0, 20).Draw(t, "events") {
		b.Events = append(b.Events, drawEvent(t))
	}
	return b
}

// sameBatch compares two batches. Empty and nil slices are equal.
func sameBatch(a, b *Batch) bool {
	x, y := *a, *b
	x.Events, y.Events, x.hashes, y.hashes = nil, nil, nil, nil
	return reflect.DeepEqual(x, y) && slices.EqualFunc(a.Events, b.Events, sameEvent)
}

func sameEvent(a, b Event) bool {
	same := slices.Equal(a.Blocks, b.Blocks) && slices.Equal(a.Locals, b.Locals)
	a.Blocks, a.Locals, b.Blocks, b.Locals = nil, nil, nil, nil
	return same && reflect.DeepEqual(a, b)
}

// A decoded batch equals the encoded batch, after any earlier use of the memory. The header alone has equal fields.
// Additional elements of a later writer have no effect.
func TestBatchRoundTrip(t *testing.T) {
	var reused Batch
	rapid.Check(t, func(t *rapid.T) {
		want := drawBatch(t)
		encoded, err := AppendBatch([]byte("before"), &want)
		if err != nil {
			t.Fatal(err)
		}
		if got := len(encoded) - len("before"); got != want.encodedSize() {
			t.Fatalf("EncodedSize = %d, and the batch has %d bytes", want.encodedSize(), got)
		}
		encoded = encoded[len("before"):]
		var fresh Batch
		for _, b := range []*Batch{&fresh, &reused} {
			if err := DecodeBatch(encoded, b); err != nil {
				t.Fatal(err)
			}
			if !sameBatch(b, &want) {
				t.Fatalf("got %+v, want %+v", *b, want)
			}
		}

		extended := extendBatch(t, encoded)
		clear(encoded) // the decoded batch does not refer to it
		if err := DecodeBatch(extended, &reused); err != nil || !sameBatch(&reused, &want) ||
			!sameBatch(&fresh, &want) {
			t.Fatalf("with additional elements: %v\n%+v, want\n%+v", err, reused, want)
		}
	})
}

// extendBatch adds elements to all arrays of the format, with another MessagePack library.
func extendBatch(t interface{ Fatal(...any) }, encoded []byte) []byte {
	var elements []any
	if err := msgpack.Unmarshal(encoded, &elements); err != nil {
		t.Fatal(err)
	}
	addition := []any{nil, map[string]any{"new": []int{1, -2}}, 1.5, []byte("x")}
	elements[5] = append(elements[5].([]any), addition...)
	for i, v := range elements[7].([]any) {
		e := v.([]any)
		e = append(e, []any{0, 0, false, 0, nil, 0}[min(len(e)-eventElements, 6):]...) // no lookahead, window, chunk, session
		elements[7].([]any)[i] = append(e, addition...)
	}
	extended, err := msgpack.Marshal(append(elements, addition...))
	if err != nil {
		t.Fatal(err)
	}
	return extended
}

func TestDecodeBatchRefuses(t *testing.T) {
	var whole []byte
	golden := goldenBatches()
	b := golden["every-kind"]
	whole, err := AppendBatch(nil, &b)
	if err != nil {
		t.Fatal(err)
	}
	// A batch is malformed if truncated anywhere, or followed by further bytes.
	for i := range whole {
		refuse(t, fmt.Sprintf("cut at %d", i), whole[:i], ErrMalformed)
	}
	refuse(t, "a byte more", append(slices.Clone(whole), 0), ErrMalformed)

	change := func(f func(elements []any) []any) []byte {
		var elements []any
		if err := msgpack.Unmarshal(whole, &elements); err != nil {
			t.Fatal(err)
		}
		out, err := msgpack.Marshal(f(elements))
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	set := func(i int, v any) []byte {
		return change(func(e []any) []any { e[i] = v; return e })
	}
	setEvent := func(i, j int, v any) []byte {
		return change(func(e []any) []any { e[7].([]any)[i].([]any)[j] = v; return e })
	}
	refuse(t, "version 2", set(0, 2), ErrVersion)
	refuse(t, "version 2, all else unknown", []byte{0x90 | 1, 2}, ErrVersion)
	refuse(t, "version 0", set(0, 0), ErrMalformed)
	refuse(t, "version nil", set(0, nil), ErrMalformed)
	refuse(t, "no array", []byte{msgp.CodeNil}, ErrMalformed)
	refuse(t, "a negative incarnation", set(1, -1), ErrMalformed)
	refuse(t, "a first id of another type", set(2, "1"), ErrMalformed)
	refuse(t, "a model that is binary", set(3, []byte("m")), ErrMalformed)
	refuse(t, "a block size beyond 32 bits", set(4, uint64(1)<<32), ErrMalformed)
	refuse(t, "a short cursor", set(5, []any{true, 1, 1}), ErrMalformed)
	refuse(t, "a cursor of other types", set(5, []any{1, 1, 1, 1}), ErrMalformed)
	refuse(t, "shutdown nil", set(6, nil), ErrMalformed)
	refuse(t, "no events", set(7, nil), ErrMalformed)
	refuse(t, "an event that is a map", change(func(e []any) []any { e[7].([]any)[0] = map[string]any{}; return e }),
		ErrMalformed)
	refuse(t, "a short event", change(func(e []any) []any { e[7].([]any)[0] = e[7].([]any)[0].([]any)[:7]; return e }),
		ErrMalformed)
	refuse(t, "kind 0", setEvent(0, 0, 0), ErrMalformed)
	refuse(t, "kind 4", setEvent(0, 0, 4), ErrMalformed)
	refuse(t, "stored in no tier", setEvent(0, 1, 0), ErrMalformed)
	refuse(t, "cleared in tier 5", setEvent(2, 1, 5), ErrMalformed)
	refuse(t, "a parent of another type", setEvent(0, 5, "x"), ErrMalformed)
	refuse(t, "blocks that are no whole hashes", setEvent(0, 6, make([]byte, 15)), ErrMalformed)
	refuse(t, "blocks as an array", setEvent(0, 6, []int{1, 2}), ErrMalformed)
	refuse(t, "too many blocks", setEvent(1, 6, make([]byte, 8*MaxBlocksPerEvent+8)), ErrMalformed)
	refuse(t, "fewer local hashes than blocks", setEvent(0, 7, make([]byte, 8)), ErrMalformed)
	refuse(t, "local hashes in a removed event", setEvent(1, 7, make([]byte, 24)), ErrMalformed)
	refuse(t, "blocks in a cleared event", setEvent(2, 6, make([]byte, 8)), ErrMalformed)
	for name, v := range map[string]any{"of another type": "1", "beyond a block's bound": MaxBlockSize + 1,
		"without local hashes": 1} {
		refuse(t, "a lookahead "+name, change(func(e []any) []any {
			e[7].([]any)[0] = append(e[7].([]any)[0].([]any), v)
			return e
		}), ErrMalformed)
	}
	for name, more := range map[string][]any{"of another type": {0, "1", false},
		"beyond its bound": {0, 1 << 33, false}, "without what it drops": {0, 1, 1}} {
		refuse(t, "a window "+name, change(func(e []any) []any {
			e[7].([]any)[0] = append(e[7].([]any)[0].([]any), more...)
			return e
		}), ErrMalformed)
	}
	for name, v := range map[string]any{"of another type": "1", "without local hashes": 1} {
		refuse(t, "a session "+name, change(func(e []any) []any {
			e[7].([]any)[0] = append(e[7].([]any)[0].([]any), 0, 0, false, 0, nil, v)
			return e
		}), ErrMalformed)
	}
	// Large lengths in the heads of arrays reserve no memory.
	head := whole[:bytes.IndexByte(whole, 0x90|4)]
	for _, n := range [][]byte{{0xdd, 0xff, 0xff, 0xff, 0xff}, {0xdc, 0xff, 0xff}} {
		refuse(t, "an array longer than the input", append(slices.Clone(head), n...), ErrMalformed)
	}
}

func refuse(t *testing.T, name string, data []byte, class error) {
	t.Helper()
	b := Batch{Events: []Event{{Kind: Cleared}}}
	if err := DecodeBatch(data, &b); !errors.Is(err, class) {
		t.Errorf("%s: %v, want %v", name, err, class)
	}
	if len(b.Events) != 0 {
		t.Errorf("%s: leaves %d events", name, len(b.Events))
	}
}

func TestAppendBatchRefuses(t *testing.T) {
	for name, e := range map[string]Event{
		"no kind":             {Tier: Device},
		"no tier":             {Kind: Stored},
		"a tier that is none": {Kind: Cleared, Tier: NumTiers + 1},
		"too many blocks":     {Kind: Removed, Tier: Device, Blocks: make([]BlockHash, MaxBlocksPerEvent+1)},
		"fewer local hashes": {Kind: Stored, Tier: Device, Blocks: make([]BlockHash, 2),
			Locals: make([]LocalHash, 1)},
		"local hashes when removed": {Kind: Removed, Tier: Device, Blocks: make([]BlockHash, 1),
			Locals: make([]LocalHash, 1)},
		"blocks in a cleared event": {Kind: Cleared, Blocks: make([]BlockHash, 1)},
		"a lookahead of no hashes":  {Kind: Stored, Tier: Device, Blocks: make([]BlockHash, 1), Lookahead: 1},
		"a lookahead beyond bounds": {Kind: Stored, Tier: Device, Blocks: make([]BlockHash, 1),
			Locals: make([]LocalHash, 1), Lookahead: MaxBlockSize + 1},
		"a window in a removal":       {Kind: Removed, Tier: Device, Blocks: make([]BlockHash, 1), Window: 1},
		"a drop in a removal":         {Kind: Removed, Tier: Device, Blocks: make([]BlockHash, 1), Drops: true},
		"local hashes without blocks": {Kind: Stored, Tier: Device, Locals: make([]LocalHash, 1)},
	} {
		out, err := AppendBatch([]byte("x"), &Batch{Events: []Event{{Kind: Cleared}, e}})
		if err == nil || !strings.Contains(err.Error(), "event 1") || string(out) != "x" {
			t.Errorf("%s: %q, %v", name, out, err)
		}
	}
}

func TestBatchDoesNotAllocate(t *testing.T) {
	b := benchBatch(20)
	var encoded []byte
	var got Batch
	if n := testing.AllocsPerRun(100, func() {
		var err error
		if encoded, err = AppendBatch(encoded[:0], b); err != nil {
			t.Fatal(err)
		}
		if err = DecodeBatch(encoded, &got); err != nil {
			t.Fatal(err)
		}
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// After batches of all shapes, with a long list in every slot once, the memory is bounded by the needs of one batch.
func TestDecodedMemoryIsBounded(t *testing.T) {
	var b Batch
	for i := range 200 {
		large := Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 16, Events: make([]Event, 400)}
		for j := range large.Events {
			large.Events[j] = Event{Kind: Stored, Tier: Device, Blocks: make([]BlockHash, 1)}
		}
		long := &large.Events[2*i]
		long.Blocks, long.Locals = make([]BlockHash, MaxBlocksPerEvent), make([]LocalHash, MaxBlocksPerEvent)
		encoded, err := AppendBatch(nil, &large)
		if err != nil {
			t.Fatal(err)
		}
		if err := DecodeBatch(encoded, &b); err != nil {
			t.Fatal(err)
		}
		b.Trim()
	}
	held := b.MemoryBytes()
	lists := 0 // the arrays of the slots, each counted once
	seen := map[*BlockHash]bool{}
	for _, e := range b.Events[:cap(b.Events)] {
		if len(e.Blocks) > 0 && !seen[&e.Blocks[0]] {
			seen[&e.Blocks[0]] = true
			lists += 8 * (cap(e.Blocks) + cap(e.Locals))
		}
	}
	if most := 256 << 10; held > most || lists > most {
		t.Errorf("holds %d bytes, its events refer to %d; want at most %d", held, lists, most)
	}
	huge := Batch{Events: make([]Event, 100)}
	for i := range huge.Events {
		huge.Events[i] = Event{Kind: Removed, Tier: Device, Blocks: make([]BlockHash, MaxBlocksPerEvent)}
	}
	encoded, err := AppendBatch(nil, &huge)
	if err != nil {
		t.Fatal(err)
	}
	if err := DecodeBatch(encoded, &b); err != nil || b.MemoryBytes() < 8*100*MaxBlocksPerEvent {
		t.Fatalf("%v; %d bytes", err, b.MemoryBytes())
	}
	if b.Trim(); b.MemoryBytes() != 0 {
		t.Errorf("holds %d bytes of a batch of an unusual size", b.MemoryBytes())
	}
}

func FuzzDecodeBatch(f *testing.F) {
	for _, b := range goldenBatches() {
		encoded, err := AppendBatch(nil, &b)
		if err != nil {
			f.Fatal(err)
		}
		if len(encoded) > 1000 {
			continue // useless for a fuzzer
		}
		f.Add(encoded)
		f.Add(extendBatch(f, encoded))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var b Batch
		err := DecodeBatch(data, &b)
		if err != nil {
			if !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrVersion) {
				t.Fatalf("error of no class: %v", err)
			}
			return
		}
		// A decoded batch can be encoded, and decoded again with an equal result.
		encoded, err := AppendBatch(nil, &b)
		if err != nil {
			t.Fatal(err)
		}
		var again Batch
		if err := DecodeBatch(encoded, &again); err != nil || !sameBatch(&again, &b) {
			t.Fatalf("%v\n%+v, want\n%+v", err, again, b)
		}
	})
}

func benchBatch(events int) *Batch {
	b := &Batch{
		Incarnation: 1795254706123, FirstID: 1000, Model: "meta-llama/Llama-3.1-8B-Instruct", BlockSize: 16,
		Cursor: Cursor{Known: true, Seq: 999, Digest: 0xfedcba9876543210},
	}
	for i := range events {
		e := Event{Kind: Stored, Tier: Device, Attention: AttentionFull, HasParent: true, Parent: BlockHash(i) << 60}
		for j := range 64 {
			e.Blocks = append(e.Blocks, BlockHash(i*64+j)*0x9e3779b97f4a7c15)
			e.Locals = append(e.Locals, LocalHash(i*64+j)*0xc2b2ae3d27d4eb4f)
		}
		b.Events = append(b.Events, e)
	}
	return b
}

func BenchmarkAppendBatch(b *testing.B) {
	for _, events := range []int{1, 20} {
		b.Run(fmt.Sprintf("events=%d", events), func(b *testing.B) {
			batch := benchBatch(events)
			buf := make([]byte, 0, batch.encodedSize())
			b.SetBytes(int64(cap(buf)))
			b.ReportAllocs()
			for b.Loop() {
				if _, err := AppendBatch(buf, batch); err != nil {
					b.Fatal(err)
				}
			}
			reportBlocks(b, 64*events)
		})
	}
}

func BenchmarkDecodeBatch(b *testing.B) {
	for _, events := range []int{1, 20} {
		b.Run(fmt.Sprintf("events=%d", events), func(b *testing.B) {
			encoded, err := AppendBatch(nil, benchBatch(events))
			if err != nil {
				b.Fatal(err)
			}
			var batch Batch
			b.SetBytes(int64(len(encoded)))
			b.ReportAllocs()
			for b.Loop() {
				if err := DecodeBatch(encoded, &batch); err != nil {
					b.Fatal(err)
				}
			}
			reportBlocks(b, 64*events)
		})
	}
}

func reportBlocks(b *testing.B, blocks int) {
	b.ReportMetric(float64(b.N)*float64(blocks)/b.Elapsed().Seconds()/1e6, "Mblocks/s")
}
