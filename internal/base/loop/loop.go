// Package loop has the wait and the wake-up that loops have in common.
package loop

import (
	"context"
	"time"
)

// Wait waits; false says that the context ended first.
func Wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// Every calls do at each tick, until the context ends.
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

// Wake has whoever waits for a channel of capacity 1 look. If it has not looked since it was woken, it will.
func Wake(c chan<- struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}
