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

// holdBack stores a live message until the end of a replay or a snapshot. It counts a message without room.
func (m *Machine) holdBack(f Frame) {
	if m.held.bytes+len(f.Payload)+frameSize > m.limits.HeldBytes {
		m.counts.Overtaken++
		m.held.overtaken = max(m.held.overtaken, f.Seq+1)
		return
	}
	m.held.frames = append(m.held.frames, f)
	m.held.bytes += len(f.Payload) + frameSize
}

// replaying is the phase of a replay of missed messages.
type replaying struct {
	asked    bool // Advance has returned the request
	verified bool // the replay has shown the last processed message, unchanged
}

func (*replaying) acceptsLive() bool { return false }

// attempts counts replays since the last new message.
type attempts struct {
	empty    int           // consecutive replays without a new message
	failures int           // consecutive failed replays
	failedAt events.Millis // time of the first of them
}

// held is the list of live messages that wait for the end of a replay or a snapshot.
type held struct {
	frames    []Frame
	bytes     int
	overtaken events.EngineSeq // the number after the newest message without room; 0 if all had room
}

// startReplay makes a replay due, if the engine has a replay endpoint.
func (m *Machine) startReplay() {
	if m.canAsk() {
		m.phase = &replaying{}
		m.learning.interrupt()
	}
}

// running returns the replay that Advance has requested, or nil.
func (m *Machine) running() *replaying {
	if p, ok := m.phase.(*replaying); ok && p.asked {
		return p
	}
	return nil
}

// ReplayState states whether further messages of a replay are needed.
type ReplayState uint8

const (
	ReplayGoesOn     ReplayState = iota // the next message is needed
	ReplaySuperseded                    // the rest is of no use: another replay is due, or a snapshot
)

// Replayed processes a message of the last requested replay.
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
		m.processFirst(f)
	case m.basis == named && f.Seq == m.taken.Seq:
		m.taken.Digest = f.digest()
		p.verified, m.basis = true, shown
	case p.verified && f.Seq == m.taken.Seq+1:
		m.attempts = attempts{} // progress permits further requests
		m.process(f)
	case p.verified && f.Seq <= m.taken.Seq:
	case p.verified: // a hole within the replay: the engine's socket dropped messages, or the engine lost them
		if m.attempts.empty++; m.attempts.empty < m.limits.ReplayTries {
			m.startReplay()
			return ReplaySuperseded
		}
		m.attempts.empty = 0
		if m.wantSnapshot() {
			return ReplaySuperseded
		}
		m.gap()
		m.process(f)
	case f.Seq == m.taken.Seq && f.digest() == m.taken.Digest:
		p.verified = true
	// the same number with another content: another process, which needs a full replay
	case f.Seq == m.taken.Seq:
		m.begin(events.ReasonRestart, now)
		m.startReplay()
		return ReplaySuperseded
	case f.Seq > m.taken.Seq && m.wantSnapshot():
		return ReplaySuperseded
	// the engine's buffer has moved on, or the engine is another; the two cannot be distinguished
	case f.Seq > m.taken.Seq:
		m.counts.Gaps++
		m.offers.lost()
		m.begin(events.ReasonGap, now)
		p.verified = true
		m.process(f)
	}
	return ReplayGoesOn
}

// ReplayEnded reports the end marker of a replay. A replay that has not reached the live messages counts as failed: the
// request may have been too early, or the replay belongs to another rank.
func (m *Machine) ReplayEnded(now events.Millis) ReplayRetry {
	m.complete()
	p := m.running()
	if p == nil {
		return ReplayRetry{}
	}
	// the engine's newest message is older than the last processed message: the engine has restarted
	if m.taken.Known && !p.verified {
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

// beyond reports whether a held live message does not follow the last processed message.
func (m *Machine) beyond() bool {
	next := m.taken.Seq + 1
	for i := range m.held.frames {
		f := &m.held.frames[i]
		if i == 0 && !m.taken.Known {
			next = f.first()
		}
		switch {
		case f.Seq > next:
			return true
		case f.Seq == next:
			next++
		}
	}
	return false
}

// ReplayedWhole processes all held blocks of the engine, in place of the last requested replay, because the engine no
// longer has the messages.
func (m *Machine) ReplayedWhole(s Snapshot, now events.Millis) (retry ReplayRetry) {
	m.complete()
	p := m.running()
	switch {
	case p == nil:
	case m.taken.Known && m.basis == named && s.Next == m.taken.Seq+1: // no message since the last
		p.verified = true
		return m.ReplayEnded(now)
	default:
		m.phase = &awaitingSnapshot{asked: true}
		m.Snapshot(s, now)
	}
	return ReplayRetry{}
}

// ReplayRetry is the reaction to a failed replay.
type ReplayRetry struct {
	Again    bool // RetryReplay is due after a pause; otherwise the missing messages count as lost
	Failures int  // with Again: how many have failed in a row
}

// ReplayFailed reports a failed replay.
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

// release continues with live messages, first with the held messages. A held message may show another gap, which is a
// loss with inVain.
func (m *Machine) release(now events.Millis, inVain bool) {
	m.phase = live{}
	m.releasing = &releasing{m.held.frames, now, inVain}
	m.held = held{overtaken: m.held.overtaken}
	m.work(m.hasRoom)
}

// releaseNext continues with the next held message, and ends the release after the last.
func (m *Machine) releaseNext() {
	r := m.releasing
	if len(r.frames) > 0 {
		f := r.frames[0]
		r.frames[0] = Frame{}
		r.frames = r.frames[1:]
		switch {
		case !m.phase.acceptsLive():
			m.holdBack(f)
		case m.taken.Known && f.Seq <= m.taken.Seq && !r.inVain:
			// included in the replay or in the snapshot
		default:
			m.processLive(f, r.now, r.inVain)
		}
		return
	}
	m.releasing = nil
	if !m.phase.acceptsLive() {
		return
	}
	missed := m.held.overtaken > 0 && (!m.taken.Known || m.held.overtaken > m.taken.Seq+1)
	m.held.overtaken = 0
	switch {
	case !missed || r.inVain: // the next live message shows the gap
	case m.replay:
		m.startReplay()
	case !m.wantSnapshot():
		m.gap()
	}
	m.heardAll()
}

// replay is a conversation with the engine's replay socket. The messages go to out, and the conversation ends with ctx.
type replay struct {
	conversation[replayed]
	from events.EngineSeq
	pace pace
}

// conversation is a request to the engine with replies in out. The zero value is none.
type conversation[T any] struct {
	out    chan T
	cancel context.CancelFunc
}

// converse begins a conversation with a child context of ctx.
func converse[T any](ctx context.Context, room int) (context.Context, conversation[T]) {
	ctx, cancel := context.WithCancel(ctx)
	return ctx, conversation[T]{out: make(chan T, room), cancel: cancel}
}

// end ends the conversation, if any.
func (c *conversation[T]) end() {
	if c.cancel != nil {
		c.cancel()
	}
	*c = conversation[T]{}
}

type replayed struct {
	frame Frame
	ended bool
	whole *Snapshot // with ended: the snapshot in place of the replay
	err   error     // with ended: the failure
}

func (r *runner) startReplay(ctx context.Context, from events.EngineSeq) {
	r.replay.end()
	r.snapshot.end()
	r.lesson.end()
	ctx, with := converse[replayed](ctx, 64)
	r.replay = replay{with, from, newPace()}
	run := r.replay // a copy: r.replay belongs to the next conversation when this conversation ends
	go run.run(ctx, r.cfg)
}

// replayed processes a result of the running replay.
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
			// live messages continued without the replay; check the engine as soon as the socket is back
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
		r.dialNow() // the publisher listens too
	}
	r.replay.end()
}

// retryLater requests the replay again after a pause, if wanted, and reports whether it is wanted.
func (r *runner) retryLater(retry ReplayRetry, most time.Duration) bool {
	if retry.Again {
		pause := min(r.cfg.RetryMin<<min(retry.Failures-1, 16), most)
		r.retry.Reset(pause/2 + rand.N(pause/2+1))
	}
	return retry.Again
}

// askSoon requests a check of the engine soon, even during live messages.
func (r *runner) askSoon() {
	r.heardAt = time.Time{}
	r.check.Reset(min(r.cfg.IdleCheck, r.cfg.RetryMax) + rand.N(r.cfg.RetryMax))
}

// endMarker is the number of the message at the end of a replay (vllm-project/vllm › vllm/distributed/kv_events.py,
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

// requestReplay sends a request to an engine's ROUTER socket. The returned connection receives the replies. The caller
// must stop it.
func requestReplay(ctx context.Context, endpoint string, sockets zmtp.Config, question []byte) (*zmtp.Dealer, error) {
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

// askReplay requests an engine's messages from a number on, and passes them to give until the end marker, or until give
// returns false.
func askReplay(ctx context.Context, cfg Config, from events.EngineSeq, give func(Frame) bool) error {
	dialing, cancel := context.WithTimeout(ctx, cfg.ReplayTimeout)
	defer cancel()
	d, err := requestReplay(dialing, cfg.Replay, cfg.Sockets, binary.BigEndian.AppendUint64(nil, uint64(from)))
	switch {
	case err != nil && dialing.Err() != nil && ctx.Err() == nil:
		return fmt.Errorf("%w: no replay socket at %s for %v", zmtp.ErrSilent, cfg.Replay,
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
			return fmt.Errorf("%w: no reply from the replay socket %s for %v", zmtp.ErrSilent, cfg.Replay,
				cfg.ReplayTimeout)
		case err != nil:
			return err
		}
		// Releases differ: with or without the topic before the number.
		if len(frames) < 3 || len(frames) > 4 || len(frames[len(frames)-2]) != 8 {
			return fmt.Errorf("the replay socket %s replied with %d frames, which is not a replay", cfg.Replay,
				len(frames))
		}
		seq := binary.BigEndian.Uint64(frames[len(frames)-2])
		if seq == endMarker || !give(Frame{Seq: events.EngineSeq(seq), Payload: frames[len(frames)-1]}) {
			return nil
		}
	}
}
