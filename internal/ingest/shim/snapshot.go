package shim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// An engine snapshot is all that an engine holds, said by itself as messages for a reader that knows nothing. It is
// what is left where the replay buffer does not reach back. No release of an engine has it; two proposals for vLLM do,
// and are told apart by the first answer:
//
//	request of both      ["", "snapshot"]
//	vllm-project/vllm#50134, on the replay socket: several replies ["", topic, next u64 BE, batch], all with the number of the live message that follows,
//	                     and the end marker of a replay
//	vllm-project/vllm#57789, on a socket of its own (snapshot_endpoint): one reply ["", last i64 BE, publisher (16 bytes), batch...]; last is the newest message
//	                     that is in it, -1 if there was none, and -2 says that there is no snapshot now
//
// A replay socket without either takes "snapshot" for a sequence beyond its newest and answers with the end marker
// alone. Formats: the description of #50134, and docs/features/kv_event_snapshots.md and
// vllm/distributed/kv_events_snapshot.py of #57789.

// Snapshot is what an engine says that it holds.
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

// offers is what is known of an engine's snapshots. The zero value is an engine that has none.
type offers struct {
	configured bool // the engine may be asked for one
	tries      int  // since something of the live stream fitted
	refused    bool // no more are asked for until something changes
	none       bool // when it was last asked for one it had none to offer
	// something was lost that a snapshot would have; what is published meanwhile has no cursor, so that a shim that
	// starts again asks for it
	lacking bool
}

// lost tells that something was lost that a snapshot would have.
func (o *offers) lost() { o.lacking = o.configured && !o.none }

// askAgain tells that the engine may have a snapshot by now.
func (o *offers) askAgain() { o.tries, o.refused = 0, false }

// UseSnapshots tells that the engine may be asked for a snapshot. It is to be called before Recovered.
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
		m.noSnapshot(true, a.now)
		return
	}
	m.adopting = nil
	m.offers.none, m.offers.lacking = false, false
	m.counts.Snapshots++
	if a.snapshot.Next > 0 {
		m.taken, m.basis = events.Cursor{Known: true, Seq: a.snapshot.Next - 1}, named
	}
	m.release(a.now, false)
}

// SnapshotFailed tells that there is no snapshot: what is missing counts as lost. If one is offered at all it is asked
// for again with the next Verify, since the engine may have it by then.
func (m *Machine) SnapshotFailed(offered bool, now events.Millis) {
	m.complete()
	if m.awaited() {
		m.noSnapshot(offered, now)
	}
}

func (m *Machine) noSnapshot(offered bool, now events.Millis) {
	m.offers.refused, m.offers.none, m.offers.lacking = true, !offered, offered
	if m.replay {
		m.startReplay()
		return
	}
	m.release(now, false)
}

// Bounds of a snapshot, and how many times as long as for a replay is waited for it: it is made when it is asked for.
const (
	maxSnapshot      = 256 << 20 // bytes
	maxSnapshotParts = 1 << 16
	snapshotPatience = 10
)

var errNotOffered = errors.New("the engine does not offer snapshots")

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
	r.cfg.Hooks.SnapshotFailed(got.err)
	r.machine.SnapshotFailed(!errors.Is(got.err, errNotOffered), now)
	r.askSoon()
}

// askSnapshot asks for a snapshot and hears all of it.
func askSnapshot(ctx context.Context, cfg Config) (Snapshot, error) {
	if cfg.Source != nil {
		said, err := askSource(ctx, cfg, 0)
		if err == nil && said.Whole == nil {
			err = errors.New("the engine does not say all that it holds")
		}
		if err != nil {
			return Snapshot{}, err
		}
		return *said.Whole, nil
	}
	ctx, cancel := context.WithTimeout(ctx, snapshotPatience*cfg.ReplayTimeout)
	defer cancel()
	sockets := cfg.Sockets
	sockets.MaxMessage, sockets.MaxFrames, sockets.RecvBytes = 2*maxSnapshot, maxSnapshotParts, maxSnapshot
	d, err := ask(ctx, cfg.Snapshot, sockets, []byte("snapshot"))
	if err != nil {
		return Snapshot{}, err
	}
	defer d.Stop()
	var s Snapshot
	for size := 0; size <= maxSnapshot; {
		frames, err := d.Recv(ctx)
		if err != nil {
			if ctx.Err() != nil {
				err = fmt.Errorf("no whole snapshot came in %v", snapshotPatience*cfg.ReplayTimeout)
			}
			return Snapshot{}, err
		}
		more, err := s.hear(frames)
		if err != nil || !more {
			return s, err
		}
		size += len(s.Payloads[len(s.Payloads)-1])
	}
	return Snapshot{}, fmt.Errorf("a snapshot of more than %d bytes", maxSnapshot)
}

// hear takes one reply, and reports whether another one follows.
func (s *Snapshot) hear(frames [][]byte) (more bool, err error) {
	if len(frames) > 0 && len(frames[0]) == 0 {
		frames = frames[1:]
	}
	switch n := len(frames); {
	case n >= 2 && len(frames[0]) == 8 && len(frames[1]) == 16: // #57789
		switch last := int64(binary.BigEndian.Uint64(frames[0])); {
		case len(s.Payloads) > 0 || last < -2:
			return false, errors.New("replies of no known kind of snapshot")
		case last == -2:
			return false, errors.New("the engine has no snapshot now")
		default:
			s.Next, s.Payloads = events.EngineSeq(last+1), frames[2:]
			return false, nil
		}
	case (n == 2 || n == 3) && len(frames[n-2]) == 8: // #50134, or a replay socket that knows neither
		next := binary.BigEndian.Uint64(frames[n-2])
		switch {
		case next == endMarker && len(s.Payloads) == 0:
			return false, errNotOffered
		case next == endMarker:
			return false, nil
		case n == 2 || len(s.Payloads) > 0 && events.EngineSeq(next) != s.Next:
			return false, errors.New("replies of no known kind of snapshot")
		}
		s.Next, s.Payloads = events.EngineSeq(next), append(s.Payloads, frames[2])
		return true, nil
	}
	return false, fmt.Errorf("an answer of %d frames that is no snapshot", len(frames))
}
