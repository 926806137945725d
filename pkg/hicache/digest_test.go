package hicache

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
)

// TestDigests compares all algorithms with the results of vLLM's own code.
func TestDigests(t *testing.T) {
	data, err := os.ReadFile("testdata/vllm.json")
	if err != nil {
		t.Fatal(err)
	}
	var cases []struct {
		Tokens           []uint32
		Block, Lookahead int
		Algo, Version    string
		Seed             *string
		LoRA, Salt       string
		Hashes           []string
	}
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatal(err)
	}
	if len(cases) < 30 {
		t.Fatalf("only %d cases", len(cases))
	}
	for i, c := range cases {
		v := VLLM{HashBlockSize: c.Block, HashAlgo: c.Algo, HashSeed: c.Seed, HashLookahead: c.Lookahead,
			EngineVersion: c.Version}
		digests, err := v.Digests(nil, c.Tokens, c.LoRA, c.Salt)
		var got []string
		for _, d := range digests {
			got = append(got, hex.EncodeToString(d[:v.digestSize()]))
		}
		if err != nil || !slices.Equal(got, c.Hashes) {
			t.Errorf("case %d (%+v): %v, %v", i, c, got, err)
		}
		for n := range digests { // existing digests stay, and the others continue from them
			more, err := v.Digests(slices.Clone(digests[:n]), c.Tokens, c.LoRA, c.Salt)
			if err != nil || !slices.Equal(more, digests) {
				t.Errorf("case %d, from digest %d on: %v, %v", i, n, more, err)
			}
		}
	}
}

// TestUnknownDigests: unknown inputs are an error, and no name is guessed.
func TestUnknownDigests(t *testing.T) {
	zero := "0"
	for _, c := range []struct {
		v          VLLM
		lora, salt string
		want       string
	}{
		{VLLM{}, "", "", "neither hash_seed"},
		{VLLM{EngineVersion: "0.28.0"}, "", "", "random in each process"},
		{VLLM{EngineVersion: "0.32.0", HashAlgo: algoXXH3CBOR}, "", "", "random in each process"},
		{VLLM{HashSeed: &zero, EngineVersion: "0.23.1"}, "", "", "vLLM 0.23.1 names objects differently"},
		{VLLM{HashSeed: &zero}, "", "tenant", "no engine_version"},
		{VLLM{HashSeed: &zero}, "adapter", "", "no engine_version"},
		{VLLM{EngineVersion: "0.31.0"}, "adapter", "", "path of a LoRA adapter"},
		{VLLM{EngineVersion: "0.30.0"}, "same", "same", "depends on the process"},
	} {
		c.v.HashBlockSize = 4
		got, err := c.v.Digests(nil, make([]uint32, 8), c.lora, c.salt)
		if !errors.Is(err, ErrNames) || !strings.Contains(err.Error(), c.want) || len(got) > 0 {
			t.Errorf("%+v: %v, %v; want %q", c, got, err, c.want)
		}
	}
}

// TestFingerprintsDistinguishNames: prompts with different names have different fingerprints.
func TestFingerprintsDistinguishNames(t *testing.T) {
	zero, one := "0", "1"
	seen := map[fingerprint]string{}
	for what, v := range map[string]VLLM{
		"seed 0":   {HashSeed: &zero, EngineVersion: "0.30.0"},
		"seed 1":   {HashSeed: &one, EngineVersion: "0.30.0"},
		"no seed":  {EngineVersion: "0.30.0"},
		"release":  {HashSeed: &zero, EngineVersion: "0.31.0"},
		"CBOR":     {HashSeed: &zero, EngineVersion: "0.30.0", HashAlgo: algoSHA256CBOR},
		"more":     {HashSeed: &zero, EngineVersion: "0.33.0"},
		"and more": {HashSeed: &zero, EngineVersion: "0.33.0", HashLookahead: 1},
	} {
		v.ModelName, v.TPSize, v.PPSize, v.NumKVHead, v.HashBlockSize, v.SchedulerBlockSize = "m", 1, 1, 1, 4, 4
		v.Groups = []Group{{Kind: Full, BlockSize: 4}}
		for _, salt := range []string{"", "tenant"} {
			p, err := (&Config{VLLM: &v}).Prompt(make([]uint32, 9), "", salt, 4)
			if err != nil {
				t.Fatal(err)
			}
			fingerprint := p.Lanes[0].fingerprints[0]
			if other, has := seen[fingerprint]; has {
				t.Errorf("%s, salt %q has the fingerprint of %s", what, salt, other)
			}
			seen[fingerprint] = what
		}
	}
}

func BenchmarkDigests(b *testing.B) {
	tokens := make([]uint32, 65536)
	for i := range tokens {
		tokens[i] = uint32(i * 7919 % 151936)
	}
	for _, algo := range []string{algoSHA256, algoSHA256CBOR, algoXXH3CBOR} {
		seed := "0"
		v := VLLM{HashBlockSize: 16, HashAlgo: algo, HashSeed: &seed}
		b.Run(algo, func(b *testing.B) {
			b.ReportAllocs()
			var dst []PageHash
			for b.Loop() {
				dst, _ = v.Digests(dst[:0], tokens, "", "")
			}
		})
	}
}
