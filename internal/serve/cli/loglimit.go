package cli

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Lines of one statement of the program: a burst, and then one for each interval. What peers send can cause a line for
// each of their messages, so without a limit they could fill the disk.
const (
	logBurst    = 100
	logInterval = time.Second
)

// limited is a handler that limits the lines of each statement that logs. Debug lines are not limited.
//
// The line that uses up the burst has the attribute limited. The next line that is written has the attribute
// suppressed: how many lines of its statement were left out before it.
type limited struct {
	slog.Handler
	statements *statements
}

// statements counts lines by the statement that logs, of which a program has a fixed number.
type statements struct {
	mu  sync.Mutex
	of  map[uintptr]*allowance
	now func() time.Time
}

// allowance is how many lines a statement may write at the time at.
type allowance struct {
	lines      float64
	at         time.Time
	suppressed uint64
}

func newLimited(h slog.Handler, now func() time.Time) *limited {
	return &limited{h, &statements{of: map[uintptr]*allowance{}, now: now}}
}

// Handle writes a line, or counts it.
func (l *limited) Handle(ctx context.Context, r slog.Record) error {
	if r.Level > slog.LevelDebug {
		written, last, suppressed := l.statements.take(r.PC)
		if !written {
			return nil
		}
		if suppressed > 0 {
			r.AddAttrs(slog.Uint64("suppressed", suppressed))
		}
		if last {
			r.AddAttrs(slog.String("limited", "from here on one line of this statement per "+logInterval.String()))
		}
	}
	return l.Handler.Handle(ctx, r)
}

// WithAttrs returns a handler with further attributes and the same limits.
func (l *limited) WithAttrs(attrs []slog.Attr) slog.Handler {
	return &limited{l.Handler.WithAttrs(attrs), l.statements}
}

// WithGroup returns a handler for a group, with the same limits.
func (l *limited) WithGroup(name string) slog.Handler {
	return &limited{l.Handler.WithGroup(name), l.statements}
}

// take reports whether the statement at pc may write a line now, whether that uses up its burst, and how many lines
// were left out since the last one.
func (s *statements) take(pc uintptr) (written, last bool, suppressed uint64) {
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
