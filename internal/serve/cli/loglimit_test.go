package cli

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"
)

// TestLogIsLimited: an endless log statement writes a burst and then a line per interval, with the number of suppressed
// lines. Other statements and debug lines are not affected.
func TestLogIsLimited(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	now := time.Unix(0, 0)
	text := slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})
	log := slog.New(newLimited(text, func() time.Time { return now })).With("from", "test")
	flood := func(n int) (lines []string) {
		out.Reset()
		for range n {
			log.Warn("refused")
		}
		return strings.Split(strings.TrimSpace(out.String()), "\n")
	}
	lines := flood(10_000)
	if len(lines) != logBurst || !strings.Contains(lines[logBurst-1], "limited=") ||
		strings.Contains(lines[logBurst-2], "limited=") {
		t.Fatalf("%d lines, the last %s", len(lines), lines[len(lines)-1])
	}
	now = now.Add(logInterval)
	lines = flood(50)
	if len(lines) != 1 || !strings.Contains(lines[0], "suppressed=9900") {
		t.Fatalf("after an interval: %q", lines)
	}
	out.Reset()
	log.Error("something else")
	for range 2 * logBurst {
		log.Debug("detail")
	}
	if n := strings.Count(out.String(), "\n"); n != 2*logBurst+1 {
		t.Fatalf("%d other lines", n)
	}
	now = now.Add(2 * logBurst * logInterval)
	lines = flood(logBurst + 1)
	if len(lines) != logBurst || !strings.Contains(lines[0], "suppressed=49") {
		t.Fatalf("after a pause %d lines, the first %s", len(lines), lines[0])
	}
}
