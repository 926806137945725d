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
	// sweep is the interval of checks of waiting requests without a change of the bookings: reports of engines and
	// registrations of workers change too. A node requests reports from the shims only for 10 s after a choice.
	sweep = 5 * time.Second

	overlaps = 10 * time.Second // interval of new lookups for a waiting request
)

// waitingRoom holds requests while all their eligible ranks are busy: a queue for each model, and a goroutine that runs
// while requests wait. The goroutine chooses and books for waiting requests in turn. Their callers sleep.
type waitingRoom struct {
	cfg     *routing.Queue
	classes []queue.Class
	most    int
	start   time.Time
	changed chan struct{} // signal after a change; capacity 1
	waiting atomic.Int64  // number of waiting requests

	mu      sync.Mutex // guards the following fields
	models  map[string]*modelQueue
	running bool // the goroutine runs
}

type modelQueue struct {
	*queue.Queue
	waiters map[uint64]*waiter
}

// waiter is a waiting request. The room owns its scratch until done is closed.
type waiter struct {
	ctx  context.Context
	a    *asked
	x    *scratch
	c    chosen
	err  error
	done chan struct{}
}

// defaultQuantum is the quantum of a class without a quantum.
const defaultQuantum = 8192

func newWaitingRoom(cfg *routing.Queue) *waitingRoom {
	w := &waitingRoom{cfg: cfg, most: cfg.Most(), start: time.Now(), changed: make(chan struct{}, 1),
		models: map[string]*modelQueue{}}
	class := func(name, policy string, quantum *float64, l routing.QueueLimits) {
		c := queue.Class{Name: name, Policy: queue.Policy(policy), Quantum: defaultQuantum,
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

// group is equal for requests with the same eligible ranks.
func group(r *api.SelectRequest) uint64 {
	pin := routing.Target{}
	rank := -1
	if r.Pinned != nil {
		if pin = *r.Pinned; pin.Rank != nil {
			rank = int(*pin.Rank)
		}
	}
	return xxh3.HashString(fmt.Sprintf("%q %d %q %q %q %q %q %q %v %d", pin.Worker, rank, r.Workers, r.Excluded,
		r.Endpoints, r.Role, r.LoRA, r.RequiredTaints, r.Disaggregated, r.BlockSize))
}

// overtakes reports whether a request would overtake a waiting one. w.mu is held.
func (w *waitingRoom) overtakes(r *api.SelectRequest) bool {
	m := w.models[r.Model]
	return m != nil && m.Waits(group(r))
}

// pending returns the waiting requests of a model.
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

// Waiting returns the models with waiting requests, by name.
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

// Queued returns the number of waiting requests of a model, and the uncached tokens of the prompts.
func (s *Service) Queued(model string) (requests int, uncached uint64) {
	if s.room == nil {
		return 0, 0
	}
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	if m := s.room.models[model]; m != nil {
		return m.Len(), m.Uncached()
	}
	return 0, 0
}

// refuse returns the reason that a request does not wait. w.mu is held.
func (w *waitingRoom) refuse(model, class, reason string, limit, current float64, format string, args ...any) error {
	e := api.Errorf(api.CodeOverloaded, format, args...)
	e.Queue = &api.QueueRefusal{Reason: reason, Class: class, Limit: limit, Current: current}
	if m := w.models[model]; m != nil {
		e.Queue.PendingCount, e.Queue.PendingISLTokens = m.Len(), m.Raw()
	}
	return e
}

// enter adds a request to the queue, with its greatest number of cached tokens and its number of eligible ranks, or
// returns a refusal. w.mu is held.
func (w *waitingRoom) enter(s *Service, u *waiter, cached uint64, ranks int) (id uint64, class string, err error) {
	r, isl := u.a.r, u.x.request.ISL
	e := queue.Entry{Group: group(r), Strict: r.StrictPriority, Jump: r.PriorityJump,
		Arrival: time.Since(w.start).Seconds(), Raw: isl, Cached: min(cached, isl)}
	e.Class = w.cfg.Class(r.PolicyClass, isl-e.Cached)
	class = w.classes[e.Class].Name
	if int(w.waiting.Load()) >= w.most {
		return 0, class, w.refuse(r.Model, class, "full", float64(w.most), float64(w.waiting.Load()),
			"all eligible workers are busy, and %d requests are waiting already", w.most)
	}
	m := w.models[r.Model]
	if m == nil {
		m = &modelQueue{queue.New(w.classes), map[uint64]*waiter{}}
		w.models[r.Model] = m
	}
	id, err = m.Add(e, ranks)
	if refusal, is := errors.AsType[*queue.Refusal](err); is {
		refused := w.refuse(r.Model, class, refusal.Limit, refusal.Bound, refusal.Waits,
			"all eligible workers are busy, and %v", refusal)
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

// replyTime is the time in which the refusal of a waiting request should reach a caller with the same deadline. At most
// a tenth of the time left is used.
const replyTime = 50 * time.Millisecond

// admit chooses for a request and books it, or lets it wait until that is possible.
func (s *Service) admit(ctx context.Context, a *asked, x *scratch) (chosen, error) {
	w, u, of := s.room, &waiter{ctx: ctx, a: a, x: x, done: make(chan struct{})}, a.of
	id, class := s.bookOrEnqueue(u)
	if id == 0 {
		return u.c, u.err
	}
	again := time.NewTicker(overlaps)
	defer again.Stop()
	var late <-chan time.Time
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		timer := time.NewTimer(left - min(replyTime, left/10))
		defer timer.Stop()
		late = timer.C
	}
	for waits := true; waits; {
		select {
		case <-u.done:
			return u.c, u.err
		case <-again.C:
			s.refreshAnswer(u, of)
		case <-late:
			waits = false
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
	loop.Wake(w.changed) // the queue may have skipped other requests because of this one
	return u.c, w.refuse(a.r.Model, class, "deadline", 0, 0,
		"the deadline passed while the request waited for a worker that is not busy")
}

// bookOrEnqueue chooses for a request and books it. Requests follow one after the other, so that each choice includes
// the earlier bookings. If all ranks are busy, or the request would overtake a waiting one, it waits and has an id.
func (s *Service) bookOrEnqueue(u *waiter) (id uint64, class string) {
	w := s.room
	w.mu.Lock()
	defer w.mu.Unlock()
	u.c, u.err = s.decide(u.ctx, u.a, u.x)
	switch busy := u.c.busy; {
	case busy != nil:
		id, class, u.err = w.enter(s, u, busy.BestCached, busy.Eligible)
		return id, class
	case u.err == nil && w.overtakes(u.a.r):
		var refusal error
		if id, class, refusal = w.enter(s, u, u.c.out.CachedTokens, u.c.eligible); refusal == nil {
			return id, class
		} // no room in the queue: the request goes now
	}
	if u.err == nil {
		u.err = s.settle(u.ctx, u.a.r, &u.c)
	}
	return 0, ""
}

// refreshAnswer repeats the lookup for a waiting request. If the lookup fails, the earlier result stays.
func (s *Service) refreshAnswer(u *waiter, of *candidates) {
	y := &scratch{locals: u.x.locals}
	answer, err := s.match(u.ctx, u.a.r, of, y)
	if err != nil {
		return
	}
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	u.a.answer, u.x.room, u.x.request.Shared, u.x.looked = answer, y.room, answer.L3.Ranges, y.looked
}

// leave removes a waiting request. w.mu is held.
func (w *waitingRoom) leave(m *modelQueue, id uint64) {
	delete(m.waiters, id)
	w.waiting.Add(-1)
}

// run examines the queues after every change, until no request waits.
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

// examine sends requests that can go, and reports whether requests still wait.
func (w *waitingRoom) examine(s *Service) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	for model, m := range w.models {
		m.Examine(func(id uint64) bool {
			u := m.waiters[id]
			if !s.retry(u) {
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

// retry chooses for a waiting request, and reports whether there is a choice, or a refusal other than busy ranks.
func (s *Service) retry(u *waiter) bool {
	if u.ctx.Err() != nil {
		return false // about to leave
	}
	of, err := s.candidates(u.a.r.Model, u.a.of.blockSize)
	if err != nil {
		u.err = err
		return true
	}
	u.a.of = of
	s.guess(u.x, of) // the ranks may have changed
	u.c, u.err = s.decide(u.ctx, u.a, u.x)
	if u.c.busy != nil {
		return false
	}
	if u.err == nil {
		u.err = s.settle(u.ctx, u.a.r, &u.c)
	}
	return true
}
