package vllm

import (
	"math/rand/v2"
	"slices"
)

// prompt is a prompt of a look-up: engine and index hash all fields.
type prompt struct {
	tokens     []uint32
	lora, salt string
}

// reusable returns the part of a prompt with reusable blocks. An engine always computes the last token, and so the
// whole block of the last token.
func (p prompt) reusable() prompt {
	p.tokens = p.tokens[:max(0, len(p.tokens)-1)]
	return p
}

// request is a request to the engine.
type request struct {
	kind           string // for people
	prompt         prompt
	maxTokens      int
	n              int // answers to the same prompt
	promptLogprobs bool
}

// Limits of generated requests.
const (
	vocabulary = 1024 // tokens of the models here; the first few mean something to an engine
	longest    = 1000 // tokens of a prompt
	remembered = 30   // conversations
)

// adapters and salts are the names in requests.
var (
	adapters = []string{"adapter-a", "adapter-b"}
	salts    = []string{"tenant-1", "tenant-2"}
)

// generator makes requests of many kinds. The requests depend only on the seed and the engine's replies.
type generator struct {
	rand      *rand.Rand
	blockSize int
	logprobs  bool       // make requests with prompt_logprobs
	prefixes  [][]uint32 // common prefixes of requests
	past      []prompt   // with the generated tokens, oldest first
}

// newGenerator returns a generator. Generators with the same pool share the prefixes of prompts.
func newGenerator(seed, pool uint64, blockSize int, logprobs bool) *generator {
	g := &generator{rand: rand.New(rand.NewPCG(pool, 0)), blockSize: blockSize, logprobs: logprobs}
	for range 4 {
		g.prefixes = append(g.prefixes, g.tokens(100+g.rand.IntN(300)))
	}
	g.rand = rand.New(rand.NewPCG(seed, 1))
	return g
}

func (g *generator) tokens(n int) []uint32 {
	tokens := make([]uint32, n)
	for i := range tokens {
		tokens[i] = uint32(10 + g.rand.IntN(vocabulary-10))
	}
	return tokens
}

// kinds are the kinds of requests with their percentages.
var kinds = []struct {
	name  string
	share int
}{
	{"fresh", 12}, {"turn", 18}, {"repeat", 10}, {"prefix", 24}, {"whole", 8}, {"chunked", 10},
	{"decode", 5}, {"short", 4}, {"n=2", 4}, {"logprobs", 5},
}

// next makes a request.
func (g *generator) next() request {
	at := g.rand.IntN(100)
	for _, k := range kinds {
		if at -= k.share; at < 0 {
			return g.make(k.name)
		}
	}
	panic("the shares of all kinds are less than a hundred")
}

func (g *generator) make(kind string) request {
	r := request{kind: kind, maxTokens: 1 + g.rand.IntN(8), n: 1}
	switch kind {
	case "turn":
		r.prompt = g.earlier()
		r.prompt.tokens = append(r.prompt.tokens, g.tokens(1+g.rand.IntN(100))...)
	case "repeat":
		r.prompt = g.earlier()
	case "prefix":
		r.prompt = g.tenant()
		prefix := g.prefixes[g.rand.IntN(len(g.prefixes))]
		prefix = prefix[:len(prefix)-g.rand.IntN(len(prefix)/2)]
		r.prompt.tokens = append(slices.Clone(prefix), g.tokens(1+g.rand.IntN(150))...)
	case "whole":
		r.prompt = g.earlier()
		r.prompt.tokens = append(r.prompt.tokens, g.tokens(g.blockSize-len(r.prompt.tokens)%g.blockSize)...)
	case "chunked":
		r.prompt = g.tenant()
		r.prompt.tokens = g.tokens(300 + g.rand.IntN(400))
	case "decode":
		r.prompt = g.earlier()
		r.maxTokens = 2*g.blockSize + g.rand.IntN(40)
	case "short":
		r.prompt = g.tenant()
		r.prompt.tokens = g.tokens(1 + g.rand.IntN(g.blockSize))
	case "n=2":
		r.prompt, r.n = g.earlier(), 2
		r.prompt.tokens = append(r.prompt.tokens, g.tokens(1+g.rand.IntN(100))...)
	case "logprobs":
		r.prompt, r.promptLogprobs = g.earlier(), g.logprobs
	default:
		r.prompt = g.tenant()
		r.prompt.tokens = g.tokens(20 + g.rand.IntN(280))
	}
	r.prompt.tokens = r.prompt.tokens[:min(longest, len(r.prompt.tokens))]
	return r
}

// tenant returns an empty prompt of a random tenant: with an adapter, a salt, both or none.
func (g *generator) tenant() (p prompt) {
	if g.rand.IntN(4) == 0 {
		p.lora = adapters[g.rand.IntN(len(adapters))]
	}
	if g.rand.IntN(4) == 0 {
		p.salt = salts[g.rand.IntN(len(salts))]
	}
	return p
}

// earlier returns an earlier prompt with its generated tokens. Recent prompts are more likely.
func (g *generator) earlier() prompt {
	if len(g.past) == 0 {
		p := g.tenant()
		p.tokens = g.tokens(20 + g.rand.IntN(280))
		return p
	}
	p := g.past[len(g.past)-1-min(g.rand.IntN(len(g.past)), g.rand.IntN(len(g.past)))]
	p.tokens = slices.Clone(p.tokens)
	return p
}

// answered records the generated tokens of a request.
func (g *generator) answered(r request, generated []uint32) {
	p := r.prompt
	p.tokens = append(slices.Clone(p.tokens), generated...)
	g.past = append(g.past, p)
	if len(g.past) > remembered {
		g.past = g.past[1:]
	}
}
