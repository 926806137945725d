package main

import (
	"log/slog"
	"runtime"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

func TestRoomForQueries(t *testing.T) {
	cores := runtime.GOMAXPROCS(0)
	for _, c := range []struct {
		s              serving
		workers, queue int
	}{
		{serving{}, max(128, cores), 512 * cores}, {serving{queryWorkers: 3, queryQueue: 5}, 3, 5},
	} {
		if workers, queue := c.s.roomForQueries(); workers != c.workers || queue != c.queue {
			t.Errorf("%+v: %d, %d", c, workers, queue)
		}
	}
}

// TestRefusalsAreLogged: what was refused since the last line is in the next one, with what helps; where nothing was,
// there is none.
func TestRefusalsAreLogged(t *testing.T) {
	var said strings.Builder
	log := slog.New(slog.NewTextHandler(&said, nil))
	var outcomes api.Outcomes
	before := map[api.RequestCount]uint64{}
	say := func() string {
		said.Reset()
		before = sayRefusals(before, outcomes.Counts(), log)
		return said.String()
	}
	outcomes.Count(api.OverNATS, api.OpFind, api.OutcomeOK)
	outcomes.Count(api.OverHTTP, api.OpFind, string(api.CodeMalformed))
	if text := say(); text != "" {
		t.Errorf("%q", text)
	}
	for range 3 {
		outcomes.Count(api.OverNATS, api.OpFind, string(api.CodeBusy))
		outcomes.Count(api.FromNodes, api.OpFind, string(api.CodeBusy))
	}
	if text := say(); !strings.Contains(text, "outcome=busy requests=6 what_to_do=") ||
		!strings.Contains(text, "--query-workers") || strings.Count(text, "\n") != 1 {
		t.Errorf("%q", text)
	}
	if text := say(); text != "" {
		t.Errorf("%q", text)
	}
	outcomes.Count(api.OverNATS, api.OpFind, api.OutcomeExpired)
	if text := say(); !strings.Contains(text, "outcome=expired requests=1 ") || strings.Contains(text, "busy") {
		t.Errorf("%q", text)
	}
	want := "find over http malformed 1, find over nats busy 3 expired 1 ok 1, find over node busy 3"
	if line := requestsLine(outcomes.Counts()); line != want {
		t.Errorf("%q, want %q", line, want)
	}
}
