package vllm

import (
	"math/rand/v2"
	"slices"
)

// prompt is a prompt as it is looked up: engine and index hash all of it.
type prompt struct {
	tokens     []uint32
	lora, salt string
}

// reusable is the part of a prompt of which blocks can be reused: an engine computes the last token in any case, and so
// all of the block that it is in.
func (p prompt) reusable() prompt {
	p.tokens = p.tokens[:max(0, len(p.tokens)-1)]
	return p
}

// request is one request to the engine.
type request struct {
	kind           string // for people
	prompt         prompt
	maxTokens      int
	n              int // answers to the same prompt
	promptLogprobs bool
}

// Bounds of what a generator makes.
const (
	vocabulary = 1024 // tokens of the models here; the first few mean something to an engine
	longest    = 1000 // tokens of a prompt
	remembered = 30   // conversations
)

// adapters and salts are those that requests name.
var (
	adapters = []string{"adapter-a", "adapter-b"}
	salts    = []string{"tenant-1", "tenant-2"}
)

// generator makes requests of many kinds: a function of its seed and of the engine's replies.
type generator struct {
	rand      *rand.Rand
	blockSize int
	logprobs  bool       // make requests with prompt_logprobs
	prefixes  [][]uint32 // that requests have in common
	past      []prompt   // with what was generated, oldest first
}

// newGenerator returns a generator. Those that share a pool share the prefixes that their prompts begin with.
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

// kinds of requests, each with its share of a hundred.
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

// tenant is an empty prompt of somebody: with an adapter, a salt, both or none.
func (g *generator) tenant() (p prompt) {
	if g.rand.IntN(4) == 0 {
		p.lora = adapters[g.rand.IntN(len(adapters))]
	}
	if g.rand.IntN(4) == 0 {
		p.salt = salts[g.rand.IntN(len(salts))]
	}
	return p
}

// earlier is an earlier prompt with what was generated for it, the youngest the likeliest.
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

// answered takes what the engine generated for a request.
func (g *generator) answered(r request, generated []uint32) {
	p := r.prompt
	p.tokens = append(slices.Clone(p.tokens), generated...)
	g.past = append(g.past, p)
	if len(g.past) > remembered {
		g.past = g.past[1:]
	}
}
