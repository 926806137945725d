package shim

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seedFlag = flag.Uint64("seed", 1, "first seed of random tests; 0 uses the clock")

// engine is a fake inference engine: numbered messages, with the last messages kept for replay.
type engine struct {
	life   int
	next   events.EngineSeq
	buffer []Frame
	keep   int
	held   map[events.BlockHash]bool
	block  events.BlockHash
	rng    *rand.Rand
	most   int // a message has fewer events

	garbles bool // sometimes publishes undecodable messages
}

func newEngine(rng *rand.Rand, keep int) *engine {
	e := &engine{rng: rng, keep: keep, most: 4}
	e.restart()
	return e
}

func (e *engine) restart() {
	e.life++
	e.next, e.buffer, e.held = 0, nil, map[events.BlockHash]bool{}
}

// publish makes a message of a few events. Payloads read like "life3 +17 -12 clear"; payloads of different lives
// differ.
func (e *engine) publish() Frame {
	words := []string{fmt.Sprintf("life%d", e.life)}
	for range e.rng.IntN(e.most) {
		switch n := e.rng.IntN(20); {
		case n == 0:
			words = append(words, "clear")
			clear(e.held)
		case n < 8 && len(e.held) > 0:
			all := slices.Sorted(maps.Keys(e.held))
			b := all[e.rng.IntN(len(all))]
			words = append(words, fmt.Sprintf("-%d", b))
			delete(e.held, b)
		default:
			e.block++
			words = append(words, fmt.Sprintf("+%d", e.block))
			e.held[e.block] = true
		}
	}
	if e.garbles && e.rng.IntN(40) == 0 {
		words = append(words, "?") // undecodable
	}
	f := Frame{Seq: e.next, Payload: []byte(strings.Join(words, " "))}
	e.next++
	if e.buffer = append(e.buffer, f); len(e.buffer) > e.keep {
		e.buffer = e.buffer[1:]
	}
	return f
}

func (e *engine) snapshot() *Snapshot { // snapshot returns the held blocks in messages of a single block
	s := &Snapshot{Next: e.next}
	for _, b := range slices.Sorted(maps.Keys(e.held)) {
		s.Payloads = append(s.Payloads, fmt.Appendf(nil, "life%d +%d", e.life, b))
	}
	return s
}

func (e *engine) since(from events.EngineSeq) (frames []Frame) {
	for _, f := range e.buffer {
		if f.Seq >= from {
			frames = append(frames, f)
		}
	}
	return frames
}

// decodeWords decodes the messages of the fake engine.
func decodeWords(payload []byte) (events.Message, error) {
	var evs []events.Event
	for _, w := range strings.Fields(string(payload))[1:] {
		var b events.BlockHash
		if w == "clear" {
			evs = append(evs, events.Event{Kind: events.Cleared, Reason: events.ReasonEngine})
		} else if _, err := fmt.Sscanf(w[1:], "%d", &b); err != nil {
			return events.Message{}, err
		} else if w[0] == '+' {
			evs = append(evs, events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{b},
				Locals: []events.LocalHash{1}})
		} else {
			evs = append(evs, events.Event{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{b}})
		}
	}
	return events.Message{Events: evs}, nil
}

// wordParts decodes as decodeWords, with parts of one or two events.
type wordParts struct {
	Whole
	rest []events.Event
}

func (p *wordParts) Begin(payload []byte) (m events.Message, more bool, err error) {
	m, err = decodeWords(payload)
	p.rest = m.Events
	m.Events, more = p.Continue()
	return m, more, err
}

func (p *wordParts) Continue() (part []events.Event, more bool) {
	n := min(len(p.rest), 1+len(p.rest)%2)
	part, p.rest = p.rest[:n], p.rest[n:]
	return part, len(p.rest) > 0
}

// logbook is the log of a rank with a reader's state.
type logbook struct {
	t    *testing.T
	last Published
	held map[events.BlockHash]bool
}

func (l *logbook) append(data []byte) {
	var b events.Batch
	if err := events.DecodeBatch(data, &b); err != nil {
		l.t.Fatal(err)
	}
	switch {
	case b.Incarnation < l.last.Incarnation:
		l.t.Fatalf("incarnation %d after %d", b.Incarnation, l.last.Incarnation)
	case b.Incarnation > l.last.Incarnation:
		clear(l.held)
		l.last.LastID = 0
		if b.FirstID != 1 {
			l.t.Fatalf("incarnation %d begins with event %d", b.Incarnation, b.FirstID)
		}
	case b.FirstID != l.last.LastID+1:
		l.t.Fatalf("event %d follows event %d", b.FirstID, l.last.LastID)
	}
	for _, e := range b.Events {
		switch e.Kind {
		case events.Cleared:
			if e.Tier == events.AllTiers || e.Tier == events.Device { // blocks are held there alone
				clear(l.held)
			}
		case events.Stored:
			if l.held[e.Blocks[0]] {
				l.t.Fatalf("block %d is stored twice", e.Blocks[0])
			}
			l.held[e.Blocks[0]] = true
		case events.Removed:
			delete(l.held, e.Blocks[0])
		}
	}
	l.last = Published{Found: true, Reached: Reached{b.Incarnation, b.LastID(), b.Cursor}}
}

// world is an engine, a shim's machine and a log, with faults in between.
type world struct {
	*testing.T
	rng     *rand.Rand
	engine  *engine
	log     *logbook
	limits  Limits
	machine *Machine
	now     events.Millis
	wire    []Frame // undelivered messages of the live socket
	replay  []Frame // undelivered messages of the replay
	asked   bool
	flight  [][]byte
	evil    bool // things may go wrong
	losses  uint64

	snapshots bool
	decoder   Decoder
	busy      int       // how often something waited for the rest of a message
	snapshot  *Snapshot // requested, and to come

	departures uint64 // engines that counted as gone
}

func (w *world) start() {
	if w.machine != nil {
		w.losses += w.machine.Counts().Gaps + w.machine.Counts().JoinedLate + w.machine.Counts().Undecodable
	}
	w.machine = NewMachine(Identity{Model: "m", BlockSize: 16}, w.limits, true, w.decoder)
	w.machine.ClearUnreadable()
	if w.snapshots {
		w.machine.UseSnapshots()
	}
	w.machine.Recovered(w.log.last, w.now)
	w.flight, w.replay, w.asked, w.snapshot = nil, nil, false, nil
	w.connect()
}

// depart reports the engine as gone. From then until the next connection, the rank must be empty in the log.
func (w *world) depart() {
	w.wire, w.replay, w.asked, w.snapshot = nil, nil, false, nil
	w.machine.Gone()
	w.departures++
	for w.step() {
	}
	if len(w.log.held) > 0 {
		w.Fatalf("the engine is gone, and the log holds %d blocks", len(w.log.held))
	}
}

func (w *world) connect() {
	w.wire = nil
	w.machine.Connected()
}

// step performs a single action, and reports whether work was left.
func (w *world) step() bool {
	w.now++
	ready := advance(w.machine)
	if ready.Snapshot {
		w.snapshot, w.replay, w.asked = w.engine.snapshot(), nil, false // the shell ends a running replay
		return true
	}
	if ready.Replay {
		w.replay, w.asked, w.snapshot = w.engine.since(ready.From), true, nil
		if w.evil && w.rng.IntN(8) == 0 && len(w.replay) > 2 { // the router drops messages at the high-water mark
			w.replay = append(w.replay[:1:1], w.replay[2:]...)
		}
		return true
	}
	if w.flight == nil {
		flight, err := w.machine.fly()
		if err != nil {
			w.Fatal(err)
		}
		w.flight = flight
	}
	switch choice := w.rng.IntN(4); {
	case w.machine.Full() && choice > 0: // the shell brings nothing
		w.busy++
		return true
	case choice == 3 && w.snapshot != nil:
		s := w.snapshot
		if w.snapshot = nil; w.evil && w.rng.IntN(4) == 0 {
			w.machine.SnapshotFailed()
		} else {
			w.machine.Snapshot(*s, w.now)
		}
	case choice == 0 && w.flight != nil:
		w.land()
	case choice == 1 && w.asked:
		w.answer()
	case len(w.wire) > 0:
		f := w.wire[0]
		w.wire = w.wire[1:]
		if w.evil && w.rng.IntN(30) == 0 {
			break // dropped at the engine's high-water mark
		}
		w.machine.Live(f, w.now)
	default:
		return w.flight != nil || w.asked || w.snapshot != nil
	}
	return true
}

// land stores the flight, or a part of it: then the rest is stored later, unless the shim crashes.
func (w *world) land() {
	stored := len(w.flight)
	if w.evil && w.rng.IntN(3) == 0 {
		stored = w.rng.IntN(len(w.flight) + 1)
	}
	for _, data := range w.flight[:stored] {
		w.log.append(data)
	}
	if w.flight = w.flight[stored:]; len(w.flight) == 0 {
		w.flight = nil
		w.machine.Flushed()
	}
}

// answer delivers the next message of the replay, or the end.
func (w *world) answer() {
	switch {
	case w.evil && w.rng.IntN(20) == 0:
		w.asked = false
		if w.machine.ReplayFailed(w.now).Again {
			w.machine.RetryReplay()
		}
	case len(w.replay) == 0:
		w.asked = false
		if w.machine.ReplayEnded(w.now).Again {
			w.machine.RetryReplay()
		}
	default:
		f := w.replay[0]
		w.replay = w.replay[1:]
		if w.machine.Replayed(f, w.now) == ReplaySuperseded {
			w.asked = false
		}
	}
}

// TestSnapshotsMakeUpForEverything checks that the log equals the memory of an engine with snapshots after any loss,
// once no message is under way.
func TestSnapshotsMakeUpForEverything(t *testing.T) {
	nothingIsLostOrInvented(t, true)
}

// TestNothingIsLostOrInvented runs engines with restarts and undecodable messages, sockets with drops, failing replays
// with losses, partly stored flights, and crashing shims. At the end the log must never have a block that the engine
// does not hold. With a sufficient replay buffer, the log must have all blocks of the engine.
func TestNothingIsLostOrInvented(t *testing.T) {
	nothingIsLostOrInvented(t, false)
}

func nothingIsLostOrInvented(t *testing.T, snapshots bool) {
	seed := *seedFlag
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	busy := 0
	rounds, departures := testkit.Rounds(1200), uint64(0)
	if snapshots {
		rounds = testkit.Rounds(500)
	}
	if testing.Short() {
		rounds /= 10
	}
	for round := range rounds {
		seed := seed + uint64(round)
		rng := rand.New(rand.NewPCG(seed, 1))
		w := &world{T: t, rng: rng, engine: newEngine(rng, 1+rng.IntN(200)), now: 1000}
		w.limits = Limits{MessageBytes: 60 + rng.IntN(400), FlightMessages: 1 + rng.IntN(5),
			HeldBytes: 50 + rng.IntN(2000)}
		w.decoder = Whole{Decode: decodeWords}
		if rng.IntN(2) == 0 {
			w.decoder, w.limits.PartBytes, w.engine.most = &wordParts{}, 1+rng.IntN(1000), 12
		}
		w.snapshots = snapshots
		w.log = &logbook{t: t, held: map[events.BlockHash]bool{}}
		w.start()
		for range 20 {
			w.evil = rng.IntN(2) == 0
			w.engine.garbles = w.evil
			for range rng.IntN(60) {
				switch n := rng.IntN(100); {
				case n < 40:
					w.wire = append(w.wire, w.engine.publish())
				case n < 42:
					w.start() // the shim crashed
				case n < 44:
					w.connect()
				case n == 45:
					w.machine.Resync(w.now)
					w.replay, w.asked, w.snapshot = nil, false, nil // the shell ends the running replay
				case n == 46: // gone, or apparently gone: the same engine may return
					w.depart()
					if rng.IntN(3) == 0 {
						w.start() // the shim too
						w.depart()
					}
					if rng.IntN(2) == 0 {
						w.engine.restart()
					}
					for range rng.IntN(5) {
						w.engine.publish()
					}
					w.connect()
				case n == 44:
					w.engine.restart()
					for range rng.IntN(5) {
						w.engine.publish() // before the shim has reconnected
					}
					w.connect()
				default:
					w.step()
				}
			}
			w.evil, w.engine.garbles = false, false
			// A replay that failed during the faults is repeated after them. It may contain unreadable messages; then a
			// snapshot is requested.
			for range 3 {
				w.machine.Verify()
				for w.step() {
				}
			}
			if w.machine.CatchingUp() {
				t.Fatalf("seed %d: all is quiet, and the shim is still catching up", seed)
			}
			for b := range w.log.held {
				if !w.engine.held[b] {
					t.Fatalf("seed %d: the log holds block %d, which the engine does not hold", seed, b)
				}
			}
			lost := w.losses + w.machine.Counts().Gaps + w.machine.Counts().JoinedLate + w.machine.Counts().Undecodable
			if (lost == 0 || snapshots) && len(w.log.held) != len(w.engine.held) {
				t.Fatalf("seed %d: the log holds %d blocks and the engine %d, and nothing was counted lost", seed,
					len(w.log.held), len(w.engine.held))
			}
		}
		departures += w.departures
		busy += w.busy
	}
	if busy == 0 {
		t.Error("no message was ever waited for")
	}
	if departures == 0 {
		t.Error("no engine was ever gone")
	}
}

// TestLogThatWasRolledBack publishes, and then finds the log with fewer messages than acknowledged. The engine's
// repeatable events are published in an incarnation above the log's. The incarnation begins once for any number of log
// losses before the first message.
func TestLogThatWasRolledBack(t *testing.T) {
	for _, left := range []Published{{}, {Found: true, Reached: Reached{Incarnation: 90, LastID: 7}},
		{Found: true, Reached: Reached{Incarnation: 100, LastID: 1}}} {
		m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
		// without a cursor: a new incarnation, 100
		m.Recovered(Published{Found: true, Reached: Reached{Incarnation: 90, LastID: 9}}, 100)
		m.Connected()
		wantsReplay(m)
		m.Replayed(Frame{Seq: 0, Payload: []byte("life1 +1")}, 100)
		m.ReplayEnded(100)
		fly := func() {
			t.Helper()
			if flight, err := m.fly(); err != nil || flight == nil {
				t.Fatalf("flight %v, %v", flight, err)
			}
		}
		fly()
		m.Flushed() // acknowledged: 100, up to event 2
		m.Live(Frame{Seq: 1, Payload: []byte("life1 +2")}, 100)
		fly()
		m.LogLost(left, 50) // the clock went back
		if m.Incarnation() != 101 {
			t.Fatalf("incarnation %d", m.Incarnation())
		}
		if from, ok := wantsReplay(m); !ok || from != 0 {
			t.Fatalf("replay from %d, %v", from, ok)
		}
		fly()
		m.LogLost(left, 50)
		if m.Incarnation() != 101 {
			t.Fatalf("nothing of incarnation 101 was lost, and %d began", m.Incarnation())
		}
		fly()
	}
}

// TestAShimThatLackedSomethingIsStartedAgain loses messages and gets no snapshot in place of the messages. The next
// shim requests a snapshot again.
func TestAShimThatLackedSomethingIsStartedAgain(t *testing.T) {
	log := &logbook{t: t, held: map[events.BlockHash]bool{}}
	start := func(now events.Millis) *Machine {
		m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, true, Whole{Decode: decodeWords})
		m.UseSnapshots()
		m.Recovered(log.last, now)
		m.Connected()
		return m
	}
	first := Frame{Seq: 5, Payload: []byte("life1 +5")} // the engine's buffer begins here
	m := start(100)
	wantsReplay(m)
	m.Replayed(first, 100)
	if !wantsSnapshot(m) {
		t.Fatal("no snapshot is wanted in place of the lost messages")
	}
	m.SnapshotFailed()
	wantsReplay(m)
	m.Replayed(first, 100)
	m.ReplayEnded(100)
	m.Live(Frame{Seq: 6, Payload: []byte("life1 +6")}, 100)
	for flight, err := m.fly(); flight != nil; flight, err = m.fly() {
		if err != nil {
			t.Fatal(err)
		}
		for _, data := range flight {
			log.append(data)
		}
		m.Flushed()
	}
	m = start(200)
	if from, ok := wantsReplay(m); !ok || from != 0 {
		t.Fatalf("the next shim wants a replay from %d, %v", from, ok)
	}
	if m.Replayed(first, 200); !wantsSnapshot(m) {
		t.Error("the next shim wants no snapshot")
	}
}

// TestQueuesAreBoundedInMemory checks that the limits count the memory of many small messages, which is greater than
// their bytes on the wire.
func TestQueuesAreBoundedInMemory(t *testing.T) {
	const limit = 1 << 20
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{QueueBytes: limit, HeldBytes: limit}, true,
		Whole{Decode: decodeWords})
	heap := func() int {
		var s runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&s)
		return int(s.HeapAlloc)
	}
	m.Recovered(Published{}, 1)
	m.Connected()
	before, n := heap(), events.EngineSeq(0)
	for ; m.Counts().Overtaken == 0; n++ {
		m.Live(Frame{Seq: n, Payload: []byte("life1 -1")}, 2)
	}
	if grown := heap() - before; grown > 2*limit {
		t.Errorf("%d frames are held in %d bytes, the limit is %d", n, grown, limit)
	}
	if _, ok := wantsReplay(m); !ok {
		t.Fatal("no replay is due")
	}
	m.Replayed(Frame{Payload: []byte("life1 -1")}, 3)
	for n = 1; !m.Full(); n++ {
		m.Replayed(Frame{Seq: n, Payload: []byte("life1 -1")}, 3)
	}
	if grown := heap() - before; grown > 4*limit { // includes the held frames
		t.Errorf("%d events wait in %d bytes, the limit is %d", n, grown, limit)
	}
	runtime.KeepAlive(m)
}

// advance begins due actions except a flight.
func advance(m *Machine) Ready {
	r, err := m.Advance(false)
	if err != nil {
		panic(err)
	}
	return r
}

// wantsReplay reports whether a replay is due, with its first message.
func wantsReplay(m *Machine) (from events.EngineSeq, ok bool) {
	r := advance(m)
	return r.From, r.Replay
}

func wantsSnapshot(m *Machine) bool { return advance(m).Snapshot }

func wantsLearning(m *Machine) (to events.Cursor, ok bool) {
	r := advance(m)
	return r.Learn, r.Learn.Known
}

// TestLogUnreadable checks that an unreadable message begins a single incarnation, for any number of reads before the
// next flight, and that another unreadable message begins another incarnation.
func TestLogUnreadable(t *testing.T) {
	m := NewMachine(Identity{Model: "m", BlockSize: 16}, Limits{}, false, Whole{Decode: decodeWords})
	m.Recovered(Published{Found: true, Unreadable: events.ErrMalformed, Seq: 9,
		Reached: Reached{Incarnation: 500, LastID: 3, Cursor: events.Cursor{Known: true, Seq: 4}}}, 100)
	if c := m.Counts(); m.Incarnation() != 501 || c.Unreadable != 1 || c.Restarts != 0 || m.Taken().Known {
		t.Fatalf("at the start: %d, %+v, %+v", m.Incarnation(), c, m.Taken())
	}
	fly := func() {
		t.Helper()
		flight, err := m.fly()
		if err != nil || len(flight) == 0 {
			t.Fatal(flight, err)
		}
	}
	fly()
	m.Flushed()
	m.Live(Frame{Seq: 0, Payload: []byte("life1 +1")}, 100)
	fly()
	for i, seq := range []events.StreamSeq{20, 20, 21} {
		if got := m.LogUnreadable(Published{Found: true, Unreadable: events.ErrMalformed, Seq: seq}, 100); got != (i != 1) {
			t.Errorf("look %d: %v", i, got)
		}
	}
	if c := m.Counts(); m.Incarnation() != 503 || c.Unreadable != 3 {
		t.Errorf("%d, %+v", m.Incarnation(), c)
	}
}
