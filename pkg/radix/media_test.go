package radix_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// picture is an image in a prompt.
type picture struct {
	name       string
	at, length int
}

// pictured is a prompt whose tokens do not show the images: texts have the placeholder of images too.
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

// keys returns the extra inputs of an engine's hash for each block. places adds the places of images, as vLLM from 0.23
// on does.
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

// blocks returns a naive identity of each block.
func (p pictured) blocks(size int, places bool) (blocks []string) {
	for i, key := range p.keys(size, places) {
		blocks = append(blocks, fmt.Sprint(p.tokens[i*size:(i+1)*size], key))
	}
	return blocks
}

// dynamo returns the block hashes of a relay without places.
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

// draw returns a random prompt. A small set of tokens and images makes many prompts differ only in the places of
// images.
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

// TestImagesElsewhere: an engine with places of images gets exactly the right credit. Engines without places, and
// queries by Dynamo's hashes, get credit up to the first image. Dynamo's own blocks match Dynamo's hashes.
func TestImagesElsewhere(t *testing.T) {
	rng := rand.New(rand.NewPCG(16, 3))
	beyond, moved := 0, 0 // matches after an image; cuts where only places differ
	for range testkit.Rounds(1500) {
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
			if len(held) > 0 && rng.IntN(2) == 0 { // the tokens of a held prompt, with other images or the same
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
					t.Fatalf("by %s, blocks of %d, held %v, query %v: %d with places, %d without, %d of a "+
						"relay's; want %d, %d, %d", by, size, held, q, depth[placed], depth[bare], depth[relayed], c.placed, c.bare,
						c.relayed)
				}
			}
		}
	}
	least := 100
	if testkit.Whole {
		least = 500
	}
	if min(beyond, moved) < least {
		t.Errorf("too few cases: %d matches after an image, %d cuts where only places differ", beyond, moved)
	}
}

func common[T comparable](a, b []T) (n int) {
	for n < min(len(a), len(b)) && a[n] == b[n] {
		n++
	}
	return n
}

// blockNames returns an engine's names of a prompt's blocks. Prompts that the engine cannot distinguish have equal
// names.
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

// stored returns a prompt's blocks as a decoder reads them from vLLM. From 0.23 on, vLLM has the places of images.
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
