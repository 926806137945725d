package events

import (
	"encoding/hex"
	"encoding/json"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// trtSize is the block size of testdata/tensorrt.json.
const trtSize = 4

type trtMedia struct {
	Hash           string
	Offset, Length uint32
}

func mediaItems(media []trtMedia) (items []MediaItem) {
	for _, m := range media {
		items = append(items, MediaItem{MediaHash(m.Hash), m.Offset, m.Length})
	}
	return items
}

// TestTensorRT decodes messages with the fields of TensorRT-LLM's publisher. A prompt with the same images at the same
// places has the events' hashes. A prompt with another image, with an image elsewhere, or without media has these
// hashes only before the image.
func TestTensorRT(t *testing.T) {
	text, err := os.ReadFile("testdata/tensorrt.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Says    string
		Payload string
		Prompt  []uint32
		Media   []trtMedia
		From    int
		Blocks  int
		LoRA    int  `json:"lora"`
		Passed  bool // a block has a digest without a key in mm_keys
	}
	if err := json.Unmarshal(text, &cases); err != nil || len(cases) < 20 {
		t.Fatal(len(cases), err)
	}
	for _, engine := range []Engine{VLLM, SGLang, AnyEngine} {
		var d *Decoder
		for _, c := range cases {
			if c.From == 0 {
				d = mustDecoder(t, engine, trtSize)
			}
			payload, err := hex.DecodeString(c.Payload)
			if err != nil {
				t.Fatal(err)
			}
			var space Space
			if c.LoRA > 0 {
				space.LoRA = LoRAByID(strconv.Itoa(c.LoRA))
			}
			h := mustHasher(t, trtSize, space, false)
			items, from := mediaItems(c.Media), c.From/trtSize
			want := h.HashItems(nil, c.Prompt, items)[from:][:c.Blocks]
			var got []LocalHash
			var passed []Skip
			if c.Passed {
				passed = append(passed, skipToken)
			}
			for _, e := range decode(t, d, payload, passed...).Events {
				if got = append(got, e.Locals...); e.Tier != Device || len(e.Blocks) != len(e.Locals) {
					t.Errorf("%s: %+v", c.Says, e)
				}
			}
			if !slices.Equal(got, want) {
				t.Errorf("%v, %s: %d, want %d", engine, c.Says, got, want)
			}
			shared := func(items []MediaItem) (n int) {
				other := h.HashItems(nil, c.Prompt, items)[from:]
				for n < len(got) && got[n] == other[n] {
					n++
				}
				return n
			}
			for i, m := range c.Media {
				before := max(0, int(m.Offset)/trtSize-from)
				another, moved := slices.Clone(items), slices.Clone(items)
				another[i].Hash++
				moved[i].Offset++
				if a, m, none := shared(another), shared(moved), shared(nil); a != before || m > before || none > before {
					t.Errorf("%s: %d blocks with another image %d, %d with it elsewhere, %d without; want %d", c.Says, a, i, m,
						none, before)
				}
			}
		}
	}
}

// TestTensorRTTwin generates random prompts in TensorRT-LLM's layout. Two prompts share the leading blocks with equal
// tokens and digests.
func TestTensorRTTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(23, 5))
	const standIns = 1000
	rounds, shared, cut := testkit.Rounds(8000), 0, 0
	for range rounds {
		size := 1 + rng.IntN(6)
		lay := func(segments []segment) (sent []uint32, engine []any, keys [][]any, items []MediaItem) {
			image, index := "", 0
			var names []string
			var indices []int
			for _, s := range segments {
				if s.image == "" {
					sent, engine = append(sent, s.text), append(engine, s.text)
					names, indices = append(names, ""), append(indices, 0)
					continue
				}
				items = append(items, MediaItem{MediaHash(s.image), uint32(len(sent)), uint32(s.length)})
				for k := range s.length {
					if sent = append(sent, uint32(standIns+k)); k == 0 {
						engine = append(engine, s.image)
					} else {
						engine = append(engine, standIns+k)
					}
					names, indices = append(names, s.image), append(indices, k)
				}
			}
			for begin := 0; begin+size <= len(sent); begin += size {
				block := []any{}
				image, index = "", 0
				for i := begin; i < begin+size; i++ {
					if names[i] != "" && (indices[i] == 0 || names[i] != image || indices[i] != index+1) {
						block = append(block, map[string]any{"type": "mm_key", "hash": names[i], "start_offset": indices[i]})
					}
					image, index = names[i], indices[i]
				}
				keys = append(keys, block)
			}
			return sent, engine, keys, items
		}
		segments := make([]segment, 1+rng.IntN(12))
		change := func(at int) {
			segments[at] = segment{text: uint32(rng.IntN(3))}
			if rng.IntN(2) == 0 {
				segments[at] = segment{image: imageNames[rng.IntN(3)], length: 1 + rng.IntN(9)}
			}
		}
		for i := range segments {
			change(i)
		}
		_, engine, keys, _ := lay(segments)
		change(rng.IntN(len(segments)))
		sent, other, _, items := lay(segments)
		if len(keys) == 0 {
			continue
		}
		want := 0
		for i, token := range engine[:len(keys)*size] {
			if i >= len(other) || other[i] != token {
				break
			}
			want = (i + 1) / size
		}
		var blocks []any
		for i := range keys {
			blocks = append(blocks, i+1)
		}
		d := mustDecoder(t, AnyEngine, uint32(size))
		var locals []LocalHash
		split := rng.IntN(len(keys)) // the blocks may come in two events
		for _, part := range [][2]int{{0, split}, {split, len(keys)}} {
			if part[0] == part[1] {
				continue
			}
			var parent any
			if part[0] > 0 {
				parent = part[0]
			}
			for _, e := range decode(t, d, message(t, map[string]any{"type": "BlockStored",
				"block_hashes": blocks[part[0]:part[1]], "parent_block_hash": parent,
				"token_ids": engine[part[0]*size : part[1]*size], "block_size": size, "lora_id": nil, "medium": "GPU",
				"lora_name": nil, "mm_keys": keys[part[0]:part[1]]})).Events {
				locals = append(locals, e.Locals...)
			}
		}
		got, asked := 0, mustHasher(t, uint32(size), Space{}, false).HashItems(nil, sent, items)
		for got < min(len(locals), len(asked)) && locals[got] == asked[got] {
			got++
		}
		if len(locals) != len(keys) || got > want {
			t.Fatalf("blocks of %d, %v: %d blocks in common, want %d", size, segments, got, want)
		}
		if got == want {
			shared++
		} else {
			cut++
		}
	}
	// An event that ends with an image's first token does not show the token's number.
	if shared < rounds*3/4 || cut > rounds/40 {
		t.Errorf("%d prompts shared as in the engine, %d less", shared, cut)
	}
}

// TestTensorRTUnreadable skips events with unreadable mm_keys, which would be credited to wrong prompts.
func TestTensorRTUnreadable(t *testing.T) {
	key := func(hash, start any) map[string]any {
		return map[string]any{"type": "mm_key", "hash": hash, "start_offset": start}
	}
	tokens := []any{1, 2, 3, 4}
	for says, keys := range map[string]any{
		"no list":       7,
		"too many":      []any{[]any{}, []any{}},
		"no key":        []any{[]any{"a"}},
		"no hash":       []any{[]any{map[string]any{"start_offset": 1}}},
		"an empty hash": []any{[]any{key("", 1)}},
		"a number":      []any{[]any{key(1, 1)}},
		"no place":      []any{[]any{map[string]any{"hash": "a"}}},
		"a bad place":   []any{[]any{key("a", "1")}},
		"a place far":   []any{[]any{key("a", 1<<40)}},
	} {
		d := mustDecoder(t, VLLM, 4)
		got := decode(t, d, message(t, store(names(1), nil, tokens, pair{"mm_keys", keys})), skipSpace).Events
		if len(got) > 0 {
			t.Errorf("%s: %+v", says, got)
		}
	}
	// Events without images are decoded with any form of empty mm_keys.
	for _, keys := range []any{nil, []any{}, []any{nil}, []any{[]any{}}} {
		d := mustDecoder(t, VLLM, 4)
		if got := decode(t, d, message(t, store(names(1), nil, tokens, pair{"mm_keys", keys}))).Events; len(got) != 1 ||
			!slices.Equal(got[0].Locals, locals(t, 4, Space{}, count(1, 5))) {
			t.Errorf("%v: %+v", keys, got)
		}
	}
	// An image in both fields is of no known engine.
	d := mustDecoder(t, VLLM, 4)
	if got := decode(t, d, message(t, store(names(1), nil, tokens, pair{"extra_keys", []any{[]any{[]any{"a", 0}}}},
		pair{"mm_keys", []any{[]any{key("a", 0)}}})), skipSpace).Events; len(got) > 0 {
		t.Errorf("images in two fields: %+v", got)
	}
}
