package main

import (
	"testing"
)

// TestOldFlagsOfServe: the old names of flags set the values of the new names.
func TestOldFlagsOfServe(t *testing.T) {
	f := serveCommand().Flags()
	if err := f.Parse([]string{"--max-parked", "1", "--park-for", "2s", "--max-remembered", "3", "--remember-for",
		"4s"}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"max-pending": "1", "pending-for": "2s", "max-tombstones": "3", "tombstone-for": "4s",
	} {
		if got := f.Lookup(name); !got.Changed || got.Value.String() != want {
			t.Errorf("--%s is %s, want %s", name, got.Value, want)
		}
	}
}
