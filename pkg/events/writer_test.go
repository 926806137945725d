package events

import (
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

// TestBatchWriterWritesWhatAppendBatchDoes: a batch encoded event by event has the same bytes, whatever the length of
// its model's name, and however small its first buffer was.
func TestBatchWriterWritesWhatAppendBatchDoes(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := drawBatch(t)
		want, err := AppendBatch(nil, &b)
		if err != nil {
			t.Fatal(err)
		}
		model := rapid.SampledFrom([]string{b.Model, "", b.Model + "longer"}).Draw(t, "model at first")
		w := NewBatchWriter(model, rapid.IntRange(0, 1000).Draw(t, "buffer"))
		if rapid.Bool().Draw(t, "zero value") {
			w = BatchWriter{}
		}
		for i := range b.Events {
			if err := w.Add(&b.Events[i]); err != nil {
				t.Fatal(err)
			}
		}
		for range 2 { // a batch may be finished again
			if got := w.Finish(&BatchHeader{Incarnation: b.Incarnation, FirstID: b.FirstID, Model: b.Model,
				BlockSize: b.BlockSize, Cursor: b.Cursor, Shutdown: b.Shutdown}); !bytes.Equal(got, want) {
				t.Fatalf("%x, want %x", got, want)
			}
		}
	})
}

// TestBatchWriterRefusesABadEvent and goes on without it.
func TestBatchWriterRefusesABadEvent(t *testing.T) {
	w := NewBatchWriter("m", 0)
	if err := w.Add(&Event{Kind: Removed, Tier: Device, Locals: []LocalHash{1}}); err == nil {
		t.Error("a removed event with local hashes is encoded")
	}
	e := Event{Kind: Removed, Tier: Device, Blocks: []BlockHash{1}}
	if err := w.Add(&e); err != nil || w.Len() != 1 {
		t.Errorf("%v, %d events", err, w.Len())
	}
	want, err := AppendBatch(nil, &Batch{Model: "m", Events: []Event{e}})
	if got := w.Finish(&BatchHeader{Model: "m"}); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%x, want %x, %v", got, want, err)
	}
}

// TestCloneSharesNothing: a copy of a decoded batch stays as it is when the batch is decoded into again.
func TestCloneSharesNothing(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first, second := drawBatch(t), drawBatch(t)
		var into Batch
		decode := func(b *Batch) []byte {
			data, err := AppendBatch(nil, b)
			if err == nil {
				err = DecodeBatch(data, &into)
			}
			if err != nil {
				t.Fatal(err)
			}
			return data
		}
		want := decode(&first)
		clone := into.Clone()
		decode(&second)
		if got, err := AppendBatch(nil, clone); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%x, want %x, %v", got, want, err)
		}
	})
}
