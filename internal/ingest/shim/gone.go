package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// diesWithTheProcess are the tiers that an engine's process takes along. vLLM and SGLang keep host copies in memory of
// their own: pinned tensors, or a mapping which the processes of one engine share and whose file is unlinked at once.
// In neither does a new process look for what an earlier one left there. Disks and stores beyond the host outlive it.
var diesWithTheProcess = [...]events.Tier{events.Device, events.Host}

// Gone tells that the engine's process has ended, and with it what it had in device and host memory: the log is told
// so, in the current incarnation, since what the rank has on disks and in stores beyond its host is still there. These
// events have no cursor: a shim that starts again meanwhile begins from nothing. The next Connected begins a new
// incarnation with all that the engine's replay buffer has: everything, if it is a new process, and also if it is the
// one that was taken to be gone and its buffer reaches back to its first message.
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

// spoken reports whether there is more in the incarnation than the clear that it begins with.
func (m *Machine) spoken() bool { return m.nextID > 2 }

// Asleep tells that the engine sleeps, and has not sent a message of this session since before it was asked. An engine
// discards its cache when it falls asleep, and announces that only after it has woken up. So what the rank holds is
// cleared, once for what was taken since the last clear: messages of before may come late. What the engine stores after
// it has woken up follows the clear.
func (m *Machine) Asleep() {
	at := Reached{Incarnation: m.incarnation, LastID: m.nextID}
	if _, ok := m.phase.(live); !ok || m.Busy() || !m.spoken() || at == m.slept {
		return
	}
	m.record(nil)
	m.recordEvent(m.clearHeld(events.ReasonEngine), true)
	m.slept = Reached{Incarnation: m.incarnation, LastID: m.nextID}
}
