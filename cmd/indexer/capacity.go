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

func capacityCommand() *cobra.Command {
	var r api.CapacityRequest
	cmd := &cobra.Command{
		Use:   "capacity --model M",
		Short: "Show the hit rate of prompts by size of the cache, with the benefit of more memory",
		Long: `Show the hit rate of a model's prompts as a function of memory, from sampled reuse distances of the requests on
all nodes. For every tier, the command prints the size, the hit rate up to this tier, the benefit of twice the size and
the loss without the last 30 %. docs/capacity.md explains the assumptions.`,
		Example: `  indexer capacity --model llama
  indexer capacity --model llama --json`,
	}
	a := remote.Flags(cmd)
	cmd.Flags().StringVar(&r.Model, "model", "", "the model (required)")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if r.Model == "" {
			return a.Refused(cli.UsageErrorf("--model is missing: name the model of the prompts"))
		}
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Capacity, error) {
			return c.Capacity(ctx, &r)
		}, tables.Capacity)
		return err
	}
	return cmd
}
