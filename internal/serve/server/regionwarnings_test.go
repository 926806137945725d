package server

import (
	"testing"
	"time"
)

// TestSighting: a name persists while its messages are recent, and after the first one is old enough. Another name
// replaces it after a pause.
func TestSighting(t *testing.T) {
	const recent, old = 10 * time.Second, 5 * time.Second
	var x sighting
	for _, step := range []struct {
		at       time.Duration
		name     string // of a message; empty: none
		is       string
		persists bool
	}{
		{1 * time.Second, "", "", false},
		{2 * time.Second, "a", "a", false},
		{4 * time.Second, "b", "a", false},
		{8 * time.Second, "a", "a", true},
		{17 * time.Second, "b", "a", true},
		{19 * time.Second, "", "a", false},
		{20 * time.Second, "b", "b", false},
		{26 * time.Second, "b", "b", true},
	} {
		if step.name != "" {
			x.note(step.name, step.at, recent)
		}
		if x.name != step.is || x.persists(step.at, recent, old) != step.persists {
			t.Errorf("at %v: %+v, persists %v", step.at, x, x.persists(step.at, recent, old))
		}
	}
}
