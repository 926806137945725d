// Package logtest passes log lines to tests.
package logtest

import (
	"context"
	"log/slog"
	"testing"
)

// Line is a line of a log.
type Line struct {
	Level slog.Level
	Text  string
	Attrs map[string]any // values as they were logged
}

// New returns a logger that calls line for each line of any level. Attributes of [slog.Logger.With] are left out, and
// groups are not supported.
func New(line func(Line)) *slog.Logger { return slog.New(handler(line)) }

// Quiet returns a logger that fails the test at each line above Info.
func Quiet(t testing.TB) *slog.Logger {
	return New(func(l Line) {
		if l.Level > slog.LevelInfo {
			t.Errorf("%s: %s %v", l.Level, l.Text, l.Attrs)
		}
	})
}

type handler func(Line)

func (handler) Enabled(context.Context, slog.Level) bool { return true }

func (h handler) Handle(_ context.Context, r slog.Record) error {
	attrs := map[string]any{}
	r.Attrs(func(a slog.Attr) bool {
		attrs[a.Key] = a.Value.Any()
		return true
	})
	h(Line{Level: r.Level, Text: r.Message, Attrs: attrs})
	return nil
}

func (h handler) WithAttrs([]slog.Attr) slog.Handler { return h }
func (h handler) WithGroup(string) slog.Handler      { return h }
