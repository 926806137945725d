package shim

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestPresenceOfSleepers checks that a sleeping engine stays asleep while it shows signs of life, until it reports that
// it is awake, or its connection ends.
func TestPresenceOfSleepers(t *testing.T) {
	now := time.Unix(1000, 0)
	p := &presence{silentAfter: time.Second, sign: now}
	is := func(want api.EngineState) {
		t.Helper()
		if p.state.Engine != want {
			t.Errorf("the engine is %q, want %q", p.state.Engine, want)
		}
	}
	p.slept(true, now)
	is("")
	p.opened(now)
	p.slept(true, now)
	is(api.EngineAsleep)
	p.received(now)
	p.replayed(now)
	is(api.EngineAsleep)
	p.slept(false, now)
	is(api.EngineConnected)
	p.slept(true, now)
	p.mute()
	is(api.EngineSilent)
	p.slept(false, now)
	is(api.EngineSilent)
	p.received(now)
	p.slept(true, now)
	p.closed(nil, now)
	p.opened(now)
	is(api.EngineConnected)
}

// TestOthersInTheLog checks that blocks of another model or size in the log start a new incarnation. A log without a
// model and size does not.
func TestOthersInTheLog(t *testing.T) {
	id := Identity{Model: "m", BlockSize: 8}
	for _, c := range []struct {
		was    Identity
		others bool
	}{{Identity{}, false}, {id, false}, {Identity{"m", 4}, true}, {Identity{"n", 8}, true}} {
		m := NewMachine(id, Limits{}, true, oneBlock)
		m.Recovered(Published{Found: true, Identity: c.was, Reached: Reached{Incarnation: 5, LastID: 7,
			Cursor: events.Cursor{Known: true, Seq: 3}}}, 9)
		if begun := m.Incarnation() != 5; begun != c.others {
			t.Errorf("after %+v a new incarnation began: %v", c.was, begun)
		}
		if entries, _ := m.Queued(); c.others { // a sleeping engine's clear is a single event, and only if blocks exist
			m.Asleep()
			if after, _ := m.Queued(); after != entries {
				t.Errorf("an incarnation that holds nothing was cleared")
			}
			continue
		}
		for range 2 {
			m.Asleep()
		}
		var clear events.Batch
		if err := events.DecodeBatch(m.queue[0].events.Finish(&events.BatchHeader{Model: "m"}), &clear); err != nil {
			t.Fatal(err)
		}
		if len(clear.Events) != 1 || clear.Events[0].Kind != events.Cleared ||
			clear.Events[0].Reason != events.ReasonEngine {
			t.Errorf("a sleeping engine queued %+v", clear.Events)
		}
		m.Live(Frame{Seq: 4}, 10) // a late message
		m.Asleep()
		if entries, _ := m.Queued(); entries != 3 {
			t.Errorf("after a late message there are %d events", entries)
		}
	}
}

// oneBlock is a Decoder that decodes every message to a stored block.
var oneBlock = Whole{Decode: func([]byte) (events.Message, error) {
	return events.Message{Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
		Locals: []events.LocalHash{1}}}}, nil
}}
