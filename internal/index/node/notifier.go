package node

import (
	"context"
	"sync"
	"sync/atomic"
)

// notifier lets queries wait for further progress of the log. Without waiting queries, notify costs the writer one
// atomic load.
type notifier struct {
	waiting atomic.Int32
	mu      sync.Mutex
	rung    chan struct{} // closed at the next notification
}

// wait returns nil once reached reports true, or the error of ctx. wait calls reached again after every notification.
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
		if reached() { // a notification may have preceded the channel
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
