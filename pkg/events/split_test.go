package events

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// naiveCursor walks the marks event by event.
func naiveCursor(marks []Mark, events int) Cursor {
	at := marks[0]
	for _, m := range marks[1:] {
		if m.Events <= events {
			at = m
		}
	}
	c := at.Cursor
	c.Partial += uint32(events - at.Events)
	return c
}

// Parts put together are the whole; none is too large, and none could have taken the next one's first event; each cursor is
// what walking the messages one by one gives.
func TestSplitBatches(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		whole := drawBatch(t)
		whole.FirstID >>= 1
		for range rapid.IntRange(0, 20).Draw(t, "large") {
			n := rapid.IntRange(1, MaxBlocksPerEvent).Draw(t, "blocks")
			whole.Events = append(whole.Events, Event{
				Kind: Stored, Tier: Device, HasParent: true, Parent: 1<<64 - 1,
				Blocks: make([]BlockHash, n), Locals: make([]LocalHash, n),
			})
		}
		limit := rapid.IntRange(MinBatchSize, 300_000).Draw(t, "limit")
		marks := []Mark{{0, Cursor{Known: rapid.Bool().Draw(t, "known"), Seq: 9, Digest: 90, Partial: rapid.Uint32Range(0, 5).Draw(t, "partial")}}}
		for at := 0; ; {
			at += rapid.IntRange(0, 10).Draw(t, "events")
			if at > len(whole.Events) {
				break
			}
			seq := 9 + len(marks)
			marks = append(marks, Mark{at, Cursor{Known: true, Seq: EngineSeq(seq), Digest: uint64(10 * seq)}})
		}
		parts, err := SplitBatches([]Batch{{Model: "kept"}}, &whole, marks, limit)
		if err != nil {
			t.Fatal(err)
		}
		if parts[0].Model != "kept" || len(parts) < 2 {
			t.Fatalf("%d parts", len(parts))
		}
		parts = parts[1:]
		next := 0
		for i, p := range parts {
			encoded, err := AppendBatch(nil, &p)
			if err != nil {
				t.Fatal(err)
			}
			if len(encoded) > limit {
				t.Fatalf("part %d takes %d bytes of %d", i, len(encoded), limit)
			}
			if p.FirstID != whole.FirstID+EventID(next) || p.Incarnation != whole.Incarnation || p.Model != whole.Model || p.BlockSize != whole.BlockSize {
				t.Fatalf("part %d: header %+v", i, p)
			}
			for j, e := range p.Events {
				if !sameEvent(e, whole.Events[next+j]) {
					t.Fatalf("part %d: event %d differs", i, j)
				}
			}
			next += len(p.Events)
			if i < len(parts)-1 {
				if len(p.Events) == 0 {
					t.Fatalf("part %d is empty", i)
				}
				if slack := limit - len(encoded); slack > whole.Events[next].EncodedSize()+64 {
					t.Fatalf("part %d leaves %d bytes where the next event takes %d", i, slack, whole.Events[next].EncodedSize())
				}
			}
			if want := naiveCursor(marks, next); p.Cursor != want {
				t.Fatalf("part %d: cursor %+v, want %+v", i, p.Cursor, want)
			}
			if p.Shutdown != (whole.Shutdown && i == len(parts)-1) {
				t.Fatalf("part %d of %d: shutdown %v", i, len(parts), p.Shutdown)
			}
		}
		if next != len(whole.Events) {
			t.Fatalf("parts have %d of %d events", next, len(whole.Events))
		}
	})
}

func TestSplitBatchesRefuses(t *testing.T) {
	one := &Batch{Events: []Event{{Kind: Cleared}}}
	start := Mark{}
	for _, c := range []struct {
		name  string
		whole *Batch
		marks []Mark
		limit int
		want  string
	}{
		{"a small limit", one, []Mark{start}, MinBatchSize - 1, "80000 bytes or more"},
		{"no marks", one, nil, MinBatchSize, "first mark"},
		{"a late first mark", one, []Mark{{Events: 1}}, MinBatchSize, "first mark"},
		{"a mark beyond the events", one, []Mark{start, {Events: 2}}, MinBatchSize, "mark 1 is at event 2"},
		{"marks out of order", one, []Mark{start, {Events: 1}, {Events: 0}}, MinBatchSize, "mark 2 is at event 0"},
		{"a message that ends and is begun", one, []Mark{start, {Events: 1, Cursor: Cursor{Partial: 1}}}, MinBatchSize, "mark 1 has 1 events"},
		{"a model name that leaves no room", &Batch{Model: strings.Repeat("m", MinBatchSize), Events: one.Events}, []Mark{start}, MinBatchSize, "event 0 takes"},
	} {
		parts, err := SplitBatches(nil, c.whole, c.marks, c.limit)
		if err == nil || !strings.Contains(err.Error(), c.want) || len(parts) != 0 {
			t.Errorf("%s: %d parts, %v", c.name, len(parts), err)
		}
	}
}
