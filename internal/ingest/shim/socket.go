package shim

import (
	"encoding/binary"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// sockets are the bounds of the engine's live socket.
func (cfg *Config) sockets() zmtp.Config {
	s := cfg.Sockets
	if s.Heartbeat == 0 {
		s.Heartbeat, s.HeartbeatTimeout = cfg.SilentAfter/4, cfg.SilentAfter
	}
	if s.BackoffMin == 0 && s.BackoffMax == 0 {
		s.BackoffMin, s.BackoffMax, s.BackoffReachable = cfg.RetryMin, cfg.RetryMax, cfg.RetryReachable
	}
	return s
}

// processMessage processes a message of the engine's live socket.
func (r *runner) processMessage(msg zmtp.Message) {
	switch msg.Kind {
	case zmtp.Opened:
		r.speakers.opened(msg.Peer)
		r.cfg.Observer.Connected(r.cfg.Engine)
		r.watching.presence.opened(time.Now())
		r.watching.expect(time.Now(), r.cfg.QuietAfter)
		r.watching.stopKnocking() // a request follows at once
		r.machine.Connected()
		r.check.Reset(time.Second)
		r.heardAt = time.Time{}
	case zmtp.Closed:
		r.cfg.Observer.Disconnected(r.cfg.Engine, msg.Err)
		r.watching.presence.closed(msg.Err, time.Now())
		if r.speakers.closed(msg.Peer) {
			r.replaceEngine(time.Now())
		}
		r.reportSpeakers()
	case zmtp.Data:
		if len(msg.Frames) != 3 || len(msg.Frames[1]) != 8 {
			r.cfg.Observer.Stray(len(msg.Frames))
			return
		}
		now := time.Now()
		switch r.speakers.message(msg.Peer, msg.Frames[0], now) {
		case skip:
			r.machine.Foreign()
			r.reportSpeakers()
			return
		case replace:
			r.replaceEngine(now)
			r.reportSpeakers()
		}
		r.heardAt = now
		r.revive(now)
		r.watching.presence.received(now)
		before := r.machine.Counts().Restarts
		seq := events.EngineSeq(binary.BigEndian.Uint64(msg.Frames[1]))
		r.machine.Live(Frame{Seq: seq, Payload: msg.Frames[2]}, millis(now))
		if r.machine.Counts().Restarts > before && r.speakers.restarted(now) {
			r.replaceEngine(now)
			r.reportSpeakers()
		}
	}
}

// replaceEngine begins a new incarnation: another engine is followed from now on.
func (r *runner) replaceEngine(now time.Time) {
	r.retry.Stop()
	r.replay.end()
	r.snapshot.end()
	r.lesson.end()
	r.machine.Replaced(millis(now))
}

// reportSpeakers reports whether several engines speak.
func (r *runner) reportSpeakers() {
	now := r.speakers.several()
	if now == r.several {
		return
	}
	if before := r.several; (before == "") != (now == "") {
		r.machine.TrustReplays(now == "", millis(time.Now()))
	}
	r.several = now
	r.cfg.Observer.Several(now)
}
