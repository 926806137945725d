package events

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
)

// mediaBlocks are local hashes of one item and of several, in blocks of two tokens 0 and 1. Those of one item are
// Dynamo's; those of several are part of snapshots and logs and must not change either.
var mediaBlocks = []struct {
	media []BlockMedia
	want  LocalHash
}{
	{[]BlockMedia{{42, 0}}, 6100948656312251355},
	{[]BlockMedia{{42, 1}}, 6100948656312251355},
	{[]BlockMedia{{42, NoOffset}}, 6100948656312251355},
	{[]BlockMedia{{42, 0}, {43, 1}}, 5206454422411081494},
	{[]BlockMedia{{43, 0}, {42, 1}}, 10569940962670842215},
	{[]BlockMedia{{42, NoOffset}, {43, NoOffset}}, 3739415956091413019},
}

func TestMediaBlocks(t *testing.T) {
	h := mustHasher(t, 2, Space{}, false)
	for _, c := range mediaBlocks {
		if got := h.HashMedia(nil, count(0, 2), [][]BlockMedia{c.media})[0]; got != c.want {
			t.Errorf("%v: %d, want %d", c.media, got, c.want)
		}
	}
}

// segment is a token of a text, or an image.
type segment struct {
	text  uint32
	image string
}

// imageTokens is how many tokens an image has. All have the same token, which no text has, as those of real models.
var imageTokens = map[string]int{"a": 1, "b": 2, "c": 3, "d": 3, "e": 7, "f": 12}

// imagePrompt is a prompt of segments as an engine has it.
type imagePrompt struct {
	tokens []uint32
	items  []MediaItem
	names  []string // of items
}

func promptOf(segments []segment) (p imagePrompt) {
	for _, s := range segments {
		if s.image == "" {
			p.tokens = append(p.tokens, s.text)
			continue
		}
		n := imageTokens[s.image]
		p.items = append(p.items, MediaItem{MediaHash(s.image), uint32(len(p.tokens)), uint32(n)})
		p.names = append(p.names, s.image)
		p.tokens = append(p.tokens, slices.Repeat([]uint32{99}, n)...)
	}
	return p
}

// keys are what vLLM (0.23 and later) hashes of each block of a prompt beside its tokens: identifiers with their
// offsets, of items that touch what is hashed of the block.
func (p imagePrompt) keys(size, ahead int) (keys []any) {
	for begin := 0; begin+size+ahead <= len(p.tokens); begin += size {
		var key []any
		for i, item := range p.items {
			if from := int(item.Offset); from < begin+size+ahead && begin < from+int(item.Length) {
				key = append(key, []any{p.names[i], from - begin})
			}
		}
		if key == nil {
			keys = append(keys, nil)
		} else {
			keys = append(keys, key)
		}
	}
	return keys
}

// TestMediaTwin swaps, shifts, doubles, takes out and replaces images, alone and beside each other. The leading blocks
// that an engine's events and a query have in common are those which a naive engine shares: those of which the tokens,
// and the identifiers with their offsets, are equal from the first block on.
func TestMediaTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 2))
	images := []string{"a", "b", "c", "d", "e", "f"}
	image := func() segment { return segment{image: images[rng.IntN(len(images))]} }
	shared, cut := 0, 0 // prompts of which all is shared though they have images, and of which some is
	for range 20_000 {
		size, ahead := 1+rng.IntN(8), rng.IntN(2)*rng.IntN(4)
		var was []segment
		for range rng.IntN(20) {
			if rng.IntN(2) == 0 {
				was = append(was, image())
			} else {
				was = append(was, segment{text: rng.Uint32N(3)})
			}
		}
		now := slices.Clone(was)
		for range min(len(now), rng.IntN(3)) {
			switch i, j := rng.IntN(len(now)), rng.IntN(len(now)); rng.IntN(6) {
			case 0:
				now[i], now[j] = now[j], now[i]
			case 1: // neighbours
				j = min(i+1, len(now)-1)
				now[i], now[j] = now[j], now[i]
			case 2:
				now = slices.Insert(now, i, now[j])
			case 3:
				now = slices.Insert(now, i, segment{text: rng.Uint32N(3)})
			case 4:
				now = slices.Delete(now, i, i+1)
				now = append(now, image())
			case 5:
				if now[i].image != "" {
					now[i] = image()
				}
			}
		}
		engine, query := promptOf(was), promptOf(now)
		announced, asked := engine.keys(size, ahead), query.keys(size, ahead)
		want := 0
		for want < min(len(announced), len(asked)) && fmt.Sprint(announced[want]) == fmt.Sprint(asked[want]) &&
			slices.Equal(engine.tokens[want*size:(want+1)*size+ahead], query.tokens[want*size:(want+1)*size+ahead]) {
			want++
		}
		h, err := NewLookaheadHasher(uint32(size), uint32(ahead), Space{})
		if err != nil {
			t.Fatal(err)
		}
		hashes, locals := h.HashItems(nil, query.tokens, query.items), announce(t, engine, announced, size, ahead)
		got := 0
		for got < min(len(hashes), len(locals)) && hashes[got] == locals[got] {
			got++
		}
		if got != want {
			t.Fatalf("blocks of %d and %d ahead, the engine has %v, asked is %v: %d blocks in common, want %d", size, ahead,
				was, now, got, want)
		}
		if len(query.items) > 1 && got > 0 {
			if got == len(hashes) {
				shared++
			} else {
				cut++
			}
		}
	}
	if shared < 500 || cut < 500 {
		t.Errorf("%d prompts shared, %d cut, are no test", shared, cut)
	}
}

// announce has a decoder read a prompt's blocks as vLLM announces them, and is their local hashes.
func announce(t *testing.T, p imagePrompt, keys []any, size, ahead int) []LocalHash {
	if len(keys) == 0 {
		return nil
	}
	var hashes, beyond []any
	for i := range keys {
		hashes = append(hashes, i+1)
		next := []any{}
		for _, token := range p.tokens[(i+1)*size : (i+1)*size+ahead] {
			next = append(next, token)
		}
		beyond = append(beyond, next)
	}
	said := map[string]any{"type": "BlockStored", "block_hashes": hashes, "token_ids": p.tokens[:len(keys)*size],
		"block_size": size, "medium": "GPU", "extra_keys": keys}
	if ahead > 0 {
		said["lookahead_token_ids"] = beyond
	}
	d, err := NewDecoder(DecoderConfig{Engine: VLLM, BlockSize: uint32(size)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Decode(message(t, said))
	if err != nil || len(m.Events) != 1 {
		t.Fatalf("%v: %+v, %v", said, m, err)
	}
	return m.Events[0].Locals
}

// TestMediaOffsetsUnknown: an engine that does not say where items are, as vLLM before 0.23, shares no block of several
// items with a query; blocks of one item it does.
func TestMediaOffsetsUnknown(t *testing.T) {
	p := promptOf([]segment{{text: 1}, {image: "b"}, {text: 2}, {image: "a"}, {image: "a"}, {text: 1}})
	keys := []any{[]any{"b"}, []any{"a", "a"}}
	tokens := make([]any, len(p.tokens))
	for i, token := range p.tokens {
		tokens[i] = token
	}
	d, err := NewDecoder(DecoderConfig{Engine: VLLM, BlockSize: 3})
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Decode(message(t, []any{"BlockStored", []any{1, 2}, 9, tokens[:6], 3, nil, "GPU", nil, keys}))
	if err != nil || len(m.Events) != 1 {
		t.Fatalf("%+v, %v", m, err)
	}
	locals, hashes := m.Events[0].Locals, mustHasher(t, 3, Space{}, false).HashItems(nil, p.tokens, p.items)
	if locals[0] != hashes[0] || locals[1] == hashes[1] {
		t.Errorf("announced %d, asked %d", locals, hashes)
	}
}
