package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// diesWithTheProcess are the tiers that end with an engine's process. vLLM and SGLang keep host copies in process
// memory: pinned tensors, or a mapping shared by the processes of an engine with a file that is unlinked at once. A new
// process never finds such copies. Disks and stores beyond the host survive.
var diesWithTheProcess = [...]events.Tier{events.Device, events.Host}

// Gone reports that the engine's process has ended, with its device and host memory. The machine publishes clears of
// these tiers in the current incarnation, because the rank's blocks on disks and in stores remain. The events have no
// cursor, so a shim that restarts in between begins without a cursor. The next Connected begins a new incarnation with
// the engine's whole replay buffer. The buffer is complete for a new process, and for the same process if it reaches
// back to the first message.
func (m *Machine) Gone() {
	switch m.phase.(type) {
	case recovering, departed:
		return
	}
	if m.Busy() {
		m.leaving = true
		return
	}
	m.phase = departed{}
	m.counts.Departures++
	m.held = held{}
	m.taken, m.basis = events.Cursor{}, heard
	m.decode.Reset()
	m.learning = nil
	if m.spoken() {
		for _, tier := range diesWithTheProcess {
			m.push(&events.Event{Kind: events.Cleared, Tier: tier, Reason: events.ReasonEngineGone}, events.Cursor{})
		}
	}
	m.fallBehind()
}

// spoken reports whether the incarnation has events after the first clear.
func (m *Machine) spoken() bool { return m.nextID > 2 }

// Asleep reports that the engine sleeps and has sent no message of this session since the request. An engine discards
// its cache when it falls asleep, and announces the clear only after it wakes up. So the machine clears the rank, once
// for the messages since the last clear, because earlier messages may arrive late. Blocks stored after the wake-up
// follow the clear.
func (m *Machine) Asleep() {
	at := Reached{Incarnation: m.incarnation, LastID: m.nextID}
	if _, ok := m.phase.(live); !ok || m.Busy() || !m.spoken() || at == m.slept {
		return
	}
	m.record(nil)
	m.recordEvent(m.clearHeld(events.ReasonEngine), true)
	m.slept = Reached{Incarnation: m.incarnation, LastID: m.nextID}
}
