package affinity

import (
	"context"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ServiceConfig configures a [Service].
type ServiceConfig struct {
	Config    // without Origin
	Conn      *jetstream.Conn
	Namespace string
	Log       *slog.Logger // nil: nothing is logged
}

// Service keeps a node's bindings equal to the bindings of other nodes, and serializes the first requests of a session.
type Service struct {
	*shared.Runner[*Machine]
	turns map[Key]chan struct{} // sessions in initialisation; closed at its end. Mu guards it
}

// New returns a service without bindings.
func New(cfg ServiceConfig) *Service {
	cfg.Origin = rand.Uint64() | 1
	return &Service{turns: map[Key]chan struct{}{}, Runner: shared.NewRunner(NewMachine(0, cfg.Config),
		shared.ShellConfig{Conn: cfg.Conn, Namespace: cfg.Namespace, Name: "sessions", Log: cfg.Log, Entries: "sessions",
			Count: "sessions"})}
}

// Get returns the rank of a session.
func (s *Service) Get(key Key) (events.RankKey, bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Machine.Get(s.Now(), key)
}

// Begin returns the rank of a session. A rank that is not alive does not count. If the session has no rank, the caller
// initialises it, and must call end, after [Service.Bind] or without it. If another request initialises the session,
// Begin waits for its end, or returns the error of ctx. Begin holds a lock during alive.
func (s *Service) Begin(ctx context.Context, key Key, alive func(events.RankKey) bool) (rank events.RankKey, bound bool,
	end func(), err error) {
	for {
		s.Mu.Lock()
		rank, bound = s.Machine.Get(s.Now(), key)
		bound = bound && alive(rank)
		turn := s.turns[key]
		if !bound && turn == nil {
			turn = make(chan struct{})
			s.turns[key] = turn
			s.Mu.Unlock()
			return rank, false, func() {
				s.Mu.Lock()
				delete(s.turns, key)
				s.Mu.Unlock()
				close(turn)
			}, nil
		}
		s.Mu.Unlock()
		if bound {
			return rank, true, func() {}, nil
		}
		select {
		case <-turn:
		case <-ctx.Done():
			return rank, false, nil, ctx.Err()
		}
	}
}

// Bind is [Machine.Bind]. It holds a lock during mayLeave.
func (s *Service) Bind(key Key, rank events.RankKey, request string,
	mayLeave func(from events.RankKey) bool) (how How, from events.RankKey, err error) {
	err = s.Change(func(m *Machine, now time.Duration) (err error) {
		how, from, err = m.Bind(now, key, rank, request, mayLeave)
		return err
	})
	return how, from, err
}

// Follow is [Machine.Follow].
func (s *Service) Follow(model string, seq []events.SeqHash) (events.RankKey, bool) {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	return s.Machine.Follow(s.Now(), model, seq)
}

// BindPrompt is [Machine.BindPrompt].
func (s *Service) BindPrompt(
	model string, seq []events.SeqHash, rank events.RankKey, request string,
) (how How, from events.RankKey, err error) {
	err = s.Change(func(m *Machine, now time.Duration) (err error) {
		how, from, err = m.BindPrompt(now, model, seq, rank, request)
		return err
	})
	return how, from, err
}

// Bound is [Machine.Bound].
func (s *Service) Bound(pick func(Key) bool) []Bound {
	s.Mu.RLock()
	defer s.Mu.RUnlock()
	return s.Machine.Bound(s.Now(), pick)
}

// Unbind is [Machine.Unbind] for several sessions.
func (s *Service) Unbind(keys ...Key) (ended []Bound) {
	_ = s.Change(func(m *Machine, now time.Duration) error {
		for _, key := range keys {
			if b, bound := m.Unbind(now, key); bound {
				ended = append(ended, b)
			}
		}
		return nil
	})
	return ended
}

// Status is the state of a service and its counts.
type Status struct {
	Ready           bool
	Peers, Sessions int
	Prompts         int    // Sessions without an id
	Sum             uint64 // equal on all nodes, except for changes in flight
	Counts          Counts
}

// Status returns the state for metrics and tests.
func (s *Service) Status() Status {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	m := s.Machine
	return Status{m.Ready(), m.Peers(), m.Len(), m.prompts, m.total, m.Counts}
}
