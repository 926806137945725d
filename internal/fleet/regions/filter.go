package regions

import (
	"math"
	"math/bits"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// FalsePositives is the rate at which a [Filter] reports a missing hash as present.
const FalsePositives = 1.0 / 256

// Filter is an immutable set of sequence hashes: a binary fuse filter with three places and fingerprints of 8 bits
// (Graf and Lemire, "Binary Fuse Filters", 2022). Large sets need 9 bits a hash. There are no false negatives. The zero
// value is empty.
type Filter struct {
	n        uint64 // hashes
	seed     uint64
	segment  uint32 // places of a segment, a power of two
	segments uint32 // segments that begin a window of three
	prints   []byte // (segments + 2) * segment fingerprints
}

const (
	maxSegment = 1 << 18
	window     = 3 // segments of the places of a hash

	triesOfSize = 16 // failed constructions before the filter grows by a segment
)

// NewFilter returns the set of the hashes. The list may have duplicates. NewFilter reorders it.
func NewFilter(hashes []events.SeqHash) *Filter {
	slices.Sort(hashes)
	hashes = slices.Compact(hashes)
	f := &Filter{n: uint64(len(hashes))}
	if len(hashes) == 0 {
		return f
	}
	f.segment, f.segments = layout(len(hashes))
	mixed := make([]uint64, len(hashes))
	for tries := 1; ; tries++ {
		f.seed = mix(f.seed + uint64(tries))
		for i, h := range hashes {
			mixed[i] = mix(uint64(h) + f.seed)
		}
		slices.Sort(mixed) // so that neighbours share segments, and the construction reads memory in order
		if f.build(mixed) {
			return f
		}
		if tries%triesOfSize == 0 {
			f.segments++
		}
	}
}

// layout returns the paper's sizes for three places.
func layout(n int) (segment, segments uint32) {
	size := float64(max(n, 2))
	segment = min(uint32(1)<<int(math.Log(size)/math.Log(3.33)+2.25), maxSegment)
	factor := max(1.125, 0.875+0.25*math.Log(1e6)/math.Log(size))
	all := (uint32(size*factor) + segment - 1) / segment
	return segment, max(all, window) - (window - 1)
}

// filterBytes returns the size of the fingerprints of n hashes.
func filterBytes(n int) int {
	if n == 0 {
		return 0
	}
	segment, segments := layout(n)
	return int(segment) * int(segments+window-1)
}

// Capacity returns the number of hashes for a filter with at most this number of bytes.
func Capacity(bytes int) int {
	n := bytes / 9 * 8
	for n > 0 && filterBytes(n) > bytes {
		n -= 1 + n/64
	}
	return max(n, 0)
}

// mix is the finalizer of MurmurHash3. It is a bijection.
func mix(x uint64) uint64 {
	x ^= x >> 33
	x *= 0xff51afd7ed558ccd
	x ^= x >> 33
	x *= 0xc4ceb9fe1a85ec53
	return x ^ x>>33
}

func fingerprint(h uint64) byte { return byte(h ^ h>>32) }

// places returns the three places of a mixed hash, in three consecutive segments.
func (f *Filter) places(h uint64) [window]uint32 {
	at, _ := bits.Mul64(h, uint64(f.segments)*uint64(f.segment))
	a, within := uint32(at), f.segment-1
	return [window]uint32{a, (a + f.segment) ^ uint32(h>>18)&within, (a + 2*f.segment) ^ uint32(h)&within}
}

// build sets the fingerprints. It returns false if the seed does not suit the hashes.
func (f *Filter) build(mixed []uint64) bool {
	type place struct {
		xor   uint64 // of the hashes with this place
		count uint32
	}
	type peeled struct {
		hash uint64
		at   uint32 // a place that no later hash of the list has
	}
	places := make([]place, (f.segments+window-1)*f.segment)
	for _, h := range mixed {
		for _, at := range f.places(h) {
			places[at].xor ^= h
			places[at].count++
		}
	}
	var single []uint32
	for at := range places {
		if places[at].count == 1 {
			single = append(single, uint32(at))
		}
	}
	order := make([]peeled, 0, len(mixed))
	for len(single) > 0 {
		last := len(single) - 1
		at := single[last]
		single = single[:last]
		if places[at].count != 1 {
			continue
		}
		h := places[at].xor
		order = append(order, peeled{h, at})
		for _, at := range f.places(h) {
			places[at].xor ^= h
			if places[at].count--; places[at].count == 1 {
				single = append(single, at)
			}
		}
	}
	if len(order) < len(mixed) {
		return false
	}
	f.prints = make([]byte, len(places))
	for _, p := range slices.Backward(order) {
		f.prints[p.at] = f.sum(p.hash) ^ fingerprint(p.hash)
	}
	return true
}

// sum returns the exclusive or of the fingerprints at the places of a mixed hash.
func (f *Filter) sum(h uint64) byte {
	at := f.places(h)
	return f.prints[at[0]] ^ f.prints[at[1]] ^ f.prints[at[2]]
}

// Has reports whether the set has a hash. It returns true for a share of [FalsePositives] of other hashes.
func (f *Filter) Has(hash events.SeqHash) bool {
	if f.n == 0 {
		return false
	}
	h := mix(uint64(hash) + f.seed)
	return f.sum(h) == fingerprint(h)
}

// Len returns the number of hashes.
func (f *Filter) Len() int { return int(f.n) }

// Prefix returns the number of leading hashes that the set has.
func (f *Filter) Prefix(hashes []events.SeqHash) int {
	for i, h := range hashes {
		if !f.Has(h) {
			return i
		}
	}
	return len(hashes)
}

// valid reports whether the fields of a received filter agree.
func (f *Filter) valid() bool {
	if f.n == 0 {
		return f.segment == 0 && f.segments == 0 && len(f.prints) == 0
	}
	return f.segment > 0 && f.segment <= maxSegment && f.segment&(f.segment-1) == 0 && f.segments > 0 &&
		uint64(f.segments+window-1)*uint64(f.segment) == uint64(len(f.prints)) && f.n <= uint64(len(f.prints))
}
