package recording

import (
	"testing"
	"time"
)

// TestParseMoment: an export is limited by a duration before now, or by a time.
func TestParseMoment(t *testing.T) {
	now := time.Date(2026, 11, 27, 9, 0, 0, 0, time.UTC)
	for text, want := range map[string]time.Time{
		"": {}, "1h": now.Add(-time.Hour), "0s": now, "2026-11-27T08:30:00Z": now.Add(-30 * time.Minute),
	} {
		if at, err := ParseMoment(text, now); err != nil || !at.Equal(want) {
			t.Errorf("%q: %v, %v, want %v", text, at, err, want)
		}
	}
	for _, text := range []string{"-1h", "yesterday", "2026-11-27"} {
		if at, err := ParseMoment(text, now); err == nil {
			t.Errorf("%q: %v", text, at)
		}
	}
}
