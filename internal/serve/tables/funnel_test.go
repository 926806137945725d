package tables

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestNotReported: without reports of engines the step reused has no share.
func TestNotReported(t *testing.T) {
	half := 0.5
	for _, reported := range []bool{false, true} {
		f := &api.Funnel{Steps: []api.FunnelTokens{{Step: api.StepSelected, Tokens: 5, Share: &half},
			{Step: api.StepReused, NotReported: !reported}}}
		if reported {
			f.Steps[1].Tokens, f.Steps[1].Share = 5, &half
		}
		var out bytes.Buffer
		Funnel(&out, f)
		line := out.String()[strings.Index(out.String(), "reused"):]
		if strings.Contains(line, "not reported") == reported || strings.Contains(line, "%") != reported {
			t.Errorf("reported %t: %q", reported, line)
		}
	}
}

// TestFunnelHistory: the funnel reports a node with a history shorter than the window, if the node dropped blocks.
func TestFunnelHistory(t *testing.T) {
	t.Parallel()
	at := time.Now()
	f := &api.Funnel{Requests: 1, Nodes: []api.FunnelNode{{Node: "a", From: at, HistoryFrom: at.Add(2 * time.Second)}}}
	var b strings.Builder
	Funnel(&b, f)
	if got := b.String(); !strings.HasPrefix(got, "1 request, 0 routed") || strings.Contains(got, "remembers") {
		t.Error(got)
	}
	f.Nodes[0].HistoryLost = 1
	b.Reset()
	Funnel(&b, f)
	if got := b.String(); !strings.Contains(got, "node a has blocks since ") {
		t.Error(got)
	}
}
