// Package loop has the waits and wake-ups of loops.
package loop

import (
	"context"
	"math/rand/v2"
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

// Backoff is an exponential backoff: the pauses between the attempts of an operation. The limit of a pause begins at
// Min and doubles up to Max. A pause is a random time between half the limit and the limit, so that many processes do
// not repeat an attempt at the same moment. Min must be positive. The caller may change Max between pauses.
type Backoff struct {
	Min, Max time.Duration

	next time.Duration // 0: Min
}

// Next returns the next pause.
func (b *Backoff) Next() time.Duration {
	d := min(max(b.next, b.Min), b.Max)
	b.next = 2 * d
	return d/2 + rand.N(d/2+1)
}

// Wait waits for the next pause. It returns false if the context ends first.
func (b *Backoff) Wait(ctx context.Context) bool { return Wait(ctx, b.Next()) }

// Reset makes the next pause the first one.
func (b *Backoff) Reset() { b.next = 0 }

// Every calls do once in every d, which must be positive, until the context ends.
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
