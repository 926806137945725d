package hicache

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// Layout is how a hybrid model's KV cache is divided into groups.
type Layout struct {
	Groups             []Group
	SchedulerBlockSize int // tokens; every hit is a multiple of it (in the Partial profile, of HashBlockSize)
	HashBlockSize      int // tokens; what one hash stands for
	UseEagle           bool
	Profile            Profile // "" is Safe
}

// errLayout is returned for a layout that vLLM itself refuses by an assertion. The text says which rule is broken.
var errLayout = errors.New("vLLM refuses this layout")

// Coordinator decides hits as vLLM's MooncakeStoreCoordinator does. It does not change after it was made, so any number
// of goroutines may use it.
type Coordinator struct {
	layout Layout
	specs  []spec
	simple bool // exactly two specs, the first of them full
}

// spec is what groups of equal kind and sizes are merged into: a block counts only if each of them has it.
type spec struct {
	Group
	gids  []int
	eagle bool
}

// NewCoordinator checks a layout. Its error wraps errLayout where vLLM has an assertion.
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
		g.Eagle = false // not part of what makes specs equal
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

// rank orders specs: full attention first, as it converges best.
func rank(k Kind) int {
	if k == Full {
		return 0
	}
	return 1
}

// alignment is what hits of a spec are multiples of, in tokens.
func (c *Coordinator) alignment(s *spec) int {
	if len(c.specs) == 1 && c.layout.Profile == Reference {
		return s.BlockSize
	}
	return c.unit()
}

// unit is what the engine's hits are multiples of, in tokens.
func (c *Coordinator) unit() int {
	if c.layout.Profile == Partial {
		return c.layout.HashBlockSize
	}
	return c.layout.SchedulerBlockSize
}

// fine reports whether hits of a spec may end within one of its blocks.
func (c *Coordinator) fine(s *spec) bool {
	return c.layout.Profile == Partial && s.BlockSize > c.layout.HashBlockSize && (s.Kind == Full || s.Kind == Mamba)
}

// store is what is there, as one search sees it.
type store struct {
	present [][]bool
	hash    int // tokens of one hash
	probes  int // how often it was asked
}

// has reports whether a block is there, under the name of its last hash.
func (st *store) has(s *spec, block int) bool {
	return st.hasHash(s, (block+1)*(s.BlockSize/st.hash)-1)
}

// hasHash reports whether something that ends with a hash block is there.
func (st *store) hasHash(s *spec, at int) bool {
	st.probes++
	for _, g := range s.gids {
		if at >= len(st.present[g]) || !st.present[g][at] {
			return false
		}
	}
	return true
}

// FindLongestCacheHit is how many tokens, maxTokens at most, the longest prefix has that every group can go on from.
// present[g][i] says whether group g has the block that ends with the prompt's hash block i (vLLM names a block by its
// last hash); the slices are as long as the prompt has hashes. Where a group's blocks are larger than a hash, only
// every n-th entry is looked at.
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

// converge lets each spec in turn shorten the hit until all agree.
func (c *Coordinator) converge(st *store, maxTokens int) (hit int) {
	reference := c.layout.Profile == Reference
	bound := maxTokens // how far a spec may look that drops a block afterwards
	if !reference {
		bound = len(st.present[0]) * st.hash
		for _, p := range st.present {
			bound = min(bound, len(p)*st.hash)
		}
	}
	visited := make([]bool, 2*len(c.specs))
	found, verified := visited[:len(c.specs)], visited[len(c.specs):]
	lengths := make([]int, len(c.specs)) // of what was found, in tokens
	for hit = maxTokens; ; {
		cur := hit
		for k := range c.specs {
			s := &c.specs[k]
			if s.Kind == Full && found[k] { // what holds for a prefix holds for a shorter one
				if reference {
					cur = cur / s.BlockSize * s.BlockSize
				} else {
					cur = min(cur, lengths[k])
				}
				continue
			}
			drop := s.eagle && !verified[k]
			limit := cur
			// a state is never dropped: looking further would let the hit grow
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

// find is the longest hit of one spec, of at most maxTokens, in tokens. drop takes the last block (or hash block, where
// a hit may end with one) away, which a draft model must compute anew.
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
		if fine { // into the first block that is not there whole
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
	if fine { // Mamba, whose state may lie at the end of any hash block
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

// window looks from the right for as many blocks in a row as a window needs, and returns where they end. A run at the
// very begin may be shorter.
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
			if end*b%align != 0 { // no hit may end here
				continue
			}
		}
		if run++; run >= need {
			return i + run
		}
	}
	return run * b / align * align / b
}

// need is how many blocks in a row make a hit in a sliding group. A window of 1 gives 0, which acts as 1.
func (g *Group) need(eagle bool) int {
	need := (g.Window - 1 + g.BlockSize - 1) / g.BlockSize
	if eagle {
		need++
	}
	return need
}

// StoreMask says which blocks of a prompt of tokens (a multiple of the scheduler's block size) an engine would write to
// the store, one mask for each group. A nil mask is all of them. In the profiles of vLLM 0.32 Mamba states are written
// on another way and their mask is all false.
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
			if !safe { // 0.24 does not spread the flag over merged groups
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

// Lookup is how many tokens of a prompt of so many an engine would take from the store, of which present says what is
// there as for FindLongestCacheHit: the engine asks for whole units, only for blocks that hits need, and computes at
// least the last token itself (vllm-project/vllm › vllm/distributed/kv_transfer/kv_connector/v1/mooncake/store,
// MooncakeStoreWorker.lookup; up to 0.24 its scheduler, get_num_new_matched_tokens). whole says that the store has all,
// and only that last token keeps the hit from being longer.
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

// lookedFor is present without what an engine does not ask for: what lies beyond the tokens that it asks about, and
// blocks that no hit can need.
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

// reachable lists the blocks of a sliding group that a hit at some multiple of the alignment needs, per blocks apart;
// nil is all.
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
