package node

import (
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
)

func TestWaitingPhrase(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	waiting := func(instance string, after time.Duration) control.Shim {
		s := control.Shim{Instance: "idle"}
		if instance != "" {
			s.Instance = "w" + "-" + "x"
			s.Waiting = &control.Waiting{Since: at.Add(after), Why: "no room", Do: "make some"}
		}
		return s
	}
	if said := waitingPhrase([]control.Shim{waiting("", 0)}); said != "" {
		t.Errorf("of a shim that does not wait: %q", said)
	}
	got := waitingPhrase([]control.Shim{waiting("x", time.Minute), waiting("", 0), waiting("x", 0)})
	if want := "2 of 3 shims wait, w-x/0 since 2026-01-02T03:04:05Z: no room; what to do: make some"; got != want {
		t.Errorf("said %q, want %q", got, want)
	}
}
