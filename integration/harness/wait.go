package harness

import (
	"testing"
	"time"
)

// Eventually waits until something is so; so tells, with what was seen.
func Eventually(t testing.TB, what string, so func() (bool, string)) {
	t.Helper()
	var seen string
	for deadline := time.Now().Add(Patience); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var ok bool
		if ok, seen = so(); ok {
			return
		}
	}
	t.Fatalf("not so: %s; seen last: %s", what, seen)
}
