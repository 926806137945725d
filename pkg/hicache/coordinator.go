package hicache

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Layout describes the KV-cache groups of a hybrid model.
type Layout struct {
	Groups             []Group
	SchedulerBlockSize int // tokens; divides every hit (in the Partial profile, HashBlockSize does)
	HashBlockSize      int // tokens of a hash
	UseEagle           bool
	Profile            Profile // "" is Safe
}

// errLayout is the error for a layout that fails an assertion in vLLM. The text names the violated rule.
var errLayout = errors.New("vLLM refuses this layout")

// Coordinator computes hits like vLLM's MooncakeStoreCoordinator. It is immutable and safe for concurrent use.
type Coordinator struct {
	layout Layout
	specs  []spec
	simple bool // exactly two specs, the first is full
}

// spec merges groups of equal kind and sizes. A block counts only if all of the groups have the block.
type spec struct {
	Group
	gids  []int
	eagle bool
}

// NewCoordinator checks a layout. The error wraps errLayout if vLLM has an assertion for the rule.
func NewCoordinator(l Layout) (*Coordinator, error) {
	l.Profile = cmp.Or(l.Profile, Safe)
	if l.Profile != Safe && l.Profile != Reference && l.Profile != Partial {
		return nil, fmt.Errorf("profile %q: want %s, %s or %s", l.Profile, Safe, Reference, Partial)
	}
	if len(l.Groups) == 0 || len(l.Groups) > maxGroups {
		return nil, fmt.Errorf("%d groups: want 1 to %d", len(l.Groups), maxGroups)
	}
	if l.HashBlockSize < 1 || l.HashBlockSize > maxBlockSize || l.SchedulerBlockSize < 1 ||
		l.SchedulerBlockSize > maxBlockSize {
		return nil, fmt.Errorf("hash_block_size %d, scheduler_block_size %d: want 1 to %d", l.HashBlockSize,
			l.SchedulerBlockSize, maxBlockSize)
	}
	broken := func(format string, args ...any) error {
		return fmt.Errorf("%w: %s", errLayout, fmt.Sprintf(format, args...))
	}
	if l.SchedulerBlockSize%l.HashBlockSize != 0 {
		return nil, broken("scheduler_block_size %d must be a multiple of hash_block_size %d", l.SchedulerBlockSize,
			l.HashBlockSize)
	}
	l.Groups = slices.Clone(l.Groups)
	c := &Coordinator{layout: l}
	anyEagle := false
	for i, g := range l.Groups {
		switch g.Kind {
		case Full, Mamba:
			if g.Window != 0 {
				return nil, fmt.Errorf("group %d: %s has no window", i, g.Kind)
			}
		case Sliding, ChunkedLocal:
			if g.Window < 1 {
				return nil, fmt.Errorf("group %d: %s with a window of %d tokens", i, g.Kind, g.Window)
			}
		default:
			return nil, fmt.Errorf("group %d: kind %q cannot be looked up: want %s, %s, %s or %s", i, g.Kind, Full,
				Sliding, ChunkedLocal, Mamba)
		}
		if g.BlockSize < 1 || g.BlockSize > maxBlockSize {
			return nil, fmt.Errorf("group %d: block_size %d: want 1 to %d", i, g.BlockSize, maxBlockSize)
		}
		if g.BlockSize%l.HashBlockSize != 0 {
			return nil, broken("group %d: block_size %d must be divisible by hash_block_size %d", i, g.BlockSize,
				l.HashBlockSize)
		}
		if l.SchedulerBlockSize%g.BlockSize != 0 {
			return nil, broken("group %d: scheduler_block_size %d must be a multiple of block_size %d", i,
				l.SchedulerBlockSize, g.BlockSize)
		}
		anyEagle = anyEagle || g.Eagle
		flag := g.Eagle
		g.Eagle = false // groups that differ only in the flag have the same spec
		at := slices.IndexFunc(c.specs, func(s spec) bool { return s.Group == g })
		if at < 0 {
			at = len(c.specs)
			c.specs = append(c.specs, spec{Group: g})
		}
		c.specs[at].gids = append(c.specs[at].gids, i)
		c.specs[at].eagle = c.specs[at].eagle || flag
	}
	slices.SortStableFunc(c.specs, func(a, b spec) int { return rank(a.Kind) - rank(b.Kind) })
	for k := range c.specs {
		s := &c.specs[k]
		s.eagle = s.eagle || l.UseEagle && !anyEagle
		if s.Kind != ChunkedLocal {
			continue
		}
		if s.eagle {
			return nil, broken("group %d: EAGLE does not go with chunked local attention", s.gids[0])
		}
		if align := c.alignment(s); s.BlockSize != align {
			return nil, broken("group %d: chunked local attention needs block_size %d to be the alignment, %d",
				s.gids[0], s.BlockSize, align)
		}
	}
	c.simple = len(c.specs) == 2 && c.specs[0].Kind == Full
	return c, nil
}

// rank orders specs: full attention first, because the search then converges fastest.
func rank(k Kind) int {
	if k == Full {
		return 0
	}
	return 1
}

// alignment returns the unit of a spec's hits, in tokens.
func (c *Coordinator) alignment(s *spec) int {
	if len(c.specs) == 1 && c.layout.Profile == Reference {
		return s.BlockSize
	}
	return c.unit()
}

// unit returns the unit of the engine's hits, in tokens.
func (c *Coordinator) unit() int {
	if c.layout.Profile == Partial {
		return c.layout.HashBlockSize
	}
	return c.layout.SchedulerBlockSize
}

// fine reports whether a hit of a spec may end within a block of the spec.
func (c *Coordinator) fine(s *spec) bool {
	return c.layout.Profile == Partial && s.BlockSize > c.layout.HashBlockSize && (s.Kind == Full || s.Kind == Mamba)
}

// store is the content of the store during a search.
type store struct {
	present [][]bool
	hash    int // tokens of a hash
	probes  int // number of lookups
}

// has reports whether the store has a block. The name of a block is the last hash.
func (st *store) has(s *spec, block int) bool {
	return st.hasHash(s, (block+1)*(s.BlockSize/st.hash)-1)
}

// hasHash reports whether the store has the block that ends with the hash block at.
func (st *store) hasHash(s *spec, at int) bool {
	st.probes++
	for _, g := range s.gids {
		if at >= len(st.present[g]) || !st.present[g][at] {
			return false
		}
	}
	return true
}

// FindLongestCacheHit returns the length in tokens of the longest prefix that all groups can continue, at most
// maxTokens. present[g][i] reports whether group g has the block that ends with the prompt's hash block i (vLLM names a
// block by the last hash). Each slice has the number of the prompt's hashes as its length. For a group with blocks
// larger than a hash, only every n-th entry counts.
func (c *Coordinator) FindLongestCacheHit(present [][]bool, maxTokens int) (int, error) {
	if len(present) != len(c.layout.Groups) {
		return 0, fmt.Errorf("hicache: presence of %d groups, the layout has %d", len(present), len(c.layout.Groups))
	}
	return c.find(&store{present: present, hash: c.layout.HashBlockSize}, max(maxTokens, 0)), nil
}

func (c *Coordinator) find(st *store, maxTokens int) int {
	if len(c.specs) == 1 {
		s := &c.specs[0]
		return st.find(s, maxTokens, s.eagle, c.alignment(s))
	}
	return c.converge(st, maxTokens)
}

// converge shortens the hit spec by spec until all specs agree.
func (c *Coordinator) converge(st *store, maxTokens int) (hit int) {
	reference := c.layout.Profile == Reference
	bound := maxTokens // limit of the search of a spec that then drops a block
	if !reference {
		bound = len(st.present[0]) * st.hash
		for _, p := range st.present {
			bound = min(bound, len(p)*st.hash)
		}
	}
	visited := make([]bool, 2*len(c.specs))
	found, verified := visited[:len(c.specs)], visited[len(c.specs):]
	lengths := make([]int, len(c.specs)) // lengths of the hits in tokens
	for hit = maxTokens; ; {
		cur := hit
		for k := range c.specs {
			s := &c.specs[k]
			if s.Kind == Full && found[k] { // a shorter prefix of a hit is a hit too
				if reference {
					cur = cur / s.BlockSize * s.BlockSize
				} else {
					cur = min(cur, lengths[k])
				}
				continue
			}
			drop := s.eagle && !verified[k]
			limit := cur
			// a state is never dropped, because a longer search could let the hit grow
			if drop && (reference || s.Kind != Mamba) {
				margin := s.BlockSize
				if c.fine(s) {
					margin = st.hash
				}
				limit = min(cur+margin, bound)
			}
			lengths[k] = st.find(s, limit, drop, c.unit())
			found[k] = true
			if drop {
				verified[k] = true
			} else if lengths[k] < cur {
				clear(verified)
			}
			cur = lengths[k]
		}
		if cur >= hit {
			return hit
		}
		if hit = cur; c.simple {
			return hit
		}
	}
}

// find returns the longest hit of a spec, in tokens, at most maxTokens. drop removes the last block (or hash block, if
// a hit may end with a hash block), because a draft model computes the block again.
func (st *store) find(s *spec, maxTokens int, drop bool, align int) int {
	b := s.BlockSize
	n := maxTokens / b
	fine := align < b && b%align == 0
	switch s.Kind {
	case Full:
		k := 0
		for k < n && st.has(s, k) {
			k++
		}
		tokens := k * b
		if fine { // a hit may end within the first incomplete block
			for i := min(tokens+b-align, maxTokens)/align - 1; i >= tokens/align; i-- {
				if st.hasHash(s, i) {
					tokens = (i + 1) * align
					break
				}
			}
		}
		if drop && tokens > 0 {
			tokens -= min(align, b)
		}
		return tokens - tokens%align

	case Sliding:
		end := st.window(s, n, drop, align)
		if drop && end > 0 {
			end = (end - 1) * b / align * align / b
		}
		return end * b

	case ChunkedLocal:
		end := maxTokens / s.Window * s.Window / b
		for end < n && st.has(s, end) {
			end++
		}
		return end * b
	}
	if fine { // Mamba: the state may be at the end of any hash block
		for i := maxTokens/align - 1; i >= 0; i-- {
			if st.hasHash(s, i) {
				return (i + 1) * align
			}
		}
		return 0
	}
	for end := n; end > 0; end-- {
		if end*b%align == 0 && st.has(s, end-1) {
			return end * b
		}
	}
	return 0
}

// window searches from the right for enough consecutive blocks for a window, and returns the end. A row at the very
// start may be shorter.
func (st *store) window(s *spec, n int, drop bool, align int) int {
	b, need, run := s.BlockSize, s.need(drop), 0
	for i := n - 1; i >= 0; i-- {
		if !st.has(s, i) {
			run = 0
			continue
		}
		if run == 0 {
			end := i + 1
			if drop {
				end = i
			}
			if end*b%align != 0 { // a hit must end at a multiple of align
				continue
			}
		}
		if run++; run >= need {
			return i + run
		}
	}
	return run * b / align * align / b
}

// need returns the number of consecutive blocks for a hit in a sliding group. A window of 1 returns 0, which acts as 1.
func (g *Group) need(eagle bool) int {
	need := (g.Window - 1 + g.BlockSize - 1) / g.BlockSize
	if eagle {
		need++
	}
	return need
}

// StoreMask returns a mask of the blocks that an engine would write to the store, for each group. tokens is the length
// of the prompt, a multiple of the scheduler's block size. A nil mask means all blocks. In the profiles of vLLM 0.32,
// the mask of a Mamba group is all false, because vLLM writes the states in another way.
func (c *Coordinator) StoreMask(tokens int) ([][]bool, error) {
	lcm, safe := c.layout.SchedulerBlockSize, c.layout.Profile != Reference
	if tokens < 0 || tokens%lcm != 0 {
		return nil, fmt.Errorf("%w: a store mask of %d tokens must be of a multiple of scheduler_block_size %d",
			errLayout, tokens, lcm)
	}
	masks := make([][]bool, len(c.layout.Groups))
	for k := range c.specs {
		s := &c.specs[k]
		for _, g := range s.gids {
			eagle := s.eagle
			if !safe { // vLLM 0.24 does not apply the flag to merged groups
				eagle = c.layout.Groups[g].Eagle || c.layout.UseEagle &&
					!slices.ContainsFunc(c.layout.Groups, func(g Group) bool { return g.Eagle })
			}
			switch {
			case s.Kind == Mamba && safe:
				masks[g] = make([]bool, tokens/s.BlockSize)
			case s.Kind == Sliding:
				masks[g] = s.reachable(tokens/s.BlockSize, lcm/s.BlockSize, eagle)
			}
		}
	}
	return masks, nil
}

// Lookup returns the number of tokens of a prompt that an engine would load from the store. present has the meaning of
// FindLongestCacheHit. The engine requests only whole units and only blocks that a hit needs. It always computes at
// least the last token (vllm-project/vllm › vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store,
// MooncakeStoreWorker.lookup; up to 0.24 in the scheduler, get_num_new_matched_tokens). whole reports that only the
// last token limits the hit.
func (c *Coordinator) Lookup(present [][]bool, tokens int) (hit int, whole bool, err error) {
	if len(present) != len(c.layout.Groups) {
		return 0, false, fmt.Errorf("hicache: presence of %d groups, the layout has %d", len(present),
			len(c.layout.Groups))
	}
	unit := c.unit()
	asked := max(tokens, 0) / unit * unit
	if asked == 0 {
		return 0, false, nil
	}
	if present, err = c.lookedFor(present, asked); err != nil {
		return 0, false, err
	}
	hit, err = c.FindLongestCacheHit(present, asked)
	if err != nil || hit < tokens {
		return hit, false, err
	}
	asked = (tokens - 1) / unit * unit
	if c.layout.Profile == Reference || asked == 0 {
		return asked, true, nil
	}
	hit, err = c.FindLongestCacheHit(present, asked)
	return hit, true, err
}

// lookedFor returns present without the blocks that an engine does not request: blocks after the requested tokens, and
// blocks outside of any possible hit.
func (c *Coordinator) lookedFor(present [][]bool, tokens int) ([][]bool, error) {
	masks := make([][]bool, len(c.layout.Groups))
	if c.layout.Profile != Partial {
		var err error
		if masks, err = c.StoreMask(tokens); err != nil {
			return nil, err
		}
	}
	out := make([][]bool, len(present))
	for g := range present {
		out[g] = make([]bool, len(present[g]))
		n := copy(out[g], present[g][:min(len(present[g]), tokens/c.layout.HashBlockSize)])
		group := &c.layout.Groups[g]
		if group.Kind != Sliding || masks[g] == nil {
			continue
		}
		for i, per := 0, group.BlockSize/c.layout.HashBlockSize; i < n; i++ {
			out[g][i] = out[g][i] && masks[g][i/per]
		}
	}
	return out, nil
}

// reachable returns a mask of the blocks of a sliding group that a hit at some multiple of the alignment needs. per is
// the alignment in blocks. nil means all blocks.
func (g *Group) reachable(n, per int, eagle bool) []bool {
	need, shift := g.need(eagle), 0
	if eagle {
		shift = 1
	}
	if need >= per {
		return nil
	}
	mask := make([]bool, n)
	for i := shift; i < n; i++ {
		mask[i] = (i-shift)%per >= per-need
	}
	return mask
}
