package snapshot

import (
	"cmp"
	"slices"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Ledger remembers which run is written where, and a fingerprint of each, so that the next snapshot writes only runs that
// changed. A [Writer] and a [Reader] make one when they are done; a Writer takes one. It belongs to one index, whose run ids it
// speaks of, and does not change.
type Ledger struct {
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

// place is where a run is written.
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

// The policy on room: records that no longer count stay in their chunks until they are too many, and small chunks stay
// small until there are too many of them. Then such chunks are written anew.
const (
	deadShare   = 8 // dead records may take an eighth of all bytes of records
	smallChunk  = MaxChunk / 2
	smallChunks = 8 // as many chunks may be smaller than smallChunk
)

// condemn chooses which segments are to be written anew.
func condemn(segments []*segment) map[*segment]bool {
	chosen := make(map[*segment]bool)
	total, dead, small := 0, 0, 0
	for _, s := range segments {
		total += s.size
		dead += s.dead()
		if s.size < smallChunk {
			small++
		}
	}
	if small > smallChunks {
		for _, s := range segments {
			if s.size < smallChunk {
				chosen[s] = true
				dead -= s.dead()
			}
		}
	}
	if dead*deadShare <= total {
		return chosen
	}
	order := slices.Clone(segments)
	slices.SortStableFunc(order, func(a, b *segment) int { // the greatest dead share first
		return cmp.Compare(int64(b.dead())*int64(a.size), int64(a.dead())*int64(b.size))
	})
	for _, s := range order {
		if dead*deadShare <= total {
			break
		}
		if !chosen[s] {
			chosen[s] = true
			dead -= s.dead()
		}
	}
	return chosen
}
