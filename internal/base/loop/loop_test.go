package loop

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestBackoff: pauses double up to the maximum. Each pause is random between half of this length and all of it. Reset
// begins with the first pause again, and a smaller maximum holds at once.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waits := map[time.Duration]bool{}
		b := Backoff{Min: 100 * time.Millisecond}
		for range 50 {
			b.Reset()
			for _, c := range []struct{ max, want time.Duration }{{400, 100}, {400, 200}, {400, 400}, {400, 400}, {300, 300}} {
				b.Max = c.max * time.Millisecond
				most, began := c.want*time.Millisecond, time.Now()
				if !b.Wait(t.Context()) {
					t.Fatal("the context has ended")
				}
				d := time.Since(began)
				if d < most/2 || d > most {
					t.Fatalf("waited %v, want %v to %v", d, most/2, most)
				}
				waits[d] = true
			}
		}
		if len(waits) < 100 {
			t.Errorf("only %d different pauses", len(waits))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if b.Wait(ctx) {
			t.Error("a wait has an ended context")
		}
	})
}
