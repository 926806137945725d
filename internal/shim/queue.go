package shim

import (
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// entry is one event on its way to the log, with the engine's cursor once it is there.
type entry struct {
	incarnation events.Incarnation
	id          events.EventID
	cursor      events.Cursor
	event       events.Event
	bytes       int // in the log, about
}

// What an entry and a frame take in memory beside their blocks and payload, so that many small ones are bounded too.
const (
	entrySize = 192 // with what a slice of them has to spare
	frameSize = 64
)

// memory is what an entry takes of QueueBytes.
func (e *entry) memory() int { return e.bytes + entrySize }

// end is the last event that one message of a flight carries.
type end struct {
	incarnation events.Incarnation
	id          events.EventID
	entries     int // of the queue, up to and including this message
}

// push queues a copy of an event.
func (m *Machine) push(e events.Event, cursor events.Cursor) {
	m.emptied = false
	e.Blocks = append([]events.BlockHash(nil), e.Blocks...)
	e.Locals = append([]events.LocalHash(nil), e.Locals...)
	if m.offers.lacking {
		cursor = events.Cursor{}
	}
	m.queue = append(m.queue, entry{incarnation: m.incarnation, id: m.nextID, cursor: cursor, event: e,
		bytes: e.EncodedSize()})
	m.queuedBytes += m.queue[len(m.queue)-1].memory()
	m.nextID++
	m.counts.Events++
	if e.Kind == events.Stored {
		m.counts.Blocks += uint64(len(e.Blocks))
	}
}

// InFlight reports whether a flight is in the air.
func (m *Machine) InFlight() bool { return m.inflight > 0 }

// NextFlight returns the messages to publish now, in order: none if nothing waits or a flight is in the air. They stay
// the machine's and must not be changed.
func (m *Machine) NextFlight() ([][]byte, error) {
	if m.inflight > 0 || len(m.queue) == 0 {
		return nil, nil
	}
	m.flight, m.flightEnds = m.flight[:0], m.flightEnds[:0]
	batch := events.Batch{Model: m.id.Model, BlockSize: m.id.BlockSize}
	for at := 0; at < len(m.queue) && len(m.flight) < m.limits.FlightMessages; {
		first := m.queue[at]
		batch.Incarnation, batch.FirstID, batch.Events = first.incarnation, first.id, batch.Events[:0]
		for size := 0; at < len(m.queue); at++ {
			e := &m.queue[at]
			if e.incarnation != first.incarnation || (size > 0 && size+e.bytes > m.limits.MessageBytes) {
				break
			}
			size += e.bytes
			batch.Events = append(batch.Events, e.event)
			batch.Cursor = e.cursor
		}
		data, err := events.AppendBatch(nil, &batch)
		if err != nil {
			return nil, fmt.Errorf("encode a batch: %w", err)
		}
		m.flight = append(m.flight, data)
		m.flightEnds = append(m.flightEnds, end{incarnation: batch.Incarnation, id: batch.LastID(), entries: at})
		m.inflight = at
	}
	m.counts.Flushes++
	return m.flight, nil
}

// Flushed tells that the flight is in the log, all of it.
func (m *Machine) Flushed() {
	if m.inflight > 0 {
		m.landed(len(m.flightEnds))
	}
}

// LogLost tells that the log no longer has what it had acknowledged, and what it has of this rank instead. What the
// engine can say again is published anew, in a new incarnation; what waits is part of what was lost.
func (m *Machine) LogLost(p Published, now events.Millis) {
	if len(m.queue) > 0 && m.queue[0].incarnation == m.incarnation && m.queue[0].id == 1 &&
		p.Incarnation < m.incarnation {
		m.landed(0) // all of the present incarnation waits here still: nothing of it was lost
		m.acked = p
		return
	}
	m.queue, m.queuedBytes, m.inflight = nil, 0, 0
	m.acked = p
	m.incarnation = max(m.incarnation, p.Incarnation)
	m.counts.Gaps++
	m.attempts = attempts{}
	m.offers.askAgain()
	m.begin(events.ReasonGap, now)
	m.startReplay()
}

// Ended tells that the log says of this rank's incarnation that it is closed: its lease had expired, and what it held
// was cleared. What the engine can say again is published anew; what waits is part of that.
func (m *Machine) Ended(p Published, now events.Millis) {
	if _, ok := m.phase.(recovering); ok {
		return
	}
	// it is known, and the next incarnation waits in the queue
	if m.acked.Shutdown && p.Incarnation == m.acked.Incarnation && p.LastID == m.acked.LastID {
		m.landed(0)
		return
	}
	m.queue, m.queuedBytes, m.inflight = nil, 0, 0
	m.acked = p
	m.incarnation = max(m.incarnation, p.Incarnation)
	m.counts.Ended++
	m.attempts = attempts{}
	m.offers.askAgain()
	m.begin(events.ReasonLeaseExpiry, now)
	m.startReplay()
}

// Resync begins a new incarnation because somebody asked: with a clear, and then all that the engine can say again.
// What waits and is not in the air is part of that.
func (m *Machine) Resync(now events.Millis) {
	if _, ok := m.phase.(recovering); ok {
		return
	}
	for i := m.inflight; i < len(m.queue); i++ {
		m.queuedBytes -= m.queue[i].memory()
		m.queue[i] = entry{}
	}
	m.queue = m.queue[:m.inflight]
	m.counts.Resyncs++
	m.attempts = attempts{}
	m.offers.askAgain()
	m.begin(events.ReasonOperator, now)
	m.startReplay()
}

// landed drops the first n messages of the flight from the queue; the rest, if any, waits to be published again.
func (m *Machine) landed(n int) {
	if n > 0 {
		last := m.flightEnds[n-1]
		entries := m.queue[:last.entries]
		m.acked = Published{Found: true, Incarnation: last.incarnation, LastID: last.id,
			Cursor: entries[len(entries)-1].cursor}
		for i := range entries {
			m.queuedBytes -= entries[i].memory()
			entries[i] = entry{}
		}
		m.queue = m.queue[last.entries:]
		m.counts.Messages += uint64(n)
		m.noteAcked()
	}
	m.inflight = 0
}

// FlushIndeterminate tells what the log holds after a flight whose fate is not known. Either nothing of it is there, or
// the messages up to one of them, or all; then the rest is published again. If the log has less than it had
// acknowledged the error is ErrLogLost, and LogLost is to be told; if it has more than this shim has sent, somebody
// else publishes for this rank: ErrFenced.
func (m *Machine) FlushIndeterminate(p Published) error {
	if m.inflight == 0 {
		return nil
	}
	if p.Found == m.acked.Found && (!p.Found || p.Incarnation == m.acked.Incarnation && p.LastID == m.acked.LastID) {
		m.landed(0)
		return nil
	}
	for i, e := range m.flightEnds {
		if p.Found && p.Incarnation == e.incarnation && p.LastID == e.id {
			m.landed(i + 1)
			return nil
		}
	}
	class := ErrFenced
	if !p.Found || p.Incarnation < m.acked.Incarnation || p.Incarnation == m.acked.Incarnation &&
		p.LastID < m.acked.LastID {
		class = ErrLogLost
	}
	return fmt.Errorf(
		"%w: the log ends with event %d of incarnation %d, this shim had published up to event %d of incarnation %d",
		class, p.LastID, p.Incarnation, m.acked.LastID, m.acked.Incarnation)
}
