package cli

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Limits for the lines of one log statement: a burst, and then one line per interval. Peers can cause a line with each
// of their messages, and could fill the disk without a limit.
const (
	logBurst    = 100
	logInterval = time.Second
)

// limited is a handler that limits the lines of each log statement. Debug lines are not limited.
//
// The last line of a burst has the attribute limited. The next written line has the attribute suppressed with the
// number of suppressed lines of its statement.
type limited struct {
	slog.Handler
	statements *statements
}

// statements counts lines by log statement. A program has a fixed number of statements.
type statements struct {
	mu  sync.Mutex
	of  map[uintptr]*allowance
	now func() time.Time
}

// allowance is the number of lines that a statement may write at the time at.
type allowance struct {
	lines      float64
	at         time.Time
	suppressed uint64
}

func newLimited(h slog.Handler, now func() time.Time) *limited {
	return &limited{h, &statements{of: map[uintptr]*allowance{}, now: now}}
}

// Handle writes a line, or counts it as suppressed.
func (l *limited) Handle(ctx context.Context, r slog.Record) error {
	if r.Level > slog.LevelDebug {
		written, last, suppressed := l.statements.admit(r.PC)
		if !written {
			return nil
		}
		if suppressed > 0 {
			r.AddAttrs(slog.Uint64("suppressed", suppressed))
		}
		if last {
			r.AddAttrs(slog.String("limited", "from now on one line of this statement per "+logInterval.String()))
		}
	}
	return l.Handler.Handle(ctx, r)
}

// WithAttrs returns a handler with additional attributes and the same limits.
func (l *limited) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limited{l.Handler.WithAttrs(attrs), l.statements}
}

// WithGroup returns a handler for a group, with the same limits.
func (l *limited) WithGroup(name string) slog.Handler {
	return &limited{l.Handler.WithGroup(name), l.statements}
}

// admit reports whether the statement at pc may write a line now, whether the line is the last of a burst, and the
// number of suppressed lines since the last one.
func (s *statements) admit(pc uintptr) (written, last bool, suppressed uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	now := s.now()
	a, ok := s.of[pc]
	if !ok {
		a = &allowance{lines: logBurst, at: now}
		s.of[pc] = a
	}
	a.lines = min(logBurst, a.lines+float64(max(now.Sub(a.at), 0))/float64(logInterval))
	a.at = now
	if a.lines < 1 {
		a.suppressed++
		return false, false, 0
	}
	a.lines--
	suppressed, a.suppressed = a.suppressed, 0
	return true, a.lines < 1 && suppressed == 0, suppressed
}
