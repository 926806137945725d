package warm

import (
	"slices"
	"sync"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Prompt is a prefix of prompts in a form that an engine computes.
type Prompt struct {
	Tokens []uint32
	LoRA   string // the adapter; empty: none
	Salt   string // cache_salt of the requests; empty: none
}

// bytes returns the memory of a prompt.
func (p *Prompt) bytes() int { return promptBytes + 4*len(p.Tokens) + len(p.LoRA) + len(p.Salt) }

// promptBytes is the memory of a prompt without its content.
const promptBytes = 160

// Prompts keeps the prompts with the largest savings in bounded memory. It is safe for concurrent use. nil keeps
// nothing.
type Prompts struct {
	limit int

	mu     sync.Mutex
	used   int
	byHash map[Key]*kept
}

// Key names a prefix of a model: the sequence hash of the last block.
type Key struct {
	Model string
	Hash  events.SeqHash
}

type kept struct {
	prompt Prompt
	saved  float64
}

// NewPrompts returns an empty store for so many bytes; nil for 0.
func NewPrompts(limit int) *Prompts {
	if limit <= 0 {
		return nil
	}
	return &Prompts{limit: limit, byHash: map[Key]*kept{}}
}

// Offer stores a copy of a prompt, or the new saving of a stored one. To make room, it removes prompts with smaller
// savings. Without enough of them, the prompt is not stored.
func (p *Prompts) Offer(key Key, prompt *Prompt, saved float64) {
	if p == nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if known := p.byHash[key]; known != nil {
		known.saved = saved
		return
	}
	need := prompt.bytes()
	if p.used+need > p.limit && !p.makeRoom(need, saved) {
		return
	}
	p.byHash[key] = &kept{Prompt{slices.Clone(prompt.Tokens), prompt.LoRA, prompt.Salt}, saved}
	p.used += need
}

// makeRoom removes the prompts with the smallest savings until need bytes are free. It removes nothing if prompts with
// less than saved do not suffice.
func (p *Prompts) makeRoom(need int, saved float64) bool {
	var less []Key
	free := p.limit - p.used
	for key, k := range p.byHash {
		if k.saved < saved {
			less = append(less, key)
		}
	}
	slices.SortFunc(less, func(a, b Key) int {
		if p.byHash[a].saved < p.byHash[b].saved {
			return -1
		}
		return 1
	})
	n := 0
	for ; n < len(less) && free < need; n++ {
		free += p.byHash[less[n]].prompt.bytes()
	}
	if free < need {
		return false
	}
	for _, key := range less[:n] {
		p.used -= p.byHash[key].prompt.bytes()
		delete(p.byHash, key)
	}
	return true
}

// Get returns a stored prompt. Its tokens must not be changed.
func (p *Prompts) Get(key Key) (Prompt, bool) {
	if p == nil {
		return Prompt{}, false
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if k := p.byHash[key]; k != nil {
		return k.prompt, true
	}
	return Prompt{}, false
}

// Bytes returns the used memory.
func (p *Prompts) Bytes() int {
	if p == nil {
		return 0
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.used
}
