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

// ControlServer answers requests to a running shim: for its identity, and for a resync.
type ControlServer struct {
	shim     control.Shim
	stop     func()
	requests chan request

	incarnation atomic.Uint64                   // of the machine after its last step
	waiting     atomic.Pointer[control.Waiting] // nil: the log accepts events
	loads       atomic.Int64                    // the last request of a node for the engine's load, in nanoseconds

	hearing sync.Mutex // guards heard
	heard   engineHeard

	mu sync.Mutex // serializes resyncs
}

// engineHeard is the state of the connection to the engine.
type engineHeard struct {
	endpoint     string
	replay       string
	counts       Counts
	begun        bool
	skips        events.SkipCounts
	replayFailed error
}

// Claim opens the control server of a rank. If another live shim has the rank, the error wraps ErrFenced and names the
// shim. Two concurrent calls may both succeed; then the log separates the shims at publication.
func Claim(ctx context.Context, ns *jetstream.Namespace, key events.RankKey, replay bool) (*ControlServer, error) {
	other, err := control.ShimOf(ctx, ns, key)
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
	s := &ControlServer{requests: make(chan request)}
	s.shim = control.Shim{Instance: key.Instance, Rank: key.Rank, Host: host, PID: os.Getpid(), Since: time.Now(),
		Replay: replay}
	s.stop, err = control.Serve(ns, key, s)
	return s, err
}

// Close gives the rank up.
func (s *ControlServer) Close() { s.stop() }

// WantLoads records that a node needs the engine's load.
func (s *ControlServer) WantLoads() { s.loads.Store(time.Now().UnixNano()) }

// LoadsWanted reports whether a node needs the engine's load. It is false on nil.
func (s *ControlServer) LoadsWanted() bool {
	return s != nil && time.Now().UnixNano()-s.loads.Load() < int64(control.LoadsWanted)
}

// Self returns the identity of the shim.
func (s *ControlServer) Self() control.Shim {
	shim := s.shim
	shim.Incarnation = events.Incarnation(s.incarnation.Load())
	shim.Waiting = s.waiting.Load()
	s.hearing.Lock()
	defer s.hearing.Unlock()
	if shim.Endpoint, shim.ReplayEndpoint = s.heard.endpoint, s.heard.replay; !s.heard.begun {
		return shim
	}
	c := &s.heard.counts
	shim.Heard = &control.Heard{Messages: c.Taken, Unreadable: c.Undecodable, Gaps: c.Gaps, JoinedLate: c.JoinedLate}
	for skip, n := range s.heard.skips {
		if n > 0 && events.Skip(skip).Loses() {
			if shim.Heard.Skipped == nil {
				shim.Heard.Skipped = map[string]uint64{}
			}
			shim.Heard.Skipped[events.Skip(skip).String()] = n
		}
	}
	if s.heard.replayFailed != nil {
		shim.Heard.ReplayFailed = s.heard.replayFailed.Error()
	}
	return shim
}

// update changes the state of the engine's connection. It does nothing on nil.
func (s *ControlServer) update(change func(h *engineHeard)) {
	if s != nil {
		s.hearing.Lock()
		defer s.hearing.Unlock()
		change(&s.heard)
	}
}

// begin sets the endpoints of the engine.
func (s *ControlServer) begin(cfg *Config) {
	if cfg.Feed == nil && cfg.Messages == nil {
		s.update(func(h *engineHeard) { h.endpoint, h.replay = cfg.Engine, cfg.Replay })
	}
}

// stepped sets the progress of the machine.
func (s *ControlServer) stepped(incarnation events.Incarnation, c Counts) {
	s.update(func(h *engineHeard) {
		s.incarnation.Store(uint64(incarnation))
		h.counts, h.begun = c, true
	})
}

// replayed sets the result of the last replay request.
func (s *ControlServer) replayed(err error) {
	s.update(func(h *engineHeard) { h.replayFailed = err })
}

// Wait sets the reason for which the log accepts no events; nil means that the log accepts events. It does nothing on
// nil.
func (s *ControlServer) Wait(w *control.Waiting) {
	if s != nil {
		s.waiting.Store(w)
	}
}

var errNotStarted = errors.New("the shim has not read the log yet")

// Resync begins a new incarnation of the machine if the request makes a new incarnation necessary, once for every id.
func (s *ControlServer) Resync(ctx context.Context, a control.ResyncRequest) (control.Shim, error) {
	if !s.mu.TryLock() { // another resync is running; a wait would block requests for the identity
		return s.Self(), errNotStarted
	}
	defer s.mu.Unlock()
	shim := s.Self()
	begun := make(chan events.Incarnation, 1)
	select {
	case s.requests <- request{a, begun}:
	case <-ctx.Done():
		return shim, errNotStarted
	}
	select {
	case shim.Incarnation = <-begun:
		return shim, nil
	case <-ctx.Done(): // the log is not readable; the client retries
		return shim, errNotStarted
	}
}
