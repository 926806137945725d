package hicache

import (
	"cmp"
	"math"
	"math/bits"
	"sort"
)

// Beyond is the reason why a rank loads no more blocks of the shared store: prompt_ends, not_in_store, not_known,
// below_threshold, capacity, gap, other_groups, alignment or last_token.
type Beyond string

const (
	beyondEnd     Beyond = "prompt_ends"  // all blocks after the own prefix are in the store
	BeyondMissing Beyond = "not_in_store" // the next block is not in the store
	// the next block was not looked up, or the store did not answer
	beyondUnknown   Beyond = "not_known"
	beyondThreshold Beyond = "below_threshold" // the present blocks are fewer than the engine's threshold
	beyondCapacity  Beyond = "capacity"        // the engine has no room for more
	// the engine loads only a run from the start of the prompt, and a block before the next block is missing; the next
	// block is present or was not looked up
	beyondGap Beyond = "gap"
	// the next block is present, but other groups of the model's cache lack blocks
	BeyondGroups Beyond = "other_groups"
	// the next block is present, but hits end at larger steps, or before a block that a draft model computes
	beyondAligned Beyond = "alignment"
	beyondLast    Beyond = "last_token" // all blocks are present; the engine computes the block with the last token itself
)

// Rule describes the engine's loads of the unbroken run of blocks after the own prefix.
type Rule struct {
	least uint32 // blocks; the engine does not load a shorter run
	most  uint32 // blocks; noBound means no limit
}

const noBound = math.MaxUint32

// defaultPrefetchThreshold is SGLang's default, in tokens.
const defaultPrefetchThreshold = 256

// Rule returns the rule of SGLang's HiCacheController. It does not include the engine's prefetches for other requests,
// which are unknown. s must have passed Check.
func (s *SGLang) Rule() Rule {
	threshold := max(cmp.Or(s.PrefetchThreshold, defaultPrefetchThreshold), s.PageSize)
	r := Rule{least: uint32((threshold + s.PageSize - 1) / s.PageSize), most: noBound}
	if s.PrefetchCapacity > 0 {
		r.most = uint32(s.PrefetchCapacity / s.PageSize)
	}
	return r
}

// Map has the blocks of a prompt in a store. Load combines it with the own prefixes of any number of ranks. It is
// immutable and safe for concurrent use.
type Map struct {
	ranges [][2]uint32
	total  uint32
	blocks uint32
	known  Bitmap
	start  *fromStart // nil: the engine loads the blocks after its own

	trailing *trailing // nil: each page after the own pages is needed whole
}

// fromStart is the hit of an engine that loads only from the start of the prompt.
type fromStart struct {
	reach  uint32 // blocks
	whole  bool   // only the last token limits the hit
	hybrid bool   // groups other than full attention matter
}

// NewMap returns the map for a store's answer. Unknown bits count as missing.
func NewMap(blocks int, present, known Bitmap) *Map {
	m := &Map{blocks: uint32(blocks), known: known}
	for at := 0; ; {
		from := next(present, known, at, blocks, 0)
		if from == blocks {
			return m
		}
		at = next(present, known, from, blocks, ^uint64(0))
		m.ranges = append(m.ranges, [2]uint32{uint32(from), uint32(at)})
		m.total += uint32(at - from)
	}
}

// next returns the first present block from at on, or with flip all ones, the first missing block. It returns blocks
// without a match.
func next(present, known Bitmap, at, blocks int, flip uint64) int {
	for at < blocks {
		if rest := (present[at>>6]&known[at>>6] ^ flip) >> (at & 63); rest != 0 {
			return min(blocks, at+bits.TrailingZeros64(rest))
		}
		at = (at | 63) + 1
	}
	return blocks
}

// Ranges returns the blocks in the store as sorted half-open ranges. The caller must not change the result.
func (m *Map) Ranges() [][2]uint32 { return m.ranges }

// Total returns the number of blocks in the store.
func (m *Map) Total() uint32 { return m.total }

// Load returns the number of blocks that a rank with the first own blocks would load, and the reason for the limit.
func (m *Map) Load(own uint32, rule Rule) (blocks uint32, why Beyond) {
	own = min(own, m.blocks)
	if m.start != nil {
		return m.fromStart(own)
	}
	end := m.end(own)
	if m.trailing != nil && m.trailing.free {
		end = m.blocks
	}
	run := end - own
	switch {
	case end == m.blocks:
		why = beyondEnd
	case !m.known.Get(int(end)):
		why = beyondUnknown
	default:
		why = BeyondMissing
	}
	if m.trailing != nil {
		return m.loadTrailing(own, end, rule, why)
	}
	if run > rule.most {
		run, why = rule.most, beyondCapacity
	}
	if end > own && run < rule.least {
		return 0, beyondThreshold
	}
	return run, why
}

// end returns the end of the unbroken run from a block on, or the block if it is missing.
func (m *Map) end(block uint32) uint32 {
	i := sort.Search(len(m.ranges), func(i int) bool { return m.ranges[i][1] > block })
	if i < len(m.ranges) && m.ranges[i][0] <= block {
		return m.ranges[i][1]
	}
	return block
}

// fromStart is Load for an engine that loads only from the start of the prompt.
func (m *Map) fromStart(own uint32) (blocks uint32, why Beyond) {
	s := m.start
	at := max(own, s.reach)
	there := m.end(at) > at
	switch {
	case at == m.blocks:
		why = beyondEnd
	case s.whole:
		why = beyondLast
	case there && m.end(0) <= at, !m.known.Get(int(at)) && m.end(0) < at && m.known.Get(int(m.end(0))):
		why = beyondGap
	case there && s.hybrid:
		why = BeyondGroups
	case there:
		why = beyondAligned
	case m.known.Get(int(at)):
		why = BeyondMissing
	default:
		why = beyondUnknown
	}
	return at - own, why
}

// Unknown returns the blocks with an unknown state in the store, in order.
func (m *Map) Unknown() (list [][2]uint32) {
	for at := 0; ; {
		from := next(m.known, m.known, at, int(m.blocks), ^uint64(0))
		if from == int(m.blocks) {
			return list
		}
		at = next(m.known, m.known, from, int(m.blocks), 0)
		list = append(list, [2]uint32{uint32(from), uint32(at)})
	}
}

// Behind returns the number of the store's blocks at or after a block.
func (m *Map) Behind(block uint32) (n uint32) {
	for _, r := range m.ranges {
		n += r[1] - min(r[1], max(r[0], block))
	}
	return n
}

// Blocks returns the number of the prompt's blocks that were looked up.
func (m *Map) Blocks() uint32 { return m.blocks }
