package shim

import (
	"cmp"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits configures the limits of a machine's memory and batches.
type Limits struct {
	// QueueBytes is the memory of events that wait for publication. Above, the shell stops reading from the engine, so
	// the engine's replay buffer keeps the rest. Default 64 MiB.
	QueueBytes int

	// PartBytes is the memory of waiting events at which the decoding of a large message pauses. It limits the memory
	// of a message, which may decode to 40 times its size. Default 4 MiB.
	PartBytes int

	// HeldBytes is the memory of live messages kept during a replay. Other messages are requested again. Default 64 MiB.
	HeldBytes int

	// MessageBytes is the size up to which events share a message of the log. A single event may be larger, by at most 16
	// bytes times events.MaxBlocksPerEvent. Large messages cause fewer waits for the disk. Default 768 KiB.
	MessageBytes int

	// FlightMessages is the maximum number of messages in a flight: an atomic batch has at most 1,000. Default 32.
	FlightMessages int

	// ReplayTries is the number of consecutive replays with a hole before the missing messages count as lost, and the
	// number of requests for an engine's snapshot. A replay that begins after the missing messages is the last one,
	// because the engine no longer has them. Default 3.
	ReplayTries int

	// ReplayFailures is the number of consecutive failed replays, with growing pauses, before the missing messages count
	// as lost: the replay endpoint does not answer, or the answer breaks off. Until then the rank keeps its blocks.
	// Default 8.
	ReplayFailures int

	// ReplayPatience bounds the time of consecutive failed replays, in milliseconds after the first of them. The first
	// failure after this time is the last, even if there are fewer than ReplayFailures. Live messages wait meanwhile.
	// Default 3,000.
	ReplayPatience events.Millis
}

// DefaultQueueBytes is the default of Limits.QueueBytes.
const DefaultQueueBytes = 64 << 20

func (l Limits) withDefaults() Limits {
	l.QueueBytes = cmp.Or(max(l.QueueBytes, 0), DefaultQueueBytes)
	l.PartBytes = cmp.Or(max(l.PartBytes, 0), 4<<20)
	l.HeldBytes = cmp.Or(max(l.HeldBytes, 0), 64<<20)
	l.MessageBytes = cmp.Or(max(l.MessageBytes, 0), 768<<10)
	l.FlightMessages = cmp.Or(max(l.FlightMessages, 0), 32)
	l.ReplayTries = cmp.Or(max(l.ReplayTries, 0), 3)
	l.ReplayFailures = cmp.Or(max(l.ReplayFailures, 0), 8)
	l.ReplayPatience = cmp.Or(max(l.ReplayPatience, 0), 3000)
	return l
}

// Identity is the fixed part of every batch.
type Identity struct {
	Model     string
	BlockSize uint32 // tokens
}

// Reached is the position of a rank's last event.
type Reached struct {
	Incarnation events.Incarnation
	LastID      events.EventID
	Cursor      events.Cursor // the engine's message of the last event
}

// compare compares positions by incarnation and event id.
func (r Reached) compare(o Reached) int {
	return cmp.Or(cmp.Compare(r.Incarnation, o.Incarnation), cmp.Compare(r.LastID, o.LastID))
}

// Published is the last published state of a rank in the log.
type Published struct {
	Found    bool // false: neither the log nor a snapshot has the rank
	Identity Identity
	Reached
	Shutdown bool
	Seq      events.StreamSeq // where in the log
	LogFirst events.StreamSeq // the first message in the log; 0: unknown

	// Unreadable is the error of an unreadable last message, or nil. Identity and Reached then come from a snapshot, or
	// are zero. A new incarnation must follow.
	Unreadable error `json:"-"`
}

// others reports whether the log has blocks of another model or size. A zero Identity is unknown.
func (p *Published) others(id Identity) bool { return p.Identity != Identity{} && p.Identity != id }

// next returns the number of an incarnation after p that begins now.
func (p *Published) next(now events.Millis) events.Incarnation {
	return max(p.Incarnation+1, events.Incarnation(max(now, 1)))
}

// Frame is an engine's message: the number and the payload. The machine keeps the payload.
type Frame struct {
	Seq     events.EngineSeq
	Payload []byte

	// Read, if not nil, replaces the payload: the message is already decoded.
	Read *Read

	// Opened marks a new connection of the feed's source. Earlier messages may be missing. Such a Frame is not a message.
	Opened bool

	received chan struct{} // is closed when a shim has received the frame; see Give
}

// Read is a decoded engine message with a digest. The machine keeps neither.
type Read struct {
	Events []events.Event
	Digest uint64
}

// first returns the number of an engine's first message.
func (f *Frame) first() events.EngineSeq {
	if f.Read != nil {
		return 1 // router events count from 1
	}
	return 0
}

func (f *Frame) digest() uint64 {
	if f.Read != nil {
		return f.Read.Digest
	}
	return events.PayloadDigest(f.Payload)
}

// Decoder turns engine messages into events. [events.Decoder] is a Decoder; [Whole] is one for simple messages.
type Decoder interface {
	// Begin decodes a message, or the first part of a large one. The result is valid until the next call. more reports
	// that further parts follow. An error means that the whole message is unreadable.
	Begin(payload []byte) (m events.Message, more bool, err error)

	// Continue returns the next part of the message.
	Continue() (part []events.Event, more bool)

	// Reset drops the state of an engine process.
	Reset()

	// Cleared drops the reported blocks after a clear in the log. Other state of the engine process stays.
	Cleared()

	// Blank returns a decoder without state from earlier messages, or nil if the decoder needs no such state.
	Blank() *events.Decoder

	// Adopt replaces the state from earlier messages with the state of a decoder of Blank.
	Adopt(*events.Decoder)

	// Counts returns the numbers of skipped events.
	Counts() events.SkipCounts
}

// Whole is a Decoder of messages without parts. It needs no state from earlier messages.
type Whole struct {
	Decode func(payload []byte) (events.Message, error)
	Forget func() // drops the reported blocks; nil: Decode keeps nothing
}

// Begin decodes a message.
func (w Whole) Begin(payload []byte) (m events.Message, more bool, err error) {
	m, err = w.Decode(payload)
	return m, false, err
}

// Continue is not called, because messages have no parts.
func (w Whole) Continue() (part []events.Event, more bool) { return nil, false }

// Reset drops the reported blocks.
func (w Whole) Reset() {
	if w.Forget != nil {
		w.Forget()
	}
}

// Cleared drops the reported blocks.
func (w Whole) Cleared() { w.Reset() }

// Blank returns nil.
func (w Whole) Blank() *events.Decoder { return nil }

// Adopt is not called, because Blank returns nil.
func (w Whole) Adopt(*events.Decoder) {}

// Counts returns zeros.
func (w Whole) Counts() (none events.SkipCounts) { return none }

// Counts has the counters of a machine. They only grow.
type Counts struct {
	Taken uint64 // engine messages processed in order
	// undecodable messages among them; skipped, or the rank is cleared ([Machine.ClearUnreadable])
	Undecodable uint64
	Events      uint64 // events queued for the log, including the machine's own events
	Blocks      uint64 // blocks in stored events
	Overtaken   uint64 // live messages dropped during a replay; requested again later
	// unfilled gaps in the engine's stream or in the log, each with a cleared event
	Gaps         uint64
	Restarts     uint64 // new incarnations after the first, each with a cleared event
	Incarnations uint64 // all new incarnations
	Departures   uint64 // engines with an ended process
	Resyncs      uint64 // new incarnations on request; included in Restarts
	Snapshots    uint64 // engine snapshots in place of missing replays, each with a new incarnation
	// first contact after message 0 without a replay; earlier messages are unknown (some engines count from 1)
	JoinedLate  uint64
	Corrections uint64 // events published to correct hashes after learning
	Unreadable  uint64 // unreadable last messages of the log, each with a new incarnation
	Foreign     uint64 // skipped messages of other engines at the same socket
	Messages    uint64 // messages of the log acknowledged
}

// Machine is the state machine of a rank's shim. It is stepped: it starts no goroutine, does not block and reads no
// clock. A single goroutine owns it.
//
// Inputs of the engine are Connected, Replaced, Gone, Asleep, Live, Foreign, Replayed, ReplayedWhole, ReplayEnded,
// ReplayFailed, Snapshot, SnapshotFailed and Learned. Inputs of the log are Recovered (once, first), Flushed, Delayed,
// LogLost, LogUnreadable and Ended. Further inputs are Verify, RetryReplay, TrustReplays and Resync. After every input,
// the owner calls Advance and executes the result.
//
// Invariants:
//  1. Event ids in the queue are consecutive within an incarnation, and incarnations only grow.
//  2. The first `inflight` batches of the queue are the last flight; no other batch is in flight. The log determines
//     the result of a flight: all of the flight is stored, or the log differs from the expected state.
//  3. In the phases recovering, replaying and awaitingSnapshot no live message is processed: a message is held, or
//     dropped and requested again.
//  4. The processed messages are consecutive, or a cleared event marks the break.
//  5. While work is in progress (Busy), nothing else is queued: Full is true, and every input except Flushed, Delayed,
//     Verify, RetryReplay, Gone and the inputs that begin a new incarnation completes the work first.
type Machine struct {
	id     Identity
	limits Limits
	decode Decoder
	replay bool // there is a replay endpoint

	distrusted bool // the value of replay before TrustReplays(false)

	strict bool // undecodable messages count as missing

	phase phase

	incarnation events.Incarnation
	nextID      events.EventID
	taken       events.Cursor // the last completely processed engine message; Partial: the published part of the next
	basis       basis         // source of the cursor
	acked       Published     // the last confirmed message in the log

	queue        []batch
	queuedBytes  int
	queuedEvents int
	inflight     int
	flight       [][]byte
	usual        int   // bytes of the largest recent batch; the value decays by half with every flight
	broken       error // an event that cannot be encoded

	reading   reading    // the message in hand
	releasing *releasing // held messages in release
	adopting  *adopting  // the engine snapshot in hand
	leaving   bool       // Gone follows when the work under way is done
	attempts  attempts   // of replays
	held      held       // live messages in phases without processing
	offers    offers     // the engine's snapshots
	emptied   bool       // no event was queued since the clear after an undecodable message

	slept Reached // the clear of a sleeping engine

	backlog  backlog
	learning *learning // nil: the decoder's state is complete

	counts Counts
}

// phase is the machine's phase, with a type for every phase:
//
//	recovering ──Recovered──▶ live ◀──────▶ *replaying ◀──▶ *awaitingSnapshot
//	                           ▲ └────Gone, from any────▶ departed
//	                           └────────Connected─────────────┘
type phase interface{ acceptsLive() bool }

type (
	recovering struct{} // waits for the state of the log
	live       struct{} // processes live messages
	departed   struct{} // the engine is gone; the next connection belongs to a new engine
)

func (recovering) acceptsLive() bool { return false }
func (live) acceptsLive() bool       { return true }
func (departed) acceptsLive() bool   { return true }

// Ready has the actions of the owner after a step.
type Ready struct {
	// Flight is the list of messages to publish now, in order; nil: none. The machine owns them, and they must not be
	// changed. The results are Flushed, LogLost or Ended.
	Flight [][]byte

	// Replay requests the engine's messages from From on. It ends a running replay, snapshot or learning. The results are
	// Replayed, ReplayEnded or ReplayFailed.
	Replay bool
	From   events.EngineSeq

	// Snapshot requests all held blocks of the engine. It ends a running replay. The results are Snapshot or
	// SnapshotFailed.
	Snapshot bool

	// Learn starts learning up to a known cursor. The result is Learned.
	Learn events.Cursor
}

// Advance begins the due actions and returns them, every action once. publish permits a flight. An error reports an
// event that cannot be encoded, which is a bug.
func (m *Machine) Advance(publish bool) (r Ready, err error) {
	m.work(m.hasRoom)
	switch p := m.phase.(type) {
	case *replaying:
		// Start with the last message: its digest shows whether the engine is the same. The number is 0 if unknown.
		r.Replay, r.From, p.asked = !p.asked, m.taken.Seq, true
	case *awaitingSnapshot:
		r.Snapshot, p.asked = !p.asked, true
	case live:
		if !m.Busy() {
			r.Learn = m.dueLearning()
		}
	}
	if publish {
		r.Flight, err = m.fly()
	}
	return r, err
}

// NewMachine returns a machine that waits for Recovered. replay is set if the engine has a replay endpoint.
func NewMachine(id Identity, limits Limits, replay bool, decode Decoder) *Machine {
	return &Machine{id: id, limits: limits.withDefaults(), decode: decode, replay: replay, phase: recovering{}}
}

// Counts returns the counters.
func (m *Machine) Counts() Counts { return m.counts }

// Incarnation returns the incarnation of the next queued event.
func (m *Machine) Incarnation() events.Incarnation { return m.incarnation }

// Taken returns the last completely processed engine message.
func (m *Machine) Taken() events.Cursor { return m.taken }

// Acked returns the confirmed state of the log. Seq is set until the first flight is confirmed.
func (m *Machine) Acked() Published { return m.acked }

// Queued returns the number and approximate bytes of events that wait for the log or are in flight.
func (m *Machine) Queued() (entries, bytes int) { return m.queuedEvents, m.queuedBytes }

// Full reports whether the owner should stop reading from the engine.
func (m *Machine) Full() bool { return m.queuedBytes >= m.limits.QueueBytes || m.Busy() }

// Recovered passes the state of the log. A new incarnation begins if the state is missing, closed or unreadable, if its
// cursor is unknown, or if it has blocks of another model or size. now is the least number of a new incarnation.
func (m *Machine) Recovered(p Published, now events.Millis) {
	if _, ok := m.phase.(recovering); !ok {
		return
	}
	m.phase = live{}
	m.acked = p
	m.incarnation = p.Incarnation
	m.nextID = p.LastID + 1
	m.taken = p.Cursor
	if !p.Found || p.Shutdown || !p.Cursor.Known || p.Unreadable != nil || p.others(m.id) {
		why := events.ReasonRestart
		if p.Unreadable != nil {
			why = events.ReasonGap
			m.counts.Unreadable++
		}
		m.begin(why, now)
		m.counts.Restarts = 0 // the start of the shim is no restart
	} else if m.replay && m.decode.Blank() != nil {
		m.learning = &learning{learner: m.decode, cursor: p.Cursor, spare: m.limits.HeldBytes}
	}
	m.fallBehind()
}

// Connected reports a first or new connection of the engine's socket. A replay then shows whether the engine is the
// same.
func (m *Machine) Connected() {
	m.complete()
	m.held = held{}
	switch m.phase.(type) {
	case recovering:
		return
	case departed:
		m.phase = live{}
		if m.spoken() {
			m.begin(events.ReasonRestart, 0)
		}
	}
	m.attempts = attempts{}
	m.offers.askAgain()
	if m.basis != heard { // no message can show that the snapshot's engine is still the same
		m.begin(events.ReasonGap, 0)
	}
	if _, ok := m.phase.(*awaitingSnapshot); ok {
		m.phase = &awaitingSnapshot{} // of the current engine
	} else {
		m.startReplay()
	}
	m.fallBehind()
}

// Verify requests a replay to check that the engine is the same and that no message is missing.
func (m *Machine) Verify() {
	if _, ok := m.phase.(live); !ok || m.adopting != nil {
		return
	}
	m.offers.askAgain()
	if m.offers.lacking && m.wantSnapshot() {
		return
	}
	if m.replay {
		m.startReplay()
	}
}

// Foreign counts a message of another rank's engine.
func (m *Machine) Foreign() { m.counts.Foreign++ }

// Replaced begins a new incarnation after the shim has lost or changed its engine. It drops running replays and
// snapshots of the earlier engine.
func (m *Machine) Replaced(now events.Millis) {
	switch m.phase.(type) {
	case recovering, departed:
		return
	}
	m.abandon()
	m.phase, m.held, m.attempts = live{}, held{}, attempts{}
	m.offers.askAgain()
	if m.taken.Known || m.spoken() {
		m.begin(events.ReasonRestart, now)
	}
}

// TrustReplays sets whether the engine's replay socket may be used. While several engines publish, the owner of the
// replay socket is unknown. When the socket is trusted again, a new incarnation begins with the replay.
func (m *Machine) TrustReplays(trust bool, now events.Millis) {
	if trust {
		m.replay = m.distrusted
		if m.phase.acceptsLive() && m.replay {
			m.Replaced(now)
			m.startReplay()
		}
		return
	}
	m.distrusted, m.replay = m.replay, false
	if !m.phase.acceptsLive() {
		m.release(now, true)
	}
}

// Live processes a message of the engine's live stream.
func (m *Machine) Live(f Frame, now events.Millis) {
	m.complete()
	if m.phase.acceptsLive() {
		m.processLive(f, now, false)
	} else {
		m.holdBack(f)
	}
}

// processLive processes a live message if the message is next, and otherwise handles the gap. inVain means that no
// replay can fill a gap, so the missing messages are lost.
func (m *Machine) processLive(f Frame, now events.Millis, inVain bool) {
	switch {
	case !m.taken.Known && f.Seq > f.first() && m.replay && !inVain: // published after the empty replay
		m.holdBack(f)
		m.startReplay()
		m.fallBehind()
	case !m.taken.Known:
		m.processFirst(f)
	case f.Seq == m.taken.Seq+1:
		m.offers.tries, m.basis = 0, heard
		m.process(f)
	case f.Seq <= m.taken.Seq && m.basis == named:
		// included in the snapshot
	case f.Seq == m.taken.Seq && f.digest() == m.taken.Digest: // a repeated message
	case m.replay && !inVain:
		m.holdBack(f)
		m.startReplay()
		m.fallBehind()
	case f.Seq <= m.taken.Seq:
		m.begin(events.ReasonRestart, now)
		m.processFirst(f)
	case m.wantSnapshot():
		m.holdBack(f)
	default:
		m.gap()
		m.process(f)
	}
}

// processFirst processes the first message of an engine process.
func (m *Machine) processFirst(f Frame) {
	if f.Seq > f.first() {
		if m.phase.acceptsLive() && m.wantSnapshot() {
			m.holdBack(f)
			return
		}
		m.counts.JoinedLate++
		m.offers.lost()
	}
	m.process(f)
}

// process queues the events of the next engine message, as far as the queue has room.
func (m *Machine) process(f Frame) {
	before := m.taken
	m.taken = events.Cursor{Known: true, Seq: f.Seq, Digest: f.digest()}
	if m.basis == named {
		m.basis = heard
	}
	m.counts.Taken++
	m.reading = reading{cursor: m.taken, before: before}
	m.record(f.Payload)
	if f.Read != nil {
		m.queuePart(f.Read.Events, false)
	} else if part, more, err := m.decodeFirst(f.Payload); err != nil {
		m.reading = reading{}
		m.rejectMessage()
	} else {
		m.queuePart(part, more)
	}
	m.read(m.hasRoom)
}

// ClearUnreadable makes undecodable messages count as missing. Call it before Recovered.
func (m *Machine) ClearUnreadable() { m.strict = true }

// rejectMessage counts an undecodable last message. In strict mode it clears the rank, because the message may have
// contained removals. A replay would not help, because the engine repeats the same bytes.
func (m *Machine) rejectMessage() {
	m.counts.Undecodable++
	m.offers.lost()
	if !m.strict || m.emptied {
		return
	}
	m.recordEvent(m.clearHeld(events.ReasonGap), true)
	m.emptied = true
}

// gap publishes a clear of the rank, because messages are missing.
func (m *Machine) gap() {
	m.counts.Gaps++
	m.offers.lost()
	m.taken.Partial = 0
	m.record(nil)
	m.recordEvent(m.clearHeld(events.ReasonGap), true)
}

// clearHeld clears the rank within the incarnation, and returns the event.
func (m *Machine) clearHeld(why events.Reason) *events.Event {
	m.decode.Cleared()
	e := &events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: why}
	m.push(e, m.taken)
	return e
}

// begin begins a new incarnation. The first event has the reason.
func (m *Machine) begin(why events.Reason, now events.Millis) {
	m.counts.Incarnations++
	m.counts.Restarts++
	m.incarnation = (&Published{Reached: Reached{Incarnation: m.incarnation}}).next(now)
	m.nextID = 1
	m.taken, m.basis = events.Cursor{}, heard
	if _, ok := m.phase.(*awaitingSnapshot); ok {
		m.phase = live{}
	}
	m.decode.Reset()
	m.learning = nil
	m.push(&events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: why}, m.taken)
	m.fallBehind()
}
