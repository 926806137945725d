package node

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Replicas of a partition are compared by checksums of what they hold at one sequence of its log. While events flow no
// two replicas are at the same sequence at the same time. So each gets a request for a sequence that it has not applied
// yet, and computes the checksum between that message and the next.

// verifyWait bounds how long a place is waited for.
const verifyWait = time.Second

// checksumRequest is a place in a partition's log at which a checksum is wanted.
type checksumRequest struct {
	seq  events.StreamSeq
	sum  uint64
	done chan struct{} // closed once sum is there
}

// RequestChecksum wants the checksum of a partition at a place that it has not come to; it reports false if it has.
func (m *Machine) RequestChecksum(p events.Partition, k *checksumRequest) bool {
	part := m.parts[p]
	if m.Applied(p) >= k.seq {
		return false
	}
	part.checksums = append(part.checksums, k)
	return true
}

// CancelChecksum removes a request that was not reached.
func (m *Machine) CancelChecksum(p events.Partition, k *checksumRequest) {
	part := m.parts[p]
	part.checksums = slices.DeleteFunc(part.checksums, func(r *checksumRequest) bool { return r == k })
}

func (m *Machine) reached(part *replica, seq events.StreamSeq) {
	left := part.checksums[:0]
	for _, k := range part.checksums {
		if k.seq != seq {
			left = append(left, k)
			continue
		}
		k.sum = m.checksum(part.id)
		close(k.done)
	}
	part.checksums = left
}

// Verify is Status with a checksum of each partition, which belongs to the place in the log that the status names:
// replicas at the same place have the same. For partitions in at it is of that place, if the node has not passed it yet
// and comes to it within a second; else of where it is. Reckoning it visits every block held and holds up events
// meanwhile, not queries.
func (n *Node) Verify(ctx context.Context, at []api.PartitionSeq) (*api.Status, error) {
	for _, want := range at {
		if int(want.Partition) >= len(n.parts) {
			return nil, api.Errorf(api.CodeMalformed, "the request names partition %d; there are %d", want.Partition,
				len(n.parts))
		}
	}
	requests := map[events.Partition]*checksumRequest{}
	for _, want := range at {
		k := &checksumRequest{seq: want.Seq, done: make(chan struct{})}
		pending := false
		if err := n.do(ctx, want.Partition, func(m *Machine) { pending = m.RequestChecksum(want.Partition, k) }); err != nil {
			return nil, err
		}
		if pending {
			requests[want.Partition] = k
		}
	}
	waiting, cancel := context.WithTimeout(ctx, verifyWait)
	defer cancel()
	for p, k := range requests {
		select {
		case <-k.done:
		case <-waiting.Done():
			if err := n.do(context.WithoutCancel(ctx), p, func(m *Machine) { m.CancelChecksum(p, k) }); err != nil {
				return nil, err
			}
		}
	}
	return n.statusNow(ctx, func(p events.Partition, applied *events.StreamSeq) (string, error) {
		if k := requests[p]; k != nil {
			select {
			case <-k.done:
				*applied = k.seq
				return sumText(k.sum), nil
			default:
			}
		}
		text := ""
		err := n.do(ctx, p, func(m *Machine) {
			*applied = m.Applied(p)
			text = sumText(m.checksum(p))
		})
		return text, err
	})
}

func sumText(sum uint64) string { return fmt.Sprintf("%016x", sum) }
