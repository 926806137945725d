package main

import (
	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func capacityCommand() *cobra.Command {
	r := &api.CapacityRequest{}
	return remote.Command(&cobra.Command{
		Use:   "capacity --model M",
		Short: "Show the hit rate of prompts by size of the cache, with the benefit of more memory",
		Long: `Show the hit rate of a model's prompts as a function of memory, from sampled reuse distances of the requests on
all nodes. For every tier, the command prints the size, the hit rate up to this tier, the benefit of twice the size and
the loss without the last 30 %. docs/capacity.md explains the assumptions.`,
		Example: `  indexer capacity --model llama
  indexer capacity --model llama --json`,
	}, remote.Request[*api.Capacity]{
		Flags: cli.Flags{
			cli.Var(&r.Model, "model", "", "the model (required)",
				cli.Required[string]("is missing: name the model of the prompts")),
		},
		Send: remote.Call((*client.Client).Capacity, r), Print: tables.Capacity,
		Columns: []cli.Columns{tables.CapacityColumns, tables.CapacityPointsColumns},
	})
}
