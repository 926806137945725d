package shim

// progress is the state of a machine's backlog: the engine's messages from before now.
type progress uint8

const (
	level      progress = iota // the log has all of the backlog
	hearing                    // a replay or a snapshot is due
	publishing                 // the backlog is queued for the log
)

// backlog is the part of the engine's messages that a machine has to catch up with.
type backlog struct {
	progress progress
	last     Reached // in the state publishing: the end of the backlog in the log
}

// CatchingUp reports whether the log lacks earlier events of the engine. The missing events are in a due replay, wait
// for publication, or were published with local hashes that learning may correct. Live messages do not count, and
// neither do messages that a check of the replay socket finds. A message too large for a single flight counts.
func (m *Machine) CatchingUp() bool {
	return m.backlog.progress != level || m.learning.pending() || m.Busy()
}

// fallBehind starts a backlog, because the engine may have unread messages.
func (m *Machine) fallBehind() {
	m.backlog = backlog{progress: hearing}
	if !m.canAsk() {
		m.heardAll()
	}
}

// canAsk reports whether missing messages can be replayed: the engine has a replay port and is not gone.
func (m *Machine) canAsk() bool { return m.replay && m.phase != departed{} }

// heardAll ends the reading of the backlog.
func (m *Machine) heardAll() {
	if m.backlog.progress == hearing && m.phase.acceptsLive() {
		m.publishBacklog()
	}
}

// Delayed reports that a flight has been waiting for the log for a while. The waiting events become a backlog.
func (m *Machine) Delayed() {
	if _, ok := m.phase.(recovering); !ok && m.backlog.progress != hearing {
		m.publishBacklog()
	}
}

// publishBacklog makes the queued events the rest of the backlog.
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
