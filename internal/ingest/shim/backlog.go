package shim

// progress is how far a machine is with what its engine said before now.
type progress uint8

const (
	level      progress = iota // the log has all of it
	hearing                    // it is still to be heard: a replay or a snapshot is due
	publishing                 // it is heard, and on its way to the log
)

// backlog is what a machine has to catch up with.
type backlog struct {
	progress progress
	last     Reached // publishing: once the log has reached this, it has all of it
}

// CatchingUp reports whether the log lacks what the engine said a while ago: a replay still brings it, or it waits to
// be published, or it was published with local hashes that learning may correct. What the engine says now, and what is
// found missing when the engine is asked on suspicion, is none of it. A message that is too large for one flight is.
func (m *Machine) CatchingUp() bool {
	return m.backlog.progress != level || m.learning.pending() || m.Busy()
}

// fallBehind tells that there may be more of what the engine said than has been heard.
func (m *Machine) fallBehind() {
	m.backlog = backlog{progress: hearing}
	if !m.canAsk() {
		m.heardAll()
	}
}

// canAsk reports whether the engine may say again what was not heard. One that is gone says nothing.
func (m *Machine) canAsk() bool { return m.replay && m.phase != departed{} }

// heardAll tells that no more of the backlog is to be heard.
func (m *Machine) heardAll() {
	if m.backlog.progress == hearing && m.phase.takesLive() {
		m.publishBacklog()
	}
}

// Delayed tells that the log has not taken a flight for a while: what waits is a backlog by now.
func (m *Machine) Delayed() {
	if _, ok := m.phase.(recovering); !ok && m.backlog.progress != hearing {
		m.publishBacklog()
	}
}

// publishBacklog makes what is queued now the rest of the backlog.
func (m *Machine) publishBacklog() {
	m.backlog = backlog{progress: publishing, last: Reached{Incarnation: m.incarnation, LastID: m.nextID - 1}}
	m.checkAcked()
}

// checkAcked looks at whether the log has the backlog.
func (m *Machine) checkAcked() {
	if m.backlog.progress == publishing && m.acked.compare(m.backlog.last) >= 0 {
		m.backlog = backlog{}
	}
}
