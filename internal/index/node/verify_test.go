package node

import (
	"testing"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestChecksumAtAPlace requests checksums at positions within one batch of messages. They equal those of a replica at
// the same position.
func TestChecksumAtAPlace(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		log := logOf(t)
		m, replica := newMachine(), newMachine()
		var marks []*checksumRequest
		for range rapid.IntRange(1, 3).Draw(t, "marks") {
			k := &checksumRequest{seq: events.StreamSeq(rapid.IntRange(0, len(log)+2).Draw(t, "at")),
				done: make(chan struct{})}
			if m.RequestChecksum(0, k) != (k.seq > 0) {
				t.Fatalf("a mark at %d of an empty partition", k.seq)
			}
			marks = append(marks, k)
		}
		back := marks[len(marks)-1]
		m.CancelChecksum(0, back)
		m.Apply(0, log)
		sums := []uint64{replica.checksum(0)}
		for _, msg := range log {
			replica.Apply(0, []jetstream.Message{msg})
			sums = append(sums, replica.checksum(0))
		}
		for _, k := range marks {
			select {
			case <-k.done:
				if k == back || k.sum != sums[k.seq] {
					t.Fatalf("at %d of %d: %x, a replica there has %x", k.seq, len(log), k.sum, sums[k.seq])
				}
			default:
				if k != back && k.seq > 0 && int(k.seq) <= len(log) {
					t.Fatalf("place %d of %d was passed", k.seq, len(log))
				}
			}
		}
		if m.RequestChecksum(0, &checksumRequest{seq: m.Applied(0)}) {
			t.Fatal("an applied position was accepted")
		}
	})
}
