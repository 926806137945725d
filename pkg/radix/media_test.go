package radix_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// picture is an image in a prompt.
type picture struct {
	name       string
	at, length int
}

// pictured is a prompt whose tokens say nothing of its images: texts have the images' placeholder too.
type pictured struct {
	tokens   []uint32
	pictures []picture
}

func (p pictured) items() (items []events.MediaItem) {
	for _, x := range p.pictures {
		items = append(items, events.MediaItem{
			Hash: events.MediaHash(x.name), Offset: uint32(x.at), Length: uint32(x.length)})
	}
	return items
}

// keys are what engines hash of each block beside its tokens, with the places as vLLM from 0.23 on, or without.
func (p pictured) keys(size int, places bool) (keys []any) {
	for begin := 0; begin+size <= len(p.tokens); begin += size {
		var key []any
		for _, x := range p.pictures {
			if x.at < begin+size && begin < x.at+x.length {
				if places {
					key = append(key, []any{x.name, x.at - begin})
				} else {
					key = append(key, x.name)
				}
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

// blocks are what a naive engine tells apart of each block.
func (p pictured) blocks(size int, places bool) (blocks []string) {
	for i, key := range p.keys(size, places) {
		blocks = append(blocks, fmt.Sprint(p.tokens[i*size:(i+1)*size], key))
	}
	return blocks
}

// dynamo are the blocks' hashes by a relay that knows no places.
func (p pictured) dynamo(h *events.Hasher, size int) []events.LocalHash {
	media := make([][]events.BlockMedia, len(p.tokens)/size)
	for i, key := range p.keys(size, false) {
		names, _ := key.([]any)
		for _, name := range names {
			media[i] = append(media[i], events.BlockMedia{Hash: events.MediaHash(name.(string)), Offset: events.NoOffset})
		}
	}
	return h.HashMedia(nil, p.tokens, media)
}

// draw is a random prompt. Few tokens and images make many that differ in the images' places alone.
func draw(rng *rand.Rand) (p pictured) {
	for range rng.IntN(24) {
		p.tokens = append(p.tokens, []uint32{7, 99, 99, 99}[rng.IntN(4)])
	}
	for at := rng.IntN(8); at < len(p.tokens); at += rng.IntN(8) {
		length := 1 + rng.IntN(min(6, len(p.tokens)-at))
		for i := range length {
			p.tokens[at+i] = 99
		}
		p.pictures = append(p.pictures, picture{[]string{"a", "b"}[rng.IntN(2)], at, length})
		at += length
	}
	return p
}

// TestImagesElsewhere: what is found of a prompt is what an engine has that knows the places of images, and never more.
// Engines that say no places, and queries by Dynamo's hashes, which have none, are found up to the first image, but for
// Dynamo's own blocks, which are found by Dynamo's hashes.
func TestImagesElsewhere(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 3))
	beyond, moved := 0, 0 // questions found beyond an image; cut where only places differ
	for range 1500 {
		size := 1 + rng.IntN(6)
		h, err := events.NewHasher(uint32(size), events.Space{})
		if err != nil {
			t.Fatal(err)
		}
		x := radix.New(radix.Config{})
		placed, bare, relayed := x.AddRank(0, uint32(size)), x.AddRank(0, uint32(size)), x.AddRank(0, uint32(size))
		names := map[string]events.BlockHash{}
		var held []pictured
		for range 1 + rng.IntN(4) {
			p := draw(rng)
			if len(p.tokens) < size {
				continue
			}
			held = append(held, p)
			x.Apply(placed, 0, stored(t, p, size, true, names))
			x.Apply(bare, 0, stored(t, p, size, false, names))
			x.Apply(relayed, 0, []events.Event{{Kind: events.Stored, Tier: events.Device,
				Blocks: blockNames(p, size, false, names), Locals: p.dynamo(h, size)}})
		}
		for range 6 {
			q := draw(rng)
			if len(held) > 0 && rng.IntN(2) == 0 { // the tokens of one, with other images or the same
				p := held[rng.IntN(len(held))]
				if q.tokens = p.tokens; rng.IntN(3) == 0 {
					q = p
				}
				q.pictures = slices.DeleteFunc(slices.Clone(q.pictures), func(x picture) bool {
					return x.at+x.length > len(q.tokens) || slices.Contains(q.tokens[x.at:x.at+x.length], 7)
				})
			}
			plain := len(q.tokens) / size // blocks before the first image
			if len(q.pictures) > 0 {
				plain = min(plain, q.pictures[0].at/size)
			}
			truth, same, dynamos := 0, 0, 0
			byDynamo := q.dynamo(h, size)
			for _, p := range held {
				truth = max(truth, common(q.blocks(size, true), p.blocks(size, true)))
				same = max(same, common(q.tokens, p.tokens)/size)
				dynamos = max(dynamos, common(byDynamo, p.dynamo(h, size)))
			}
			if truth > plain {
				beyond++
			}
			if truth < same {
				moved++
			}
			for by, c := range map[string]struct {
				hashes                []events.LocalHash
				placed, bare, relayed int
			}{
				"tokens":          {h.HashItems(nil, q.tokens, q.items()), truth, min(truth, plain), min(truth, plain)},
				"Dynamo's hashes": {byDynamo, min(truth, plain), -1, dynamos},
			} {
				var answer radix.Answer
				x.Match(0, c.hashes, nil, &answer)
				depth := map[radix.RankID]int{}
				for _, o := range answer.Ranks {
					depth[o.Rank] = int(o.Depth[0])
				}
				if depth[placed] != c.placed || c.bare >= 0 && depth[bare] != c.bare || depth[relayed] != c.relayed {
					t.Fatalf("by %s, blocks of %d, held %v, asked %v: found %d where places are known, %d where not, %d of a "+
						"relay's; want %d, %d, %d", by, size, held, q, depth[placed], depth[bare], depth[relayed], c.placed, c.bare,
						c.relayed)
				}
			}
		}
	}
	if min(beyond, moved) < 500 {
		t.Errorf("%d questions found beyond an image, %d cut where only places differ, are no test", beyond, moved)
	}
}

func common[T comparable](a, b []T) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// blockNames are what an engine calls the blocks of a prompt: alike where it does not tell prompts apart.
func blockNames(p pictured, size int, places bool, names map[string]events.BlockHash) (list []events.BlockHash) {
	blocks := p.blocks(size, places)
	for i := range blocks {
		prefix := strings.Join(blocks[:i+1], " ")
		if names[prefix] == 0 {
			names[prefix] = events.BlockHash(len(names) + 1)
		}
		list = append(list, names[prefix])
	}
	return list
}

// stored are a prompt's blocks as a decoder reads them from vLLM, which has said places of images from 0.23 on.
func stored(t *testing.T, p pictured, size int, places bool, names map[string]events.BlockHash) []events.Event {
	list := blockNames(p, size, places, names)
	event := []any{"BlockStored", list, nil, p.tokens[:len(list)*size], size, nil, "GPU", nil, p.keys(size, places)}
	if places {
		event = append(event, 0)
	}
	payload, err := msgpack.Marshal([]any{1.5, []any{event}, 0})
	if err != nil {
		t.Fatal(err)
	}
	d, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: uint32(size)})
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Decode(payload)
	if err != nil || len(m.Events) != 1 {
		t.Fatalf("%v: %+v, %v", event, m, err)
	}
	return m.Events
}
