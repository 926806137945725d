package host

import (
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestFigures checks the sum over all ranks, with the counts of ended shims.
func TestFigures(t *testing.T) {
	f := &Figures{QueueMost: 100}
	is := func(want string) {
		t.Helper()
		if got := f.NotReady(); !strings.Contains(got, want) || want == "" && got != "" {
			t.Errorf("not ready: %q, want %q", got, want)
		}
	}
	is("no rank")
	a, b := &watcher{}, &watcher{}
	f.update(a, func(r *rankFigures) { r.counts.Taken, r.counts.Gaps, r.queued = 5, 1, 7 })
	is("1 of 1 ranks are catching up")
	f.update(a, func(r *rankFigures) { r.state = shim.State{Engine: api.EngineConnected} })
	is("")
	f.update(b, func(r *rankFigures) {
		r.counts.Taken, r.queued, r.refused, r.skipped[0] = 10, 8, true, 3
		r.state = shim.State{Engine: api.EngineSilent}
	})
	is("the log does not accept the events of 1 of 2 ranks")
	got := f.Sum()
	if got.Messages != 15 || got.QueueBytes != 15 || got.QueueMost != 200 || got.Ranks["connected"] != 1 ||
		got.Ranks["silent"] != 1 || got.Incidents["gap"] != 1 || got.Skipped[events.Skip(0).String()] != 3 {
		t.Errorf("got %+v", got)
	}
	f.end(b)
	if got := f.Sum(); got.Messages != 15 || got.QueueBytes != 7 || got.Ranks["silent"] != 0 {
		t.Errorf("after its end: %+v", got)
	}
}
