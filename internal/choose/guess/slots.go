package guess

import (
	"container/heap"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/choose/prompts"
)

// node is a node of the prompts. Leased requests end only at the ends of nodes. A rank with any block of a node has all
// blocks of the node.
type node = prompts.Node[*slot]

// slot is the guess that a rank holds all blocks of a node.
type slot struct {
	rank   *rank
	node   *node // nil: blocks without hashes of an ended request
	blocks int   // the number of blocks without a node
	used   time.Duration
	leases int // the number of requests under way with the node
	at     int // the index in rank.queue; -1 with a lease

	owner load.Key      // the last request with the node
	due   time.Duration // the time of the owner's first output token or end: the rank has the blocks; 0: not yet
}

// halved gives the first half of a split node slots of its own.
func halved(head, _ *node) {
	for i := range head.Slots {
		s := *head.Slots[i].Share
		s.node = head
		head.Slots[i].Share = &s
		if s.at >= 0 {
			heap.Push(&s.rank.queue, &s) // the position of the old slot stays
		}
	}
}

// covered reports whether an equally recent request at the slot's rank went further.
func (s *slot) covered() bool {
	if s.node == nil {
		return false
	}
	for kid := range s.node.Kids {
		if i, ok := kid.Find(s.rank.id); ok && kid.Slots[i].Share.used == s.used {
			return true
		}
	}
	return false
}

// size returns the number of the slot's blocks.
func (s *slot) size() int {
	if s.node == nil {
		return s.blocks
	}
	return len(s.node.Edge)
}

// depth orders slots with equal times of use. Blocks without hashes are the end of a request.
func (s *slot) depth() int {
	if s.node == nil {
		return int(^uint(0) >> 1)
	}
	return s.node.Start
}

// queue is a heap of slots with the least recently used slot on top; of the slots of one prompt, the last one.
type queue []*slot

func (q queue) Len() int { return len(q) }
func (q queue) Less(i, j int) bool {
	if q[i].used != q[j].used {
		return q[i].used < q[j].used
	}
	return q[i].depth() > q[j].depth()
}
func (q queue) Swap(i, j int) {
	q[i], q[j] = q[j], q[i]
	q[i].at, q[j].at = i, j
}

func (q *queue) Push(x any) {
	s := x.(*slot)
	s.at = len(*q)
	*q = append(*q, s)
}

func (q *queue) Pop() any {
	last := len(*q) - 1
	s := (*q)[last]
	(*q)[last] = nil
	*q = (*q)[:last]
	s.at = -1
	return s
}
