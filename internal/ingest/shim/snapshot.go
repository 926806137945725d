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
	Next     events.EngineSeq // number of the next live message
	Payloads [][]byte
}

// Source supplies missed messages of a feed.
type Source interface {
	// Ask requests the messages from a number on. 0 requests all held blocks.
	Ask(ctx context.Context, from events.EngineSeq) (Said, error)
}

// Said is the reply of a source.
type Said struct {
	Frames []Frame   // the requested messages; empty if none exist yet
	Whole  *Snapshot // or all held blocks, if the messages are no longer kept
}

// askSource sends a request to the source, with the timeout of a snapshot.
func askSource(ctx context.Context, cfg Config, from events.EngineSeq) (Said, error) {
	asking, cancel := context.WithTimeout(ctx, snapshotPatience*cfg.ReplayTimeout)
	defer cancel()
	said, err := cfg.Source.Ask(asking, from)
	if err != nil && asking.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w: no answer in %v", zmtp.ErrSilent, snapshotPatience*cfg.ReplayTimeout)
	}
	return said, err
}

// awaitingSnapshot is the phase of a snapshot request.
type awaitingSnapshot struct {
	asked bool // Advance has returned the request
}

func (*awaitingSnapshot) acceptsLive() bool { return false }

// basis is the source of the last processed message.
type basis uint8

const (
	heard basis = iota
	named       // from a snapshot; the digest is unknown
	shown       // the digest is from a replay after a snapshot; no live message has followed yet
)

// offers is the state of requests for snapshots. The zero value is that of an engine without snapshots.
type offers struct {
	configured bool // the engine may have snapshots
	tries      int  // since something of the live stream fitted
	refused    bool // no more requests until something changes
	// events were lost that a snapshot would contain; batches have no cursor until it arrives, so that a restarted shim
	// requests a snapshot
	lacking bool
}

// lost records a loss that a snapshot would make up for.
func (o *offers) lost() { o.lacking = o.configured }

// askAgain allows requests again, since the engine may have a snapshot by now.
func (o *offers) askAgain() { o.tries, o.refused = 0, false }

// UseSnapshots lets the machine request snapshots, beside replays. Call UseSnapshots before Recovered.
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

// awaited reports whether Advance has requested a snapshot.
func (m *Machine) awaited() bool {
	p, ok := m.phase.(*awaitingSnapshot)
	return ok && p.asked
}

// Snapshot processes the engine's held blocks in a new incarnation. Until a later message, the log has no cursor, so a
// restarted shim begins without a cursor.
func (m *Machine) Snapshot(s Snapshot, now events.Millis) {
	m.complete()
	if !m.awaited() {
		return
	}
	if m.taken.Known || m.spoken() { // otherwise the incarnation has only its first clear
		m.begin(events.ReasonGap, now)
	}
	m.adopting = &adopting{s, now}
	m.work(m.hasRoom)
}

// adoptNext processes the next message of the snapshot, and continues with live messages after the last.
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

// askSnapshot requests all held blocks of the engine from the source.
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
