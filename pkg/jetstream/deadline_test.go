package jetstream

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestDeadline: a context with a late timer, and its descendants, end like contexts of package context.
func TestDeadline(t *testing.T) {
	type key struct{}
	synctest.Test(t, func(t *testing.T) {
		at := time.Now().Add(time.Second)
		for name, ends := range map[string]struct {
			do   func(d *deadline, parent context.CancelFunc)
			want error
		}{
			"not":    {func(*deadline, context.CancelFunc) {}, nil},
			"time":   {func(*deadline, context.CancelFunc) { time.Sleep(time.Until(at)) }, context.DeadlineExceeded},
			"parent": {func(_ *deadline, parent context.CancelFunc) { parent() }, context.Canceled},
			"end":    {func(d *deadline, _ context.CancelFunc) { d.end() }, context.Canceled},
		} {
			for _, waits := range []bool{false, true} {
				at = time.Now().Add(time.Second)
				parent, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
				d := withDeadline(parent, at)
				if got, ok := d.Deadline(); !ok || !got.Equal(at) {
					t.Errorf("%s: the deadline is %v", name, got)
				}
				var of context.Context = d
				stop := func() {}
				if waits {
					of, stop = context.WithCancel(d)
				}
				ends.do(d, cancel)
				synctest.Wait()
				if d.Value(key{}) != "value" {
					t.Errorf("%s: the value is %v", name, d.Value(key{}))
				}
				done := false
				if ends.want != nil || waits {
					select {
					case <-of.Done():
						done = true
					default:
					}
				}
				if err := of.Err(); err != ends.want || done != (ends.want != nil) || d.Err() != ends.want {
					t.Errorf("%s, waits %v: %v, %v, done %v; want %v", name, waits, err, d.Err(), done, ends.want)
				}
				stop()
				cancel()
				d.end()
			}
		}
	})
}
