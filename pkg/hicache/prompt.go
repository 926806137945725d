package hicache

import (
	"encoding/hex"
	"fmt"
)

// Prompt is one prompt as a store knows it: what to ask for, and what the answers mean for the index's blocks. It is
// for one goroutine.
type Prompt struct {
	// Lanes are what to ask for: one of pages and one for each pool of which only the last pages are needed (SGLang), or
	// one of blocks for each group of the KV cache (vLLM).
	Lanes []Lane

	// Continues is whether the engine loads what follows the blocks it has (SGLang). If not, it loads only a run from
	// the prompt's first block on (vLLM), so that all of the prompt is to be asked for.
	Continues bool

	// Unbroken is whether nothing matters but the unbroken run of each lane's pages from where an engine begins to load:
	// [Question.Follow] asks for enough. It is not so where groups are not of full attention, or hits end within a block.
	Unbroken bool

	blockSize int
	tokens    int
	trailing  []Pool // SGLang's pools of the last lanes
	free      bool   // SGLang: there are no other lanes
	vllm      *VLLM  // nil: SGLang
	hashes    int    // vLLM's, of the whole prompt
	spans     []int  // for each lane, how many of vLLM's hashes one name stands for
	co        *Coordinator
}

// Prompt names what a store may hold of a prompt, in an index with blocks of so many tokens. tokens must not
// change while the prompt is used. Its error wraps ErrNames. c must be [Config.Usable].
func (c *Config) Prompt(tokens []uint32, lora, salt string, blockSize uint32) (*Prompt, error) {
	p := &Prompt{blockSize: int(blockSize), tokens: len(tokens)}
	if s := c.SGLang; s != nil {
		if lora != "" && !s.namespacesIgnored() {
			return nil, fmt.Errorf(
				"%w: SGLang hashes the id that it gives an adapter when it loads it, and the query has its name",
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
	seed, _ := v.seed() // it is known where the hashes are
	space := fmt.Appendf(nil, "%s %q %q %q %q", v.algo(), seed, v.EngineVersion, lora, salt)
	p.Unbroken = v.Profile != Partial && !anyGroup(v.Groups, func(g *Group) bool { return g.Kind != Full })
	var digests []PageHash                  // as many as were named so far
	fingerprints := map[int][]fingerprint{} // by span
	for g := range v.Groups {
		span := v.Groups[g].BlockSize / v.HashBlockSize
		if v.Profile == Partial { // what ends within a block has a name too
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
			if len(digests) < to*span { // they can be named
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

// Map says what answers mean, one for each of the lanes.
func (p *Prompt) Map(found []Found) *Map {
	if p.vllm == nil {
		return p.pageMap(found)
	}
	groups := p.vllm.Groups
	there := make([][]bool, len(groups)) // for each group and hash
	said := make([][]bool, len(groups))
	for g, f := range found {
		there[g], said[g] = make([]bool, p.hashes), make([]bool, p.hashes)
		for i := range p.Lanes[g].Pages {
			at := (i+1)*p.spans[g] - 1
			said[g][at] = f.Known.Get(i)
			there[g][at] = said[g][at] && f.Present.Get(i)
		}
	}
	hybrid := false // groups that are not full attention have a say in what can be used
	for _, g := range groups {
		hybrid = hybrid || g.Kind != Full
	}
	full := func(g *Group) bool { return g.Kind == Full }
	if !anyGroup(groups, full) { // the blocks are those of all groups then
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
				inside := at < p.hashes // else it is longer than the prompt, and has no name
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
	if err != nil { // of a layout that was checked there is none
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

// Keys names the objects of one of the index's blocks: of its page, or in the groups that decide whether it is there.
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
		// names of one of the group's blocks, the last of which is its own
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
