package main

import (
	"context"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/spf13/cobra"
)

func funnelCommand() *cobra.Command {
	var r api.FunnelRequest
	cmd := &cobra.Command{
		Use:   "funnel --model M [--since 10m]",
		Short: "Show where prompts' tokens are lost that could have been reused, and why",
		Long: `Show why a model's hit rate is what it is: of the tokens of all prompts that were asked for or routed, how many were
seen before, held by some worker, held by the chosen worker, and reused by the engine; and for each step why the others
were lost. All nodes are asked, and the answer says which of them did not answer and since when they remember.`,
		Example: `  indexer funnel --model llama
  indexer funnel --model llama --since 30m --json`,
	}
	a := askingFlags(cmd)
	cmd.Flags().StringVar(&r.Model, "model", "", "the model (required)")
	cmd.Flags().StringVar(&r.Since, "since", api.FunnelSince.String(), "how far back to look; at most 1h")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if r.Model == "" {
			return a.refused(cli.UsageErrorf("--model is missing: name the model whose prompts are looked at"))
		}
		if err := r.Check(); err != nil {
			return a.refused(cli.UsageErrorf("--since: %s", api.AsError(err).Message))
		}
		_, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Funnel, error) {
			return c.Funnel(ctx, &r)
		}, printFunnel)
		return err
	}
	return cmd
}

func printFunnel(w io.Writer, f *api.Funnel) {
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
	cli.Table(w, []string{"STEP", "TOKENS", "SHARE", "BY"}, rows)
	for _, name := range f.Missing {
		cli.Fprintf(w, "node %s did not answer: what it recorded is missing here\n", name)
	}
	for _, n := range f.Nodes {
		if n.Dropped > 0 {
			cli.Fprintf(w, "node %s did not record %d requests: they were too many\n", n.Node, n.Dropped)
		}
		if n.HistoryLost > 0 && n.HistoryFrom.After(n.From) {
			cli.Fprintf(w, "node %s remembers blocks since %s only: see --funnel-blocks of indexer serve\n", n.Node,
				n.HistoryFrom.Local().Format(time.TimeOnly))
		}
	}
}

func percent(share float64) string { return fmt.Sprintf("%.1f %%", 100*share) }

// lostByWhom names the first workers that have lost tokens.
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
