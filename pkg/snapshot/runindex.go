package snapshot

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// RunIndex has the place and a fingerprint of every written run, so that the next snapshot writes only changed runs. A
// [Writer] and a [Reader] return a RunIndex at the end; a Writer accepts one. It belongs to a single index, because it
// refers to run ids. It is immutable.
type RunIndex struct {
	segments []*segment // in the order of the manifest
	places   map[events.RunID]place
}

// segment is a chunk of runs, or the chunks of a run that is too long for a chunk.
type segment struct {
	refs    []ChunkRef
	records int
	size    int    // bytes of all records
	live    bitset // records that count, by position
	alive   int    // bytes of live records
}

func (s *segment) dead() int { return s.size - s.alive }

type place struct {
	segment *segment
	at      uint32 // position of the record
	blocks  uint32 // length of the run
	size    uint32 // bytes of the record
	sum     Hash
}

type bitset []uint64

func newBitset(n int) bitset { return make(bitset, (n+63)/64) }

func (b bitset) has(i uint32) bool { return b[i/64]>>(i%64)&1 != 0 }
func (b bitset) set(i uint32)      { b[i/64] |= 1 << (i % 64) }

// Space policy. Dead records and small chunks stay until the snapshot has too many. A snapshot with changes then
// rewrites a few of the chunks. So no snapshot writes much more than the changes.
const (
	deadShare   = 8 // dead records may use an eighth of the bytes of all records
	smallChunks = 8 // this many chunks may be shorter than a quarter of the target size

	// A snapshot rewrites at most a 32nd of all bytes (or minChunk) plus twice the changes.
	anewShare  = 32
	anewFactor = 2

	// maxWaiting limits the bytes of runs that a Writer keeps for a possible rewrite.
	maxWaiting = 64 << 20
)

// byDead orders segments by the share of dead records, largest first.
func byDead(a, b *segment) int {
	return cmp.Compare(int64(b.dead())*int64(a.size), int64(a.dead())*int64(b.size))
}

// bySize orders segments by size, smallest first.
func bySize(a, b *segment) int { return cmp.Compare(a.alive, b.alive) }

type usage struct {
	total, dead int // bytes
	short       int // shorter segments are small
	small       int // small segments
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

// candidates returns the segments that a snapshot may rewrite, within maxWaiting: first the segments with most dead
// records, then the oldest, because caches evict old blocks. The final share of dead records is not yet known.
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

// condemn returns the candidates to rewrite, at the end of a snapshot with news bytes of changes.
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
