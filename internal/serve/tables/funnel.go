package tables

import (
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Funnel prints a line for each step, with the tokens lost before the step.
func Funnel(w io.Writer, f *api.Funnel) {
	cli.Fprintf(w, "%s, %d routed, %d reported, in %v until %s\n\n", cli.Count(f.Requests, "request"), f.Routed,
		f.Reported, f.To.Sub(f.From).Round(time.Second), f.To.Local().Format(time.TimeOnly))
	var rows [][]any
	for _, step := range f.Steps {
		for _, l := range step.Lost {
			rows = append(rows, []any{"  - " + string(l.Cause), l.Tokens, percent(l.Share), lostByWhom(l.Workers)})
		}
		if step.NotReported || step.Share == nil {
			rows = append(rows, []any{step.Step, "-", "not reported", ""})
		} else {
			rows = append(rows, []any{step.Step, step.Tokens, percent(*step.Share), ""})
		}
	}
	FunnelColumns.Table(w, rows)
	for _, name := range f.Missing {
		cli.Fprintf(w, "node %s did not answer: the node's records are missing here\n", name)
	}
	for _, n := range f.Nodes {
		if n.Dropped > 0 {
			cli.Fprintf(w, "node %s did not record %d requests: too many requests\n", n.Node, n.Dropped)
		}
		if n.HistoryLost > 0 && n.HistoryFrom.After(n.From) {
			cli.Fprintf(w, "node %s has blocks since %s only: see --funnel-blocks of indexer serve\n", n.Node,
				n.HistoryFrom.Local().Format(time.TimeOnly))
		}
	}
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// lostByWhom returns the first workers that lost tokens.
func lostByWhom(workers []api.FunnelWorker) string {
	var parts []string
	for i, x := range workers {
		if i == 3 {
			parts = append(parts, fmt.Sprintf("and %d more", len(workers)-i))
			break
		}
		at := string(x.Worker)
		if x.Tier != "" {
			at += " " + x.Tier
		}
		parts = append(parts, fmt.Sprintf("%s %d, %v before", at, x.Tokens, time.Duration(x.AgeMS)*time.Millisecond))
	}
	return strings.Join(parts, "; ")
}
