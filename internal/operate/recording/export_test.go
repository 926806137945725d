package recording

import (
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/usage"
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

// TestExportSettings: each invalid setting is an error with the name of its flag.
func TestExportSettings(t *testing.T) {
	for _, c := range []struct {
		set  ExportSettings
		want string // empty: the settings are valid
	}{
		{ExportSettings{Format: Mooncake, Tokens: 512}, ""},
		{ExportSettings{Since: "1h", Until: "10m", Format: JSON, Tokens: 1}, ""},
		{ExportSettings{Since: "soon", Format: JSON, Tokens: 1}, "--since"},
		{ExportSettings{Until: "soon", Format: JSON, Tokens: 1}, "--until"},
		{ExportSettings{Since: "10m", Until: "1h", Format: JSON, Tokens: 1}, "--until is not after --since"},
		{ExportSettings{Format: "csv", Tokens: 1}, "--format"},
		{ExportSettings{Format: JSON}, "--block-tokens is 0"},
	} {
		var wrong usage.Complaints
		c.set.Check(&wrong)
		err := wrong.Usage()
		if (err == nil) != (c.want == "") || err != nil && !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %q", c.set, err, c.want)
		}
	}
}
