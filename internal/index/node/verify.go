package node

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Replicas of a partition are compared by checksums of the ranks at one sequence of the log. While events flow, no two
// replicas are at the same sequence at the same time. So every replica receives a request for a later sequence, and
// computes the checksum between the requested message and the next.

// verifyWait limits the wait for a log position.
const verifyWait = time.Second

// checksumRequest is a log position with a requested checksum.
type checksumRequest struct {
	seq  events.StreamSeq
	sum  uint64
	done chan struct{} // closed once sum is set
}

// RequestChecksum requests the checksum of a partition at a later position. RequestChecksum returns false if the
// position is already applied.
func (m *Machine) RequestChecksum(p events.Partition, k *checksumRequest) bool {
	part := m.parts[p]
	if m.Applied(p) >= k.seq {
		return false
	}
	part.checksums = append(part.checksums, k)
	return true
}

// CancelChecksum removes a request before the position is reached.
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

// Verify returns Status with a checksum of each partition at the status's log position; replicas at the same position
// have equal checksums. For a partition in at, the checksum is for the given position if the node reaches the position
// within a second and is not beyond; otherwise for the present position. The computation visits every held block and
// delays events, but not queries.
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
