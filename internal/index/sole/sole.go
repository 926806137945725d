// Package sole counts the blocks with only one holder, on one node and then on all nodes.
package sole

import (
	"math/bits"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Blocks counts the blocks with only one holder. The zero value is empty.
type Blocks struct {
	owners map[uint64]events.WorkerID // by hash of the block and everything before it; "": several
}

// Add adds a block of a worker. The empty worker means several workers.
func (s *Blocks) Add(block uint64, worker events.WorkerID) {
	if s.owners == nil {
		s.owners = map[uint64]events.WorkerID{}
	}
	if before, there := s.owners[block]; there && before != worker {
		worker = ""
	}
	s.owners[block] = worker
}

// Holders returns the blocks by their only worker. The blocks of several workers are under the empty name.
func (s *Blocks) Holders() map[events.WorkerID][]uint64 {
	list, _ := s.Sample(len(s.owners))
	return list
}

// Sample is Holders for at most about most blocks: the blocks with a number of zero bits at the begin of the hash.
func (s *Blocks) Sample(most int) (list map[events.WorkerID][]uint64, zeroBits uint32) {
	zeroBits = uint32(bits.Len(uint(max(len(s.owners)-1, 0) / max(most, 1))))
	list = map[events.WorkerID][]uint64{}
	for block, worker := range s.owners {
		if Sampled(block, zeroBits) {
			list[worker] = append(list[worker], block)
		}
	}
	return list, zeroBits
}

// Sampled reports whether a block is in a sample: the hash begins with the number of zero bits.
func Sampled(block uint64, zeroBits uint32) bool { return block>>(64-zeroBits) == 0 }
