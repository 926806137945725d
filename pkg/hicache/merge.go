package hicache

import (
	"math"
	"math/bits"
)

// Range is a range of blocks of a prompt: from From up to, not including, To.
type Range struct{ From, To uint32 }

// Beyond is why a rank loads no more of the shared store than it does.
type Beyond string

// The reasons.
const (
	BeyondEnd       Beyond = "prompt_ends"     // all that follows its own prefix is in the store
	BeyondMissing   Beyond = "not_in_store"    // the next block is not there
	BeyondUnknown   Beyond = "not_known"       // the store did not say whether the next block is there, or was not asked
	BeyondThreshold Beyond = "below_threshold" // what is there is less than the engine begins to load for
	BeyondCapacity  Beyond = "capacity"        // the engine has no room for more
)

// Rule is what an engine loads of the unbroken run of blocks that follows its own prefix.
type Rule struct {
	Least uint32 // blocks; of fewer it loads none
	Most  uint32 // blocks; NoBound: as many as there are
}

// NoBound is the Most of a Rule that has none.
const NoBound = math.MaxUint32

// Rule is [SGLang.WouldLoad] as a pair of bounds, for many workers at once. s must have passed Check.
func (s *SGLang) Rule() Rule {
	threshold := s.PrefetchThreshold
	if threshold == 0 {
		threshold = defaultPrefetchThreshold
	}
	r := Rule{Least: uint32((max(threshold, s.PageSize) + s.PageSize - 1) / s.PageSize), Most: NoBound}
	if s.PrefetchCapacity > 0 {
		r.Most = uint32(s.PrefetchCapacity / s.PageSize)
	}
	return r
}

// Map is what a store holds of one prompt, ready to be merged with any number of ranks' own prefixes. It does not change; any
// number of goroutines may use it.
type Map struct {
	ranges []Range
	total  uint32
	blocks int
	known  Bitmap
	ends   []uint32 // for each block the end of the unbroken run from it on; itself, if it is not there
}

// NewMap takes what a store said of a prompt's blocks. Bits that are not known count as not there.
func NewMap(blocks int, present, known Bitmap) *Map {
	m := &Map{blocks: blocks, known: known, ends: make([]uint32, blocks+1)}
	end := uint32(blocks)
	m.ends[blocks] = end
	for i := blocks - 1; i >= 0; i-- {
		if !present.Get(i) || !known.Get(i) {
			end = uint32(i)
		}
		m.ends[i] = end
	}
	for i := 0; i < blocks; {
		if present[i>>6]>>(i&63) == 0 { // nothing more in this word
			i = (i | 63) + 1
			continue
		}
		i += bits.TrailingZeros64(present[i>>6] >> (i & 63))
		if i >= blocks || m.ends[i] == uint32(i) {
			i++
			continue
		}
		m.ranges = append(m.ranges, Range{uint32(i), m.ends[i]})
		m.total += m.ends[i] - uint32(i)
		i = int(m.ends[i])
	}
	return m
}

// Ranges are the blocks that are in the store, in order. The caller must not change them.
func (m *Map) Ranges() []Range { return m.ranges }

// Total is how many blocks are in the store.
func (m *Map) Total() uint32 { return m.total }

// Load is how many blocks a rank would load that has the first own blocks itself, and why no more.
func (m *Map) Load(own uint32, rule Rule) (blocks uint32, why Beyond) {
	own = min(own, uint32(m.blocks))
	end := m.ends[own]
	run := end - own
	switch {
	case int(end) == m.blocks:
		why = BeyondEnd
	case !m.known.Get(int(end)):
		why = BeyondUnknown
	default:
		why = BeyondMissing
	}
	if run > rule.Most {
		run, why = rule.Most, BeyondCapacity
	}
	if end > own && run < rule.Least {
		return 0, BeyondThreshold
	}
	return run, why
}
