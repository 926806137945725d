package api

import (
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"
)

func TestProblemsOfLate(t *testing.T) {
	var o Outcomes
	at := time.Unix(1000, 0)
	problems := func() string { return strings.Join(o.Problems(at), "; ") }
	count := func(outcome string, n int) {
		for range n {
			o.count(OverNATS, OpFind, outcome, func() time.Time { return at })
		}
	}
	count(OutcomeOK, 3)
	count(string(CodeMalformed), 3) // is the caller's own trouble
	if p := problems(); p != "" {
		t.Errorf("%q", p)
	}
	count(string(CodeBusy), 2)
	count(OutcomeUnsent, 1)
	if p := problems(); !strings.Contains(p, "2 requests were refused as busy") ||
		!strings.Contains(p, "1 requests were unsent") {
		t.Errorf("%q", p)
	}
	at = at.Add(lately)
	count(string(CodeBusy), 5)
	if p := problems(); !strings.Contains(p, "7 requests were refused as busy") {
		t.Errorf("%q", p)
	}
	at = at.Add(lately)
	if p := problems(); !strings.Contains(p, "5 requests were refused as busy") || strings.Contains(p, "unsent") {
		t.Errorf("%q", p)
	}
	at = at.Add(2 * lately)
	if p := problems(); p != "" {
		t.Errorf("%q", p)
	}
	want := "[{nats find busy 7} {nats find malformed 3} {nats find ok 3} {nats find unsent 1}]"
	if got := fmt.Sprint(o.Counts()); got != want {
		t.Errorf("%s, want %s", got, want)
	}
}

// TestCatalogue: docs/errors.md lists every code with its status, and no other.
func TestCatalogue(t *testing.T) {
	text, err := os.ReadFile("../../docs/errors.md")
	if err != nil {
		t.Fatal(err)
	}
	listed := map[Code]string{}
	for _, row := range regexp.MustCompile(
		"(?m)^\\| `([a-z_0-9]+)` \\| (\\d+) \\| .+ \\| .+ \\|$").FindAllStringSubmatch(string(text), -1) {
		listed[Code(row[1])] = row[2]
	}
	for code, status := range httpStatus {
		if listed[code] != fmt.Sprint(status) {
			t.Errorf("%s has the status %d; the page says %q", code, status, listed[code])
		}
		delete(listed, code)
	}
	if len(listed) > 0 {
		t.Errorf("the page has %v too", listed)
	}
	for _, limit := range []string{"900,000", "8 MiB", fmt.Sprintf("%d,%03d,%03d", MaxTokens/1000000,
		MaxTokens/1000%1000, MaxTokens%1000)} {
		if !strings.Contains(string(text), limit) {
			t.Errorf("the page does not name the limit %s", limit)
		}
	}
}

func BenchmarkCount(b *testing.B) {
	var o Outcomes
	b.ReportAllocs()
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			o.Count(OverNATS, OpFind, OutcomeOK)
		}
	})
}
