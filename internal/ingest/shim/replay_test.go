package shim

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestReplayInPieces has an engine with a replay socket that drops all messages of a reply after the first few, as
// libzmq's ROUTER does at its high-water mark. Every reply advances the machine, so no message is lost, for any number
// of replies. Only a permanent hole is a loss.
func TestReplayInPieces(t *testing.T) {
	const messages, hole = 30, 25
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	m.Recovered(Published{}, 100)
	m.Connected()
	for asked := 0; ; asked++ {
		from, ok := wantsReplay(m)
		if !ok {
			break
		}
		if asked > messages {
			t.Fatal("there is no end")
		}
		more, given := true, 0
		for seq := from; seq < messages && more; seq++ {
			if given++; seq != hole && (given <= 3 || seq == messages-1) {
				more = m.Replayed(Frame{Seq: seq, Payload: fmt.Appendf(nil, "life1 +%d", seq)}, 100) == ReplayGoesOn
			}
		}
		if more {
			m.ReplayEnded(100)
		}
	}
	if c := m.Counts(); c.Gaps != 1 || c.Taken != messages-1 {
		t.Fatalf("%d gaps, %d of %d messages processed", c.Gaps, c.Taken, messages)
	}
}

// TestOvertakenBeforeTheFirst drops a live message for lack of room during the first replay. The answer to the replay
// may be a snapshot. The machine requests the message again.
func TestOvertakenBeforeTheFirst(t *testing.T) {
	for _, snapshots := range []bool{false, true} {
		m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{HeldBytes: 1}, true, Whole{Decode: decodeWords})
		if snapshots {
			m.UseSnapshots()
		}
		m.Recovered(Published{}, 100)
		m.Connected()
		asked := func() bool {
			r := advance(m)
			return r.Replay || r.Snapshot
		}
		if !asked() {
			t.Fatalf("snapshots %v: no request at the start", snapshots)
		}
		m.Live(Frame{Seq: 0, Payload: []byte("life1 +1")}, 100)
		if snapshots {
			m.ReplayedWhole(Snapshot{}, 100) // of before it
		} else {
			m.ReplayEnded(100)
		}
		if c := m.Counts(); c.Overtaken != 1 || c.Taken != 0 || !asked() {
			t.Errorf("snapshots %v: no request; %+v", snapshots, c)
		}
	}
}

// TestReplayOfAnother checks a replay that never reaches the live messages, as another rank's replay. It is requested a
// few times with pauses. Then the missing messages count as lost, and live messages are processed.
func TestReplayOfAnother(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
	m.Recovered(Published{}, 1)
	m.Connected()
	frame := func(n events.EngineSeq) Frame { return Frame{Seq: n, Payload: []byte("x +1")} }
	due := func() bool {
		r, err := m.Advance(false)
		if err != nil {
			t.Fatal(err)
		}
		return r.Replay
	}
	due()
	m.Replayed(frame(0), 1)
	m.ReplayEnded(1)
	m.Live(frame(1000), 1)
	replays := 0
	for ; due(); replays++ {
		if replays > m.limits.ReplayFailures {
			t.Fatal("endless requests")
		}
		m.Replayed(frame(0), 2)
		if retry := m.ReplayEnded(2); retry.Again {
			if retry.Failures != replays+1 {
				t.Errorf("%d have failed, want %d", retry.Failures, replays+1)
			}
			m.RetryReplay()
		}
	}
	if m.counts.Gaps != 1 || m.taken.Seq != 1000 || replays != m.limits.ReplayFailures {
		t.Errorf("%d gaps, processed up to %d, after %d replays", m.counts.Gaps, m.taken.Seq, replays)
	}
}

// TestMessagesBeforeTheSubscription lets the engine publish its first messages after an empty replay, but before the
// publisher has the subscription. The first live message is a gap, and another replay has the missing messages. If all
// replays are empty, the engine's earlier messages count as lost.
func TestMessagesBeforeTheSubscription(t *testing.T) {
	frame := func(n events.EngineSeq) Frame { return Frame{Seq: n, Payload: fmt.Appendf(nil, "life1 +%d", n)} }
	for _, repeats := range []bool{true, false} {
		m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
		m.Recovered(Published{}, 1)
		m.Connected()
		wantsReplay(m)
		m.ReplayEnded(1)
		if m.CatchingUp() {
			fly(t, m)
		}
		m.Live(frame(2), 1)
		if !m.CatchingUp() {
			t.Error("the machine has caught up without two messages")
		}
		replays := 0
		for ; ; replays++ {
			from, ok := wantsReplay(m)
			if !ok {
				break
			}
			if from != 0 || replays > m.limits.ReplayFailures {
				t.Fatalf("replay %d from %d", replays, from)
			}
			for seq := events.EngineSeq(0); repeats && seq < 3; seq++ {
				m.Replayed(frame(seq), 1)
			}
			if m.ReplayEnded(1).Again {
				m.RetryReplay()
			}
		}
		c, late, taken, most := m.Counts(), uint64(0), uint64(3), 1
		if !repeats {
			late, taken, most = 1, 1, m.limits.ReplayFailures
		}
		if c.JoinedLate != late || c.Taken != taken || c.Gaps != 0 || replays != most || m.taken.Seq != 2 {
			t.Errorf("replays %v: %+v after %d replays, up to %d", repeats, c, replays, m.taken.Seq)
		}
	}
}
