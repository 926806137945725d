package shim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func (m *Machine) hold(f Frame) {
	if m.held.bytes+len(f.Payload)+frameSize > m.limits.HeldBytes {
		m.counts.Overtaken++
		m.held.overtaken = max(m.held.overtaken, f.Seq+1)
		return
	}
	m.held.frames = append(m.held.frames, f)
	m.held.bytes += len(f.Payload) + frameSize
}

// replaying is the phase in which the engine says again what was missed.
type replaying struct {
	asked    bool // Advance has returned it
	verified bool // the replay has shown the message that was taken last, unchanged
}

func (*replaying) takesLive() bool { return false }

// attempts is how replays have ended since one brought something new.
type attempts struct {
	empty    int           // replays in a row that were answered and brought nothing new
	failures int           // replays in a row that failed
	failedAt events.Millis // when the first of them did
}

// held is live messages that wait until a replay or a snapshot has ended.
type held struct {
	frames    []Frame
	bytes     int
	overtaken events.EngineSeq // one more than the newest that found no room; 0 if all did
}

// startReplay makes a replay due, if the engine can be asked for one.
func (m *Machine) startReplay() {
	if m.canAsk() {
		m.phase = &replaying{}
		m.learning.interrupt()
	}
}

// running returns the replay that Advance has asked for, or nil.
func (m *Machine) running() *replaying {
	if p, ok := m.phase.(*replaying); ok && p.asked {
		return p
	}
	return nil
}

// ReplayState says whether more is wanted of a replay.
type ReplayState uint8

const (
	ReplayGoesOn     ReplayState = iota // its next message is wanted
	ReplaySuperseded                    // the rest is of no use: another replay is due, or a snapshot
)

// Replayed takes one message of the replay that was asked for last.
func (m *Machine) Replayed(f Frame, now events.Millis) ReplayState {
	m.complete()
	p := m.running()
	if p == nil {
		return ReplaySuperseded
	}
	switch {
	case !m.taken.Known && f.Seq > 0 && m.wantSnapshot():
		return ReplaySuperseded
	case !m.taken.Known:
		p.verified = true
		m.takeFirst(f)
	case m.basis == named && f.Seq == m.taken.Seq:
		m.taken.Digest = f.digest()
		p.verified, m.basis = true, shown
	case p.verified && f.Seq == m.taken.Seq+1:
		m.attempts = attempts{} // what brings us further is worth asking again
		m.take(f)
	case p.verified && f.Seq <= m.taken.Seq:
	case p.verified: // a hole within the replay: the engine's socket dropped something, or the engine lost it itself
		if m.attempts.empty++; m.attempts.empty < m.limits.ReplayTries {
			m.startReplay()
			return ReplaySuperseded
		}
		m.attempts.empty = 0
		if m.wantSnapshot() {
			return ReplaySuperseded
		}
		m.gap()
		m.take(f)
	case f.Seq == m.taken.Seq && f.digest() == m.taken.Digest:
		p.verified = true
	// same number, another content: another process, of which the replay must be had from its start
	case f.Seq == m.taken.Seq:
		m.begin(events.ReasonRestart, now)
		m.startReplay()
		return ReplaySuperseded
	case f.Seq > m.taken.Seq && m.wantSnapshot():
		return ReplaySuperseded
	case f.Seq > m.taken.Seq: // the engine's buffer has moved on, or it is another engine: no telling
		m.counts.Gaps++
		m.offers.lost()
		m.begin(events.ReasonGap, now)
		p.verified = true
		m.take(f)
	}
	return ReplayGoesOn
}

// ReplayEnded tells that the replay has come to its end marker. One that has not got as far as live messages say is as
// one that failed: it may have been asked for before the engine had more, or be that of another rank.
func (m *Machine) ReplayEnded(now events.Millis) ReplayRetry {
	m.complete()
	p := m.running()
	if p == nil {
		return ReplayRetry{}
	}
	if m.taken.Known && !p.verified { // the engine's newest is older than what was taken: it has begun anew
		m.begin(events.ReasonRestart, now)
		m.startReplay()
		return ReplayRetry{}
	}
	if m.beyond() {
		return m.ReplayFailed(now)
	}
	m.attempts = attempts{}
	m.learning.verified()
	m.release(now, false)
	return ReplayRetry{}
}

// beyond reports whether a live message that is held does not follow what was taken.
func (m *Machine) beyond() bool {
	next := m.taken.Seq + 1
	for i := range m.held.frames {
		switch f := &m.held.frames[i]; {
		case m.taken.Known && f.Seq > next:
			return true
		case f.Seq == next:
			next++
		}
	}
	return false
}

// ReplayedWhole takes all that the engine holds, in place of the replay that was asked for last: it does not keep what
// was asked for.
func (m *Machine) ReplayedWhole(s Snapshot, now events.Millis) (retry ReplayRetry) {
	m.complete()
	p := m.running()
	switch {
	case p == nil:
	case m.taken.Known && m.basis == named && s.Next == m.taken.Seq+1: // nothing came since the last one
		p.verified = true
		return m.ReplayEnded(now)
	default:
		m.phase = &awaitingSnapshot{asked: true}
		m.Snapshot(s, now)
	}
	return ReplayRetry{}
}

// ReplayRetry says what follows from a replay that failed.
type ReplayRetry struct {
	Again    bool // RetryReplay is to be called after a pause; else what is missing counts as lost
	Failures int  // with Again: how many have failed in a row
}

// ReplayFailed tells that the replay could not be had.
func (m *Machine) ReplayFailed(now events.Millis) ReplayRetry {
	m.complete()
	if m.running() == nil {
		return ReplayRetry{}
	}
	a := &m.attempts
	if a.failures == 0 {
		a.failedAt = now
	}
	if a.failures++; a.failures < m.limits.ReplayFailures && now-a.failedAt < m.limits.ReplayPatience {
		return ReplayRetry{Again: true, Failures: a.failures}
	}
	a.failures = 0
	if m.taken.Known || !m.wantSnapshot() {
		m.release(now, true)
	}
	return ReplayRetry{}
}

// RetryReplay makes the replay due again.
func (m *Machine) RetryReplay() {
	if _, ok := m.phase.(*replaying); ok {
		m.startReplay()
	}
}

// release goes on with live messages, first with those that were held. One of them may show the next gap, which is a
// loss if replays are in vain.
func (m *Machine) release(now events.Millis, inVain bool) {
	m.phase = live{}
	m.releasing = &releasing{m.held.frames, now, inVain}
	m.held = held{overtaken: m.held.overtaken}
	m.work(m.hasRoom)
}

// releaseNext goes on with the next message that was held, and behind the last one ends the release.
func (m *Machine) releaseNext() {
	r := m.releasing
	if len(r.frames) > 0 {
		f := r.frames[0]
		r.frames[0] = Frame{}
		r.frames = r.frames[1:]
		switch {
		case !m.phase.takesLive():
			m.hold(f)
		case m.taken.Known && f.Seq <= m.taken.Seq && !r.inVain:
			// the replay brought it, or the snapshot
		default:
			m.takeLive(f, r.now, r.inVain)
		}
		return
	}
	m.releasing = nil
	if !m.phase.takesLive() {
		return
	}
	missed := m.held.overtaken > 0 && (!m.taken.Known || m.held.overtaken > m.taken.Seq+1)
	m.held.overtaken = 0
	switch {
	case !missed || r.inVain: // the next live message shows it
	case m.replay:
		m.startReplay()
	case !m.wantSnapshot():
		m.gap()
	}
	m.heardAll()
}

// replay is one conversation with the engine's replay socket. What it brings goes to out, and it ends when ctx does.
type replay struct {
	conversation[replayed]
	from events.EngineSeq
	pace pace
}

// conversation is a question to the engine whose answers come to out. The zero value is none.
type conversation[T any] struct {
	out    chan T
	cancel context.CancelFunc
}

// converse begins a conversation whose context is ctx's child.
func converse[T any](ctx context.Context, room int) (context.Context, conversation[T]) {
	ctx, cancel := context.WithCancel(ctx)
	return ctx, conversation[T]{out: make(chan T, room), cancel: cancel}
}

// end ends the conversation, if there is one.
func (c *conversation[T]) end() {
	if c.cancel != nil {
		c.cancel()
	}
	*c = conversation[T]{}
}

type replayed struct {
	frame Frame
	ended bool
	whole *Snapshot // with ended: it is this instead
	err   error     // with ended: it failed
}

func (r *runner) startReplay(ctx context.Context, from events.EngineSeq) {
	r.replay.end()
	r.snapshot.end()
	r.lesson.end()
	ctx, with := converse[replayed](ctx, 64)
	r.replay = replay{with, from, newPace()}
	run := r.replay // its own copy: r.replay is of the next one when this one ends
	go run.run(ctx, r.cfg)
}

// replayed takes one thing from the replay that runs.
func (r *runner) replayed(ctx context.Context, got replayed) {
	at := time.Now()
	now := millis(at)
	if got.err == nil {
		r.watching.presence.replayed(at)
	}
	switch {
	case !got.ended:
		if r.machine.Replayed(got.frame, now) == ReplaySuperseded {
			r.replay.end()
		}
		return
	case got.err != nil:
		r.cfg.Observer.ReplayFailed(r.replay.from, got.err)
		r.cfg.Control.replayed(got.err)
		most := r.cfg.RetryMax
		switch {
		case zmtp.Refuses(got.err):
			most = r.cfg.RetryReachable
		case errors.Is(got.err, zmtp.ErrSilent):
			r.watching.presence.mute()
		}
		switch {
		case r.retryLater(r.machine.ReplayFailed(now), most):
		case zmtp.Refuses(got.err) && r.cfg.Feed == nil:
			// live messages went on without it; whether they are the same engine's is asked as soon as it is back
			r.knock(ctx)
		default:
			r.askSoon()
		}
	case got.whole != nil:
		r.cfg.Observer.ReplayEnded()
		r.cfg.Control.replayed(nil)
		r.retryLater(r.machine.ReplayedWhole(*got.whole, now), r.cfg.RetryMax)
	default:
		r.cfg.Observer.ReplayEnded()
		r.cfg.Control.replayed(nil)
		r.retryLater(r.machine.ReplayEnded(now), r.cfg.RetryMax)
		r.dialNow() // who answers here publishes too
	}
	r.replay.end()
}

// retryLater asks again after a pause, if that is wanted, and reports whether it is.
func (r *runner) retryLater(retry ReplayRetry, most time.Duration) bool {
	if retry.Again {
		pause := min(r.cfg.RetryMin<<min(retry.Failures-1, 16), most)
		r.retry.Reset(pause/2 + rand.N(pause/2+1))
	}
	return retry.Again
}

// askSoon has the engine asked again before long, talkative as it may be.
func (r *runner) askSoon() {
	r.heardAt = time.Time{}
	r.check.Reset(min(r.cfg.IdleCheck, r.cfg.RetryMax) + rand.N(r.cfg.RetryMax))
}

// endMarker is the number of the message that ends a replay (vllm-project/vllm › vllm/distributed/kv_events.py,
// END_SEQ).
const endMarker = 1<<64 - 1

func (p *replay) run(ctx context.Context, cfg Config) {
	defer p.cancel()
	if cfg.Source != nil {
		said, err := askSource(ctx, cfg, p.from)
		for i := range said.Frames {
			if !p.give(ctx, replayed{frame: said.Frames[i]}) {
				return
			}
			said.Frames[i] = Frame{}
		}
		p.give(ctx, replayed{ended: true, whole: said.Whole, err: err})
		return
	}
	err := askReplay(ctx, cfg, p.from, func(f Frame) bool { return p.give(ctx, replayed{frame: f}) })
	p.give(ctx, replayed{ended: true, err: err})
}

func (p *replay) give(ctx context.Context, got replayed) bool {
	select {
	case p.out <- got:
	case <-ctx.Done():
		return false
	}
	return got.ended || p.pace.sent(ctx, got.frame.size())
}

// ask sends a question to an engine's ROUTER socket. The answers come from what it returns, which is to be stopped.
func ask(ctx context.Context, endpoint string, sockets zmtp.Config, question []byte) (*zmtp.Dealer, error) {
	d, err := zmtp.DialDealer(ctx, endpoint, sockets)
	if err != nil {
		return nil, err
	}
	if err := d.Send(ctx, nil, question); err != nil {
		d.Stop()
		return nil, err
	}
	return d, nil
}

// askReplay asks an engine for its messages from one on, and gives them until the end marker, or until no more are
// wanted.
func askReplay(ctx context.Context, cfg Config, from events.EngineSeq, give func(Frame) bool) error {
	dialing, cancel := context.WithTimeout(ctx, cfg.ReplayTimeout)
	defer cancel()
	d, err := ask(dialing, cfg.Replay, cfg.Sockets, binary.BigEndian.AppendUint64(nil, uint64(from)))
	switch {
	case err != nil && dialing.Err() != nil && ctx.Err() == nil:
		return fmt.Errorf("%w: nobody at %s has spoken as a replay socket for %v", zmtp.ErrSilent, cfg.Replay,
			cfg.ReplayTimeout)
	case err != nil:
		return err
	}
	defer d.Stop()
	for {
		waiting, cancel := context.WithTimeout(ctx, cfg.ReplayTimeout)
		frames, err := d.Recv(waiting)
		cancel()
		switch {
		case err != nil && waiting.Err() != nil && ctx.Err() == nil:
			return fmt.Errorf("%w: the replay socket %s said nothing for %v", zmtp.ErrSilent, cfg.Replay,
				cfg.ReplayTimeout)
		case err != nil:
			return err
		}
		// Releases differ: with or without the topic before the number.
		if len(frames) < 3 || len(frames) > 4 || len(frames[len(frames)-2]) != 8 {
			return fmt.Errorf("the replay socket %s answered with %d frames that are no replay", cfg.Replay,
				len(frames))
		}
		seq := binary.BigEndian.Uint64(frames[len(frames)-2])
		if seq == endMarker || !give(Frame{Seq: events.EngineSeq(seq), Payload: frames[len(frames)-1]}) {
			return nil
		}
	}
}
