package shim

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestCatchingUp runs a shim that starts beside an engine with many messages. The shim is catching up until the last
// message is in the log, and not later, for any further messages. It is catching up again after every new connection,
// and while the log accepts nothing for a while.
func TestCatchingUp(t *testing.T) {
	is := func(m *Machine, want bool, when string) {
		t.Helper()
		if m.CatchingUp() != want {
			t.Fatalf("%s: catching up is %v", when, !want)
		}
	}
	frame := func(seq events.EngineSeq) Frame {
		return Frame{Seq: seq, Payload: fmt.Appendf(nil, "life1 +%d", seq+1)}
	}
	land := func(m *Machine) {
		t.Helper()
		if flight, err := m.fly(); err != nil || flight == nil {
			t.Fatalf("flight %v, %v", flight, err)
		}
		m.Flushed()
	}
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{MessageBytes: 1, FlightMessages: 2}, true,
		Whole{Decode: decodeWords})
	m.Recovered(Published{Found: true, Reached: Reached{Incarnation: 7, LastID: 1}}, 100)
	is(m, true, "before the first message")
	m.Connected()
	wantsReplay(m)
	for seq := range 4 {
		m.Replayed(frame(events.EngineSeq(seq)), 100)
	}
	is(m, true, "during the replay")
	m.ReplayEnded(100)
	m.Live(frame(4), 100)
	is(m, true, "before it is published") // a clear and four blocks are the backlog, and a block is new
	land(m)
	land(m)
	is(m, true, "before the last block of the backlog")
	land(m)
	is(m, false, "after the backlog")
	m.Live(frame(5), 100)
	m.Verify()
	is(m, false, "with something new")
	wantsReplay(m)
	m.Replayed(frame(5), 100)
	m.ReplayEnded(100)
	land(m)
	is(m, false, "after a question whether anything was missed")

	m.Connected()
	is(m, true, "after a new connection")
	wantsReplay(m)
	m.Replayed(frame(5), 100)
	m.ReplayEnded(100)
	is(m, false, "with nothing missed")

	m.Live(frame(6), 100)
	m.Live(frame(7), 100)
	m.Live(frame(8), 100)
	m.fly()
	is(m, false, "with a flight in the air")
	m.Delayed()
	is(m, true, "with a flight that does not land")
	m.Flushed()
	is(m, true, "with a waiting flight")
	land(m)
	is(m, false, "after the waiting flights")

	m.Resync(200)
	is(m, true, "after a resync request")
	m.Gone()
	land(m)
	is(m, false, "with an engine that is gone")

	// Without a replay socket, only waiting events are a backlog.
	m = NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, false, Whole{Decode: decodeWords})
	m.Recovered(Published{}, 100)
	is(m, true, "without a replay socket, before the first clear is published")
	land(m)
	is(m, false, "without a replay socket")
	m.Connected()
	is(m, false, "without a replay socket, connected")
}
