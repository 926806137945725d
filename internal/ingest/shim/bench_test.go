package shim

import (
	"context"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// acknowledging is a log that stores nothing.
type acknowledging struct{ seq events.StreamSeq }

func (*acknowledging) Last(context.Context) (Published, error) { return Published{}, nil }

func (l *acknowledging) Publish(_ context.Context, msgs [][]byte) (events.StreamSeq, error) {
	l.seq += events.StreamSeq(len(msgs))
	return l.seq, nil
}

// BenchmarkRun measures the loop of a shim from a feed with decoded events to the log, per event.
func BenchmarkRun(b *testing.B) {
	feed := make(chan Frame, 64)
	result := make(chan error, 1)
	go func() {
		result <- Run(b.Context(), Config{Feed: feed, Identity: Identity{Model: "m", BlockSize: 16}, Log: &acknowledging{}})
	}()
	b.ReportAllocs()
	for seq := events.EngineSeq(1); b.Loop(); seq++ {
		stored := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{events.BlockHash(seq)},
			Locals: []events.LocalHash{events.LocalHash(seq)}}
		feed <- Frame{Seq: seq, Read: &Read{Events: []events.Event{stored}, Digest: 1}}
	}
	close(feed)
	if err := <-result; err != nil {
		b.Fatal(err)
	}
}
