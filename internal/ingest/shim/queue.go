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

// spareEntries bounds the memory that an empty queue keeps, at 5 MB.
const spareEntries = 32 << 10

// memory is what an entry takes of QueueBytes.
func (e *entry) memory() int { return e.bytes + entrySize }

// reached is how far the rank's events go with this one.
func (e *entry) reached() Reached { return Reached{e.incarnation, e.id, e.cursor} }

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

// fly takes off: it returns the messages to publish now, in order, none if nothing waits or a flight is in the air.
func (m *Machine) fly() ([][]byte, error) {
	if m.inflight > 0 || len(m.queue) == 0 {
		return nil, nil
	}
	m.flight = m.flight[:0]
	batch := events.Batch{Model: m.id.Model, BlockSize: m.id.BlockSize}
	at := 0
	for at < len(m.queue) && len(m.flight) < m.limits.FlightMessages {
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
	}
	m.inflight = at
	return m.flight, nil
}

// Flushed tells that the flight is in the log, all of it.
func (m *Machine) Flushed() {
	if m.inflight == 0 {
		return
	}
	landed := m.queue[:m.inflight]
	last := &landed[len(landed)-1]
	m.acked = Published{Found: true, Reached: last.reached()}
	for i := range landed {
		m.queuedBytes -= landed[i].memory()
		landed[i] = entry{}
	}
	if m.inflight == len(m.queue) && cap(m.queue) <= spareEntries {
		m.queue = m.queue[:0]
	} else {
		m.queue = m.queue[m.inflight:]
	}
	m.inflight = 0
	m.counts.Messages += uint64(len(m.flight))
	m.checkAcked()
}

// LogLost tells that the log no longer has what it had acknowledged, and what it has of this rank instead. What the
// engine can say again is published anew, in a new incarnation; what waits is part of what was lost.
func (m *Machine) LogLost(p Published, now events.Millis) {
	if len(m.queue) > 0 && m.queue[0].incarnation == m.incarnation && m.queue[0].id == 1 &&
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
	for i := m.inflight; i < len(m.queue); i++ {
		m.queuedBytes -= m.queue[i].memory()
		m.queue[i] = entry{}
	}
	m.queue = m.queue[:m.inflight]
	m.incarnation = max(m.incarnation, m.acked.Incarnation)
	m.attempts = attempts{}
	m.offers.askAgain()
	m.begin(why, now)
	m.startReplay()
}
