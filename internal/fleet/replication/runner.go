// Package replication runs a machine that keeps its state equal to that of the same machine on other nodes. A [Runner]
// holds the lock and the clock, steps the machine when it is due, and sends what it has to say. What messages mean is
// the machine's.
package replication

import (
	"context"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/hooks"
	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Machine keeps the same state on every node, with messages of type T. One goroutine at a time uses it.
type Machine[T any] interface {
	Begin(now time.Duration)      // other nodes are heard from now on
	Alone()                       // there is no other node: what there is is all
	Ready() bool                  // the state is that of the other nodes
	Peers() int                   // other nodes that were heard a moment ago
	Len() int                     // things that it keeps
	Wake() time.Duration          // when Step is due if nothing happens before
	Step(now time.Duration) []T   // goes on to now, and returns what is to be sent
	Finish(now time.Duration) []T // the last step: all that waits is due
}

// Hooks tell what happens, from goroutines of [Runner.Run]. Each may be nil. They must not block.
type Hooks struct {
	Ready  func(peers, things int) // the state is that of the other nodes
	Listen func(err error)         // other nodes cannot be heard; it is tried again
	Send   func(err error)         // a message was not sent; digests make up for it
}

// Config says how a machine reaches other nodes.
type Config[T any] struct {
	Conn     *jetstream.Conn
	Subjects []string                // of what other nodes send
	Receive  func(jetstream.Request) // takes one of their messages, from a goroutine for each subject
	Send     func(T) error
	Changed  func() // the state may have changed; called without the lock. nil: nobody is told
	Hooks    Hooks
}

// Runner runs a machine. Its methods may be called from any goroutine, and are harmless before Run and after it.
type Runner[M Machine[T], T any] struct {
	Mu      sync.RWMutex // of the machine
	Machine M

	cfg   Config[T]
	start time.Time
	ready chan struct{}
	due   chan struct{} // there is something to do sooner than Run knows
}

// New returns a runner of a machine whose time begins at 0.
func New[M Machine[T], T any](m M, cfg Config[T]) *Runner[M, T] {
	hooks.Fill(&cfg.Hooks)
	return &Runner[M, T]{Machine: m, cfg: cfg, start: time.Now(), ready: make(chan struct{}),
		due: make(chan struct{}, 1)}
}

// Now is the machine's time.
func (r *Runner[M, T]) Now() time.Duration { return time.Since(r.start) }

// Ready is closed when the state is that of the other nodes, or there is no other node.
func (r *Runner[M, T]) Ready() <-chan struct{} { return r.ready }

// Alone says that there is no other node, so that this one does not wait for what others have.
func (r *Runner[M, T]) Alone() {
	_ = r.Change(func(m M, _ time.Duration) error { m.Alone(); return nil })
}

// Change changes something, and wakes Run if there is something to send. It returns do's error.
func (r *Runner[M, T]) Change(do func(m M, now time.Duration) error) error {
	r.Mu.Lock()
	now := r.Now()
	before, ready := r.Machine.Wake(), r.Machine.Ready()
	err := do(r.Machine, now)
	sooner := r.Machine.Wake() < before || r.Machine.Ready() != ready
	r.Mu.Unlock()
	if sooner {
		loop.Wake(r.due)
	}
	r.changed()
	return err
}

func (r *Runner[M, T]) changed() {
	if r.cfg.Changed != nil {
		r.cfg.Changed()
	}
}

// Run hears other nodes and tells them, until ctx ends.
func (r *Runner[M, T]) Run(ctx context.Context) {
	r.Mu.Lock()
	r.Machine.Begin(r.Now())
	r.Mu.Unlock()
	var parts sync.WaitGroup
	for _, subject := range r.cfg.Subjects {
		parts.Go(func() { r.cfg.Conn.KeepSubscribed(ctx, subject, r.cfg.Receive, r.cfg.Hooks.Listen) })
	}
	parts.Go(func() { r.publish(ctx) })
	parts.Wait()
}

// publish sends what is due, and at the end what waits.
func (r *Runner[M, T]) publish(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	told := false
	for last := false; !last; {
		select {
		case <-timer.C:
		case <-r.due:
		case <-ctx.Done():
		}
		r.Mu.Lock()
		step := r.Machine.Step
		if last = ctx.Err() != nil; last {
			step = r.Machine.Finish
		}
		list := step(r.Now())
		wake, ready, peers, things := r.Machine.Wake(), r.Machine.Ready(), r.Machine.Peers(), r.Machine.Len()
		r.Mu.Unlock()
		r.changed()
		if ready && !told {
			told = true
			close(r.ready)
			r.cfg.Hooks.Ready(peers, things)
		}
		for _, message := range list {
			if err := r.cfg.Send(message); err != nil {
				r.cfg.Hooks.Send(err)
			}
		}
		timer.Reset(wake - r.Now())
	}
}
