package affinity

import (
	"context"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/hooks"
	"github.com/kvatlas/kvatlas/internal/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// ServiceConfig is a node's.
type ServiceConfig struct {
	Config    // without Origin
	Conn      *jetstream.Conn
	Namespace string
	Hooks     Hooks
}

// Hooks tell what happens, from goroutines of [Service.Run]. Each may be nil. They must not block.
type Hooks struct {
	Ready  func(peers, sessions int) // the bindings are those of the other nodes
	Listen func(err error)           // other nodes cannot be heard; it is tried again
	Send   func(err error)           // a message was not sent; sums make up for it
}

// Service is a node's bindings, what keeps them equal to those of the other nodes, and whose turn it is to initialise a
// session. Its methods may be called from any goroutine, and are harmless before Run and after it.
type Service struct {
	cfg   ServiceConfig
	start time.Time
	ready chan struct{}
	due   chan struct{} // there is something to do sooner than Run knows

	mu      sync.Mutex // of what follows
	machine *Machine
	turns   map[Key]chan struct{} // of sessions that are being initialised; closed when that has ended
}

// New returns a service without bindings.
func New(cfg ServiceConfig) *Service {
	hooks.Fill(&cfg.Hooks)
	cfg.Origin = rand.Uint64() | 1
	return &Service{cfg: cfg, start: time.Now(), ready: make(chan struct{}), due: make(chan struct{}, 1),
		machine: NewMachine(0, cfg.Config), turns: map[Key]chan struct{}{}}
}

func (s *Service) now() time.Duration { return time.Since(s.start) }

// Ready is closed when the bindings are those of the other nodes, or there is no other node.
func (s *Service) Ready() <-chan struct{} { return s.ready }

// Alone says that there is no other node, so that this one does not wait for what others have.
func (s *Service) Alone() { s.change(func(m *Machine, _ time.Duration) { m.Alone() }) }

// change changes something, and wakes Run if there is something to send.
func (s *Service) change(do func(m *Machine, now time.Duration)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	before, ready := s.machine.Wake(), s.machine.Ready()
	do(s.machine, now)
	if s.machine.Wake() < before || s.machine.Ready() != ready {
		loop.Wake(s.due)
	}
}

// Get returns the rank to which a session is bound.
func (s *Service) Get(key Key) (events.RankKey, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.machine.Get(s.now(), key)
}

// Begin returns the rank to which a session is bound. If there is none, it is the caller's turn to initialise it: the
// caller calls end, perhaps after [Service.Bind]. If it is another's turn Begin waits for the end of that, or until ctx
// ends, whose error it then returns.
func (s *Service) Begin(ctx context.Context, key Key) (rank events.RankKey, bound bool, end func(), err error) {
	for {
		s.mu.Lock()
		rank, bound = s.machine.Get(s.now(), key)
		turn := s.turns[key]
		if !bound && turn == nil {
			turn = make(chan struct{})
			s.turns[key] = turn
			s.mu.Unlock()
			return rank, false, func() {
				s.mu.Lock()
				delete(s.turns, key)
				s.mu.Unlock()
				close(turn)
			}, nil
		}
		s.mu.Unlock()
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
	s.change(func(m *Machine, now time.Duration) { how, err = m.Bind(now, key, rank, request, hard) })
	return how, err
}

// Status is what a service has and has done.
type Status struct {
	Ready           bool
	Peers, Sessions int
	Sum             uint64 // equal on all nodes, but for what is on its way
	Counts          Counts
}

// Status is for metrics and tests.
func (s *Service) Status() Status {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.machine
	return Status{m.Ready(), m.Peers(), m.Len(), m.sum(), m.Counts}
}

// Run keeps the bindings until ctx ends.
func (s *Service) Run(ctx context.Context) {
	s.mu.Lock()
	s.machine.begin(s.now())
	s.mu.Unlock()
	var parts sync.WaitGroup
	parts.Go(func() {
		s.cfg.Conn.KeepSubscribed(ctx, jetstream.SessionsSubject(s.cfg.Namespace), s.receive, s.cfg.Hooks.Listen)
	})
	parts.Go(func() { s.publish(ctx) })
	parts.Wait()
}

// receive takes a message of another node.
func (s *Service) receive(r jetstream.Request) {
	s.change(func(m *Machine, now time.Duration) { _ = m.Receive(now, r.Body) })
}

// publish sends what is due, and at the end what waits.
func (s *Service) publish(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	told := false
	for last := false; !last; {
		select {
		case <-timer.C:
		case <-s.due:
		case <-ctx.Done():
		}
		s.mu.Lock()
		now := s.now()
		list := s.machine.Step(now)
		if last = ctx.Err() != nil; last { // all that waits is due
			now += s.machine.usePeriod()
			list = append(list, s.machine.Step(now)...)
			list = append(list, s.machine.Step(now+batchDelay)...)
		}
		wake, ready, peers, sessions := s.machine.Wake(), s.machine.Ready(), s.machine.Peers(), s.machine.Len()
		s.mu.Unlock()
		if ready && !told {
			told = true
			close(s.ready)
			s.cfg.Hooks.Ready(peers, sessions)
		}
		for _, data := range list {
			if err := s.cfg.Conn.Send(jetstream.SessionsSubject(s.cfg.Namespace), "", data); err != nil {
				s.cfg.Hooks.Send(err)
			}
		}
		timer.Reset(wake - s.now())
	}
}
