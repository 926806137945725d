package node

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// TestDecodedIsCalledBeforeABatchIsApplied: each readable message is passed on once, decoded, before its application.
// Unreadable messages, messages without a rank, and applied messages are not.
func TestDecodedIsCalledBeforeABatchIsApplied(t *testing.T) {
	x := radix.New(radix.Config{})
	m := NewMachine(x, 1)
	var got []events.EventID
	m.decoded = func(msg *jetstream.Message, b *events.Batch) {
		if msg.Key.Instance != "w" || len(b.Events) != 1 {
			t.Errorf("%d events of %q", len(b.Events), msg.Key)
		}
		if n := m.counts.BlocksStored; n != uint64(len(got)) {
			t.Errorf("%d blocks are stored before batch %d", n, b.FirstID)
		}
		got = append(got, b.FirstID)
	}
	message := func(seq events.StreamSeq, id events.EventID) jetstream.Message {
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: id, Model: "m", BlockSize: 16,
			Events: []events.Event{{Kind: events.Stored, Tier: events.Device,
				Blocks: []events.BlockHash{events.BlockHash(id)}, Locals: []events.LocalHash{events.LocalHash(id)}}}})
		if err != nil {
			t.Fatal(err)
		}
		return jetstream.Message{Seq: seq, Key: events.RankKey{Instance: "w"}, Data: data}
	}
	unreadable, nobodys := message(2, 9), message(3, 9)
	unreadable.Data, nobodys.Key = unreadable.Data[:5], events.RankKey{}
	first := message(1, 1)
	if !m.Apply(0, []jetstream.Message{first, unreadable, nobodys, message(4, 2)}) ||
		!m.Apply(0, []jetstream.Message{first}) {
		t.Fatal("messages are missing")
	}
	if !slices.Equal(got, []events.EventID{1, 2}) {
		t.Errorf("batches that begin with %v are passed on", got)
	}
}
