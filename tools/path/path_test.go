package main

import (
	"strings"
	"testing"
)

// TestFlagsThatMakeNoSense are refused before anything is built.
func TestFlagsThatMakeNoSense(t *testing.T) {
	for _, c := range []struct{ args, want string }{
		{"extra", "extra"},
		{"--rounds 0", "one round"},
		{"--blocks 100", "768 blocks"},
		{"--workers 65", "64 workers"},
		{"--only kvatlas,nobody", `"nobody"`},
	} {
		if _, err := parse(strings.Fields(c.args)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.args, err, c.want)
		}
	}
}
