package hicache

import (
	"cmp"
	"math"
	"math/bits"
	"sort"
)

// Beyond is why a rank loads no more of the shared store than it does.
type Beyond string

const (
	BeyondEnd     Beyond = "prompt_ends"  // all that follows its own prefix is in the store
	BeyondMissing Beyond = "not_in_store" // the next block is not there
	// the store did not say whether the next block is there, or was not asked
	BeyondUnknown   Beyond = "not_known"
	BeyondThreshold Beyond = "below_threshold" // what is there is less than the engine begins to load for
	BeyondCapacity  Beyond = "capacity"        // the engine has no room for more
	// the engine loads only what begins with the prompt, and a block before the next one, which is there or was not asked
	// for, is not there
	BeyondGap Beyond = "gap"
	// the next block is there, but not what other groups of the model's cache need to go on from it
	BeyondGroups Beyond = "other_groups"
	// the next block is there, but the engine's hits end at larger steps, or before a block that a draft model computes
	BeyondAligned Beyond = "alignment"
	BeyondLast    Beyond = "last_token" // all is there; the engine computes what holds the last token itself
)

// Rule is what an engine loads of the unbroken run of blocks that follows its own prefix.
type Rule struct {
	least uint32 // blocks; of fewer it loads none
	most  uint32 // blocks; noBound: as many as there are
}

const noBound = math.MaxUint32

// defaultPrefetchThreshold is SGLang's, in tokens.
const defaultPrefetchThreshold = 256

// Rule is that of SGLang's HiCacheController. It leaves out what the engine has in flight for other requests, which
// nobody outside knows. s must have passed Check.
func (s *SGLang) Rule() Rule {
	threshold := max(cmp.Or(s.PrefetchThreshold, defaultPrefetchThreshold), s.PageSize)
	r := Rule{least: uint32((threshold + s.PageSize - 1) / s.PageSize), most: noBound}
	if s.PrefetchCapacity > 0 {
		r.most = uint32(s.PrefetchCapacity / s.PageSize)
	}
	return r
}

// Map is what a store holds of one prompt, ready to be merged with any number of ranks' own prefixes. It does not
// change; any number of goroutines may use it.
type Map struct {
	ranges [][2]uint32
	total  uint32
	blocks uint32
	known  Bitmap
	start  *fromStart // nil: the engine loads what follows its own blocks

	trailing *trailing // nil: each page that follows is needed whole
}

// fromStart is how far an engine gets that loads only what begins with the prompt.
type fromStart struct {
	reach  uint32 // blocks
	whole  bool   // nothing but the last token keeps it from more
	hybrid bool   // groups other than of full attention have a say
}

// NewMap takes what a store said of a prompt's blocks. Bits that are not known count as not there.
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

// next is the first block from at on that is there, or, with flip all ones, that is not; blocks if there is none.
func next(present, known Bitmap, at, blocks int, flip uint64) int {
	for at < blocks {
		if rest := (present[at>>6]&known[at>>6] ^ flip) >> (at & 63); rest != 0 {
			return min(blocks, at+bits.TrailingZeros64(rest))
		}
		at = (at | 63) + 1
	}
	return blocks
}

// Ranges are the blocks that are in the store, in order: from, up to (not including). The caller must not change them.
func (m *Map) Ranges() [][2]uint32 { return m.ranges }

// Total is how many blocks are in the store.
func (m *Map) Total() uint32 { return m.total }

// Load is how many blocks a rank would load that has the first own blocks itself, and why no more.
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
		why = BeyondEnd
	case !m.known.Get(int(end)):
		why = BeyondUnknown
	default:
		why = BeyondMissing
	}
	if m.trailing != nil {
		return m.loadTrailing(own, end, rule, why)
	}
	if run > rule.most {
		run, why = rule.most, BeyondCapacity
	}
	if end > own && run < rule.least {
		return 0, BeyondThreshold
	}
	return run, why
}

// end is where the unbroken run from a block on ends; the block itself, if it is not there.
func (m *Map) end(block uint32) uint32 {
	i := sort.Search(len(m.ranges), func(i int) bool { return m.ranges[i][1] > block })
	if i < len(m.ranges) && m.ranges[i][0] <= block {
		return m.ranges[i][1]
	}
	return block
}

// fromStart is Load for an engine that loads only what begins with the prompt.
func (m *Map) fromStart(own uint32) (blocks uint32, why Beyond) {
	s := m.start
	at := max(own, s.reach)
	there := m.end(at) > at
	switch {
	case at == m.blocks:
		why = BeyondEnd
	case s.whole:
		why = BeyondLast
	case there && m.end(0) <= at, !m.known.Get(int(at)) && m.end(0) < at && m.known.Get(int(m.end(0))):
		why = BeyondGap
	case there && s.hybrid:
		why = BeyondGroups
	case there:
		why = BeyondAligned
	case m.known.Get(int(at)):
		why = BeyondMissing
	default:
		why = BeyondUnknown
	}
	return at - own, why
}

// Unknown are the blocks of which it is not known whether they are in the store, in order.
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

// Behind is how many blocks of the store lie at or after a block.
func (m *Map) Behind(block uint32) (n uint32) {
	for _, r := range m.ranges {
		n += r[1] - min(r[1], max(r[0], block))
	}
	return n
}

// Blocks is how many blocks of the prompt the store was asked about.
func (m *Map) Blocks() uint32 { return m.blocks }
