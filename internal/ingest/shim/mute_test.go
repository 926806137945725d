package shim

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestDeadReplayHoldsLiveMessagesForSecondsOnly has a replay endpoint with repeated failures: after the patience, live
// messages continue. A gap clears the rank. Without a gap nothing is cleared, and a later reply shows whether this was
// right.
func TestDeadReplayHoldsLiveMessagesForSecondsOnly(t *testing.T) {
	frame := func(life int, seq events.EngineSeq) Frame {
		return Frame{Seq: seq, Payload: fmt.Appendf(nil, "life%d +%d", life, seq+1)}
	}
	fail := func(m *Machine, from events.Millis) events.Millis {
		for now := from; ; now += 700 {
			if _, ok := wantsReplay(m); !ok {
				t.Fatal("no replay is due")
			}
			if !m.ReplayFailed(now).Again {
				return now
			}
			m.RetryReplay()
		}
	}
	for _, gap := range []bool{false, true} {
		m := NewMachine(Identity{Model: "m", BlockSize: 1}, Limits{}, true, Whole{Decode: decodeWords})
		m.Recovered(Published{}, 1)
		m.Connected()
		wantsReplay(m)
		m.Replayed(frame(1, 0), 2)
		m.ReplayEnded(2)
		m.Connected()
		next := events.EngineSeq(1)
		if gap {
			next = 5
		}
		m.Live(frame(1, next), 10)
		before := m.Counts()
		if !m.CatchingUp() {
			t.Fatalf("gap %v: not catching up before the replay has failed", gap)
		}
		if before.Taken != 1 {
			t.Fatalf("gap %v: %d messages processed before the replay has failed", gap, before.Taken)
		}
		if end := fail(m, 10); end-10 > 4000 {
			t.Fatalf("gap %v: live messages were held for %d ms", gap, end-10)
		}
		for m.CatchingUp() { // until the waiting events are published
			if flight, err := m.fly(); err != nil || flight == nil {
				t.Fatalf("gap %v: still catching up after the replay has failed: %v", gap, err)
			}
			m.Flushed()
		}
		after := m.Counts()
		want := uint64(0)
		if gap {
			want = 1
		}
		if after.Taken != 2 || after.Gaps != want || after.Restarts != before.Restarts {
			t.Fatalf("gap %v: came to %+v", gap, after)
		}
		m.Verify()
		if from, ok := wantsReplay(m); !ok || from != next {
			t.Fatalf("gap %v: repeated request from %d, %v", gap, from, ok)
		}
		m.Replayed(frame(2, next), 9000) // another life
		if c := m.Counts(); c.Restarts != after.Restarts+1 {
			t.Fatalf("gap %v: another life was not noticed: %+v", gap, c)
		}
	}
}
