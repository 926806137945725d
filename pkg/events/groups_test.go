package events

import (
	"reflect"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

func TestParseGroups(t *testing.T) {
	full := GroupSpec{Kind: AttentionFull}
	for text, want := range map[string][]GroupSpec{
		"full":                   {full},
		"full, swa:1024,mamba":   {full, {Kind: AttentionSlidingWindow, Window: 1024}, {Kind: AttentionMamba}},
		"mla:eagle,chunked:8192": {{Kind: AttentionMLA, Drops: true}, {Kind: AttentionChunkedLocal, Window: 8192}},
		"swa:128:eagle,full:eagle": {{Kind: AttentionSlidingWindow, Window: 128, Drops: true},
			{Kind: AttentionFull, Drops: true}},
	} {
		if got, err := ParseGroups(text); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q: %+v, %v; want %+v", text, got, err, want)
		}
	}
	for text, why := range map[string]string{
		"": "want full", "full,": "want full", "window:8": "want full", "swa": "missing", "swa:eagle": "missing",
		"swa:0": "not a number", "swa:x": "not a number",
		"full:8": "unexpected", "mamba:eagle:8": "unexpected", "swa:99999999999": "not a number",
	} {
		if _, err := ParseGroups(text); err == nil || !strings.Contains(err.Error(), why) {
			t.Errorf("%q: %v, want an error with %q", text, err, why)
		}
	}
}

// TestGroupsOfEvents decodes the groups of events, with and without a configuration of groups.
func TestGroupsOfEvents(t *testing.T) {
	configured := []GroupSpec{{Kind: AttentionFull, Drops: true}, {Kind: AttentionSlidingWindow, Window: 24},
		{Kind: AttentionChunkedLocal, Window: 64}}
	swa := map[string]any{"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 12}
	for name, c := range map[string]struct {
		groups []GroupSpec
		fields map[string]any
		want   Event
	}{
		"a window":                  {nil, swa, Event{Group: 1, Attention: AttentionSlidingWindow, Window: 12}},
		"a window in the event too": {configured, swa, Event{Group: 1, Attention: AttentionSlidingWindow, Window: 12}},
		"a window by configuration": {configured, map[string]any{"group_idx": 1, "kv_cache_spec_kind": "sliding_window"},
			Event{Group: 1, Attention: AttentionSlidingWindow, Window: 24}},
		"a kind by configuration": {configured, map[string]any{"group_idx": 2},
			Event{Group: 2, Attention: AttentionChunkedLocal, Window: 64}},
		"a chunk of unknown size": {nil,
			map[string]any{"group_idx": 2, "kv_cache_spec_kind": "chunked_local_attention"}, Event{Group: 2,
				Attention: AttentionChunkedLocal}},
		"a group beyond the configuration": {configured, map[string]any{"group_idx": 3, "kv_cache_spec_kind": "mamba"},
			Event{Group: 3, Attention: AttentionMamba}},
		"a draft model": {configured, nil, Event{Attention: AttentionFull, Drops: true}},
		"a window in another group": {nil, map[string]any{"kv_cache_spec_kind": "full_attention",
			"kv_cache_spec_sliding_window": 12}, Event{Attention: AttentionFull}},
		"a window of blocks of its own": {nil, map[string]any{"group_idx": 1, "kv_cache_spec_kind": "sliding_window",
			"kv_cache_spec_sliding_window": 12, "block_size": 8}, Event{Group: 1, Attention: AttentionSlidingWindow}},
		"a window of unknown blocks": {nil, map[string]any{"group_idx": 1, "kv_cache_spec_kind": "sliding_window",
			"kv_cache_spec_sliding_window": 12, "block_size": 0, "token_ids": []int{}},
			Event{Group: 1, Attention: AttentionSlidingWindow}},
		"a group that keeps no block": {nil, map[string]any{"group_idx": 1, "kv_cache_spec_kind": "sliding_window",
			"kv_cache_spec_sliding_window": 12, "block_hashes": []int{}},
			Event{Group: 1, Attention: AttentionSlidingWindow, Window: 12}},
		"a draft model that reads ahead": {configured, map[string]any{"lookahead_token_ids": []int{9}},
			Event{Attention: AttentionFull, Lookahead: 1}},
		"SGLang's windows": {configured[:2], map[string]any{"sglang": true}, Event{Attention: AttentionFull, Window: 1,
			Drops: true}},
		"SGLang's full attention": {configured[:1], map[string]any{"sglang": true},
			Event{Attention: AttentionFull, Drops: true}},
	} {
		engine := VLLM
		if c.fields["sglang"] != nil {
			engine = SGLang
		}
		fields := map[string]any{"type": "BlockStored", "block_hashes": []int{5}, "token_ids": []int{1, 2, 3, 4},
			"block_size": 4, "medium": "GPU"}
		for k, v := range c.fields {
			fields[k] = v
		}
		payload, err := msgpack.Marshal([]any{1.5, []any{fields}})
		if err != nil {
			t.Fatal(err)
		}
		d, err := NewDecoder(DecoderConfig{Engine: engine, BlockSize: 4, Groups: c.groups})
		if err != nil {
			t.Fatal(err)
		}
		m, err := d.Decode(payload)
		if err != nil || len(m.Events) != 1 {
			t.Fatalf("%s: %+v, %v", name, m, err)
		}
		got := m.Events[0]
		blocks := len(got.Blocks)
		got.Blocks, got.Locals = nil, nil
		c.want.Kind, c.want.Tier = Stored, Device
		if !reflect.DeepEqual(got, c.want) || (blocks == 0) != (name == "a group that keeps no block") {
			t.Errorf("%s: %+v with %d blocks, want %+v", name, got, blocks, c.want)
		}
	}
}

// TestMainGroupOfAnotherBlockSize: the index lacks the blocks of such a group, so depths are upper bounds.
func TestMainGroupOfAnotherBlockSize(t *testing.T) {
	d, err := NewDecoder(DecoderConfig{Engine: VLLM, BlockSize: 4})
	if err != nil {
		t.Fatal(err)
	}
	decode := func(group, size, blocks int) []Event {
		t.Helper()
		payload, err := msgpack.Marshal([]any{1.5, []any{map[string]any{
			"type": "BlockStored", "block_hashes": []int{5, 6}[:blocks], "token_ids": []int{1, 2, 3, 4}[:size*blocks],
			"block_size": size, "medium": "GPU",
			"group_idx": group, "kv_cache_spec_kind": "full_attention",
		}}})
		if err != nil {
			t.Fatal(err)
		}
		m, err := d.Decode(payload)
		if err != nil {
			t.Fatal(err)
		}
		return m.Events
	}
	for i, c := range []struct {
		group, size, blocks, events int
		window                      uint32
	}{
		{0, 4, 1, 1, 0},
		{0, 2, 1, 0, 0}, {0, 4, 1, 1, 0}, // a tail of the same group
		{1, 2, 1, 0, 0}, {0, 4, 1, 1, 0}, // a tail of a group without whole blocks so far
		{1, 2, 2, 0, 0}, {0, 4, 1, 1, unannounced},
		{1, 4, 1, 1, unannounced}, {0, 4, 1, 1, 0}, // the group has whole blocks after all
	} {
		if got := decode(c.group, c.size, c.blocks); len(got) != c.events || c.events > 0 && got[0].Window != c.window {
			t.Errorf("event %d: %+v, want %d with window %d", i, got, c.events, c.window)
		}
	}
	decode(2, 2, 2)
	if got := decode(0, 4, 1); got[0].Window != unannounced {
		t.Errorf("with a further group: window %d", got[0].Window)
	}
	d.Reset()
	if got := decode(0, 4, 1); got[0].Window != 0 {
		t.Errorf("a new engine: window %d", got[0].Window)
	}
}
