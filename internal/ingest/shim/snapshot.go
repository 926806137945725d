package shim

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Snapshot is everything that an engine holds, as messages for a reader without earlier messages.
type Snapshot struct {
	Next     events.EngineSeq // the live message that follows
	Payloads [][]byte
}

// Source can be asked for what a feed has missed.
type Source interface {
	// Ask asks for the messages from one on, or, from 0, for all that is held.
	Ask(ctx context.Context, from events.EngineSeq) (Said, error)
}

// Said is what a source answers.
type Said struct {
	Frames []Frame   // what was asked for; none if there is nothing yet that was
	Whole  *Snapshot // or all that is held, where it does not keep that
}

// askSource asks the source, and waits as long as for a snapshot.
func askSource(ctx context.Context, cfg Config, from events.EngineSeq) (Said, error) {
	asking, cancel := context.WithTimeout(ctx, snapshotPatience*cfg.ReplayTimeout)
	defer cancel()
	said, err := cfg.Source.Ask(asking, from)
	if err != nil && asking.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: no answer in %v", zmtp.ErrSilent, snapshotPatience*cfg.ReplayTimeout)
	}
	return said, err
}

// awaitingSnapshot is the phase in which the engine is asked for all that it holds.
type awaitingSnapshot struct {
	asked bool // Advance has returned it
}

func (*awaitingSnapshot) takesLive() bool { return false }

// basis is how the message that was taken last is known.
type basis uint8

const (
	heard basis = iota
	named       // a snapshot names it; its digest is not known
	shown       // its digest is what a replay showed after a snapshot; nothing live has followed it yet
)

// offers is the state of requests for snapshots. The zero value is that of an engine without snapshots.
type offers struct {
	configured bool // the engine may be asked for one
	tries      int  // since something of the live stream fitted
	refused    bool // no more are asked for until something changes
	// something was lost that a snapshot would have; what is published meanwhile has no cursor, so that a shim that
	// starts again asks for it
	lacking bool
}

// lost records a loss that a snapshot would make up for.
func (o *offers) lost() { o.lacking = o.configured }

// askAgain allows requests again, since the engine may have a snapshot by now.
func (o *offers) askAgain() { o.tries, o.refused = 0, false }

// UseSnapshots lets the machine ask for snapshots, beside replays. It must be called before Recovered.
func (m *Machine) UseSnapshots() { m.offers.configured = true }

// wantSnapshot makes a snapshot due in place of a loss, unless there can be none.
func (m *Machine) wantSnapshot() bool {
	if o := &m.offers; !o.configured || o.refused || o.tries >= m.limits.ReplayTries {
		return false
	}
	m.offers.tries++
	m.phase = &awaitingSnapshot{}
	return true
}

// awaited reports whether Advance has asked for a snapshot.
func (m *Machine) awaited() bool {
	p, ok := m.phase.(*awaitingSnapshot)
	return ok && p.asked
}

// Snapshot takes what the engine holds, in a new incarnation. Until a message after it was taken the log has no cursor,
// so that a shim which starts again meanwhile begins from nothing.
func (m *Machine) Snapshot(s Snapshot, now events.Millis) {
	m.complete()
	if !m.awaited() {
		return
	}
	if m.taken.Known || m.spoken() { // else the incarnation has its first clear and nothing more
		m.begin(events.ReasonGap, now)
	}
	m.adopting = &adopting{s, now}
	m.work(m.hasRoom)
}

// adoptNext takes the next message of the snapshot in hand, and behind the last one goes on with live messages.
func (m *Machine) adoptNext() {
	a := m.adopting
	if len(a.snapshot.Payloads) > 0 {
		payload := a.snapshot.Payloads[0]
		a.snapshot.Payloads[0] = nil
		a.snapshot.Payloads = a.snapshot.Payloads[1:]
		part, more, err := m.decodeFirst(payload)
		if err == nil {
			m.reading = reading{}
			m.queuePart(part, more)
			return
		}
		m.counts.Undecodable++ // a part of a snapshot is worth nothing
		m.adopting = nil
		m.begin(events.ReasonGap, a.now)
		m.noSnapshot()
		return
	}
	m.adopting = nil
	m.offers.lacking = false
	m.counts.Snapshots++
	if a.snapshot.Next > 0 {
		m.taken, m.basis = events.Cursor{Known: true, Seq: a.snapshot.Next - 1}, named
	}
	m.release(a.now, false)
}

// SnapshotFailed records the failure of the request for a snapshot. The missing messages count as lost. The next Verify
// makes another request due.
func (m *Machine) SnapshotFailed() {
	m.complete()
	if m.awaited() {
		m.noSnapshot()
	}
}

func (m *Machine) noSnapshot() {
	m.offers.refused, m.offers.lacking = true, true
	m.startReplay()
}

// snapshotPatience is how many times as long as for a replay a shim waits for a snapshot, which is made on request.
const snapshotPatience = 10

type snapshotted struct {
	snapshot Snapshot
	err      error
}

func (r *runner) startSnapshot(ctx context.Context) {
	r.snapshot.end()
	r.replay.end()
	ctx, s := converse[snapshotted](ctx, 1)
	r.snapshot = s
	go func() {
		defer s.cancel()
		var got snapshotted
		got.snapshot, got.err = askSnapshot(ctx, r.cfg)
		s.out <- got
	}()
}

func (r *runner) snapshotted(got snapshotted) {
	now := millis(time.Now())
	r.snapshot.end()
	if got.err == nil {
		r.machine.Snapshot(got.snapshot, now)
		return
	}
	r.cfg.Observer.SnapshotFailed(got.err)
	r.machine.SnapshotFailed()
	r.askSoon()
}

// askSnapshot asks the source for everything that the engine holds.
func askSnapshot(ctx context.Context, cfg Config) (Snapshot, error) {
	said, err := askSource(ctx, cfg, 0)
	if err == nil && said.Whole == nil {
		err = errors.New("the answer of the engine is not a snapshot")
	}
	if err != nil {
		return Snapshot{}, err
	}
	return *said.Whole, nil
}
