package jetstream

import (
	"context"
	"sync"
	"time"
)

// deadline is a context with a deadline that sets a timer only when a goroutine waits for it, because most requests are
// answered earlier.
type deadline struct {
	context.Context // the parent
	at              time.Time

	mu    sync.Mutex
	timed context.Context // with the timer, after the first wait
	stop  context.CancelFunc
	ended bool
}

func withDeadline(parent context.Context, at time.Time) *deadline {
	return &deadline{Context: parent, at: at}
}

func (d *deadline) Deadline() (time.Time, bool) { return d.at, true }

func (d *deadline) Done() <-chan struct{} { return d.waited().Done() }

// waited returns the context with the timer.
func (d *deadline) waited() context.Context {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timed == nil {
		d.timed, d.stop = context.WithDeadline(d.Context, d.at)
		if d.ended {
			d.stop()
		}
	}
	return d.timed
}

func (d *deadline) Err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.timed != nil:
		return d.timed.Err()
	case d.Context.Err() != nil:
		return d.Context.Err()
	case !time.Now().Before(d.at):
		return context.DeadlineExceeded
	case d.ended:
		return context.Canceled
	}
	return nil
}

// Value lets package context find the context with the timer, so that derived contexts need no goroutine.
func (d *deadline) Value(key any) any {
	d.mu.Lock()
	timed := d.timed
	d.mu.Unlock()
	if timed != nil {
		return timed.Value(key)
	}
	return d.Context.Value(key)
}

// end cancels the context after the work.
func (d *deadline) end() {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.ended = true
	if d.stop != nil {
		d.stop()
	}
}
