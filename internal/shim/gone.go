package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// tenure is whether the engine that the current incarnation is of still runs, as far as is known.
type tenure uint8

const (
	runs     tenure = iota
	departed        // it is gone: whoever connects next begins a new incarnation
)

// diesWithTheProcess are the tiers that an engine's process takes along. vLLM and SGLang keep host copies in memory of
// their own: pinned tensors, or a mapping which the processes of one engine share and whose file is unlinked at once.
// In neither does a new process look for what an earlier one left there. Disks and stores beyond the host outlive it.
var diesWithTheProcess = [...]events.Tier{events.Device, events.Host}

// Gone tells that the engine's process has ended, and with it what it had in device and host memory: the log is told
// so, in the current incarnation, since what the rank has on disks and in stores beyond its host is still there. These
// events have no cursor: a shim that starts again meanwhile begins from nothing. The next Connected begins a new
// incarnation with all that the engine's replay buffer has: everything, if it is a new life, and also if it is the one
// that was taken to be gone and its buffer reaches back to its first message.
func (m *Machine) Gone() {
	if !m.started || m.tenure == departed {
		return
	}
	m.tenure = departed
	m.counts.Departures++
	m.replaying, m.asked, m.snapshot = false, false, notWanted
	m.held, m.heldBytes, m.overtaken = nil, 0, 0
	m.taken, m.unseen, m.adopted = events.Cursor{}, false, false
	m.decode.Reset()
	m.learning = nil
	if m.spoken() {
		for _, tier := range diesWithTheProcess {
			m.push(events.Event{Kind: events.Cleared, Tier: tier, Reason: events.ReasonEngineGone}, events.Cursor{})
		}
	}
	m.fallBehind()
}

// spoken reports whether there is more in the incarnation than the clear that it begins with.
func (m *Machine) spoken() bool { return m.nextID > 2 }

// arrived tells that an engine is connected: after a departure it is another one as far as anybody knows.
func (m *Machine) arrived() {
	if m.tenure != departed {
		return
	}
	m.tenure = runs
	if m.spoken() {
		m.rebirth(events.ReasonRestart, 0)
	}
}
