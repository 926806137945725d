package hicache

import (
	"encoding/hex"
	"fmt"
)

// Prompt has the pages of a prompt in a store, and converts answers to the index's blocks. It belongs to a single
// goroutine.
type Prompt struct {
	// Lanes are the pages to look up. SGLang has a lane of pages, and a lane for each pool of which only the last pages
	// matter. vLLM has a lane of blocks for each KV-cache group.
	Lanes []Lane

	// Continues reports whether the engine loads the blocks after its own (SGLang). Otherwise it loads only a run from
	// the prompt's first block (vLLM), and the whole prompt must be looked up.
	Continues bool

	// Unbroken reports whether only the unbroken run of each lane after the start of a load matters, so
	// [Question.Follow] is enough. It is false for groups other than full attention and for hits that end within a
	// block.
	Unbroken bool

	blockSize int
	tokens    int
	trailing  []Pool // SGLang: pools of the last lanes
	free      bool   // SGLang: no other lanes exist
	vllm      *VLLM  // nil: SGLang
	hashes    int    // vLLM: hashes of the whole prompt
	spans     []int  // vLLM: hashes per name, for each lane
	co        *Coordinator
}

// Prompt returns the pages of a prompt in a store, for an index with blocks of blockSize tokens. The caller must not
// change tokens while it uses the prompt. The error wraps ErrNames. c must be [Config.Usable].
func (c *Config) Prompt(tokens []uint32, lora, salt string, blockSize uint32) (*Prompt, error) {
	p := &Prompt{blockSize: int(blockSize), tokens: len(tokens)}
	if s := c.SGLang; s != nil {
		if lora != "" && !s.namespacesIgnored() {
			return nil, fmt.Errorf(
				"%w: SGLang hashes the id of a loaded adapter, and the query has the name",
				ErrNames)
		}
		var space Space
		if salt != "" {
			space.CacheSalt = &salt
		}
		p.Lanes, p.trailing, p.free = s.lanes(tokens, space)
		p.Continues, p.Unbroken = true, len(p.trailing) == 0
		return p, nil
	}
	v := c.VLLM
	if v == nil {
		return nil, fmt.Errorf("%w: the workers share no store", ErrNames)
	}
	if err := v.nameable(lora, salt); err != nil {
		return nil, err
	}
	var err error
	if p.co, err = NewCoordinator(v.Layout()); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNames, err)
	}
	p.vllm, p.hashes = v, max(0, len(tokens)-v.HashLookahead)/v.HashBlockSize
	seed, _ := v.seed() // nameable has checked the seed
	space := fmt.Appendf(nil, "%s %q %q %q %q", v.algo(), seed, v.EngineVersion, lora, salt)
	p.Unbroken = v.Profile != Partial && !anyGroup(v.Groups, func(g *Group) bool { return g.Kind != Full })
	var digests []PageHash                  // computed digests
	fingerprints := map[int][]fingerprint{} // by span
	for g := range v.Groups {
		span := v.Groups[g].BlockSize / v.HashBlockSize
		if v.Profile == Partial { // blocks that end within a block have names too
			span = 1
		}
		lane := Lane{ID: uint64(g), Pages: p.hashes / span}
		if fingerprints[span] == nil {
			m := fingerprinter{pageSize: span * v.HashBlockSize, ahead: v.HashLookahead, space: space}
			fingerprints[span] = m.append(nil, tokens, lane.Pages)
		}
		lane.fingerprints = fingerprints[span]
		var prefixes []string
		lane.Names = func(from, to int) PageKeys {
			if prefixes == nil {
				prefixes = v.keyPrefixes(g)
			}
			if len(digests) < to*span { // the digests exist
				digests, _ = v.Digests(digests, tokens[:to*span*v.HashBlockSize+v.HashLookahead], lora, salt)
			}
			keys, size := make([]string, 0, (to-from)*len(prefixes)), v.digestSize()
			for i := from; i < to; i++ {
				for _, prefix := range prefixes {
					keys = append(keys, prefix+hex.EncodeToString(digests[(i+1)*span-1][:size]))
				}
			}
			return PageKeys{Keys: keys, PerPage: len(prefixes)}
		}
		p.spans, p.Lanes = append(p.spans, span), append(p.Lanes, lane)
	}
	return p, nil
}

// Map converts answers, one for each lane.
func (p *Prompt) Map(found []Found) *Map {
	if p.vllm == nil {
		return p.pageMap(found)
	}
	groups := p.vllm.Groups
	there := make([][]bool, len(groups)) // by group and hash
	said := make([][]bool, len(groups))
	for g, f := range found {
		there[g], said[g] = make([]bool, p.hashes), make([]bool, p.hashes)
		for i := range p.Lanes[g].Pages {
			at := (i+1)*p.spans[g] - 1
			said[g][at] = f.Known.Get(i)
			there[g][at] = said[g][at] && f.Present.Get(i)
		}
	}
	hybrid := false // whether groups other than full attention affect the hit
	for _, g := range groups {
		hybrid = hybrid || g.Kind != Full
	}
	full := func(g *Group) bool { return g.Kind == Full }
	if !anyGroup(groups, full) { // otherwise the blocks of all groups count
		full = func(*Group) bool { return true }
	}
	n := p.tokens / p.blockSize
	present, known := NewBitmap(n), NewBitmap(n)
	for i := range n {
		is, sure, gone := true, true, false
		for g := range groups {
			if !full(&groups[g]) {
				continue
			}
			b, per := groups[g].BlockSize, groups[g].BlockSize/p.vllm.HashBlockSize
			for chunk := i * p.blockSize / b; chunk*b < (i+1)*p.blockSize; chunk++ {
				at := (chunk+1)*per - 1
				inside := at < p.hashes // longer prefixes have no name
				is = is && inside && there[g][at]
				sure = sure && (!inside || said[g][at])
				gone = gone || !inside || said[g][at] && !there[g][at]
			}
		}
		if is {
			present.Set(i)
		}
		if sure || gone {
			known.Set(i)
		}
	}
	m := NewMap(n, present, known)
	hit, whole, err := p.co.Lookup(there, p.tokens)
	if err != nil { // a checked layout has no error
		hit = 0
	}
	m.start = &fromStart{reach: uint32(hit / p.blockSize), whole: whole, hybrid: hybrid}
	return m
}

func anyGroup(groups []Group, is func(*Group) bool) bool {
	for i := range groups {
		if is(&groups[i]) {
			return true
		}
	}
	return false
}

// Keys returns the names of the objects of an index block: the objects of the page, or of the groups that determine its
// presence.
func (p *Prompt) Keys(block uint32) (keys []string) {
	if p.vllm == nil {
		for i := range p.Lanes {
			if i == 0 || p.free {
				keys = append(keys, p.Lanes[i].Names(int(block), int(block)+1).Keys...)
			}
		}
		return keys
	}
	for g, group := range p.vllm.Groups {
		if group.Kind != Full && anyGroup(p.vllm.Groups, func(g *Group) bool { return g.Kind == Full }) {
			continue
		}
		// names of the group's blocks; the last name is the block's own
		per := group.BlockSize / p.vllm.HashBlockSize / p.spans[g]
		for chunk := int(block) * p.blockSize / group.BlockSize; chunk*group.BlockSize < int(
			block+1)*p.blockSize; chunk++ {
			if at := (chunk+1)*per - 1; at < p.Lanes[g].Pages {
				keys = append(keys, p.Lanes[g].Names(at, at+1).Keys...)
			}
		}
	}
	return keys
}
