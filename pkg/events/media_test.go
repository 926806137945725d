package events

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// mediaBlocks are local hashes of items in blocks of the tokens 0 and 1. The first hash is Dynamo's; Python's xxhash
// computed the hashes of items with offsets. Snapshots and logs contain such hashes, so they must not change.
var mediaBlocks = []struct {
	media []BlockMedia
	want  LocalHash
}{
	{[]BlockMedia{{42, NoOffset}}, 6100948656312251355},
	{[]BlockMedia{{42, 0}}, 2117319670889744571},
	{[]BlockMedia{{42, 1}}, 9659140180895511161},
	{[]BlockMedia{{42, -3}}, 11338092855403261866},
	{[]BlockMedia{{42, 0}, {43, 1}}, 11360654830478593672},
	{[]BlockMedia{{43, 0}, {42, 1}}, 3884491956456615948},
	{[]BlockMedia{{42, NoOffset}, {43, NoOffset}}, 1598710929150674555},
}

func TestMediaBlocks(t *testing.T) {
	h := mustHasher(t, 2, Space{}, false)
	for _, c := range mediaBlocks {
		if got := h.HashMedia(nil, count(0, 2), [][]BlockMedia{c.media})[0]; got != c.want {
			t.Errorf("%v: %d, want %d", c.media, got, c.want)
		}
	}
}

// placeholder is the token of all images. Texts contain it too.
const placeholder = 99

// imageNames are digests with equal mm_hashes in Dynamo.
var imageNames = []string{"a", "b", "c", strings.Repeat("0", 63) + "1", strings.Repeat("0", 63) + "2",
	strings.Repeat("a", 64), strings.Repeat("A", 64)}

// segment is a token of a text, or an image.
type segment struct {
	text   uint32
	image  string
	length int // tokens of an image; an image may have different lengths at different places
}

// imagePrompt is a prompt of segments in the engine's form.
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
		p.items = append(p.items, MediaItem{MediaHash(s.image), uint32(len(p.tokens)), uint32(s.length)})
		p.names = append(p.names, s.image)
		p.tokens = append(p.tokens, slices.Repeat([]uint32{placeholder}, s.length)...)
	}
	return p
}

// keys returns the inputs of vLLM's block hashes beside the tokens (0.23 and later): the identifiers and offsets of the
// items within the hashed tokens of each block.
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

// TestMediaTwin swaps, shifts, doubles, removes and replaces images, alone and beside each other, with and without
// equal tokens. The common leading blocks of an engine's events and a query equal those of a naive engine: the blocks
// up to the first difference in tokens, identifiers or offsets.
func TestMediaTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 2))
	image := func() segment {
		return segment{image: imageNames[rng.IntN(len(imageNames))], length: 1 + rng.IntN(4)*rng.IntN(4)}
	}
	text := func() segment { return segment{text: []uint32{0, 1, placeholder, placeholder}[rng.IntN(4)]} }
	shared, cut, moved := 0, 0, 0 // prompts with images that share all blocks, some blocks, no blocks despite equal tokens
	rounds := testkit.Rounds(16_000)
	for range rounds {
		size, ahead := 1+rng.IntN(8), rng.IntN(2)*rng.IntN(4)
		var was []segment
		for range rng.IntN(20) {
			if rng.IntN(2) == 0 {
				was = append(was, image())
			} else {
				was = append(was, text())
			}
		}
		now := slices.Clone(was)
		for range min(len(now), rng.IntN(3)) {
			switch i, j := rng.IntN(len(now)), rng.IntN(len(now)); rng.IntN(7) {
			case 0:
				now[i], now[j] = now[j], now[i]
			case 1: // neighbours
				j = min(i+1, len(now)-1)
				now[i], now[j] = now[j], now[i]
			case 2:
				now = slices.Insert(now, i, now[j])
			case 3:
				now = slices.Insert(now, i, text())
			case 4:
				now = slices.Delete(now, i, i+1)
				now = append(now, image())
			case 5:
				if now[i].image != "" {
					now[i] = segment{image: image().image, length: now[i].length}
				}
			case 6: // equal tokens: an image becomes shorter or text, and another image follows
				if now[i].image != "" {
					rest := rng.IntN(now[i].length)
					tail := slices.Repeat([]segment{{text: placeholder}}, now[i].length-rest)
					if rng.IntN(2) == 0 {
						tail = []segment{{image: image().image, length: len(tail)}}
					}
					if now[i].length = rest; rest == 0 {
						now = slices.Delete(now, i, i+1)
						i--
					}
					now = slices.Insert(now, i+1, tail...)
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
		switch {
		case len(query.items) == 0 || len(hashes) == 0:
		case got == len(hashes):
			shared++
		case got > 0:
			cut++
		case slices.Equal(engine.tokens, query.tokens):
			moved++
		}
	}
	if min(shared, cut, moved) < rounds/80 {
		t.Errorf("%d prompts shared, %d cut, %d with images elsewhere, are no test", shared, cut, moved)
	}
}

// announce decodes vLLM's announcement of a prompt's blocks and returns the local hashes.
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
	announcement := map[string]any{"type": "BlockStored", "block_hashes": hashes, "token_ids": p.tokens[:len(keys)*size],
		"block_size": size, "medium": "GPU", "extra_keys": keys}
	if ahead > 0 {
		announcement["lookahead_token_ids"] = beyond
	}
	d, err := NewDecoder(DecoderConfig{Engine: VLLM, BlockSize: uint32(size)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Decode(message(t, announcement))
	if err != nil || len(m.Events) != 1 {
		t.Fatalf("%v: %+v, %v", announcement, m, err)
	}
	return m.Events[0].Locals
}

// TestMediaOffsetsUnknown: an engine without offsets (vLLM before 0.23) shares no block with items with a query with
// offsets. Blocks with a single item have Dynamo's hash.
func TestMediaOffsetsUnknown(t *testing.T) {
	p := promptOf([]segment{{text: 1}, {text: 2}, {text: 3}, {text: 1}, {image: "b", length: 2}, {text: 2},
		{image: "a", length: 1}, {image: "a", length: 1}, {text: 1}})
	keys := []any{nil, []any{"b"}, []any{"a", "a"}}
	tokens := make([]any, len(p.tokens))
	for i, token := range p.tokens {
		tokens[i] = token
	}
	d, err := NewDecoder(DecoderConfig{Engine: VLLM, BlockSize: 3})
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Decode(message(t, []any{"BlockStored", []any{1, 2, 3}, 9, tokens[:9], 3, nil, "GPU", nil, keys}))
	if err != nil || len(m.Events) != 1 {
		t.Fatalf("%+v, %v", m, err)
	}
	h := mustHasher(t, 3, Space{}, false)
	locals, asked := m.Events[0].Locals, h.HashItems(nil, p.tokens, p.items)
	dynamo := h.HashMedia(nil, p.tokens, [][]BlockMedia{{}, {{MediaHash("b"), NoOffset}}})
	if locals[0] != asked[0] || locals[1] == asked[1] || locals[2] == asked[2] || locals[1] != dynamo[1] {
		t.Errorf("announced %d, asked %d, Dynamo's %d", locals, asked, dynamo)
	}
}
