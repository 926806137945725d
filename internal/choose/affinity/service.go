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

// ServiceConfig is a node's.
type ServiceConfig struct {
	Config    // without Origin
	Conn      *jetstream.Conn
	Namespace string
	Log       *slog.Logger // nil: nothing is logged
}

// Service is a node's bindings, what keeps them equal to those of the other nodes, and whose turn it is to initialise a
// session.
type Service struct {
	*shared.Runner[*Machine]
	turns map[Key]chan struct{} // of sessions that are being initialised; closed when that has ended. Mu guards it
}

// New returns a service without bindings.
func New(cfg ServiceConfig) *Service {
	cfg.Origin = rand.Uint64() | 1
	return &Service{turns: map[Key]chan struct{}{}, Runner: shared.NewRunner(NewMachine(0, cfg.Config),
		shared.ShellConfig{Conn: cfg.Conn, Namespace: cfg.Namespace, Name: "sessions", Log: cfg.Log, Entries: "sessions",
			Count: "sessions"})}
}

// Get returns the rank to which a session is bound.
func (s *Service) Get(key Key) (events.RankKey, bool) {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	return s.Machine.Get(s.Now(), key)
}

// Begin returns the rank to which a session is bound. If there is none, it is the caller's turn to initialise it: the
// caller calls end, perhaps after [Service.Bind]. If it is another's turn Begin waits for the end of that, or until ctx
// ends, whose error it then returns.
func (s *Service) Begin(ctx context.Context, key Key) (rank events.RankKey, bound bool, end func(), err error) {
	for {
		s.Mu.Lock()
		rank, bound = s.Machine.Get(s.Now(), key)
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

// Bind is [Machine.Bind].
func (s *Service) Bind(key Key, rank events.RankKey, request string, hard bool) (how How, err error) {
	err = s.Change(func(m *Machine, now time.Duration) (err error) {
		how, err = m.Bind(now, key, rank, request, hard)
		return err
	})
	return how, err
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

// Status is what a service has and has done.
type Status struct {
	Ready           bool
	Peers, Sessions int
	Prompts         int    // of Sessions: ends of prompts without an id
	Sum             uint64 // equal on all nodes, but for what is on its way
	Counts          Counts
}

// Status is for metrics and tests.
func (s *Service) Status() Status {
	s.Mu.Lock()
	defer s.Mu.Unlock()
	m := s.Machine
	return Status{m.Ready(), m.Peers(), m.Len(), m.prompts, m.total, m.Counts}
}
