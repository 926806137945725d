// Package loop has the waits and wake-ups of loops.
package loop

import (
	"context"
	"time"
)

// Wait waits for d. It returns false if the context ends first.
func Wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// Every calls do at each tick, until the context is done.
func Every(ctx context.Context, d time.Duration, do func(now time.Time)) {
	tick := time.NewTicker(d)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			do(now)
		}
	}
}

// Wake wakes the goroutine that reads from c, a channel of capacity 1. A signal stays in the channel until the next
// read.
func Wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
