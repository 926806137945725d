package server

import (
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestRoomForQueries(t *testing.T) {
	cores := runtime.GOMAXPROCS(0)
	for _, c := range []struct {
		s              Settings
		workers, queue int
	}{
		{Settings{}, max(128, cores), 512 * cores}, {Settings{QueryWorkers: 3, QueryQueue: 5}, 3, 5},
	} {
		if c.s.setDefaults(); c.s.QueryWorkers != c.workers || c.s.QueryQueue != c.queue {
			t.Errorf("%+v", c)
		}
	}
}

// TestRefusalsAreLogged checks that a log line has the refusals since the last line with the remedy, and that no line
// is written without refusals.
func TestRefusalsAreLogged(t *testing.T) {
	var said strings.Builder
	log := slog.New(slog.NewTextHandler(&said, nil))
	var outcomes outcomes
	before := map[api.RequestCount]uint64{}
	say := func() string {
		said.Reset()
		before = sayRefusals(before, outcomes.Counts(), log)
		return said.String()
	}
	outcomes.Count(api.OverNATS, ops.Find, ops.OK)
	outcomes.Count(api.OverHTTP, ops.Find, string(api.CodeMalformed))
	if text := say(); text != "" {
		t.Errorf("%q", text)
	}
	for range 3 {
		outcomes.Count(api.OverNATS, ops.Find, string(api.CodeBusy))
		outcomes.Count(api.FromNodes, ops.Find, string(api.CodeBusy))
	}
	if text := say(); !strings.Contains(text, "outcome=busy requests=6 why=") ||
		!strings.Contains(text, "--query-workers") || strings.Count(text, "\n") != 1 {
		t.Errorf("%q", text)
	}
	if text := say(); text != "" {
		t.Errorf("%q", text)
	}
	outcomes.Count(api.OverNATS, ops.Find, ops.Expired)
	if text := say(); !strings.Contains(text, "outcome=expired requests=1 ") || strings.Contains(text, "busy") {
		t.Errorf("%q", text)
	}
}
