//go:build judges

package dynamo

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// dynamoCase is an input of Dynamo's hash function.
type dynamoCase struct {
	Tokens    []uint32   `json:"tokens"`
	BlockSize uint32     `json:"block_size"`
	Media     [][]uint64 `json:"media,omitempty"`
	LoRA      string     `json:"lora,omitempty"`
	Salt      string     `json:"salt,omitempty"`
	Eagle     bool       `json:"eagle,omitempty"`
}

// TestHashesEqualDynamos compares local hashes with Dynamo's own function: plain, with a LoRA, with a salt, with both,
// with multimodal items and with EAGLE. Prompts end within a block or at the end of a block, and contain the least and
// the greatest token.
func TestHashesEqualDynamos(t *testing.T) {
	dynamo := pyenv.StartDynamo(t)
	rng := rand.New(rand.NewPCG(1, 2))
	var cases []dynamoCase
	for i := range 2000 {
		c := dynamoCase{BlockSize: []uint32{1, 2, 4, 16, 64, 128}[rng.IntN(6)], Tokens: make([]uint32, rng.IntN(500))}
		for j := range c.Tokens {
			c.Tokens[j] = []uint32{0, math.MaxUint32, rng.Uint32N(151_936), rng.Uint32()}[rng.IntN(4)]
		}
		if i&1 != 0 {
			c.LoRA = []string{"adapter-a", "ü/ber", "x"}[rng.IntN(3)]
		}
		if i&2 != 0 {
			c.Salt = []string{"tenant-a", "tenant-b", " "}[rng.IntN(3)]
		}
		switch i >> 2 % 4 {
		case 1:
			c.Eagle = true
		case 2:
			c.Media = make([][]uint64, len(c.Tokens)/int(c.BlockSize))
			for j := range c.Media {
				for range rng.IntN(3) {
					c.Media[j] = append(c.Media[j], rng.Uint64())
				}
			}
		}
		cases = append(cases, c)
	}
	var got struct{ Hashes [][]events.LocalHash }
	dynamo.Do(map[string]any{"op": "hash", "cases": cases}, &got)
	if len(got.Hashes) != len(cases) {
		t.Fatalf("%d answers to %d cases", len(got.Hashes), len(cases))
	}
	blocks, ordered := 0, 0
	for i, c := range cases {
		ahead := uint32(0)
		if c.Eagle {
			ahead = 1
		}
		h, err := events.NewLookaheadHasher(c.BlockSize, ahead, events.Space{LoRA: c.LoRA, Salt: c.Salt})
		if err != nil {
			t.Fatal(err)
		}
		media, several := make([][]events.BlockMedia, len(c.Media)), 0
		for j, items := range c.Media {
			for _, hash := range items {
				media[j] = append(media[j], events.BlockMedia{Hash: hash, Offset: events.NoOffset})
			}
		}
		ours := h.HashMedia(nil, c.Tokens, media)
		// a block of several items is ours alone
		for j, items := range c.Media {
			if j < len(ours) && len(items) > 1 && ours[j] != got.Hashes[i][j] {
				ours[j] = got.Hashes[i][j]
				several++
			}
		}
		ordered += several
		if !slices.Equal(ours, got.Hashes[i]) {
			t.Errorf(
				"case %d: %d tokens in blocks of %d, LoRA %q, salt %q, EAGLE %v, %d blocks with media: kvatlas has %d, Dynamo %d",
				i, len(c.Tokens), c.BlockSize, c.LoRA, c.Salt, c.Eagle, len(c.Media), ours, got.Hashes[i])
		}
		blocks += len(ours)
	}
	if blocks < 10*len(cases) || ordered < 1000 {
		t.Errorf("only %d blocks, %d with several items", blocks, ordered)
	}
}
