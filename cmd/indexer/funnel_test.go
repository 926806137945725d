package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestNotReported: a funnel without reports shows no share of the step reused.
func TestNotReported(t *testing.T) {
	half := 0.5
	for _, reported := range []bool{false, true} {
		f := &api.Funnel{Steps: []api.FunnelTokens{{Step: api.StepSelected, Tokens: 5, Share: &half},
			{Step: api.StepReused, NotReported: !reported}}}
		if reported {
			f.Steps[1].Tokens, f.Steps[1].Share = 5, &half
		}
		var out bytes.Buffer
		printFunnel(&out, f)
		line := out.String()[strings.Index(out.String(), "reused"):]
		if strings.Contains(line, "not reported") == reported || strings.Contains(line, "%") != reported {
			t.Errorf("reported %t: %q", reported, line)
		}
	}
}
