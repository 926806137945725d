package main

import (
	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func tenantsCommand() *cobra.Command {
	r := &api.TenantsRequest{}
	return remote.Command(&cobra.Command{
		Use:   "tenants",
		Short: "Show requested, reused and computed tokens by tenant, and held blocks",
		Long: `Show the requested, reused and computed tokens of each tenant in a window, from the recorded requests of all
nodes, and with --held the held blocks. The nodes need --tenants. docs/tenants.md explains the columns.

The NATS user needs the rights of an operator.`,
		Example: `  indexer tenants --since 1h
  indexer tenants --model llama --held --json`,
	}, remote.Request[*api.TenantList]{
		Flags: cli.Flags{
			cli.Var(&r.Model, "model", "", "only requests for this model; empty: all"),
			cli.Var(&r.Since, "since", "", "length of the window up to now, at most 1h (default: 10m)"),
			cli.Var(&r.Limit, "limit", api.UsualTenants, "most tenants to list; the others are added up as other"),
			cli.Var(&r.Held, "held", false, "count the held blocks too; needs --model, and each node visits its whole index"),
		},
		Check: func(*cobra.Command, []string) error { return r.Check() },
		Send:  remote.Call((*client.Client).Tenants, r), Print: tables.Tenants,
		Columns: []cli.Columns{tables.TenantsColumns},
	})
}
