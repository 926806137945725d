package events

import (
	"errors"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/testkit"
)

// store returns the map of a stored event with the usual fields; the arguments override or add fields.
func store(blocks []any, parent any, tokens any, others ...pair) pairs {
	fields := pairs{{"type", "BlockStored"}, {"block_hashes", blocks}, {"parent_block_hash", parent},
		{"token_ids", tokens}, {"block_size", 4}}
	for _, o := range others {
		i := slices.IndexFunc(fields, func(f pair) bool { return f.key == o.key })
		if i < 0 {
			fields = append(fields, o)
		} else {
			fields[i] = o
		}
	}
	return fields
}

func names(values ...any) []any { return values }

func message(t testing.TB, events ...any) []byte {
	t.Helper()
	return pack(t, []any{1.5, events, 0})
}

// Blocks of an engine that does not announce adapters are skipped. Blocks with an adapter's name, removals and clears
// count.
func TestUnnamedAdapters(t *testing.T) {
	d, err := NewDecoder(DecoderConfig{Engine: SGLang, BlockSize: 4, UnnamedAdapters: true})
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		got := decode(t, d, message(t, store(names(-1), nil, count(0, 4)),
			store(names(-2), nil, count(0, 4), pair{"lora_name", "a"}),
			store(names(-3), nil, count(0, 4), pair{"lora_id", nil}, pair{"cache_salt", "s"}, pair{"medium", "CPU_PINNED"}),
			pairs{{"type", "BlockRemoved"}, {"block_hashes", names(-1)}}, pairs{{"type", "AllBlocksCleared"}}),
			SkipAdapter, SkipAdapter).Events
		if len(got) != 3 || got[0].Kind != Stored || got[0].Locals[0] != locals(t, 4, Space{LoRA: "a"}, count(0, 4))[0] ||
			got[1].Kind != Removed || got[2].Kind != Cleared || !SkipAdapter.Loses() {
			t.Errorf("%+v", got)
		}
		d.Reset()
		d = d.Blank()
	}
}

// Later events lack the salt; a prompt's blocks are still hashed with the salt.
func TestSaltIsInherited(t *testing.T) {
	testkit.Sequential(t)
	d := mustDecoder(t, VLLM, 4)
	salted := Space{Salt: "tenant-a", LoRA: "adapter-a"}
	tokens := count(0, 16)
	want := locals(t, 4, salted, tokens)
	lora := pair{"lora_name", "adapter-a"}
	keys := func(k ...any) pair { return pair{"extra_keys", k} }
	got := decode(t, d, message(t,
		store(names(10), nil, tokens[:4], lora, keys([]any{"adapter-a", "tenant-a"})),
		store(names(11, 12), 10, tokens[4:12], lora, keys([]any{"adapter-a"}, []any{"adapter-a"})),
	)).Events
	if !slices.Equal(got[0].Locals, want[:1]) || !slices.Equal(got[1].Locals, want[1:3]) {
		t.Errorf("in one message: %v, want %x", got, want)
	}
	got = decode(t, d, message(t, store(names(13), 12, tokens[12:], lora))).Events
	if !slices.Equal(got[0].Locals, want[3:]) {
		t.Errorf("in a later message: %v, want %x", got, want)
	}
	// A copy in host memory without a salt does not count as a block without tenant; a copy with a salt is hashed.
	got = decode(t, d, message(t,
		store(names(10), nil, tokens[:4], lora, pair{"medium", "CPU"}),
		store(names(10), nil, tokens[:4], lora, pair{"medium", "CPU"}, keys([]any{"adapter-a", "tenant-a"})),
	), skipCopyTokens).Events
	if got[0].Places() || got[0].Tier != Host || got[0].Blocks[0] != 10 || !slices.Equal(got[1].Locals, want[:1]) {
		t.Errorf("copies: %v, want %x", got, want[:1])
	}
	// The salt does not apply to another prompt, nor to SGLang's events, which have a salt each or none.
	plain := locals(t, 4, Space{}, tokens)
	got = decode(t, d, message(t, store(names(20), nil, tokens[:4]),
		store(names(21), 13, tokens[4:8], pair{"cache_salt", nil}))).Events
	if !slices.Equal(got[0].Locals, plain[:1]) || !slices.Equal(got[1].Locals, plain[1:2]) {
		t.Errorf("other prompts: %v, want %x", got, plain)
	}
	for name, forget := range map[string]func(){
		"a clear":     func() { decode(t, d, message(t, []any{"AllBlocksCleared"})) },
		"a new life":  d.Reset,
		"other salts": func() { fillSalts(t, d) },
	} {
		decode(t, d, message(t, store(names(10), nil, tokens[:4], keys([]any{"tenant-a"}))))
		forget()
		got = decode(t, d, message(t, store(names(11), 10, tokens[4:8]))).Events
		if !slices.Equal(got[0].Locals, plain[1:2]) {
			t.Errorf("after %s: %x, want %x", name, got[0].Locals, plain[1:2])
		}
	}
}

// fillSalts announces many salted blocks, until earlier salts are forgotten, and checks the memory bound.
func fillSalts(t *testing.T, d *Decoder) {
	t.Helper()
	const each = 1 << 16
	blocks := make([]any, each)
	tokens := make([]uint32, 4*each)
	keys := make([]any, each)
	keys[0] = []any{"tenant-b"}
	for next := 1000; next < 1000+3*maxSalted; {
		for i := range blocks {
			blocks[i] = next
			next++
		}
		decode(t, d, message(t, store(blocks, nil, tokens, pair{"extra_keys", keys})))
	}
	if n := len(d.salts.recent) + len(d.salts.older); n > 2*maxSalted {
		t.Errorf("%d salted blocks are stored", n)
	}
}

// A stored event of many blocks results in several consecutive events.
func TestLongEventsAreCut(t *testing.T) {
	const n = 2*MaxBlocksPerEvent + 5
	blocks, hashes := make([]any, n), make([]BlockHash, n)
	for i := range blocks {
		hashes[i] = BlockHash(i+1) * 0x9e3779b97f4a7c15
		blocks[i] = uint64(hashes[i])
	}
	tokens := count(0, 4*n)
	want := locals(t, 4, Space{}, tokens)
	d := mustDecoder(t, VLLM, 4)
	m := decode(t, d, message(t,
		store(blocks, 7, tokens, pair{"kv_cache_spec_kind", "mla_attention"}),
		[]any{"BlockRemoved", blocks, "CPU", 3},
		store(blocks, 7, nil, pair{"medium", "CPU"}),
	))
	if len(m.Events) != 9 {
		t.Fatalf("%d events", len(m.Events))
	}
	for i, e := range m.Events {
		begin := i % 3 * MaxBlocksPerEvent
		end := min(begin+MaxBlocksPerEvent, n)
		wanted := Event{Kind: Stored, Tier: Device, Attention: AttentionMLA, HasParent: true, Parent: 7,
			Blocks: hashes[begin:end], Locals: want[begin:end]}
		if begin > 0 {
			wanted.Parent = hashes[begin-1]
		}
		switch i / 3 {
		case 1:
			wanted = Event{Kind: Removed, Tier: Host, Group: 3, Blocks: hashes[begin:end]}
		case 2:
			wanted = Event{Kind: Stored, Tier: Host, Chunk: 1, Blocks: hashes[begin:end]}
		}
		if !sameEvent(e, wanted) {
			t.Errorf("event %d: %d blocks, parent %x (%v)", i, len(e.Blocks), e.Parent, e.HasParent)
		}
		if err := e.check(); err != nil {
			t.Errorf("event %d: %v", i, err)
		}
		if cap(e.Blocks) != len(e.Blocks) || cap(e.Locals) != len(e.Locals) {
			t.Errorf("event %d: appending to it would write over the next one", i)
		}
	}
}

func TestBlockSizeDiagnosis(t *testing.T) {
	for _, c := range []struct {
		engine Engine
		size   int
		want   string
	}{
		{SGLang, 1,
			"SGLang announces blocks of 1 tokens, and blocks of 4 are expected: 2 events skipped, none taken; start the engine with --page-size 4 or expect 1"},
		{SGLang, 2,
			"SGLang announces blocks of 2 tokens, and blocks of 4 are expected: 2 events skipped, none taken; start the engine with --page-size 4 or expect 2"},
		{SGLang, 64,
			"SGLang announces blocks of 64 tokens, and blocks of 4 are expected: 2 events skipped, none taken; start the engine with --page-size 4 or expect 64"},
		{VLLM, 0,
			"vLLM announces blocks with tokens and a block_size that is 0 or missing, and blocks of 4 are expected: 2 events skipped, none taken; have its publisher announce the size"},
		{VLLM, 8,
			"vLLM announces blocks of 8 tokens, and blocks of 4 are expected: 2 events skipped, none taken; start the engine with --block-size 4 or expect 8"},
	} {
		d := mustDecoder(t, c.engine, 4)
		if d.Diagnosis() != nil {
			t.Fatal("a diagnosis before the first message")
		}
		wrong := store(names(1), nil, count(0, uint32(max(c.size, 4))), pair{"block_size", c.size})
		another := wrong
		if c.size == 0 { // an absent field is equal
			another = pairs{{"type", "BlockStored"}, {"block_hashes", names(1)}, {"token_ids", count(0, 4)}}
		}
		m, err := d.Decode(message(t, wrong, another))
		if err != nil || len(m.Events) != 0 || d.Counts() != (SkipCounts{SkipBlockSize: 2}) {
			t.Fatal(m, err, d.Counts())
		}
		var sizeError *BlockSizeError
		if err := d.Diagnosis(); !errors.As(err, &sizeError) || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v, want %s", err, c.want)
		}
		if sizeError.Want != 4 || sizeError.Got != uint32(c.size) {
			t.Errorf("%+v", sizeError)
		}
	}
	// A connector may announce chunks of several blocks below the device, and the end of a prompt: no fault either.
	other := mustDecoder(t, VLLM, 4)
	decode(t, other, message(t, store(names(1), nil, count(0, 8), pair{"block_size", 8}, pair{"medium", "CPU"}),
		store(names(1), nil, count(0, 6), pair{"block_size", 6}, pair{"medium", "CPU"})),
		skipCopyTokens, SkipCopySize)
	if other.Diagnosis() != nil {
		t.Error(other.Diagnosis())
	}
	// A partial block beside whole blocks is no fault of the configuration, nor is a group with blocks of another size.
	d := mustDecoder(t, VLLM, 4)
	m, err := d.Decode(message(t,
		store(names(1), nil, count(0, 4)),
		store(names(2), 1, count(4, 2), pair{"block_size", 2}),
		store(names(3), nil, count(0, 64), pair{"block_size", 64}, pair{"kv_cache_spec_kind", "mamba"},
			pair{"group_idx", 1}),
	))
	if err != nil || d.Diagnosis() != nil || d.Counts() != (SkipCounts{skipPartialBlock: 1, skipGroupTokens: 1}) {
		t.Error(err, d.Diagnosis(), d.Counts())
	}
	if want := (Event{Kind: Stored, Tier: Device, Group: 1, Attention: AttentionMamba,
		Blocks: []BlockHash{3}}); len(m.Events) != 2 || !sameEvent(m.Events[1], want) {
		t.Errorf("%+v", m.Events)
	}
}

// Pairs of tokens, and lookahead tokens, give the hashes of an EAGLE hasher.
func TestEagle(t *testing.T) {
	tokens := count(100, 9)
	want := mustHasher(t, 4, Space{}, true).Hash(nil, tokens)
	bigrams := make([]any, 8)
	for i := range bigrams {
		bigrams[i] = []any{tokens[i], tokens[i+1]}
	}
	for name, event := range map[string]any{
		"pairs":           store(names(1, 2), nil, bigrams),
		"pairs, an array": []any{"BlockStored", names(1, 2), nil, bigrams, 4, nil},
		"lookahead": store(names(1, 2), nil, tokens[:8],
			pair{"lookahead_token_ids", []any{[]any{tokens[4]}, []any{tokens[8]}}}),
		"lookahead, plain": store(names(1, 2), nil, tokens[:8],
			pair{"lookahead_token_ids", []any{tokens[4], tokens[8]}}),
	} {
		d := mustDecoder(t, SGLang, 4)
		if m := decode(t, d, message(t, event)); len(m.Events) != 1 || !slices.Equal(m.Events[0].Locals, want) ||
			m.Events[0].Lookahead != 1 {
			t.Errorf("%s: %+v, want %x and a lookahead of 1", name, m.Events, want)
		}
	}
}

// A drafter with a longer lookahead.
func TestLongLookahead(t *testing.T) {
	tokens := count(100, 11)
	h, err := NewLookaheadHasher(4, 3, Space{})
	if err != nil {
		t.Fatal(err)
	}
	d := mustDecoder(t, VLLM, 4)
	m := decode(t, d, message(t, store(names(1, 2), nil, tokens[:8],
		pair{"lookahead_token_ids", []any{tokens[4:7], tokens[8:]}})))
	if want := h.Hash(nil, tokens); len(want) != 2 || !slices.Equal(m.Events[0].Locals, want) ||
		m.Events[0].Lookahead != 3 {
		t.Errorf("%+v, want %x and a lookahead of 3", m.Events, want)
	}
	// No query could find all blocks of an event with different lookaheads.
	m = decode(t, d, message(t,
		store(names(1, 2), nil, tokens[:8], pair{"lookahead_token_ids", []any{tokens[4:7], tokens[8:10]}}),
		store(names(1, 2), nil, tokens[:8], pair{"lookahead_token_ids", []any{nil, tokens[8:]}}),
	), skipLookahead, skipLookahead)
	if len(m.Events) != 0 {
		t.Errorf("%+v", m.Events)
	}
}

func TestParentZero(t *testing.T) {
	d := mustDecoder(t, VLLM, 4)
	has := func(event any) bool {
		t.Helper()
		return decode(t, d, message(t, event)).Events[0].HasParent
	}
	if has(store(names(1), 0, count(0, 4))) {
		t.Error("0 is a parent although no block was ever called so")
	}
	if has(store(names(0), 1, nil)) || !has(store(names(2), 0, count(0, 4))) {
		t.Error("0 is no parent although a block was called so")
	}
	d.Reset()
	if has(store(names(3), 0, count(0, 4))) {
		t.Error("0 is a parent in a new life")
	}
}

func TestDecodeLimits(t *testing.T) {
	testkit.Sequential(t)
	d := mustDecoder(t, VLLM, 1)
	tooMany := make([]uint32, maxEventTokens+1)
	blocks := make([]any, maxEventTokens+1)
	for i := range blocks {
		blocks[i] = i
	}
	m, err := d.Decode(message(t,
		store(names(1), nil, tooMany, pair{"block_size", 1}),
		store(blocks, nil, nil, pair{"block_size", 1}),
		store(blocks[1:], nil, tooMany[1:], pair{"block_size", 1}),
	))
	if err != nil || len(m.Events) != maxEventTokens/MaxBlocksPerEvent || d.Counts() != (SkipCounts{skipTooLarge: 2}) {
		t.Errorf("%d events, %v, %v", len(m.Events), err, d.Counts())
	}
	// Large unused buffers are freed.
	for range 2 {
		if _, err := d.Decode(message(t, []any{"AllBlocksCleared"})); err != nil {
			t.Fatal(err)
		}
	}
	if cap(d.blocks) > 1<<16 || cap(d.locals) > 1<<16 {
		t.Errorf("room for %d blocks is kept", cap(d.blocks))
	}
	large := make([]byte, maxPayload+1)
	if _, err := d.Decode(large); !errors.Is(err, ErrMalformed) {
		t.Errorf("a message of %d bytes: %v", len(large), err)
	}
}

func TestUndecodableMessages(t *testing.T) {
	good := message(t, store(names(1, 2), nil, count(0, 8)), []any{"BlockRemoved", names(1), "GPU", 0})
	want := []Event{
		{Kind: Stored, Tier: Device, Blocks: []BlockHash{1, 2}, Locals: locals(t, 4, Space{}, count(0, 8))},
		{Kind: Removed, Tier: Device, Blocks: []BlockHash{1}},
	}
	d := mustDecoder(t, VLLM, 4)
	bad := [][]byte{
		nil, {msgp.CodeNil}, {0xc1}, pack(t, []any{1.5}), pack(t, []any{}), pack(t, "x"), pack(t, []any{1.5, nil}),
		pack(t, []any{1.5, 7, 0}),
		pack(t, pairs{{"ts", 1.5}}), pack(t, pairs{{"ts", 1.5}, {"events", nil}}),
		pack(t, pairs{{"events", []any{}}, {"events", []any{}}}),
	}
	for i := range good[:len(good)-1] {
		bad = append(bad, good[:i])
	}
	for _, payload := range bad {
		if m, err := d.Decode(payload); !errors.Is(err, ErrMalformed) || m.Events != nil {
			t.Errorf("%x: %+v, %v", payload, m, err)
		} else if !strings.Contains(err.Error(), "vLLM message") {
			t.Errorf("%x: %v does not name the engine", payload, err)
		}
		if m := decode(t, d, good); !reflect.DeepEqual(m.Events, want) {
			t.Fatalf("after %x: %+v", payload, m.Events)
		}
	}
	// Bytes after a message are ignored.
	if m := decode(t, d, append(slices.Clone(good), 0xc1)); !reflect.DeepEqual(m.Events, want) {
		t.Errorf("with a byte after it: %+v", m.Events)
	}
}

// A removal with unreadable names removes the readable ones. A clear is applied with any values in other fields.
func TestWhatTakesAwayIsTaken(t *testing.T) {
	d := mustDecoder(t, VLLM, 4)
	m, err := d.Decode(message(t,
		[]any{"BlockRemoved", names(1, "?", 2), "GPU"},
		pairs{{"type", "AllBlocksCleared"}, {"medium", 7}, {"locality", "REMOTE"}, {"block_hashes", "?"}},
		[]any{"TierBlocksCleared", "CPU"},
		[]any{"TierBlocksCleared"},
	))
	want := []Event{
		{Kind: Removed, Tier: Device, Blocks: []BlockHash{1, 2}},
		{Kind: Cleared, Reason: ReasonEngine},
		{Kind: Cleared, Tier: Host, Reason: ReasonEngine},
		{Kind: Cleared, Reason: ReasonEngine},
	}
	if err != nil || !slices.EqualFunc(m.Events, want, sameEvent) || d.Counts() != (SkipCounts{skipHash: 1}) {
		t.Errorf("%+v, %v, %v", m.Events, err, d.Counts())
	}
}

func TestNameSetTwin(t *testing.T) {
	r := rand.New(rand.NewPCG(11, 12))
	var s nameSet
	for range 5000 {
		list := make([]BlockHash, r.IntN(200))
		span := uint64(1) << r.IntN(64)
		for i := range list {
			list[i] = BlockHash(r.Uint64N(span)) << r.IntN(3)
		}
		parent, hasParent := BlockHash(r.Uint64N(span)), r.IntN(2) == 0
		seen := map[BlockHash]bool{}
		want := false
		if hasParent {
			seen[parent] = true
		}
		for _, name := range list {
			want = want || seen[name]
			seen[name] = true
		}
		if got := s.repeats(list, parent, hasParent); got != want {
			t.Fatalf("%x after %x (%v): %v, want %v", list, parent, hasParent, got, want)
		}
	}
	s.round = 1<<32 - 1 // the rounds wrap around: old marks must not count as new ones
	for i := range s.rounds {
		s.rounds[i] = 1
	}
	list := make([]BlockHash, 20)
	for i := range list {
		list[i] = BlockHash(i)
	}
	if s.repeats(list, 0, false) || !s.repeats(append(list, 3), 0, false) {
		t.Error("wrong after the marks began anew")
	}
}

func TestNewDecoderRefuses(t *testing.T) {
	for _, cfg := range []DecoderConfig{{}, {Engine: VLLM}, {Engine: AnyEngine + 1, BlockSize: 16}, {BlockSize: 16},
		{Engine: SGLang, BlockSize: MaxBlockSize + 1}} {
		if _, err := NewDecoder(cfg); err == nil {
			t.Errorf("%+v makes a decoder", cfg)
		}
	}
	for name, want := range map[string]Engine{"vllm": VLLM, "SGLang": SGLang, "sglang": SGLang} {
		if e, err := EngineOf(name); err != nil || e != want {
			t.Errorf("%s: %s, %v", name, e, err)
		}
	}
	if _, err := EngineOf("tgi"); err == nil || !strings.Contains(err.Error(), `"tgi"`) {
		t.Error(err)
	}
}

func FuzzVLLM(f *testing.F)   { fuzzDecoder(f, VLLM) }
func FuzzSGLang(f *testing.F) { fuzzDecoder(f, SGLang) }

// fuzzDecoder decodes any bytes: all events can be published, and a second decoding has equal results.
func fuzzDecoder(f *testing.F, engine Engine) {
	for seed := range uint64(20) {
		c := chooser{rand.New(rand.NewPCG(13, seed)), 2}
		f.Add(pack(f, c.message()))
	}
	f.Add(vllmStore(f, true, 3, 2))
	for _, path := range capturePaths(f) {
		if strings.Contains(path, strings.ToLower(engine.String())) {
			for _, payload := range capturedPayloads(f, path) {
				f.Add(payload)
			}
		}
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		checkParts(t, mustDecoder(t, engine, 2), mustDecoder(t, engine, 2), payload, partBound{1, 2})
		d := mustDecoder(t, engine, 2)
		m, err := d.Decode(payload)
		if err != nil {
			if !errors.Is(err, ErrMalformed) || m.Events != nil {
				t.Fatalf("%+v, %v", m, err)
			}
			return
		}
		blocks := 0
		for _, e := range m.Events {
			if err := e.check(); err != nil {
				t.Fatal(err)
			}
			if e.Kind != Cleared && len(e.Blocks) == 0 && !e.Attention.Bounds() {
				t.Fatal("an event without blocks")
			}
			blocks += len(e.Blocks)
		}
		if blocks > len(payload) {
			t.Fatalf("%d blocks from %d bytes", blocks, len(payload))
		}
		// The events can be encoded, and decoded again with an equal result.
		encoded, err := AppendBatch(nil, &Batch{Events: m.Events})
		if err != nil {
			t.Fatal(err)
		}
		var b Batch
		if err := DecodeBatch(encoded, &b); err != nil || !slices.EqualFunc(b.Events, m.Events, sameEvent) {
			t.Fatalf("%v\n%+v, want\n%+v", err, b.Events, m.Events)
		}
		again, err := mustDecoder(t, engine, 2).Decode(payload)
		if err != nil || !slices.EqualFunc(again.Events, b.Events, sameEvent) {
			t.Fatalf("%v\n%+v, want\n%+v", err, again.Events, b.Events)
		}
		// The message is decoded with every configured engine; without a sign, all results are equal.
		unknown := mustDecoder(t, AnyEngine, 2)
		read, err := unknown.Decode(payload)
		if e, _ := unknown.Engine(); err != nil || (e == engine || e == AnyEngine) &&
			!slices.EqualFunc(read.Events, b.Events, sameEvent) {
			t.Fatalf("engine %s: %v\n%+v, want\n%+v", e, err, read.Events, b.Events)
		}
	})
}
