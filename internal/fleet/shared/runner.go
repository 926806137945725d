package shared

import (
	"cmp"
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Stepped is a [Machine], or a type with an embedded Machine.
type Stepped interface {
	Begin(now time.Duration)
	Origin() uint64
	Alone()
	Ready() bool
	Peers() int
	Len() int // entries
	Wake() time.Duration
	Step(now time.Duration) []Message
	Finish(now time.Duration) []Message
	Prepare(data []byte) []func(now time.Duration)
}

// ShellConfig configures a [Runner].
type ShellConfig struct {
	Conn      *jetstream.Conn
	Namespace string
	Name      string       // of the table, in subjects; the same on all nodes
	Changed   func()       // called without the lock when entries may have changed; nil: not called
	Log       *slog.Logger // nil: nothing is logged
	Entries   string       // names the entries in log lines
	Count     string       // the attribute that has the number of entries in log lines
}

// Runner runs a machine: lock, clock, and messages over NATS. The methods may be called from any goroutine, also before
// and after Run.
type Runner[M Stepped] struct {
	Mu      sync.RWMutex // of the machine
	Machine M

	cfg   ShellConfig
	start time.Time
	ready chan struct{}
	due   chan struct{} // Step is due earlier than the publisher expects
}

// NewRunner returns a runner of a machine with a time from 0 on.
func NewRunner[M Stepped](m M, cfg ShellConfig) *Runner[M] {
	cfg.Log = cmp.Or(cfg.Log, slog.New(slog.DiscardHandler))
	return &Runner[M]{Machine: m, cfg: cfg, start: time.Now(), ready: make(chan struct{}), due: make(chan struct{}, 1)}
}

// Now returns the machine's time.
func (r *Runner[M]) Now() time.Duration { return time.Since(r.start) }

// Ready is closed when the table has the entries of all nodes, or there is no other node.
func (r *Runner[M]) Ready() <-chan struct{} { return r.ready }

// Alone marks that no other node exists, so that this node does not wait for entries.
func (r *Runner[M]) Alone() {
	_ = r.Change(func(m M, _ time.Duration) error { m.Alone(); return nil })
}

// Change changes the machine, and wakes the publisher if there is a message to send. It returns do's error.
func (r *Runner[M]) Change(do func(m M, now time.Duration) error) error {
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

func (r *Runner[M]) changed() {
	if r.cfg.Changed != nil {
		r.cfg.Changed()
	}
}

// Run exchanges messages with other nodes until ctx ends.
func (r *Runner[M]) Run(ctx context.Context) {
	r.Mu.Lock()
	r.Machine.Begin(r.Now())
	r.Mu.Unlock()
	var parts sync.WaitGroup
	subjects := []string{jetstream.Names(r.cfg.Namespace).Shared(r.cfg.Name, 0),
		jetstream.Names(r.cfg.Namespace).Shared(r.cfg.Name, r.Machine.Origin())}
	parts.Go(func() { r.cfg.Conn.KeepSubscribedInOrder(ctx, subjects, r.receive, r.listenFailed) })
	parts.Go(func() { r.publish(ctx) })
	parts.Wait()
}

func (r *Runner[M]) listenFailed(err error) {
	r.cfg.Log.Warn("cannot receive other nodes' "+r.cfg.Entries+"; the subscription is retried", "error", err,
		"what_to_do", "grant the permission to this user: indexer auth create prints the permissions of all users")
}

func (r *Runner[M]) receive(m jetstream.Request) {
	for _, step := range r.Machine.Prepare(m.Body) {
		_ = r.Change(func(_ M, now time.Duration) error { step(now); return nil })
	}
}

// publish sends due messages, and all waiting messages at the end.
func (r *Runner[M]) publish(ctx context.Context) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	announced := false
	var warned time.Time
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
		wake, ready, peers, entries := r.Machine.Wake(), r.Machine.Ready(), r.Machine.Peers(), r.Machine.Len()
		r.Mu.Unlock()
		r.changed()
		if ready && !announced {
			announced = true
			close(r.ready)
			r.cfg.Log.Debug("received all "+r.cfg.Entries, "nodes", peers, r.cfg.Count, entries)
		}
		for _, message := range list {
			subject := jetstream.Names(r.cfg.Namespace).Shared(r.cfg.Name, message.To)
			// digests repeat what was not sent
			if err := r.cfg.Conn.Send(subject, "", message.Data); err != nil && time.Since(warned) > time.Minute {
				warned = time.Now()
				r.cfg.Log.Warn("cannot send changes of "+r.cfg.Entries+" to other nodes", "error", err, "what_to_do",
					"check that NATS answers; the nodes catch up after that")
			}
		}
		timer.Reset(wake - r.Now())
	}
}
