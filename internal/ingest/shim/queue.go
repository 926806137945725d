package shim

import (
	"cmp"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// batch is a message for the log: events of one incarnation with consecutive ids, encoded when they are queued.
type batch struct {
	incarnation events.Incarnation
	firstID     events.EventID
	cursor      events.Cursor // of the last event
	events      events.BatchWriter
	bytes       int  // of the encoded events
	sealed      bool // it has flown: nothing is added
}

// What an event and a frame count beside their blocks and payload, so that many small ones are bounded too. An event
// takes as much in a message that was read already, and less in a batch.
const (
	entrySize = 192
	frameSize = 64
)

// leastBatch is the first buffer of a batch, in bytes.
const leastBatch = 128

// memory is what a batch takes of QueueBytes.
func (b *batch) memory() int { return b.bytes + b.events.Len()*entrySize }

// reached is how far the rank's events go with this batch.
func (b *batch) reached() Reached {
	return Reached{b.incarnation, b.firstID + events.EventID(b.events.Len()) - 1, b.cursor}
}

// push encodes an event at the end of the queue and keeps nothing else of it.
func (m *Machine) push(e *events.Event, cursor events.Cursor) {
	m.emptied = false
	if m.offers.lacking {
		cursor = events.Cursor{}
	}
	size := e.EncodedSize()
	if n := len(m.queue); n == 0 || !m.queue[n-1].takes(m.incarnation, size, m.limits.MessageBytes) {
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

// takes reports whether an event of an incarnation belongs into the batch.
func (b *batch) takes(incarnation events.Incarnation, size, most int) bool {
	return !b.sealed && b.incarnation == incarnation && (b.events.Len() == 0 || b.bytes+size <= most)
}

// open begins a batch whose first event has a size. The buffer has room for as much as the batches that flew last, or
// for a whole message if the batch before is full.
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

// fly takes off: it returns the messages to publish now, in order, none if nothing waits or a flight is in the air.
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

// Flushed tells that the flight is in the log, all of it.
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

// LogLost tells that the log no longer has what it had acknowledged, and what it has of this rank instead. What the
// engine can say again is published anew, in a new incarnation; what waits is part of what was lost.
func (m *Machine) LogLost(p Published, now events.Millis) {
	if len(m.queue) > 0 && m.queue[0].incarnation == m.incarnation && m.queue[0].firstID == 1 &&
		p.Incarnation < m.incarnation {
		m.inflight, m.acked = 0, p // all of the present incarnation waits here still: nothing of it was lost
		return
	}
	m.acked, m.inflight = p, 0
	m.counts.Gaps++
	m.reset(events.ReasonGap, now)
}

// Ended tells that the log says of this rank's incarnation that it is closed: its lease had expired, and what it held
// was cleared. What the engine can say again is published anew; what waits is part of that.
func (m *Machine) Ended(p Published, now events.Millis) {
	if _, ok := m.phase.(recovering); ok {
		return
	}
	// it is known, and the next incarnation waits in the queue
	if m.acked.Shutdown && p.compare(m.acked.Reached) == 0 {
		m.inflight = 0
		return
	}
	m.acked, m.inflight = p, 0
	m.reset(events.ReasonLeaseExpiry, now)
}

// LogUnreadable tells that the rank's last message in the log cannot be read. The machine does not know what that
// message says of the rank: it begins a new incarnation with all that the engine can say again. It returns false if the
// machine has done that for this message already.
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

// Resync begins a new incarnation because somebody asked: with a clear, and then all that the engine can say again.
// What waits and is not in the air is part of that.
func (m *Machine) Resync(now events.Millis) {
	if _, ok := m.phase.(recovering); ok {
		return
	}
	m.counts.Resyncs++
	m.reset(events.ReasonOperator, now)
}

// reset begins a new incarnation, above what the log has, with all that the engine can say again. What waits and is not
// in the air is dropped.
func (m *Machine) reset(why events.Reason, now events.Millis) {
	m.abandon()
	m.drop(m.inflight)
	m.incarnation = max(m.incarnation, m.acked.Incarnation)
	m.attempts = attempts{}
	m.offers.askAgain()
	m.begin(why, now)
	m.startReplay()
}
