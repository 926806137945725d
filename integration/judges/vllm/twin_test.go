package vllm

import (
	"encoding/binary"
	"fmt"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// tell sends the next message with the given events to a twin.
func tell(t *testing.T, into *twin, evs ...map[string]any) {
	t.Helper()
	if err := into.apply(encode(t, len(into.messages), evs...)); err != nil {
		t.Fatal(err)
	}
}

func encode(t *testing.T, seq int, evs ...map[string]any) [][]byte {
	t.Helper()
	payload, err := msgpack.Marshal([]any{1.5, evs, 0})
	if err != nil {
		t.Fatal(err)
	}
	return [][]byte{{}, binary.BigEndian.AppendUint64(nil, uint64(seq)), payload}
}

// Events of blocks of two tokens, in the form of vLLM 0.32.
func stored(group int, kind string, window any, parent any, names []int, tokens ...int) map[string]any {
	return map[string]any{
		"type": "BlockStored", "block_hashes": names, "parent_block_hash": parent, "token_ids": tokens,
		"block_size": 2, "lora_id": nil, "medium": "GPU", "lora_name": nil,
		"group_idx": group, "kv_cache_spec_kind": kind, "kv_cache_spec_sliding_window": window,
	}
}

func full(parent any, names []int, tokens ...int) map[string]any {
	return stored(0, "full_attention", nil, parent, names, tokens...)
}

func window(names ...int) map[string]any {
	return stored(1, "sliding_window", 4, nil, names)
}

func removed(group int, names ...int) map[string]any {
	return map[string]any{"type": "BlockRemoved", "block_hashes": names, "medium": "GPU", "group_idx": group}
}

var cleared = map[string]any{"type": "AllBlocksCleared"}

func of(tokens ...uint32) prompt { return prompt{tokens: tokens} }

func wantReusable(t *testing.T, tw *twin, p prompt, want int) {
	t.Helper()
	if got := tw.reusable(p); got != want {
		t.Errorf("%v: %d blocks, want %d", p, got, want)
	}
}

func TestTwinOfFullAttention(t *testing.T) {
	tw := newTwin(2)
	tell(t, tw, full(nil, []int{-11, 12}, 1, 2, 3, 4), full(12, []int{13}, 5, 6))
	wantReusable(t, tw, of(1, 2, 3, 4, 5, 6, 7), 3)
	wantReusable(t, tw, of(1, 2, 3, 9, 5, 6), 1)
	wantReusable(t, tw, of(3, 4), 0)
	wantReusable(t, tw, prompt{tokens: []uint32{1, 2}, salt: "s"}, 0)
	before, _, _ := tw.now()

	tell(t, tw, full(nil, []int{-11}, 1, 2), removed(0, 12, -11)) // of the first block there is another copy
	wantReusable(t, tw, of(1, 2, 3, 4, 5, 6), 1)
	tell(t, tw, cleared)
	wantReusable(t, tw, of(1, 2), 0)
	if n := tw.fullBlocks(); n != 0 {
		t.Errorf("%d blocks are held after all were cleared", n)
	}
	now, _, _ := tw.now()
	p := of(1, 2, 3, 4, 5, 6)
	if !tw.everUsable(p, before, now, 3) || tw.everUsable(p, before+1, now, 2) {
		t.Error("the twin does not keep past states")
	}
	if tw.versionAt(2) != before || tw.versionAt(0) != 0 {
		t.Errorf("the version after two events is %d, want %d", tw.versionAt(2), before)
	}
}

// TestStoredFrom lists the blocks of stored events after a version, also removed ones, in the order of the events.
func TestStoredFrom(t *testing.T) {
	tw := newTwin(2)
	tell(t, tw, full(nil, []int{11, 12}, 1, 2, 3, 4), full(nil, []int{11}, 1, 2))
	before, _, _ := tw.now()
	tell(t, tw, removed(0, 11), full(12, []int{14, 13}, 7, 8, 5, 6), removed(0, 14, 12), full(11, []int{12}, 3, 4))
	if got := fmt.Sprint(tw.storedFrom(before)); got != "[14 13 12]" {
		t.Errorf("stored after version %d: %s", before, got)
	}
	if now, _, _ := tw.now(); len(tw.storedFrom(now)) > 0 {
		t.Error("blocks are stored after the last version")
	}
}

func TestTwinOfTenants(t *testing.T) {
	tw := newTwin(2)
	both := full(nil, []int{21, 22}, 1, 2, 3, 4)
	both["lora_name"], both["extra_keys"] = "a", [][]any{{"a", "s"}, {"a"}}
	tell(t, tw, both)
	wantReusable(t, tw, prompt{[]uint32{1, 2, 3, 4}, "a", "s"}, 2)
	for _, other := range []prompt{{[]uint32{1, 2}, "a", ""}, {[]uint32{1, 2}, "", "s"}, {[]uint32{1, 2}, "b", "s"}} {
		wantReusable(t, tw, other, 0)
	}
}

// A window of four tokens touches the two blocks before a prefix's end.
func TestTwinOfWindows(t *testing.T) {
	tw := newTwin(2)
	p := of(1, 2, 3, 4, 5, 6, 7, 8)
	tell(t, tw, full(nil, []int{1, 2, 3, 4}, 1, 2, 3, 4, 5, 6, 7, 8), window(3, 4))
	wantReusable(t, tw, p, 4)
	wantReusable(t, tw, of(1, 2, 3, 4, 5, 6), 0) // the group lacks the second-last block
	if n := tw.fullyHeld(of(1, 2, 3, 4, 5, 6)); n != 3 {
		t.Errorf("full attention has %d blocks, want 3", n)
	}
	tell(t, tw, window(1))
	wantReusable(t, tw, of(1, 2, 3, 4, 5, 6), 1)
	tell(t, tw, removed(1, 3))
	wantReusable(t, tw, p, 1)
	tell(t, tw, window())
	wantReusable(t, tw, p, 1)
}

func TestTwinRefuses(t *testing.T) {
	for want, message := range map[string][][]byte{
		"message 1 after 0":     encode(t, 1, cleared),
		"missing block":         encode(t, 0, removed(0, 1)),
		`kind "mamba"`:          encode(t, 0, stored(0, "mamba", nil, nil, []int{1}, 1, 2)),
		`type "BlockMoved"`:     encode(t, 0, map[string]any{"type": "BlockMoved"}),
		"2 blocks, 2 tokens":    encode(t, 0, full(nil, []int{1, 2}, 1, 2)),
		"another name":          encode(t, 0, full(nil, []int{1}, 1, 2), full(nil, []int{2}, 1, 2)),
		"a message of 1 frames": {{1}},
	} {
		tw := newTwin(2)
		if err := tw.apply(message); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q", err, want)
		}
		if err := tw.wait(t.Context(), func() bool { return true }); err == nil {
			t.Errorf("%s: the waiting goroutine gets no error", want)
		}
	}
}

func TestClassify(t *testing.T) {
	tw := newTwin(2)
	tell(t, tw, full(nil, []int{1, 2}, 1, 2, 3, 4))
	from, messages, _ := tw.now()
	tell(t, tw, removed(0, 2))
	tell(t, tw, full(1, []int{2, 3}, 3, 4, 5, 6))
	to, _, _ := tw.now()
	p := of(1, 2, 3, 4, 5, 6, 7)
	for i, c := range []struct {
		request request
		under   circumstances

		predicted, reused int
		want              class
	}{
		{request{n: 1}, alone, 2, 2, equal},
		{request{n: 1}, alone, 2, 1, unexplained},
		{request{n: 1}, alone, 2, 3, unexplained},
		{request{n: 1, promptLogprobs: true}, alone, 2, 0, promptLogprobs},
		{request{n: 1, promptLogprobs: true}, alone, 2, 1, unexplained},
		{request{n: 2}, alone, 2, 3, sibling},
		{request{n: 2}, alone, 2, 1, unexplained},
		{request{n: 1}, among, 2, 1, concurrent},
		{request{n: 1}, among, 2, 3, concurrent},
		{request{n: 1}, among, 2, 0, unexplained},
		{request{n: 1}, afterReset, 2, 0, unexplained},
	} {
		c.request.prompt = p
		o := observation{request: c.request, under: c.under, predicted: c.predicted, reused: c.reused}
		o.from, o.to, o.messages = from, to, tw.messagesFrom(messages)
		if got := classify(tw, &o); got != c.want {
			t.Errorf("case %d: %s, want %s", i, got, c.want)
		}
	}
	if !tw.usableAtStep(request{prompt: p}, from, to, 1) || tw.usableAtStep(request{prompt: p}, from, to, 0) {
		t.Error("the step of a look-up is not found")
	}

	_, messages, _ = tw.now()
	tell(t, tw, cleared, full(nil, []int{1}, 1, 2))
	o := observation{request: request{prompt: p, n: 1}, under: afterReset, predicted: 3, from: to, to: to + 2}
	o.messages = tw.messagesFrom(messages)
	if got := classify(tw, &o); got != resetHeldBack {
		t.Errorf("after a reset: %s", got)
	}
}

// The same seed gives the same requests, of every kind.
func TestGenerator(t *testing.T) {
	var runs [2]strings.Builder
	seen := map[string]bool{}
	for i := range runs {
		g := newGenerator(7, 7, 32, true)
		for range 300 {
			r := g.next()
			if n := len(r.prompt.tokens); n == 0 || n > longest || r.n < 1 || r.maxTokens < 1 {
				t.Fatalf("a request of %d tokens: %+v", n, r)
			}
			seen[r.kind] = true
			fmt.Fprintln(&runs[i], r)
			g.answered(r, []uint32{20, 21, 22})
		}
	}
	if runs[0].String() != runs[1].String() {
		t.Error("two runs with the same seed differ")
	}
	for _, k := range kinds {
		if !seen[k.name] {
			t.Errorf("no request is of the kind %s", k.name)
		}
	}
}
