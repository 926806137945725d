package selection

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/choose/queue"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

const (
	sweep    = 60 * time.Second // when requests that wait are looked at although nothing has changed
	overlaps = 10 * time.Second // when it is looked up anew what workers hold of the prompt of one that waits
)

// waitingRoom is where requests wait while all ranks that they may go to are busy: a queue for each model, and a
// goroutine that lives while somebody waits. It chooses and books for those whose turn it is; whoever asked sleeps.
type waitingRoom struct {
	cfg     *routing.Queue
	classes []queue.Class
	most    int
	start   time.Time
	changed chan struct{} // something has; of capacity one
	waiting atomic.Int64  // how many do

	mu      sync.Mutex // of what follows
	models  map[string]*modelQueue
	running bool // the goroutine
}

type modelQueue struct {
	*queue.Queue
	waiters map[uint64]*waiter
}

// waiter is a request that waits. Its scratch is the room's until done is closed.
type waiter struct {
	ctx  context.Context
	a    *asked
	x    *scratch
	c    chosen
	err  error
	done chan struct{}
}

func newWaitingRoom(cfg *routing.Queue) *waitingRoom {
	w := &waitingRoom{cfg: cfg, most: cfg.Most(), start: time.Now(), changed: make(chan struct{}, 1),
		models: map[string]*modelQueue{}}
	class := func(name, policy string, quantum *float64, l routing.QueueLimits) {
		c := queue.Class{Name: name, Policy: queue.Policy(policy), Quantum: routing.DefaultQuantum,
			Limits: queue.Limits{Requests: l.MaxRequests, RawTokens: l.MaxRawTokens, CachedTokens: l.MaxCachedTokens}}
		if policy == "" {
			c.Policy = queue.Policy(cfg.Policy)
		}
		if quantum != nil {
			c.Quantum = *quantum
		}
		w.classes = append(w.classes, c)
	}
	for i := range cfg.Classes {
		c := &cfg.Classes[i]
		class(c.Name, c.Policy, c.Quantum, c.QueueLimits)
	}
	class("default", "", nil, cfg.QueueLimits)
	return w
}

// group is equal for requests that may go to the same ranks.
func group(r *api.SelectRequest) uint64 {
	pin := routing.Target{}
	rank := -1
	if r.Pinned != nil {
		if pin = *r.Pinned; pin.Rank != nil {
			rank = int(*pin.Rank)
		}
	}
	return xxh3.HashString(fmt.Sprintf("%q %d %q %q %q %q %q %v %d", pin.Worker, rank, r.Workers, r.Endpoints, r.Role,
		r.LoRA, r.RequiredTaints, r.Disaggregated, r.BlockSize))
}

// overtakes reports whether a request that might go would overtake one that waits. w.mu is held.
func (w *waitingRoom) overtakes(r *api.SelectRequest) bool {
	m := w.models[r.Model]
	return m != nil && m.Waits(group(r))
}

// pending is what waits of a model.
func (w *waitingRoom) pending(model string) (count int, tokens uint64) {
	if w == nil {
		return 0, 0
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if m := w.models[model]; m != nil {
		return m.Len(), m.Raw()
	}
	return 0, 0
}

// Waiting lists the models for which requests wait, by name.
func (s *Service) Waiting() (list []api.WaitingStatus) {
	if s.room == nil {
		return nil
	}
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	for name, m := range s.room.models {
		list = append(list, api.WaitingStatus{Model: name, Requests: m.Len(), Tokens: m.Raw()})
	}
	slices.SortFunc(list, func(a, b api.WaitingStatus) int { return strings.Compare(a.Model, b.Model) })
	return list
}

// refuse is why a request does not wait. w.mu is held.
func (w *waitingRoom) refuse(model, class, reason string, limit, current float64, format string, args ...any) error {
	e := api.Errorf(api.CodeOverloaded, format, args...)
	e.Queue = &api.QueueRefusal{Reason: reason, Class: class, Limit: limit, Current: current}
	if m := w.models[model]; m != nil {
		e.Queue.PendingCount, e.Queue.PendingISLTokens = m.Len(), m.Raw()
	}
	return e
}

// enter lets a request wait, that has so many tokens cached somewhere and may go to so many ranks, or says why it may
// not. w.mu is held.
func (w *waitingRoom) enter(s *Service, u *waiter, cached uint64, ranks int) (id uint64, class string, err error) {
	r, isl := u.a.r, u.x.request.ISL
	e := queue.Entry{Group: group(r), Strict: r.StrictPriority, Jump: r.PriorityJump,
		Arrival: time.Since(w.start).Seconds(), Raw: isl, Cached: min(cached, isl)}
	e.Class = w.cfg.Class(r.PolicyClass, isl-e.Cached)
	class = w.classes[e.Class].Name
	if int(w.waiting.Load()) >= w.most {
		return 0, class, w.refuse(r.Model, class, "full", float64(w.most), float64(w.waiting.Load()),
			"all workers that may be chosen are busy, and %d requests wait already", w.most)
	}
	m := w.models[r.Model]
	if m == nil {
		m = &modelQueue{queue.New(w.classes), map[uint64]*waiter{}}
		w.models[r.Model] = m
	}
	id, err = m.Add(e, ranks)
	if refusal, is := errors.AsType[*queue.Refusal](err); is {
		refused := w.refuse(r.Model, class, refusal.Limit, refusal.Bound, refusal.Waits,
			"all workers that may be chosen are busy, and %v", refusal)
		return 0, class, refused
	}
	m.waiters[id] = u
	w.waiting.Add(1)
	if !w.running {
		w.running = true
		go w.run(s)
	}
	loop.Wake(w.changed)
	return id, class, nil
}

// admit chooses for a request and books it, or lets it wait until that can be done.
func (s *Service) admit(ctx context.Context, a *asked, x *scratch) (chosen, error) {
	w, u, of := s.room, &waiter{ctx: ctx, a: a, x: x, done: make(chan struct{})}, a.of
	id, class := s.goOrWait(u)
	if id == 0 {
		return u.c, u.err
	}
	again := time.NewTicker(overlaps)
	defer again.Stop()
	for waits := true; waits; {
		select {
		case <-u.done:
			return u.c, u.err
		case <-again.C:
			s.lookAgain(u, of)
		case <-ctx.Done():
			waits = false
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-u.done: // at the last moment
		return u.c, u.err
	default:
	}
	m := w.models[a.r.Model]
	m.Remove(id)
	w.leave(m, id)
	loop.Wake(w.changed) // others may have been passed over with it
	return u.c, w.refuse(a.r.Model, class, "deadline", 0, 0,
		"the deadline passed while the request waited for a worker that is not busy")
}

// goOrWait chooses for a request and books it, one request after the other, so that each finds those before it booked.
// If all ranks are busy, or if it would overtake one that waits, it waits: it has an id then.
func (s *Service) goOrWait(u *waiter) (id uint64, class string) {
	w, x := s.room, u.x
	w.mu.Lock()
	defer w.mu.Unlock()
	u.c, u.err = s.decide(u.a, x)
	switch {
	case u.err != nil && x.busy != nil:
		id, class, u.err = w.enter(s, u, x.busy.BestCached, x.busy.Eligible)
		return id, class
	case u.err == nil && w.overtakes(u.a.r):
		var refusal error
		if id, class, refusal = w.enter(s, u, u.c.out.CachedTokens, u.c.eligible); refusal == nil {
			return id, class
		} // else it goes where there is room
	}
	if u.err == nil {
		u.err = s.settle(u.ctx, u.a.r, &u.c)
	}
	return 0, ""
}

// lookAgain looks up what workers hold by now of the prompt of a request that waits. If that fails what was found
// before holds on.
func (s *Service) lookAgain(u *waiter, of *candidates) {
	y := &scratch{locals: u.x.locals}
	answer, err := s.match(u.ctx, u.a.r, of, y)
	if err != nil {
		return
	}
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	u.a.answer, u.x.room, u.x.request.Shared = answer, y.room, answer.L3.Ranges
}

// leave notes that a request waits no more. w.mu is held.
func (w *waitingRoom) leave(m *modelQueue, id uint64) {
	delete(m.waiters, id)
	w.waiting.Add(-1)
}

// run looks who can go whenever something has changed, until nobody waits.
func (w *waitingRoom) run(s *Service) {
	timer := time.NewTicker(sweep)
	defer timer.Stop()
	for {
		select {
		case <-w.changed:
		case <-timer.C:
		}
		if !w.examine(s) {
			return
		}
	}
}

// examine looks who can go, and reports whether somebody waits still.
func (w *waitingRoom) examine(s *Service) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for model, m := range w.models {
		m.Examine(func(id uint64) bool {
			u := m.waiters[id]
			if !s.try(u) {
				return false
			}
			w.leave(m, id)
			close(u.done)
			return true
		})
		if m.Len() == 0 {
			delete(w.models, model)
		}
	}
	w.running = len(w.models) > 0
	return w.running
}

// try chooses for a request that waits, and reports whether there is a choice, or a reason why there is none.
func (s *Service) try(u *waiter) bool {
	if u.ctx.Err() != nil {
		return false // it is about to leave
	}
	of, err := s.candidates(u.a.r.Model, u.a.of.blockSize)
	if err != nil {
		u.err = err
		return true
	}
	u.a.of = of
	s.guess(u.x, of) // its ranks may be others
	u.c, u.err = s.decide(u.a, u.x)
	if u.err != nil && u.x.busy != nil {
		return false
	}
	if u.err == nil {
		u.err = s.settle(u.ctx, u.a.r, &u.c)
	}
	return true
}
