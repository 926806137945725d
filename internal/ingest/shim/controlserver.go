package shim

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ControlServer answers what others ask a running shim: who it is, and to say again what its engine holds.
type ControlServer struct {
	who      control.Shim
	stop     func()
	requests chan request

	incarnation atomic.Uint64                   // of the machine, as of its last step
	waiting     atomic.Pointer[control.Waiting] // for the log; nil: it takes events

	hearing sync.Mutex // guards heard
	heard   engineHeard

	mu    sync.Mutex // one resync at a time
	done  map[string]events.Incarnation
	order []string // the keys of done, oldest first
}

// engineHeard is how it stands with the engine.
type engineHeard struct {
	endpoint     string
	replay       string
	counts       Counts
	begun        bool
	skips        events.SkipCounts
	replayFailed error
}

// request asks for a new incarnation, on its way to the loop that owns the machine.
type request struct {
	lost  bool // as in control.ResyncRequest
	begun chan<- events.Incarnation
}

// knownResyncs is how many resyncs a server knows again.
const knownResyncs = 64

// Claim opens the server of a rank, unless another shim that lives has one: then the error is ErrFenced and says who.
// Two that claim at the same moment may both get one; the log tells them apart when both publish.
func Claim(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, replay bool) (*ControlServer, error) {
	other, err := control.Who(ctx, ns, key)
	if err != nil {
		return nil, err
	}
	if other != nil {
		return nil, fmt.Errorf("%w: %s is served by %v", ErrFenced, key, other)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	s := &ControlServer{requests: make(chan request), done: map[string]events.Incarnation{}}
	s.who = control.Shim{Instance: key.Instance, Rank: key.Rank, Host: host, PID: os.Getpid(), Since: time.Now(),
		Replay: replay}
	s.stop, err = control.Serve(ns, key, s)
	return s, err
}

// Close gives the rank up.
func (s *ControlServer) Close() { s.stop() }

// Who says whose server this is.
func (s *ControlServer) Who() control.Shim {
	who := s.who
	who.Incarnation = events.Incarnation(s.incarnation.Load())
	who.Waiting = s.waiting.Load()
	s.hearing.Lock()
	defer s.hearing.Unlock()
	if who.Endpoint, who.ReplayEndpoint = s.heard.endpoint, s.heard.replay; !s.heard.begun {
		return who
	}
	c := &s.heard.counts
	who.Heard = &control.Heard{Messages: c.Taken, Unreadable: c.Undecodable, Gaps: c.Gaps, JoinedLate: c.JoinedLate}
	for skip, n := range s.heard.skips {
		if n > 0 && events.Skip(skip).Loses() {
			if who.Heard.Skipped == nil {
				who.Heard.Skipped = map[string]uint64{}
			}
			who.Heard.Skipped[events.Skip(skip).String()] = n
		}
	}
	if s.heard.replayFailed != nil {
		who.Heard.ReplayFailed = s.heard.replayFailed.Error()
	}
	return who
}

// hear changes how it stands with the engine. A nil server says nothing.
func (s *ControlServer) hear(change func(h *engineHeard)) {
	if s != nil {
		s.hearing.Lock()
		defer s.hearing.Unlock()
		change(&s.heard)
	}
}

// begin has the server say where the engine is heard.
func (s *ControlServer) begin(cfg *Config) {
	if cfg.Feed == nil && cfg.Messages == nil {
		s.hear(func(h *engineHeard) { h.endpoint, h.replay = cfg.Engine, cfg.Replay })
	}
}

// stepped has the server say how far the machine is.
func (s *ControlServer) stepped(incarnation events.Incarnation, c Counts) {
	s.hear(func(h *engineHeard) {
		s.incarnation.Store(uint64(incarnation))
		h.counts, h.begun = c, true
	})
}

// replayed has the server say how the last question to the replay endpoint ended.
func (s *ControlServer) replayed(err error) {
	s.hear(func(h *engineHeard) { h.replayFailed = err })
}

// Wait has the server say that the log takes nothing, and why; nil says that it does. A nil server says nothing.
func (s *ControlServer) Wait(w *control.Waiting) {
	if s != nil {
		s.waiting.Store(w)
	}
}

var errNotStarted = errors.New("the shim has not read the log yet")

// Resync has the machine begin a new incarnation, once for each id, if what is asked makes it necessary.
func (s *ControlServer) Resync(ctx context.Context, a control.ResyncRequest) (control.Shim, error) {
	if !s.mu.TryLock() { // another is in hand. Who waited for it would keep this shim from saying who it is
		return s.Who(), errNotStarted
	}
	defer s.mu.Unlock()
	who := s.Who()
	if incarnation, ok := s.done[a.ID]; ok {
		who.Incarnation = incarnation
		return who, nil
	}
	if a.Of != 0 && who.Incarnation > a.Of {
		return who, nil
	}
	begun := make(chan events.Incarnation, 1)
	select {
	case s.requests <- request{a.Lost, begun}:
	case <-ctx.Done():
		return who, errNotStarted
	}
	select {
	case who.Incarnation = <-begun:
	case <-ctx.Done(): // the log cannot be looked into; whoever asks will ask again
		return who, errNotStarted
	}
	s.done[a.ID] = who.Incarnation
	if s.order = append(s.order, a.ID); len(s.order) > knownResyncs {
		delete(s.done, s.order[0])
		s.order = s.order[1:]
	}
	return who, nil
}
