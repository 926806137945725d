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

// TestRounds: a usual run and the race detector shorten tests, but never to nothing.
func TestRounds(t *testing.T) {
	defer func(was bool) { Whole = was }(Whole)
	for _, c := range []struct {
		whole bool
		want  [3]int
	}{{true, [3]int{1, 6, 800}}, {false, [3]int{1, 6, 200}}} {
		if Whole = c.whole; Race {
			Whole, c.want = false, [3]int{1, 1, 100}
		}
		if got := [3]int{Rounds(1), Rounds(6), Rounds(800)}; got != c.want {
			t.Errorf("whole %v: %d rounds, want %d", Whole, got, c.want)
		}
	}
}
