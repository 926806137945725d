package events

import (
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// statement is one known fact about engines' streams: a form or a fault. testdata/COVERAGE.md lists all facts, and the
// tests of each.
type statement struct {
	says   string
	engine Engine // default VLLM
	events []any  // of one message
	want   []Event
	passed []Skip
}

func (s statement) check(t *testing.T) {
	t.Run(s.says, func(t *testing.T) {
		engine := s.engine
		if engine == 0 {
			engine = VLLM
		}
		m := decode(t, mustDecoder(t, engine, 4), message(t, s.events...), s.passed...)
		if !slices.EqualFunc(m.Events, s.want, sameEvent) {
			t.Errorf("\n%+v, want\n%+v", m.Events, s.want)
		}
	})
}

// device returns a stored event of the prompt 1, 2, 3… with these names and the given changes.
func device(t *testing.T, first uint32, names []BlockHash, changes ...func(*Event)) Event {
	e := Event{Kind: Stored, Tier: Device, Blocks: names,
		Locals: locals(t, 4, Space{}, count(first, uint32(4*len(names))))}
	for _, c := range changes {
		c(&e)
	}
	return e
}

func after(parent BlockHash) func(*Event) {
	return func(e *Event) { e.HasParent, e.Parent = true, parent }
}

func ofSession(id string) func(*Event) {
	return func(e *Event) { e.Session = HashSession(id) }
}

func of(a Attention, g GroupIndex) func(*Event) {
	return func(e *Event) { e.Attention, e.Group = a, g }
}

func removed(tier Tier, names ...BlockHash) Event {
	return Event{Kind: Removed, Tier: tier, Blocks: names}
}

var cleared = Event{Kind: Cleared, Reason: ReasonEngine}

// TestWhatEnginesWrite: the forms of events.
func TestWhatEnginesWrite(t *testing.T) {
	one, tokens := []BlockHash{1}, count(1, 4)
	digest32, digest16 := make([]byte, 32), make([]byte, 16)
	for i := range digest32 {
		digest32[i] = byte(i)
	}
	copy(digest16, digest32)
	array := func(n int) []any { // a stored event of the first n elements
		return []any{"BlockStored", names(1), nil, tokens, 4, nil, "GPU", nil, []any{nil}, 0, "full_attention", nil,
			"one more", 7}[:n]
	}
	for _, s := range []statement{
		// Encodings.
		{says: "an array and a map in one message",
			events: []any{array(7), store(names(2), 1, count(5, 4))},
			want:   []Event{device(t, 1, one), device(t, 5, []BlockHash{2}, after(1))}},
		{says: "keys of a map may come in any order",
			events: []any{pairs{{"block_size", 4}, {"token_ids", tokens}, {"block_hashes", names(1)},
				{"type", "BlockStored"}}},
			want: []Event{device(t, 1, one)}},
		{says: "fields that are nil are left out of maps",
			events: []any{pairs{{"type", "BlockStored"}, {"block_hashes", names(1)}, {"token_ids", tokens},
				{"block_size", 4}}},
			want: []Event{device(t, 1, one)}},
		{says: "fields that are nil stand in arrays",
			events: []any{[]any{"BlockStored", names(1), nil, tokens, 4, nil, nil, nil, nil, nil, nil, nil}},
			want:   []Event{device(t, 1, one)}},
		{says: "5 elements: 0.9 without an adapter", events: []any{array(5)}, want: []Event{device(t, 1, one)}},
		{says: "6 elements: lora_id", events: []any{array(6)}, want: []Event{device(t, 1, one)}},
		{says: "7 elements: medium", events: []any{array(7)}, want: []Event{device(t, 1, one)}},
		{says: "8 elements: lora_name", events: []any{array(8)}, want: []Event{device(t, 1, one)}},
		{says: "9 elements: extra_keys", events: []any{array(9)}, want: []Event{device(t, 1, one)}},
		{says: "10 elements: group_idx", events: []any{array(10)}, want: []Event{device(t, 1, one)}},
		{says: "11 elements: kv_cache_spec_kind", events: []any{array(11)},
			want: []Event{device(t, 1, one, of(AttentionFull, 0))}},
		{says: "12 elements: kv_cache_spec_sliding_window", events: []any{array(12)},
			want: []Event{device(t, 1, one, of(AttentionFull, 0))}},
		{says: "elements to come", events: []any{array(14)}, want: []Event{device(t, 1, one, of(AttentionFull, 0))}},
		{says: "a removal of 2, 3 and 4 elements, and a removal with a kind", events: []any{
			[]any{"BlockRemoved", names(1)}, []any{"BlockRemoved", names(2), "CPU"}, []any{"BlockRemoved", names(3),
				"GPU", 1}, []any{"BlockRemoved", names(4), "GPU", 1, "mamba", 64}},
			want: []Event{removed(Device, 1), removed(Host, 2), {Kind: Removed, Tier: Device, Group: 1,
				Blocks: []BlockHash{3}}, {Kind: Removed, Tier: Device, Group: 1, Blocks: []BlockHash{4}}}},
		{says: "a clear as array and as map", events: []any{[]any{"AllBlocksCleared"},
			pairs{{"type", "AllBlocksCleared"}}}, want: []Event{cleared, cleared}},
		{says: "an unknown type is passed over, and nothing else",
			events: []any{pairs{{"type", "BlockInactive"}, {"block_hashes", names(1)}}, array(7)},
			want:   []Event{device(t, 1, one)}, passed: []Skip{skipUnknownType}},
		{says: "proposed fields do not disturb", events: []any{
			store(names(1), nil, tokens, pair{"remaining_copy_counts", []int{2}}, pair{"skipped_parent_block_hash", 9},
				pair{"skipped_token_ids", tokens}, pair{"skipped_extra_keys", nil},
				pair{"event_version", 2}, pair{"ownership", "tier-2"}, pair{"kv_cache_spec_sliding_window", 64})},
			want: []Event{device(t, 1, one)}},
		{says: "TierBlocksCleared clears its medium alone",
			events: []any{pairs{{"type", "TierBlocksCleared"}, {"medium", "CPU"}}}, want: []Event{{Kind: Cleared,
				Tier: Host, Reason: ReasonEngine}}},
		{says: "a wrong type in a field that only describes is nil, and counted",
			events: []any{store(names(1), nil, tokens, pair{"group_idx", "x"}, pair{"kv_cache_spec_kind", 3})},
			want:   []Event{device(t, 1, one)}, passed: []Skip{skipField, skipField}},
		{says: "locality LOCAL or none is ours, all else is not", events: []any{
			store(names(1), nil, tokens, pair{"locality", "LOCAL"}), store(names(2), 1, count(5, 4),
				pair{"locality", "REMOTE"}),
			pairs{{"type", "BlockRemoved"}, {"block_hashes", names(1)}, {"locality", "REMOTE"}}},
			want: []Event{device(t, 1, one)}, passed: []Skip{skipRemote, skipRemote}},

		// Values.
		{says: "a hash above 2^63", events: []any{store(names(uint64(1<<63+5)), nil, tokens)},
			want: []Event{device(t, 1, []BlockHash{1<<63 + 5})}},
		{says: "a signed hash has the same bits", engine: SGLang, events: []any{store(names(-5), -6, tokens)},
			want: []Event{device(t, 1, []BlockHash{1<<64 - 5}, after(1<<64-6))}},
		{says: "of vLLM's digest the last 8 bytes", events: []any{[]any{"BlockRemoved", names(digest32, digest16)}},
			want: []Event{removed(Device, 0x18191a1b1c1d1e1f, 0x08090a0b0c0d0e0f)}},
		{says: "of SGLang's digest the first 8 bytes", engine: SGLang,
			events: []any{[]any{"BlockRemoved", names(digest32)}}, want: []Event{removed(Device, 0x0001020304050607)}},
		{says: "hashes in digits", events: []any{[]any{"BlockRemoved", names("15760518052499183552", "-5", "0xab",
			hex.EncodeToString(digest32))}},
			want: []Event{removed(Device, 15760518052499183552, 1<<64-5, 0xab, 0x18191a1b1c1d1e1f)}},
		{says: "media in any case, of all engines", engine: VLLM, events: []any{
			[]any{"BlockRemoved", names(1), "GPU"}, []any{"BlockRemoved", names(1), nil}, []any{"BlockRemoved",
				names(1), "cpu"}, []any{"BlockRemoved", names(1), "CPU"},
			[]any{"BlockRemoved", names(1), "STORAGE"}, []any{"BlockRemoved", names(1), "FS"}, []any{"BlockRemoved",
				names(1), "OBJ"}, []any{"BlockRemoved", names(1), "CPU_PINNED"},
			[]any{"BlockRemoved", names(1), "CPU_TIER1"}, []any{"BlockRemoved", names(1),
				"CPU_TIER2"}, []any{"BlockRemoved", names(1), "DISK"}, []any{"BlockRemoved", names(1), "EXTERNAL"},
			[]any{"BlockRemoved", names(1), "TAPE"}},
			want: []Event{removed(Device, 1), removed(Device, 1), removed(Host, 1), removed(Host, 1), removed(Disk, 1),
				removed(Disk, 1), removed(Disk, 1), removed(Host, 1),
				removed(Host, 1), removed(Disk, 1), removed(Disk, 1), removed(External, 1)},
			passed: []Skip{skipMedium}},
		{says: "kinds of attention, of which three make up a prefix", events: func() (list []any) {
			for _, kind := range []string{"full_attention", "mla_attention", "sink_full_attention", "unknown",
				"sliding_window", "sliding_window_mla", "mamba", "chunked_local_attention",
				"encoder_only_attention", "cross_attention", "something new"} {
				list = append(list, store(names(1), nil, tokens, pair{"kv_cache_spec_kind", kind},
					pair{"group_idx", 3}))
			}
			return list
		}(), want: []Event{device(t, 1, one, of(AttentionFull, 3)), device(t, 1, one, of(AttentionMLA, 3)), device(t, 1,
			one, of(AttentionSinkFull, 3)), device(t, 1, one, of(AttentionUnknown, 3)),
			device(t, 1, one, of(AttentionSlidingWindow, 3)), device(t, 1, one, of(AttentionSlidingMLA, 3)), device(t,
				1, one, of(AttentionMamba, 3)), device(t, 1, one, of(AttentionChunkedLocal, 3)),
			device(t, 1, one, of(AttentionEncoderOnly, 3)), device(t, 1, one, of(AttentionCross, 3)), device(t, 1, one,
				of(AttentionOther, 3))}},
		{says: "extra keys: the adapter, items with their offsets, the salt, embeddings", events: []any{
			store(names(1, 2), nil, count(1, 8), pair{"lora_name", "a"},
				pair{"extra_keys", []any{[]any{"a", []any{"img", 2}, "tenant", digest32},
					[]any{"a", []any{"img", -2}}}})},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: []BlockHash{1, 2},
				Locals: mustHasher(t, 4, Space{LoRA: "a", Salt: "tenant"}, false).
					HashMedia(nil, count(1, 8), [][]BlockMedia{{{MediaHash("img"), 2},
						{PayloadDigest(digest32), NoOffset}}, {{MediaHash("img"), -2}}})}}},
		{says: "an adapter's name in extra keys is no item",
			events: []any{store(names(1), 9, tokens, pair{"lora_name", "a"}, pair{"extra_keys", []any{[]any{"a"}}})},
			want: []Event{{Kind: Stored, Tier: Device, HasParent: true, Parent: 9, Blocks: one,
				Locals: locals(t, 4, Space{LoRA: "a"}, tokens)}}},
		{says: "an item as a bare identifier, up to 0.22",
			events: []any{[]any{"BlockStored", names(1), 9, tokens, 4, nil, "GPU", nil, []any{[]any{"img"}}}},
			want: []Event{{Kind: Stored, Tier: Device, HasParent: true, Parent: 9, Blocks: one,
				Locals: mustHasher(t, 4, Space{}, false).HashMedia(nil, tokens, [][]BlockMedia{{{MediaHash("img"), NoOffset}}})}}},
		{says: "lora_name counts before lora_id",
			events: []any{store(names(1), nil, tokens, pair{"lora_id", 3}, pair{"lora_name", "a"})},
			want:   []Event{{Kind: Stored, Tier: Device, Blocks: one, Locals: locals(t, 4, Space{LoRA: "a"}, tokens)}}},
		{says: "an adapter and a tenant of one name are two spaces", events: []any{
			store(names(1), nil, tokens, pair{"lora_name", "x"}, pair{"extra_keys", []any{[]any{"x"}}}), store(names(2),
				nil, tokens, pair{"extra_keys", []any{[]any{"x"}}})},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one, Locals: locals(t, 4, Space{LoRA: "x"}, tokens)},
				{Kind: Stored, Tier: Device, Blocks: []BlockHash{2}, Locals: locals(t, 4, Space{Salt: "x"}, tokens)}}},

		// Announcements.
		{says: "one event has a step's whole chunk", events: []any{store(func() (list []any) {
			for i := range 2000 {
				list = append(list, i+1)
			}
			return list
		}(), nil, count(1, 8000))}, want: []Event{device(t, 1, func() (list []BlockHash) {
			for i := range 2000 {
				list = append(list, BlockHash(i+1))
			}
			return list
		}())}},
		{says: "two copies are two events, and a removal removes one copy",
			events: []any{array(7), array(7), []any{"BlockRemoved", names(1), "GPU"}},
			want:   []Event{device(t, 1, one), device(t, 1, one), removed(Device, 1)}},
		{says: "events keep their order", events: []any{array(7), []any{"BlockRemoved", names(1), "GPU"}, array(7)},
			want: []Event{device(t, 1, one), removed(Device, 1), device(t, 1, one)}},
		{says: "an edge block that is smaller is passed over once whole ones were announced",
			events: []any{array(7), store(names(2), 1, count(5, 2), pair{"block_size", 2})},
			want:   []Event{device(t, 1, one)}, passed: []Skip{skipPartialBlock}},
		{says: "tokens of more blocks than are named: passed over", events: []any{store(names(1), nil, count(1, 8))},
			passed: []Skip{skipLength}},
		{says: "the same of a sparse group: its names",
			events: []any{store(names(1), nil, count(1, 8), pair{"kv_cache_spec_kind", "sliding_window"})},
			want:   []Event{{Kind: Stored, Tier: Device, Attention: AttentionSlidingWindow, Blocks: one}},
			passed: []Skip{skipGroupTokens}},
		{says: "no names: passed over", events: []any{store(names(), nil, count(1, 8))}, passed: []Skip{skipEmpty}},
		{says: "a placeholder of an offloading connector has names alone",
			events: []any{store(names(1, 2), nil, []any{}, pair{"block_size", 0}, pair{"medium", "CPU"})},
			want:   []Event{{Kind: Stored, Tier: Host, Chunk: ChunkSizeUnknown, Blocks: []BlockHash{1, 2}}}},
		{says: "one that describes itself, but for extra keys: its names",
			events: []any{store(names(1), nil, tokens, pair{"medium", "CPU"})},
			want: []Event{{Kind: Stored, Tier: Host, Chunk: 1, Own: true, Blocks: one, Locals: locals(t, 4, Space{},
				tokens)}}, passed: []Skip{skipCopyTokens}},
		{says: "and with extra keys: its tokens too",
			events: []any{store(names(1), nil, tokens, pair{"medium", "CPU"},
				pair{"extra_keys", []any{[]any{"tenant"}}})},
			want: []Event{{Kind: Stored, Tier: Host, Blocks: one, Locals: locals(t, 4, Space{Salt: "tenant"},
				tokens)}}},
		{says: "tokens that are nil, from connectors",
			events: []any{store(names(1), nil, nil, pair{"medium", "CPU"}, pair{"group_idx", 0})},
			want:   []Event{{Kind: Stored, Tier: Host, Chunk: 1, Blocks: one}}},
		{says: "tokens with a block size of 0: passed over",
			events: []any{store(names(1), nil, tokens, pair{"block_size", 0})}, passed: []Skip{SkipBlockSize}},
		{says: "tokens without a block size: passed over",
			events: []any{pairs{{"type", "BlockStored"}, {"block_hashes", names(1)}, {"token_ids", tokens}}},
			passed: []Skip{SkipBlockSize}},

		// SGLang.
		{says: "SGLang: pages of the size of a token", engine: SGLang,
			events: []any{store(names(1, 2), nil, count(1, 2), pair{"block_size", 1}),
				store(names(3), 2, count(3, 1), pair{"block_size", 1}), store(names(4), 3, count(4, 1), pair{"block_size", 1})},
			passed: []Skip{skipPartialBlock, skipPartialBlock, SkipBlockSize}},
		{says: "SGLang: a map at the place of lora_name has the salt", engine: SGLang,
			events: []any{[]any{"BlockStored", names(1), nil, tokens, 4, nil, "GPU",
				map[string]any{"cache_salt": "tenant", "session_id": "s"}}},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one, Locals: locals(t, 4, Space{Salt: "tenant"},
				tokens), Session: HashSession("s")}}},
		{says: "SGLang: a map at the place of lora_name has the session alone", engine: SGLang,
			events: []any{[]any{"BlockStored", names(1), nil, tokens, 4, nil, "GPU", map[string]any{"session_id": "s"}}},
			want:   []Event{device(t, 1, one, ofSession("s"))}},
		{says: "the session of the request that stored the blocks",
			events: []any{store(names(1), nil, tokens, pair{"session_id", "s"}),
				store(names(2), 1, count(5, 4), pair{"session_id", strings.Repeat("s", maxSession)}),
				store(names(3), 2, count(9, 4), pair{"session_id", ""}), store(names(4), 3, count(13, 4))},
			want: []Event{device(t, 1, one, ofSession("s")), device(t, 5, []BlockHash{2}, after(1),
				ofSession(strings.Repeat("s", maxSession))), device(t, 9, []BlockHash{3}, after(2)), device(t, 13,
				[]BlockHash{4}, after(3))}},
		{says: "a session of a wrong type or too long is none, is counted, and loses no event",
			events: []any{store(names(1), nil, tokens, pair{"session_id", 7}),
				store(names(2), 1, count(5, 4), pair{"session_id", strings.Repeat("s", maxSession+1)}),
				store(names(3), 2, count(9, 4), pair{"session_id", map[string]any{"id": "s"}})},
			want: []Event{device(t, 1, one), device(t, 5, []BlockHash{2}, after(1)), device(t, 9, []BlockHash{3},
				after(2))}, passed: []Skip{skipField, skipField, skipField}},
		{says: "a copy by name has no session: it determines no place",
			events: []any{store(names(1), nil, []any{}, pair{"medium", "CPU"}, pair{"session_id", "s"})},
			want:   []Event{{Kind: Stored, Tier: Host, Blocks: one, Chunk: 1}}},
		{says: "SGLang: the salt is said with every event", engine: SGLang,
			events: []any{store(names(1), nil, tokens, pair{"cache_salt", "tenant"}), store(names(2), 1, count(5, 4))},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one, Locals: locals(t, 4, Space{Salt: "tenant"},
				tokens)}, device(t, 5, []BlockHash{2}, after(1))}},
		{says: "SGLang: many names in one removal", engine: SGLang,
			events: []any{[]any{"BlockRemoved", names(3, 2, 1), "GPU"}}, want: []Event{removed(Device, 3, 2, 1)}},
		{says: "SGLang: a page's way down and up", engine: SGLang,
			events: []any{store(names(1), nil, tokens, pair{"medium", "GPU"}),
				store(names(1), nil, tokens, pair{"medium", "CPU_PINNED"}),
				[]any{"BlockRemoved", names(1), "GPU"}, store(names(1), nil, tokens,
					pair{"medium", "GPU"}), []any{"BlockRemoved", names(1), "CPU_PINNED"}},
			want: []Event{device(t, 1, one), device(t, 1, one, func(e *Event) { e.Tier = Host }), removed(Device, 1),
				device(t, 1, one), removed(Host, 1)}},
		{says: "SGLang: the first message is a clear", engine: SGLang, events: []any{[]any{"AllBlocksCleared"}},
			want: []Event{cleared}},
		{says: "TensorRT-LLM: maps as vLLM's, hashes of either sign",
			events: []any{pairs{{"type", "BlockStored"}, {"block_hashes", names(-7)}, {"parent_block_hash", nil},
				{"token_ids", tokens}, {"block_size", 4}}},
			want: []Event{device(t, 1, []BlockHash{1<<64 - 7})}},
		{says: "Dynamo's mocker: no medium, no lora_id, tokens up to 2^32-1, many names in one removal", events: []any{
			pairs{{"type", "BlockStored"}, {"block_hashes", names(1)}, {"token_ids", []uint32{1, 2, 3, 1<<32 - 1}},
				{"block_size", 4}}, pairs{{"type", "BlockRemoved"}, {"block_hashes", names(1, 2)}}},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one,
				Locals: locals(t, 4, Space{}, []uint32{1, 2, 3, 1<<32 - 1})}, removed(Device, 1, 2)}},
	} {
		s.check(t)
	}
}

// TestWhatStreamsGetWrong: faults from the reports of other indexers' users.
func TestWhatStreamsGetWrong(t *testing.T) {
	one, tokens := []BlockHash{1}, count(1, 4)
	for _, s := range []statement{
		{says: "a parent that was never announced is a parent all the same", events: []any{store(names(1), 99, tokens)},
			want: []Event{device(t, 1, one, after(99))}},
		{says: "skipped blocks that a proposal would name",
			events: []any{store(names(1), 99, tokens, pair{"skipped_parent_block_hash", 98},
				pair{"skipped_token_ids", tokens}, pair{"skipped_extra_keys", []any{nil}})},
			want: []Event{device(t, 1, one, after(99))}},
		{says: "a store without tokens, parent 0, refers to known names",
			events: []any{store(names(1), 0, []any{}, pair{"medium", "CPU"})}, want: []Event{{Kind: Stored, Tier: Host,
				Chunk: 1, Blocks: one}}},
		{says: "parent 0 is none", events: []any{store(names(1), 0, tokens)}, want: []Event{device(t, 1, one)}},
		{says: "parent nil is none", events: []any{store(names(1), nil, tokens)}, want: []Event{device(t, 1, one)}},
		{says: "an optional medium moves no other field", engine: SGLang, events: []any{
			[]any{"BlockStored", names(1), nil, tokens, 4, nil}, []any{"BlockStored", names(2), 1, count(5, 4), 4, nil,
				"GPU"}},
			want: []Event{device(t, 1, one), device(t, 5, []BlockHash{2}, after(1))}},
		{says: "lora_name is absent, and no salt in extra_keys", engine: SGLang,
			events: []any{store(names(1), nil, tokens, pair{"lora_id", 7}, pair{"cache_salt", "tenant"})},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one,
				Locals: locals(t, 4, Space{LoRA: LoRAByID("7"), Salt: "tenant"}, tokens)}}},
		{says: "a removal has no reason: it is of its tier and no other",
			events: []any{[]any{"BlockRemoved", names(1), "GPU"}, []any{"BlockRemoved", names(1), "CPU"}},
			want:   []Event{removed(Device, 1), removed(Host, 1)}},
		{says: "map and array in one fleet, and in one message", events: []any{[]any{"AllBlocksCleared"},
			store(names(1), nil, tokens)}, want: []Event{cleared, device(t, 1, one)}},
		{says: "pairs of tokens", engine: SGLang,
			events: []any{store(names(1), nil, []any{names(1, 2), names(2, 3), names(3, 4), names(4, 5)})},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one, Locals: mustHasher(t, 4, Space{}, true).Hash(nil,
				count(1, 5)), Lookahead: 1}}},
		{says: "tokens beyond 2^31", events: []any{store(names(1), nil, []uint32{1 << 31, 1<<32 - 1, 0, 1})},
			want: []Event{{Kind: Stored, Tier: Device, Blocks: one,
				Locals: locals(t, 4, Space{}, []uint32{1 << 31, 1<<32 - 1, 0, 1})}}},
		{says: "tokens below 0 and beyond 32 bits are none", events: []any{store(names(1), nil, []any{1, 2, 3, -1}),
			store(names(1), nil, []any{1, 2, 3, uint64(1 << 32)})}, passed: []Skip{skipToken, skipToken}},
		{says: "the same block again within an event", events: []any{store(names(1, 1), nil, count(1, 8)),
			store(names(1), 1, tokens)}, passed: []Skip{skipRepeated, skipRepeated}},
		{says: "blocks announced as reused are no copies",
			events: []any{store(names(1), nil, tokens, pair{"origin", "NEW"}),
				store(names(1), nil, tokens, pair{"origin", "REUSED"})},
			want: []Event{device(t, 1, one)}, passed: []Skip{skipReused}},
	} {
		s.check(t)
	}
	// The message has the rank; the shim checks the rank of its connection.
	for _, rank := range []any{3, nil} {
		m := decode(t, mustDecoder(t, VLLM, 4), pack(t, []any{1.5, []any{}, rank}))
		if m.HasRank != (rank != nil) || rank != nil && m.Rank != 3 {
			t.Errorf("rank %v is read as %d, %v", rank, m.Rank, m.HasRank)
		}
	}
	// Envelopes: two elements, three, more, a map.
	for name, payload := range map[string][]byte{
		"two elements": pack(t, []any{1.5, []any{[]any{"AllBlocksCleared"}}}),
		"three":        pack(t, []any{1.5, []any{[]any{"AllBlocksCleared"}}, nil}),
		"more":         pack(t, []any{1.5, []any{[]any{"AllBlocksCleared"}}, 0, "x", 7}),
		"a map": pack(t, pairs{{"ts", 1.5}, {"events", []any{[]any{"AllBlocksCleared"}}},
			{"data_parallel_rank", 0}, {"new", "x"}}),
		"SGLang's map":  pack(t, pairs{{"events", []any{[]any{"AllBlocksCleared"}}}, {"attn_dp_rank", 0}}),
		"whole seconds": pack(t, []any{1, []any{[]any{"AllBlocksCleared"}}, 0}),
	} {
		if m := decode(t, mustDecoder(t, VLLM, 4), payload); !slices.EqualFunc(m.Events, []Event{cleared}, sameEvent) {
			t.Errorf("an envelope of %s: %+v", name, m.Events)
		}
	}
}

// golden has results of the engines' own code; see testdata/README.md.
type golden struct {
	VLLM, SGLang []struct {
		Version, Of string
		Digests     []string
		Names       []string // in the form of events
	}
	Lookahead map[string]struct {
		Payload string
		Tokens  []uint32
		Digests []string
	}
}

// The names of blocks in events, for digests computed by the engines' own code.
func TestNamesOfDigests(t *testing.T) {
	var g golden
	readCapture(t, "testdata/golden.json", &g)
	check := func(engine Engine, version string, digests []string, names []string) {
		t.Helper()
		var raw, digits []any
		for i := range digests {
			raw, digits = append(raw, mustHex(t, digests[i])), append(digits, names[i])
		}
		m := decode(t, mustDecoder(t, engine, 4), message(t, []any{"BlockRemoved", raw, "GPU"},
			[]any{"BlockRemoved", digits, "GPU"}))
		for i, name := range m.Events[0].Blocks {
			got := fmt.Sprint(uint64(name))
			if engine == SGLang {
				got = fmt.Sprint(int64(name))
			}
			if got != names[i] || m.Events[1].Blocks[i] != name {
				t.Errorf("%s %s: %s is called %s and %x, want %s", engine, version, digests[i], got,
					m.Events[1].Blocks[i], names[i])
			}
		}
	}
	for _, v := range g.VLLM {
		check(VLLM, v.Version, v.Digests, v.Names)
	}
	for _, v := range g.SGLang {
		check(SGLang, v.Version, v.Digests, v.Names)
	}
	if len(g.VLLM) < 15 || len(g.SGLang) < 4 {
		t.Errorf("%d and %d vectors", len(g.VLLM), len(g.SGLang))
	}
}

// The announcements of vLLM's own cache with lookahead equal the hashes of a hasher with the same lookahead, without
// further blocks.
func TestLookaheadOfVLLM(t *testing.T) {
	var g golden
	readCapture(t, "testdata/golden.json", &g)
	if len(g.Lookahead) == 0 {
		t.Fatal("no version reads ahead")
	}
	for version, l := range g.Lookahead {
		h, err := NewLookaheadHasher(4, 1, Space{})
		if err != nil {
			t.Fatal(err)
		}
		want := Event{Kind: Stored, Tier: Device, Attention: AttentionFull, Locals: h.Hash(nil, l.Tokens), Lookahead: 1}
		for _, digest := range l.Digests {
			name, ok := VLLM.hashOfDigits([]byte(digest))
			if !ok {
				t.Fatal(digest)
			}
			want.Blocks = append(want.Blocks, name)
		}
		m := decode(t, mustDecoder(t, VLLM, 4), mustHex(t, l.Payload))
		if len(m.Events) != 1 || !sameEvent(m.Events[0], want) || len(want.Blocks) != 2 {
			t.Errorf("%s: %+v, want %+v", version, m.Events, want)
		}
	}
}

// All tests in testdata/COVERAGE.md exist.
func TestCoverageIsReal(t *testing.T) {
	text, err := os.ReadFile("testdata/COVERAGE.md")
	if err != nil {
		t.Fatal(err)
	}
	there := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func (Test\w+)\(`)
	if err := filepath.WalkDir("../..", func(path string, _ fs.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		source, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(source, -1) {
			there[string(m[1])] = true
		}
		return err
	}); err != nil {
		t.Fatal(err)
	}
	named := regexp.MustCompile("`(Test\\w+)`").FindAllSubmatch(text, -1)
	for _, m := range named {
		if name := string(m[1]); !there[name] {
			t.Errorf("there is no test %s", name)
		}
	}
	if len(named) < 40 {
		t.Errorf("%d tests are named", len(named))
	}
}
