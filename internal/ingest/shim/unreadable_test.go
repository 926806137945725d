package shim

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestUnreadable publishes undecodable messages. Each is skipped without other effects. In strict mode the rank is
// cleared, once for consecutive messages, and the log's cursor continues after them.
func TestUnreadable(t *testing.T) {
	said := []string{"life1 +1 +2", "life1 ?", "life1 ? -1", "life1", "life1 +3", "life1 -2 ?", "life1 +4"}
	for _, c := range []struct {
		clear bool
		want  []string
	}{
		{true, []string{"cleared", "stored 1", "stored 2", "cleared", "stored 3", "cleared", "stored 4"}},
		{false, []string{"cleared", "stored 1", "stored 2", "stored 3", "stored 4"}},
	} {
		m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, false, Whole{Decode: decodeWords})
		if c.clear {
			m.ClearUnreadable()
		}
		m.Recovered(Published{}, 100)
		m.Connected()
		var got []string
		for seq, payload := range said {
			m.Live(Frame{Seq: events.EngineSeq(seq), Payload: []byte(payload)}, 100)
			flight, err := m.fly()
			if err != nil {
				t.Fatal(err)
			}
			for _, data := range flight {
				var b events.Batch
				if err := events.DecodeBatch(data, &b); err != nil {
					t.Fatal(err)
				}
				for _, e := range b.Events {
					word := map[events.Kind]string{events.Stored: "stored", events.Removed: "removed",
						events.Cleared: "cleared"}[e.Kind]
					for _, block := range e.Blocks {
						word += " " + string(rune('0'+block))
					}
					got = append(got, word)
					if e.Kind == events.Cleared && len(got) > 1 && (e.Reason != events.ReasonGap ||
						b.Cursor.Seq != events.EngineSeq(seq) || b.Cursor.Partial != 0) {
						t.Errorf("after message %d: %+v, cursor %+v", seq, e, b.Cursor)
					}
				}
			}
			m.Flushed()
		}
		if n := m.Counts(); !slices.Equal(got, c.want) || n.Undecodable != 3 || n.Taken != uint64(len(said)) ||
			n.Gaps != 0 {
			t.Errorf("cleared: %v: %q, want %q; %+v", c.clear, got, c.want, n)
		}
	}
}

// TestUnreadableAsksForASnapshot skips an unreadable message of an engine with snapshots. The machine requests a
// snapshot as soon as the engine is quiet.
func TestUnreadableAsksForASnapshot(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	m.UseSnapshots()
	m.Recovered(Published{}, 100)
	m.Connected()
	m.Live(Frame{Seq: 0, Payload: []byte("life1 +1 +2")}, 100)
	if _, ok := wantsReplay(m); ok {
		m.ReplayedWhole(Snapshot{Next: 1, Payloads: [][]byte{[]byte("life1 +1"), []byte("life1 +2")}}, 100)
	}
	m.Live(Frame{Seq: 1, Payload: []byte("life1 -1 ?")}, 100)
	if wantsSnapshot(m) {
		t.Fatal("while the engine speaks")
	}
	if m.Verify(); !wantsSnapshot(m) {
		t.Fatal("no snapshot request")
	}
	before := m.Counts().Events
	// a clear and the block
	if m.Snapshot(Snapshot{Next: 2, Payloads: [][]byte{[]byte("life1 +2")}}, 200); m.Counts().Events != before+2 {
		t.Errorf("%+v", m.Counts())
	}
}
