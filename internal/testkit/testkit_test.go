package testkit

import (
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"
)

// failing records a fatal failure and ends the goroutine, like a test.
type failing struct {
	testing.TB
	said string
}

func (f *failing) Helper() {}

func (f *failing) Fatalf(format string, args ...any) {
	f.said = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// TestEventually: the wait ends when the condition holds, or fails after Patience with the last description.
func TestEventually(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun := time.Now()
		Eventually(t, "a minute has passed", func() bool { return time.Since(begun) >= time.Minute })
		if waited := time.Since(begun); waited > time.Minute+time.Second {
			t.Errorf("the condition held after a minute, and the wait took %v", waited)
		}
		for _, c := range []struct {
			wait func(t testing.TB)
			want string
		}{
			{func(t testing.TB) { Eventually(t, "rain", func() bool { return false }) }, "timeout: rain"},
			{func(t testing.TB) { Eventually(t, "rain", func() (bool, string) { return false, "sun" }) },
				"timeout: rain; last seen: sun"},
		} {
			f, begun, done := &failing{TB: t}, time.Now(), make(chan struct{})
			go func() {
				defer close(done)
				c.wait(f)
			}()
			<-done
			if waited := time.Since(begun); f.said != c.want || waited < Patience || waited > Patience+time.Second {
				t.Errorf("after %v: %q, want %q", waited, f.said, c.want)
			}
		}
	})
}

// TestRounds: the race detector shortens tests, but never to nothing.
func TestRounds(t *testing.T) {
	if few, many := Rounds(1), Rounds(800); few != 1 || many != 800 && !Race || many != 100 && Race {
		t.Errorf("%d and %d rounds", few, many)
	}
}
