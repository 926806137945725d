package node

import (
	"context"
	"sync"
	"sync/atomic"
)

// notifier lets queries wait until more of the log is applied. Notify costs the writer one atomic load while no query
// waits.
type notifier struct {
	waiting atomic.Int32
	mu      sync.Mutex
	rung    chan struct{} // closed at the next ring
}

// wait returns once reached reports true, which it asks again after each ring, or with ctx's error.
func (b *notifier) wait(ctx context.Context, reached func() bool) error {
	if reached() {
		return nil
	}
	b.waiting.Add(1)
	defer b.waiting.Add(-1)
	for {
		b.mu.Lock()
		if b.rung == nil {
			b.rung = make(chan struct{})
		}
		rung := b.rung
		b.mu.Unlock()
		if reached() { // it may have been so before the channel was there
			return nil
		}
		select {
		case <-rung:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (b *notifier) notify() {
	if b.waiting.Load() == 0 {
		return
	}
	b.mu.Lock()
	if b.rung != nil {
		close(b.rung)
		b.rung = nil
	}
	b.mu.Unlock()
}
