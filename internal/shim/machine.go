package shim

import (
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits bound what a machine keeps and how it cuts what it publishes.
type Limits struct {
	// QueueBytes is how much memory may wait to be published; the shell stops reading from the engine above it, so that
	// the engine's own replay buffer holds the rest. Default 64 MiB.
	QueueBytes int

	// HeldBytes is how much live traffic is kept while a replay runs. What does not fit is asked for again. Default 64
	// MiB.
	HeldBytes int

	// MessageBytes is the size up to which events share one message of the log. One event alone may be larger, by at
	// most 16 bytes times events.MaxBlocksPerEvent. Large messages cost the log fewer waits for the disk. Default 768
	// KiB.
	MessageBytes int

	// FlightMessages is how many messages one flush may carry: an atomic batch takes at most 1,000. Default 32.
	FlightMessages int

	// ReplayTries is how often in a row a replay is asked for that is answered and brings nothing new, before what it
	// should have brought counts as lost. Default 3.
	ReplayTries int

	// ReplayFailures is how often in a row a replay may fail, with longer and longer pauses between, before what it
	// should have brought counts as lost. Meanwhile the rank is taken to hold what it held. Default 8.
	ReplayFailures int

	// ReplayPatience is how long after the first failure in a row another one is still not the last, in milliseconds:
	// live messages wait that long. Default 3,000.
	ReplayPatience events.Millis
}

func (l Limits) withDefaults() Limits {
	def := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	def(&l.QueueBytes, 64<<20)
	def(&l.HeldBytes, 64<<20)
	def(&l.MessageBytes, 768<<10)
	def(&l.FlightMessages, 32)
	def(&l.ReplayTries, 3)
	def(&l.ReplayFailures, 8)
	if l.ReplayPatience <= 0 {
		l.ReplayPatience = 3000
	}
	return l
}

// Identity is what a machine writes into every batch.
type Identity struct {
	Model     string
	BlockSize uint32 // tokens
}

// Published is what the log says a rank's shim has published last.
type Published struct {
	Found       bool // false: nothing is in the log, nor in a snapshot of it
	Identity    Identity
	Incarnation events.Incarnation
	LastID      events.EventID
	Cursor      events.Cursor
	Shutdown    bool
	Seq         events.StreamSeq // where in the log
	LogFirst    events.StreamSeq // the first message that the log has; 0: not known
}

// Frame is one message of an engine: its number and its payload as sent. The machine keeps the payload.
type Frame struct {
	Seq     events.EngineSeq
	Payload []byte

	// Read, if not nil, is there instead of a payload: the message was read already.
	Read *Read
}

// Read is what an engine's message says, and a digest by which it is known again. The machine keeps neither.
type Read struct {
	Events []events.Event
	Digest uint64
}

func (f *Frame) digest() uint64 {
	if f.Read != nil {
		return f.Read.Digest
	}
	return events.PayloadDigest(f.Payload)
}

// Decoder turns engine messages into events, in the manner of [events.Decoder].
type Decoder interface {
	// Decode decodes one message. What it returns is good until the next call. An error means that the message as a
	// whole cannot be read.
	Decode(payload []byte) (events.Message, error)

	// Reset forgets what was learned of an engine process.
	Reset()
}

// Learner is a Decoder that remembers what one message leaves to be known of another.
type Learner interface {
	Decoder

	// Blank returns a decoder that remembers nothing, or nil if there is nothing to remember.
	Blank() *events.Decoder

	// Adopt replaces what is remembered with what another decoder remembers.
	Adopt(*events.Decoder)
}

// Counts says what became of what the engine sent. All only grow.
type Counts struct {
	Taken uint64 // engine messages taken, in order
	// of those, how many could not be decoded; each costs itself alone, or the rank what it held
	// ([Machine.ClearUnreadable])
	Undecodable uint64
	Events      uint64 // events queued for the log, those of our own making included
	Blocks      uint64 // blocks in stored events
	Duplicates  uint64 // engine messages seen before
	Overtaken   uint64 // live messages not kept while a replay ran; they are asked for again
	Replays     uint64 // replays asked for
	// gaps that nothing could fill, in the engine's stream or in the log; each became a cleared event
	Gaps       uint64
	Restarts   uint64 // new incarnations; each began with a cleared event
	Departures uint64 // engines whose process was found to be gone
	Resyncs    uint64 // new incarnations because somebody asked; Restarts has them too
	// new incarnations because the one before was closed when its lease expired; Restarts has them too
	Ended     uint64
	Snapshots uint64 // engine snapshots taken in place of what could not be replayed; each began a new incarnation
	// first contact after message 0, and no replay from there; what it said is not known (some engines count from 1)
	JoinedLate  uint64
	Corrections uint64 // events published because learning showed that others had a wrong hash
	Flushes     uint64
	Messages    uint64 // messages of the log acknowledged
}

// Machine decides what one rank's shim does next. It is stepped: it starts nothing, waits for nothing and reads no
// clock. One goroutine owns it.
//
// Inputs are Recovered (once, first), Connected, Gone, Live, Replayed, ReplayEnded, ReplayFailed, Snapshot,
// SnapshotFailed, Flushed, FlushDoubted, Delayed, LogLost, Resync. After each the owner asks WantsReplay, WantsSnapshot
// and NextFlight what is to be done.
//
// Invariants:
//  1. Event ids in the queue are consecutive within an incarnation, incarnations only grow.
//  2. The first `inflight` entries of the queue are what the last flight carried; nothing else is in the air.
//  3. While a replay runs or a snapshot is awaited, no live message is taken: it is held, or dropped and asked for
//     again.
//  4. What was taken is an unbroken run of the engine's numbers, or a cleared event stands at the break.
type Machine struct {
	id     Identity
	limits Limits
	decode Decoder
	replay bool // there is a replay endpoint
	strict bool // what cannot be decoded counts as missing

	started     bool
	incarnation events.Incarnation
	nextID      events.EventID
	// the last engine message taken whole; Partial is how much of the next is published already
	taken events.Cursor
	acked Published // the last message known to be in the log

	queue       []entry
	queuedBytes int
	inflight    int
	flight      [][]byte
	flightEnds  []end

	replaying bool
	asked     bool          // the shell was told to ask, and has not been told since
	verified  bool          // the replay has shown the message that was taken last, unchanged
	tries     int           // replays in a row that were answered and brought nothing new
	failures  int           // replays in a row that failed
	failedAt  events.Millis // when the first of them did
	giveUp    bool          // the replay failed for good: a gap found now is a loss
	held      []Frame
	heldBytes int
	overtaken events.EngineSeq // one more than the newest that was not held for want of room; 0 if all were

	snapshots     bool // the engine may be asked for one
	snapshot      wanted
	snapshotTries int  // since something of the live stream fitted
	refused       bool // no more are asked for until something changes
	none          bool // when it was last asked for one it had none to offer
	// something was lost that a snapshot would have; what is published meanwhile has no cursor, so that a shim that
	// starts again asks for it
	lacking bool
	unseen  bool // taken is what a snapshot names; its digest is not known
	adopted bool // its digest is what a replay showed; nothing live has followed it yet
	emptied bool // nothing was queued since the clear after a message that could not be decoded

	tenure   tenure
	backlog  backlog
	learning *learning // nil: what the decoder remembers is all that it can know

	counts Counts
}

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

// NewMachine returns a machine that waits for Recovered. replay says whether the engine has a replay endpoint.
func NewMachine(id Identity, limits Limits, replay bool, decode Decoder) *Machine {
	return &Machine{id: id, limits: limits.withDefaults(), decode: decode, replay: replay}
}

// Counts returns what has been counted so far.
func (m *Machine) Counts() Counts { return m.counts }

// Incarnation returns the engine's life that events are published under now.
func (m *Machine) Incarnation() events.Incarnation { return m.incarnation }

// Taken returns the last engine message that was taken whole.
func (m *Machine) Taken() events.Cursor { return m.taken }

// Acked returns what is known to be in the log. Its Seq is not kept.
func (m *Machine) Acked() Published { return m.acked }

// Queued returns how many events, and about how many bytes of them, wait for the log or are on their way to it.
func (m *Machine) Queued() (entries, bytes int) { return len(m.queue), m.queuedBytes }

// Full reports whether the owner should stop reading from the engine.
func (m *Machine) Full() bool { return m.queuedBytes >= m.limits.QueueBytes }

// Recovered tells what the log holds of this rank. now becomes the incarnation's number if a new one begins.
func (m *Machine) Recovered(p Published, now events.Millis) {
	if m.started {
		return
	}
	m.started = true
	m.acked = p
	m.incarnation = p.Incarnation
	m.nextID = p.LastID + 1
	m.taken = p.Cursor
	if !p.Found || p.Shutdown || !p.Cursor.Known {
		m.rebirth(events.ReasonRestart, now)
	} else if l, ok := m.decode.(Learner); ok && m.replay && l.Blank() != nil {
		m.learning = &learning{learner: l, cursor: p.Cursor, spare: m.limits.HeldBytes}
	}
	m.fallBehind()
}

// Connected tells that the engine's socket is connected, for the first time or again. Whether it is still the same
// engine is for a replay to show.
func (m *Machine) Connected() {
	m.held, m.heldBytes, m.overtaken = nil, 0, 0
	if !m.started {
		return
	}
	m.afresh()
	m.arrived()
	if m.unseen || m.adopted { // nothing could show that this is still the engine whose snapshot was taken
		m.rebirth(events.ReasonGap, 0)
	}
	if m.snapshot != notWanted {
		m.snapshot = due // of who is there now
	} else {
		m.startReplay()
	}
	m.fallBehind()
}

// afresh forgets how often the engine was asked in vain.
func (m *Machine) afresh() { m.tries, m.failures, m.snapshotTries, m.refused = 0, 0, 0, false }

// Verify makes a replay due that shows whether the engine is still the same and has said nothing that was not heard.
func (m *Machine) Verify() {
	if !m.started || m.replaying || m.snapshot != notWanted || m.tenure == departed {
		return
	}
	m.snapshotTries, m.refused = 0, false
	if m.replay && !(m.lacking && m.wantSnapshot()) {
		m.startReplay()
	} else if m.lacking {
		m.wantSnapshot()
	}
}

// Live takes one message from the engine's live stream.
func (m *Machine) Live(f Frame, now events.Millis) {
	if !m.started || m.replaying || m.snapshot != notWanted {
		m.hold(f)
		return
	}
	m.takeLive(f, now)
}

func (m *Machine) hold(f Frame) {
	if m.heldBytes+len(f.Payload)+frameSize > m.limits.HeldBytes {
		m.counts.Overtaken++
		m.overtaken = max(m.overtaken, f.Seq+1)
		return
	}
	m.held = append(m.held, f)
	m.heldBytes += len(f.Payload) + frameSize
}

// takeLive takes a live message if it is the next one, and otherwise finds out what happened.
func (m *Machine) takeLive(f Frame, now events.Millis) {
	switch {
	case !m.taken.Known:
		m.takeFirst(f)
	case f.Seq == m.taken.Seq+1:
		m.snapshotTries, m.adopted = 0, false
		m.take(f)
	case f.Seq <= m.taken.Seq && m.unseen:
		m.counts.Duplicates++ // the snapshot has it
	case f.Seq == m.taken.Seq && f.digest() == m.taken.Digest:
		m.counts.Duplicates++
	case m.replay && !m.giveUp:
		m.hold(f)
		m.startReplay()
		m.fallBehind()
	case f.Seq <= m.taken.Seq:
		m.rebirth(events.ReasonRestart, now)
		m.takeFirst(f)
	case m.wantSnapshot():
		m.hold(f)
	default:
		m.gap()
		m.take(f)
	}
}

// WantsReplay tells, once for each replay that is due, from which engine message on to ask.
func (m *Machine) WantsReplay() (from events.EngineSeq, ok bool) {
	if !m.replaying || m.asked {
		return 0, false
	}
	m.asked = true
	m.counts.Replays++
	if m.taken.Known {
		return m.taken.Seq, true // the last one again: its digest shows whether this is the same engine
	}
	return 0, true
}

func (m *Machine) startReplay() {
	if m.tenure == departed { // there is nobody to ask
		return
	}
	if !m.replay {
		if m.snapshots {
			m.wantSnapshot()
		}
		return
	}
	m.replaying, m.asked, m.verified, m.snapshot = true, false, false, notWanted
	m.learning.interrupt()
}

// Replayed takes one message of the replay that was asked for last. It reports false if the rest of that replay is of
// no use, because another one is due.
func (m *Machine) Replayed(f Frame, now events.Millis) (more bool) {
	if !m.replaying || !m.asked {
		return false
	}
	switch {
	case !m.taken.Known && f.Seq > 0 && m.wantSnapshot():
		return false
	case !m.taken.Known:
		m.verified = true
		m.takeFirst(f)
	case m.unseen && f.Seq == m.taken.Seq:
		m.taken.Digest = f.digest()
		m.verified, m.unseen, m.adopted = true, false, true
	case m.verified && f.Seq == m.taken.Seq+1:
		m.tries, m.failures = 0, 0 // what brings us further is worth asking again
		m.take(f)
	case m.verified && f.Seq <= m.taken.Seq:
		m.counts.Duplicates++
	case m.verified: // a hole within the replay: the engine's socket dropped something, or the engine lost it itself
		if m.tries++; m.tries < m.limits.ReplayTries {
			m.startReplay()
			return false
		}
		m.tries = 0
		if m.wantSnapshot() {
			return false
		}
		m.gap()
		m.take(f)
	case f.Seq == m.taken.Seq && f.digest() == m.taken.Digest:
		m.verified = true
	// same number, another content: another life, of which the replay must be had from its start
	case f.Seq == m.taken.Seq:
		m.rebirth(events.ReasonRestart, now)
		m.startReplay()
		return false
	case f.Seq > m.taken.Seq && m.wantSnapshot():
		return false
	case f.Seq > m.taken.Seq: // the engine's buffer has moved on, or it is another engine: no telling
		m.counts.Gaps++
		m.lacking = m.snapshots && !m.none
		m.rebirth(events.ReasonGap, now)
		m.verified = true
		m.take(f)
	}
	return true
}

// ReplayEnded tells that the replay has come to its end marker.
func (m *Machine) ReplayEnded(now events.Millis) {
	if !m.replaying || !m.asked {
		return
	}
	if m.taken.Known && !m.verified { // the engine's newest is older than what was taken: it has begun anew
		m.rebirth(events.ReasonRestart, now)
		m.startReplay()
		return
	}
	m.tries, m.failures = 0, 0
	m.learning.verified()
	m.endReplay(now)
}

// ReplayFailed tells that the replay could not be had. If it is to be asked for again after a pause, by RetryReplay, it
// says how many have failed in a row; 0 says that what is missing counts as lost.
func (m *Machine) ReplayFailed(now events.Millis) (failures int) {
	if !m.replaying || !m.asked {
		return 0
	}
	if m.failures == 0 {
		m.failedAt = now
	}
	if m.failures++; m.failures < m.limits.ReplayFailures && now-m.failedAt < m.limits.ReplayPatience {
		return m.failures
	}
	m.failures = 0
	if !m.taken.Known && m.wantSnapshot() {
		return 0
	}
	m.giveUp = true
	m.endReplay(now)
	m.giveUp = false
	return 0
}

// RetryReplay makes the replay due again.
func (m *Machine) RetryReplay() {
	if m.replaying {
		m.startReplay()
	}
}

// endReplay takes the live messages that came meanwhile.
func (m *Machine) endReplay(now events.Millis) {
	m.replaying, m.asked = false, false
	m.release(now)
}

// release takes the live messages that were held. One of them may show the next gap.
func (m *Machine) release(now events.Millis) {
	held := m.held
	m.held, m.heldBytes = nil, 0
	for _, f := range held {
		switch {
		case m.replaying || m.snapshot != notWanted:
			m.hold(f)
		case m.taken.Known && f.Seq <= m.taken.Seq && !m.giveUp:
			m.counts.Duplicates++ // the replay brought it, or the snapshot
		default:
			m.takeLive(f, now)
		}
	}
	if m.replaying || m.snapshot != notWanted {
		return
	}
	missed := m.overtaken > 0 && (!m.taken.Known || m.overtaken > m.taken.Seq+1)
	m.overtaken = 0
	switch {
	case !missed || m.giveUp: // the next live message shows it
	case m.replay:
		m.startReplay()
	case !m.wantSnapshot():
		m.gap()
	}
	m.heardAll()
}

// takeFirst takes the first message of a life that is heard.
func (m *Machine) takeFirst(f Frame) {
	first := events.EngineSeq(0)
	if f.Read != nil {
		first = 1 // router events count from 1
	}
	if f.Seq > first {
		if !m.replaying && m.wantSnapshot() {
			m.hold(f)
			return
		}
		m.counts.JoinedLate++
		m.lacking = m.snapshots && !m.none
	}
	m.take(f)
}

// take queues the events of the next engine message.
func (m *Machine) take(f Frame) {
	skip := m.taken.Partial
	before := m.taken
	queued := len(m.queue)
	m.taken, m.unseen = events.Cursor{Known: true, Seq: f.Seq, Digest: f.digest()}, false
	m.counts.Taken++
	var evs []events.Event
	if f.Read != nil {
		evs = f.Read.Events
	} else if msg, err := m.decode.Decode(f.Payload); err != nil {
		m.unread()
	} else {
		evs = msg.Events
	}
	for i := range evs {
		if uint32(i) < skip {
			continue
		}
		cursor := m.taken
		if i < len(evs)-1 {
			cursor = before
			cursor.Partial = uint32(i) + 1
		}
		m.push(evs[i], cursor)
	}
	m.record(f.Payload, skip, m.queue[queued:])
}

// ClearUnreadable has a message that cannot be decoded count as one that is missing. It is to be called before
// Recovered.
func (m *Machine) ClearUnreadable() { m.strict = true }

// unread counts that the message which was taken last could not be decoded, and, if that is to be so, says in the log
// that whatever the rank was known to hold is no longer known: it may have told of removals. To ask for it again is
// useless: the engine keeps the bytes that it has sent.
func (m *Machine) unread() {
	m.counts.Undecodable++
	m.lacking = m.snapshots && !m.none
	if !m.strict || m.emptied {
		return
	}
	m.push(events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonGap}, m.taken)
	m.emptied = true
}

// gap says in the log that something is missing: whatever the rank was known to hold is no longer known.
func (m *Machine) gap() {
	m.counts.Gaps++
	m.lacking = m.snapshots && !m.none
	m.taken.Partial = 0
	m.push(events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonGap}, m.taken)
	m.record(nil, 0, m.queue[len(m.queue)-1:])
}

// rebirth begins a new incarnation. Its first event says why.
func (m *Machine) rebirth(why events.Reason, now events.Millis) {
	m.counts.Restarts++
	m.incarnation = max(m.incarnation+1, events.Incarnation(max(now, 1)))
	m.nextID = 1
	m.taken, m.unseen, m.adopted, m.snapshot = events.Cursor{}, false, false, notWanted
	m.decode.Reset()
	m.learning = nil
	m.push(events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: why}, m.taken)
	m.fallBehind()
}

// push queues a copy of an event.
func (m *Machine) push(e events.Event, cursor events.Cursor) {
	m.emptied = false
	e.Blocks = append([]events.BlockHash(nil), e.Blocks...)
	e.Locals = append([]events.LocalHash(nil), e.Locals...)
	if m.lacking {
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
	m.afresh()
	m.rebirth(events.ReasonGap, now)
	m.startReplay()
}

// Ended tells that the log says of this rank's incarnation that it is closed: its lease had expired, and what it held
// was cleared. What the engine can say again is published anew; what waits is part of that.
func (m *Machine) Ended(p Published, now events.Millis) {
	if !m.started {
		return
	}
	// it is known, and the next life waits in the queue
	if m.acked.Shutdown && p.Incarnation == m.acked.Incarnation && p.LastID == m.acked.LastID {
		m.landed(0)
		return
	}
	m.queue, m.queuedBytes, m.inflight = nil, 0, 0
	m.acked = p
	m.incarnation = max(m.incarnation, p.Incarnation)
	m.counts.Ended++
	m.afresh()
	m.rebirth(events.ReasonLeaseExpiry, now)
	m.startReplay()
}

// Resync begins a new incarnation because somebody asked: with a clear, and then all that the engine can say again.
// What waits and is not in the air is part of that.
func (m *Machine) Resync(now events.Millis) {
	if !m.started {
		return
	}
	for i := m.inflight; i < len(m.queue); i++ {
		m.queuedBytes -= m.queue[i].memory()
		m.queue[i] = entry{}
	}
	m.queue = m.queue[:m.inflight]
	m.counts.Resyncs++
	m.afresh()
	m.rebirth(events.ReasonOperator, now)
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

// FlushDoubted tells what the log holds after a flight whose fate is not known. Either nothing of it is there, or the
// messages up to one of them, or all; then the rest is published again. If the log has less than it had acknowledged
// the error is ErrLogLost, and LogLost is to be told; if it has more than this shim has sent, somebody else publishes
// for this rank: ErrFenced.
func (m *Machine) FlushDoubted(p Published) error {
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
