package main

import (
	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func funnelCommand() *cobra.Command {
	r := &api.FunnelRequest{}
	return remote.Command(&cobra.Command{
		Use:   "funnel --model M [--since 10m]",
		Short: "Show the losses of reusable tokens of prompts, with causes",
		Long: `Show the causes of a model's hit rate: the tokens of all queried or routed prompts, and the tokens seen
before, held by some worker, held by the chosen worker, and reused by the engine. For every step, the command prints
the causes of the losses. Requests go to all nodes. The answer lists the silent nodes and the start of the nodes'
records.`,
		Example: `  indexer funnel --model llama
  indexer funnel --model llama --since 30m --json`,
	}, remote.Request[*api.Funnel]{
		Flags: cli.Flags{
			cli.Var(&r.Model, "model", "", "the model (required)",
				cli.Required[string]("is missing: name the model of the prompts")),
			cli.Var(&r.Since, "since", api.FunnelSince.String(), "how far back to look; at most 1h"),
		},
		Check: func(*cobra.Command, []string) error {
			if err := r.Check(); err != nil {
				return cli.UsageErrorf("--since: %s", api.AsError(err).Message)
			}
			return nil
		},
		Send: remote.Call((*client.Client).Funnel, r), Print: tables.Funnel,
		Columns: []cli.Columns{tables.FunnelColumns},
	})
}
