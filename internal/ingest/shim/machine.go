package shim

import (
	"cmp"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits bound what a machine keeps and how it cuts what it publishes.
type Limits struct {
	// QueueBytes is how much memory may wait to be published; the shell stops reading from the engine above it, so that
	// the engine's own replay buffer holds the rest. Default 64 MiB.
	QueueBytes int

	// PartBytes is how much may wait to be published while a message of very many events is decoded further. It bounds
	// the memory of such a message, which may be 40 times its size. Default 4 MiB.
	PartBytes int

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
	l.QueueBytes = cmp.Or(max(l.QueueBytes, 0), 64<<20)
	l.PartBytes = cmp.Or(max(l.PartBytes, 0), 4<<20)
	l.HeldBytes = cmp.Or(max(l.HeldBytes, 0), 64<<20)
	l.MessageBytes = cmp.Or(max(l.MessageBytes, 0), 768<<10)
	l.FlightMessages = cmp.Or(max(l.FlightMessages, 0), 32)
	l.ReplayTries = cmp.Or(max(l.ReplayTries, 0), 3)
	l.ReplayFailures = cmp.Or(max(l.ReplayFailures, 0), 8)
	l.ReplayPatience = cmp.Or(max(l.ReplayPatience, 0), 3000)
	return l
}

// Identity is what a machine writes into every batch.
type Identity struct {
	Model     string
	BlockSize uint32 // tokens
}

// Reached is how far a rank's events go.
type Reached struct {
	Incarnation events.Incarnation
	LastID      events.EventID
	Cursor      events.Cursor // the engine's message that the last event is of
}

// compare orders two by the last event.
func (r Reached) compare(o Reached) int {
	return cmp.Or(cmp.Compare(r.Incarnation, o.Incarnation), cmp.Compare(r.LastID, o.LastID))
}

// Published is what the log says a rank's shim has published last.
type Published struct {
	Found    bool // false: nothing is in the log, nor in a snapshot of it
	Identity Identity
	Reached
	Shutdown bool
	Seq      events.StreamSeq // where in the log
	LogFirst events.StreamSeq // the first message that the log has; 0: not known

	// Unreadable is why the last message cannot be read; nil if it can. Identity and Reached are those of a snapshot
	// then, or zero. A new incarnation must follow.
	Unreadable error `json:"-"`
}

// others reports whether the log has blocks of another model, or of another size. A zero Identity is not known.
func (p *Published) others(id Identity) bool { return p.Identity != Identity{} && p.Identity != id }

// next is the number of the incarnation that follows p and begins now.
func (p *Published) next(now events.Millis) events.Incarnation {
	return max(p.Incarnation+1, events.Incarnation(max(now, 1)))
}

// Frame is one message of an engine: its number and its payload as sent. The machine keeps the payload.
type Frame struct {
	Seq     events.EngineSeq
	Payload []byte

	// Read, if not nil, is there instead of a payload: the message was read already.
	Read *Read

	// Opened says that this is no message: a connection of who feeds has begun, before which something may have been
	// missed.
	Opened bool

	received chan struct{} // is closed when a shim has received the frame; see Give
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

// PartDecoder is a Decoder that returns the events of a large message in parts, as [events.Decoder] does. Begin takes
// the place of Decode.
type PartDecoder interface {
	Decoder
	Begin(payload []byte) (m events.Message, more bool, err error)
	Continue() (part []events.Event, more bool)
}

// Learner is a Decoder that remembers what one message leaves to be known of another.
type Learner interface {
	Decoder

	// Blank returns a decoder that remembers nothing, or nil if there is nothing to remember.
	Blank() *events.Decoder

	// Adopt replaces what is remembered with what another decoder remembers.
	Adopt(*events.Decoder)
}

// Clearer is a Decoder that remembers which blocks it has said to be stored.
type Clearer interface {
	Decoder

	// Cleared tells that the log says that nothing is held any more. The engine process is the same: what was learned of
	// it stays.
	Cleared()
}

// Counts says what became of what the engine sent. All only grow.
type Counts struct {
	Taken uint64 // engine messages taken, in order
	// of those, how many could not be decoded; each costs itself alone, or the rank what it held
	// ([Machine.ClearUnreadable])
	Undecodable uint64
	Events      uint64 // events queued for the log, those of our own making included
	Blocks      uint64 // blocks in stored events
	Overtaken   uint64 // live messages not kept while a replay ran; they are asked for again
	// gaps that nothing could fill, in the engine's stream or in the log; each became a cleared event
	Gaps         uint64
	Restarts     uint64 // new incarnations but for one that the shim began with; each began with a cleared event
	Incarnations uint64 // new ones in all
	Departures   uint64 // engines whose process was found to be gone
	Resyncs      uint64 // new incarnations because somebody asked; Restarts has them too
	Snapshots    uint64 // engine snapshots taken in place of what could not be replayed; each began a new incarnation
	// first contact after message 0, and no replay from there; what it said is not known (some engines count from 1)
	JoinedLate  uint64
	Corrections uint64 // events published because learning showed that others had a wrong hash
	Unreadable  uint64 // last messages of the log that could not be read; each began a new incarnation
	Foreign     uint64 // messages of other engines at the same socket; they are skipped
	Messages    uint64 // messages of the log acknowledged
}

// Machine decides what one rank's shim does next. It is stepped: it starts nothing, waits for nothing and reads no
// clock. One goroutine owns it.
//
// Inputs are Recovered (once, first), Connected, Gone, Asleep, Live, Replayed, ReplayEnded, ReplayFailed, Snapshot,
// SnapshotFailed, Learned, Flushed, Delayed, LogLost, Ended, Resync. After each the owner does what Advance returns.
//
// Invariants:
//  1. Event ids in the queue are consecutive within an incarnation, incarnations only grow.
//  2. The first `inflight` batches of the queue are what the last flight carried; nothing else is in the air. The
//     log finds out whether a flight landed: the machine learns that all of it did, or that the log is not as it was.
//  3. In the phases recovering, replaying and awaitingSnapshot no live message is taken: it is held, or dropped and
//     asked for again.
//  4. What was taken is an unbroken run of the engine's numbers, or a cleared event stands at the break.
//  5. While work is under way (Busy), nothing else is queued: Full is true, and each input but Flushed, Delayed,
//     Verify, RetryReplay, Gone and those that begin a new incarnation completes the work first.
type Machine struct {
	id     Identity
	limits Limits
	decode Decoder
	replay bool // there is a replay endpoint

	distrusted bool // TrustReplays has set replay aside

	strict bool // what cannot be decoded counts as missing

	phase phase

	incarnation events.Incarnation
	nextID      events.EventID
	// the last engine message taken whole; Partial is how much of the next is published already
	taken events.Cursor
	basis basis     // how taken is known
	acked Published // the last message known to be in the log

	queue        []batch
	queuedBytes  int
	queuedEvents int
	inflight     int
	flight       [][]byte
	usual        int   // bytes of the batches that flew last: the largest, which counts half after each
	broken       error // an event that cannot be encoded

	reading   reading    // the message in hand
	releasing *releasing // held messages that are taken one after the other
	adopting  *adopting  // the engine snapshot in hand
	leaving   bool       // Gone follows when the work under way is done
	attempts  attempts   // of replays
	held      held       // live messages, while they are not taken
	offers    offers     // the engine's snapshots
	emptied   bool       // nothing was queued since the clear after a message that could not be decoded

	slept Reached // the clear of an engine that fell asleep

	backlog  backlog
	learning *learning // nil: what the decoder remembers is all that it can know

	counts Counts
}

// phase is what a machine does with its engine. It is one of the types below.
//
//	recovering ──Recovered──▶ live ◀──────▶ *replaying ◀──▶ *awaitingSnapshot
//	                           ▲ └────Gone, from any────▶ departed
//	                           └────────Connected─────────────┘
type phase interface{ takesLive() bool }

type (
	recovering struct{} // waits for what the log holds
	live       struct{} // takes live messages as they come
	departed   struct{} // the engine is gone: there is nobody to ask, and who connects next is another one
)

func (recovering) takesLive() bool { return false }
func (live) takesLive() bool       { return true }
func (departed) takesLive() bool   { return true }

// Ready is what the owner has to do after a step.
type Ready struct {
	// Flight is the messages to publish now, in order; nil: none. They stay the machine's and must not be changed.
	// Flushed, LogLost or Ended answer.
	Flight [][]byte

	// Replay has the engine asked for its messages from From on. It ends a replay, a snapshot and learning that run.
	// Replayed, ReplayEnded or ReplayFailed answer.
	Replay bool
	From   events.EngineSeq

	// Snapshot has the engine asked for all that it holds. It ends a replay that runs. Snapshot or SnapshotFailed
	// answer.
	Snapshot bool

	// Learn, if known, has the messages up to it learned from. Learned answers.
	Learn events.Cursor
}

// Advance begins what is due and returns it for the owner to do, each thing once. publish allows a flight to take off.
// An error says that an event cannot be written, which is a bug.
func (m *Machine) Advance(publish bool) (r Ready, err error) {
	m.work(m.hasRoom)
	switch p := m.phase.(type) {
	case *replaying:
		// From the last one again: its digest shows whether this is the same engine. It is 0 if none is known.
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

// NewMachine returns a machine that waits for Recovered. replay says whether the engine has a replay endpoint.
func NewMachine(id Identity, limits Limits, replay bool, decode Decoder) *Machine {
	return &Machine{id: id, limits: limits.withDefaults(), decode: decode, replay: replay, phase: recovering{}}
}

// Counts returns what has been counted so far.
func (m *Machine) Counts() Counts { return m.counts }

// Incarnation returns the incarnation that events are published under now.
func (m *Machine) Incarnation() events.Incarnation { return m.incarnation }

// Taken returns the last engine message that was taken whole.
func (m *Machine) Taken() events.Cursor { return m.taken }

// Acked returns what is known to be in the log. Its Seq is not kept.
func (m *Machine) Acked() Published { return m.acked }

// Queued returns how many events, and about how many bytes of them, wait for the log or are on their way to it.
func (m *Machine) Queued() (entries, bytes int) { return m.queuedEvents, m.queuedBytes }

// Full reports whether the owner should stop reading from the engine.
func (m *Machine) Full() bool { return m.queuedBytes >= m.limits.QueueBytes || m.Busy() }

// Recovered tells what the log holds of this rank. Blocks of another model or of another size do not go on: a new
// incarnation begins. now becomes the incarnation's number if a new one begins.
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
		m.counts.Restarts = 0 // it is the shim that starts
	} else if l, ok := m.decode.(Learner); ok && m.replay && l.Blank() != nil {
		m.learning = &learning{learner: l, cursor: p.Cursor, spare: m.limits.HeldBytes}
	}
	m.fallBehind()
}

// Connected tells that the engine's socket is connected, for the first time or again. Whether it is still the same
// engine is for a replay to show.
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
	if m.basis != heard { // nothing could show that this is still the engine whose snapshot was taken
		m.begin(events.ReasonGap, 0)
	}
	if _, ok := m.phase.(*awaitingSnapshot); ok {
		m.phase = &awaitingSnapshot{} // of who is there now
	} else {
		m.startReplay()
	}
	m.fallBehind()
}

// Verify makes a replay due that shows whether the engine is still the same and has said nothing that was not heard.
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

// Foreign counts a message of an engine that is not this rank's.
func (m *Machine) Foreign() { m.counts.Foreign++ }

// Replaced begins a new incarnation, since another engine than before speaks from now on, or none. Whatever is under
// way with the engine before is dropped.
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
		if m.phase.takesLive() && m.replay {
			m.Replaced(now)
			m.startReplay()
		}
		return
	}
	m.distrusted, m.replay = m.replay, false
	if !m.phase.takesLive() {
		m.release(now, true)
	}
}

// Live takes one message from the engine's live stream.
func (m *Machine) Live(f Frame, now events.Millis) {
	m.complete()
	if m.phase.takesLive() {
		m.takeLive(f, now, false)
	} else {
		m.hold(f)
	}
}

// takeLive takes a live message if it is the next one, and otherwise finds out what happened. A gap is a loss if
// replays are in vain.
func (m *Machine) takeLive(f Frame, now events.Millis, inVain bool) {
	switch {
	case !m.taken.Known:
		m.takeFirst(f)
	case f.Seq == m.taken.Seq+1:
		m.offers.tries, m.basis = 0, heard
		m.take(f)
	case f.Seq <= m.taken.Seq && m.basis == named:
		// the snapshot has it
	case f.Seq == m.taken.Seq && f.digest() == m.taken.Digest: // it was said again
	case m.replay && !inVain:
		m.hold(f)
		m.startReplay()
		m.fallBehind()
	case f.Seq <= m.taken.Seq:
		m.begin(events.ReasonRestart, now)
		m.takeFirst(f)
	case m.wantSnapshot():
		m.hold(f)
	default:
		m.gap()
		m.take(f)
	}
}

// takeFirst takes the first message of an engine process that is heard.
func (m *Machine) takeFirst(f Frame) {
	first := events.EngineSeq(0)
	if f.Read != nil {
		first = 1 // router events count from 1
	}
	if f.Seq > first {
		if m.phase.takesLive() && m.wantSnapshot() {
			m.hold(f)
			return
		}
		m.counts.JoinedLate++
		m.offers.lost()
	}
	m.take(f)
}

// take queues the events of the next engine message, as far as there is room.
func (m *Machine) take(f Frame) {
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
		m.unread()
	} else {
		m.queuePart(part, more)
	}
	m.read(m.hasRoom)
}

// ClearUnreadable has a message that cannot be decoded count as one that is missing. It is to be called before
// Recovered.
func (m *Machine) ClearUnreadable() { m.strict = true }

// unread counts that the message which was taken last could not be decoded, and, if that is to be so, says in the log
// that whatever the rank was known to hold is no longer known: it may have told of removals. To ask for it again is
// useless: the engine keeps the bytes that it has sent.
func (m *Machine) unread() {
	m.counts.Undecodable++
	m.offers.lost()
	if !m.strict || m.emptied {
		return
	}
	m.recordEvent(m.clearHeld(events.ReasonGap), true)
	m.emptied = true
}

// gap says in the log that something is missing: whatever the rank was known to hold is no longer known.
func (m *Machine) gap() {
	m.counts.Gaps++
	m.offers.lost()
	m.taken.Partial = 0
	m.record(nil)
	m.recordEvent(m.clearHeld(events.ReasonGap), true)
}

// clearHeld clears, within the incarnation, all that the rank was known to hold. It returns the event.
func (m *Machine) clearHeld(why events.Reason) *events.Event {
	if c, ok := m.decode.(Clearer); ok {
		c.Cleared()
	}
	e := &events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: why}
	m.push(e, m.taken)
	return e
}

// begin begins a new incarnation. Its first event says why.
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
