package snapshot

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// RunIndex remembers which run is written where, and a fingerprint of each, so that the next snapshot writes only runs
// that changed. A [Writer] and a [Reader] make one when they are done; a Writer takes one. It belongs to one index,
// whose run ids it speaks of, and does not change.
type RunIndex struct {
	segments []*segment // in the order of the manifest
	places   map[events.RunID]place
}

// segment is one chunk of runs, or the chunks of one run that is too long for a chunk.
type segment struct {
	refs    []ChunkRef
	records int
	size    int    // bytes of all records
	live    bitset // which records count, by position
	alive   int    // bytes of those
}

func (s *segment) dead() int { return s.size - s.alive }

type place struct {
	segment *segment
	at      uint32 // position of the record
	blocks  uint32 // the run's length
	size    uint32 // bytes of the record
	sum     Hash
}

type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) has(i uint32) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b bitset) set(i uint32)      { b[i/64] |= 1 << (i % 64) }

// The policy on space. Records that no longer count stay in their chunks until they are too many, and small chunks stay
// until there are too many of them. Then some are written anew, a few at each snapshot that has something to write
// anyway, so that no snapshot writes much more than what has changed.
const (
	deadShare   = 8 // dead records may take an eighth of all bytes of records
	smallChunks = 8 // so many chunks may be shorter than a quarter of what a chunk should have

	// A chunk of runs has a 64th of all, within bounds, so that writing one anew is cheap.
	chunkShare = 64
	minChunk   = 128 << 10

	// A snapshot writes anew at most a 32nd of all (or minChunk), and twice what has changed.
	anewShare  = 32
	anewFactor = 2

	// maxWaiting bounds the bytes of runs that a Writer keeps because they may be written anew.
	maxWaiting = 64 << 20
)

// chunkSize is how long a chunk of runs gets, if the records of all runs take total bytes.
func chunkSize(total int) int { return min(maxRaw, max(minChunk, total/chunkShare)) }

// byDead puts the greatest share of dead first.
func byDead(a, b *segment) int {
	return cmp.Compare(int64(b.dead())*int64(a.size), int64(a.dead())*int64(b.size))
}

// bySize puts the smallest first.
func bySize(a, b *segment) int { return cmp.Compare(a.alive, b.alive) }

type usage struct {
	total, dead int // bytes
	short       int // what is shorter is small
	small       int // segments
}

func usageOf(segments []*segment) (r usage) {
	for _, s := range segments {
		r.total += s.size
		r.dead += s.dead()
	}
	r.short = chunkSize(r.total-r.dead) / 4
	for _, s := range segments {
		if r.isSmall(s) {
			r.small++
		}
	}
	return r
}

func (r *usage) isSmall(s *segment) bool { return s.size < r.short && s.alive > 0 }

func (r *usage) tooManySmall() bool { return r.small > smallChunks }
func (r *usage) tooManyDead() bool  { return r.dead*deadShare > r.total }

// candidates says, before a snapshot, which segments may be written anew: as many as may wait, first those with most
// dead, then the oldest, as caches let go of what is old. How much of each will be dead is known only at the end.
func candidates(segments []*segment) (chosen []*segment) {
	order, size := slices.Clone(segments), 0
	slices.SortStableFunc(order, byDead)
	for _, s := range order {
		if size+s.alive <= maxWaiting {
			chosen = append(chosen, s)
			size += s.alive
		}
	}
	return chosen
}

// condemn chooses, at the end of a snapshot that has news bytes to write, which candidates are written anew.
func condemn(segments []*segment, news int, candidate func(*segment) bool) (chosen []*segment) {
	r := usageOf(segments)
	budget := max(minChunk, (r.total-r.dead)/anewShare) + anewFactor*news
	choose := func(order func(a, b *segment) int, needed func(s *segment) bool) {
		list := slices.Clone(segments)
		slices.SortStableFunc(list, order)
		for _, s := range list {
			if !needed(s) || s.alive == 0 || s.alive > budget || !candidate(s) || slices.Contains(chosen, s) {
				continue
			}
			chosen = append(chosen, s)
			budget -= s.alive
			r.dead -= s.dead()
			r.total -= s.dead()
			if r.isSmall(s) {
				r.small--
			}
		}
	}
	choose(bySize, func(s *segment) bool { return r.isSmall(s) && r.tooManySmall() })
	choose(byDead, func(s *segment) bool { return s.dead() > 0 && r.tooManyDead() })
	return chosen
}
