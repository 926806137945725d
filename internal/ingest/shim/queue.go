package shim

import (
	"cmp"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// batch is a message for the log: encoded events of an incarnation with consecutive ids.
type batch struct {
	incarnation events.Incarnation
	firstID     events.EventID
	cursor      events.Cursor // of the last event
	events      events.BatchWriter
	bytes       int  // of the encoded events
	sealed      bool // was in flight: no further events
}

// The charged bytes of an event and a frame in addition to blocks and payload, so that many small messages are limited
// too. An event has this size in a decoded message, and a smaller size in a batch.
const (
	entrySize = 192
	frameSize = 64
)

// leastBatch is the first buffer of a batch, in bytes.
const leastBatch = 128

// memory returns the charged bytes of a batch.
func (b *batch) memory() int { return b.bytes + b.events.Len()*entrySize }

// reached returns the end of the rank's events with this batch.
func (b *batch) reached() Reached {
	return Reached{b.incarnation, b.firstID + events.EventID(b.events.Len()) - 1, b.cursor}
}

// push encodes an event at the end of the queue. It keeps no reference to the event.
func (m *Machine) push(e *events.Event, cursor events.Cursor) {
	m.emptied = false
	if m.offers.lacking {
		cursor = events.Cursor{}
	}
	size := e.EncodedSize()
	if n := len(m.queue); n == 0 || !m.queue[n-1].fits(m.incarnation, size, m.limits.MessageBytes) {
		m.open(size)
	}
	b := &m.queue[len(m.queue)-1]
	if err := b.events.Add(e); err != nil {
		m.broken = cmp.Or(m.broken, err)
		return
	}
	b.cursor = cursor
	b.bytes += size
	m.queuedBytes += size + entrySize
	m.queuedEvents++
	m.nextID++
	m.counts.Events++
	if e.Kind == events.Stored {
		m.counts.Blocks += uint64(len(e.Blocks))
	}
}

// fits reports whether an event of an incarnation fits into the batch.
func (b *batch) fits(incarnation events.Incarnation, size, most int) bool {
	return !b.sealed && b.incarnation == incarnation && (b.events.Len() == 0 || b.bytes+size <= most)
}

// open begins a batch with room for an event of the given size. The buffer has the size of the last batches, or of a
// whole message if the batch before is full.
func (m *Machine) open(size int) {
	room := leastBatch
	switch n := len(m.queue); {
	case n == 0 || m.queue[n-1].sealed:
		room = m.usual
	case m.queue[n-1].incarnation == m.incarnation:
		room = m.limits.MessageBytes
	}
	room = max(leastBatch, size, min(room, m.limits.MessageBytes))
	m.queue = append(m.queue, batch{incarnation: m.incarnation, firstID: m.nextID,
		events: events.NewBatchWriter(m.id.Model, room)})
}

// InFlight reports whether a flight is in the air.
func (m *Machine) InFlight() bool { return m.inflight > 0 }

// fly returns the messages to publish now, in order. The result is empty if nothing waits or a flight is in progress.
func (m *Machine) fly() ([][]byte, error) {
	if m.broken != nil {
		return nil, fmt.Errorf("encode a batch: %w", m.broken)
	}
	if m.inflight > 0 || len(m.queue) == 0 {
		return nil, nil
	}
	m.flight = m.flight[:0]
	m.inflight = min(len(m.queue), m.limits.FlightMessages)
	for i := range m.queue[:m.inflight] {
		b := &m.queue[i]
		b.sealed, m.usual = true, max(b.bytes, m.usual/2)
		m.flight = append(m.flight, b.events.Finish(&events.BatchHeader{Incarnation: b.incarnation, FirstID: b.firstID,
			Model: m.id.Model, BlockSize: m.id.BlockSize, Cursor: b.cursor}))
	}
	return m.flight, nil
}

// drop removes all batches behind the first n.
func (m *Machine) drop(n int) {
	for i := n; i < len(m.queue); i++ {
		m.forget(&m.queue[i])
	}
	m.queue = m.queue[:n]
}

// forget frees the memory of a batch that leaves the queue.
func (m *Machine) forget(b *batch) {
	m.queuedBytes -= b.memory()
	m.queuedEvents -= b.events.Len()
	*b = batch{}
}

// Flushed reports that the whole flight is in the log.
func (m *Machine) Flushed() {
	if m.inflight == 0 {
		return
	}
	landed := m.queue[:m.inflight]
	m.acked = Published{Found: true, Reached: landed[len(landed)-1].reached()}
	for i := range landed {
		m.forget(&landed[i])
	}
	left := copy(m.queue, m.queue[m.inflight:])
	clear(m.queue[left:])
	m.queue, m.inflight = m.queue[:left], 0
	m.counts.Messages += uint64(len(m.flight))
	m.checkAcked()
}

// LogLost reports that the log no longer has acknowledged messages, with the present state p. The machine publishes the
// engine's repeatable events in a new incarnation, which include the waiting events.
func (m *Machine) LogLost(p Published, now events.Millis) {
	if len(m.queue) > 0 && m.queue[0].incarnation == m.incarnation && m.queue[0].firstID == 1 &&
		p.Incarnation < m.incarnation {
		m.inflight, m.acked = 0, p // all of the present incarnation still waits here, so none of it was lost
		return
	}
	m.acked, m.inflight = p, 0
	m.counts.Gaps++
	m.reset(events.ReasonGap, now)
}

// Ended reports that the log has closed this rank's incarnation, after the expiry of the lease. The machine publishes
// the engine's repeatable events again, which include the waiting events.
func (m *Machine) Ended(p Published, now events.Millis) {
	if _, ok := m.phase.(recovering); ok {
		return
	}
	// already known, and the next incarnation waits in the queue
	if m.acked.Shutdown && p.compare(m.acked.Reached) == 0 {
		m.inflight = 0
		return
	}
	m.acked, m.inflight = p, 0
	m.reset(events.ReasonLeaseExpiry, now)
}

// LogUnreadable reports an unreadable last message of the rank in the log. The content of the message is unknown, so
// the machine begins a new incarnation with the engine's repeatable events. The result is false if the machine has
// already done so for this message.
func (m *Machine) LogUnreadable(p Published, now events.Millis) bool {
	if _, ok := m.phase.(recovering); ok {
		return false
	}
	if m.acked.Unreadable != nil && m.acked.Seq == p.Seq {
		m.inflight = 0
		return false
	}
	m.acked, m.inflight = p, 0
	m.counts.Unreadable++
	m.reset(events.ReasonGap, now)
	return true
}

// Resync begins a new incarnation on request: with a clear, and the engine's repeatable events. They include the
// waiting events that are not in flight.
func (m *Machine) Resync(now events.Millis) {
	if _, ok := m.phase.(recovering); ok {
		return
	}
	m.counts.Resyncs++
	m.reset(events.ReasonOperator, now)
}

// reset begins a new incarnation, above the log's, with the engine's repeatable events. Waiting events that are not in
// flight are dropped.
func (m *Machine) reset(why events.Reason, now events.Millis) {
	m.abandon()
	m.drop(m.inflight)
	m.incarnation = max(m.incarnation, m.acked.Incarnation)
	m.attempts = attempts{}
	m.offers.askAgain()
	m.begin(why, now)
	m.startReplay()
}
