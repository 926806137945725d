package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
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
	a := remote.Flags(cmd)
	cmd.Flags().StringVar(&r.Model, "model", "", "the model (required)")
	cmd.Flags().StringVar(&r.Since, "since", api.FunnelSince.String(), "how far back to look; at most 1h")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if r.Model == "" {
			return a.Refused(cli.UsageErrorf("--model is missing: name the model whose prompts are looked at"))
		}
		if err := r.Check(); err != nil {
			return a.Refused(cli.UsageErrorf("--since: %s", api.AsError(err).Message))
		}
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Funnel, error) {
			return c.Funnel(ctx, &r)
		}, tables.Funnel)
		return err
	}
	return cmd
}
