package shim

import "github.com/kvatlas/kvatlas/pkg/events"

// A message may decode to 40 times its size. So the machine decodes a message in parts, and a part only while few bytes
// wait for the log. The rest of the work waits in the machine: the current message, held messages, payloads of an
// engine snapshot.

// reading is a message with events queued in parts. The zero value is none.
type reading struct {
	cursor events.Cursor // of the last event
	before events.Cursor // of the message before; the other events have this cursor with Partial
	at     uint32        // number of decoded events
	more   bool          // the decoder has more
}

// releasing is the release of held messages.
type releasing struct {
	frames []Frame
	now    events.Millis
	inVain bool
}

// adopting is an engine snapshot in hand.
type adopting struct {
	snapshot Snapshot
	now      events.Millis
}

// Busy reports whether a part of the machine's input is not queued yet.
func (m *Machine) Busy() bool { return m.reading.more || m.releasing != nil || m.adopting != nil }

// hasRoom reports whether the next part may be decoded.
func (m *Machine) hasRoom() bool { return m.queuedBytes < m.limits.PartBytes }

// complete completes the work in progress, regardless of memory. An owner that respects Full never needs it.
func (m *Machine) complete() { m.work(func() bool { return true }) }

// work continues the work in progress, part by part, while may returns true.
func (m *Machine) work(may func() bool) {
	for m.Busy() && may() {
		switch {
		case m.reading.more:
			m.read(may)
		case m.adopting != nil:
			m.adoptNext()
		default:
			m.releaseNext()
		}
	}
	if m.leaving && !m.Busy() {
		m.leaving = false
		m.Gone()
	}
}

// abandon drops the work in progress: a new incarnation begins with the engine's repeatable events.
func (m *Machine) abandon() { m.reading, m.releasing, m.adopting = reading{}, nil, nil }

// decodeFirst decodes a message, or the first part.
func (m *Machine) decodeFirst(payload []byte) (part []events.Event, more bool, err error) {
	msg, more, err := m.decode.Begin(payload)
	return msg.Events, more, err
}

// read queues further parts of the message in hand.
func (m *Machine) read(may func() bool) {
	for m.reading.more && may() {
		m.queuePart(m.decode.Continue())
	}
}

// queuePart queues the next events of the message in hand.
func (m *Machine) queuePart(part []events.Event, more bool) {
	r := &m.reading
	for i := range part {
		if r.at++; r.at <= r.before.Partial { // published by an earlier shim
			m.recordEvent(&part[i], false)
			continue
		}
		cursor := r.cursor
		if r.cursor.Known && (more || i < len(part)-1) {
			cursor = r.before
			cursor.Partial = r.at
		}
		m.push(&part[i], cursor)
		m.recordEvent(&part[i], true)
	}
	if r.more = more; !more {
		*r = reading{}
	}
}
