package demo

import (
	"strings"
	"testing"
)

// TestProgress checks that the first report and every new stage are printed at once. Changes within a stage are printed
// after an interval.
func TestProgress(t *testing.T) {
	for _, terminal := range []bool{false, true} {
		var out strings.Builder
		tell := progress(&out, terminal)
		tell(Progress{Stage: "one", Of: 7})
		if text := out.String(); !strings.Contains(text, "one") || !strings.Contains(text, "0 of 7 requests") ||
			strings.HasSuffix(text, "\n") == terminal {
			t.Errorf("terminal %v: at first %q", terminal, text)
		}
		for i := range 1000 {
			tell(Progress{Stage: "one", Requests: i, Of: 1000})
		}
		tell(Progress{Stage: "two"})
		if text := out.String(); strings.Count(text, "requests") > 100 || !strings.Contains(text, "two") {
			t.Errorf("terminal %v: %q", terminal, text)
		}
	}
}
