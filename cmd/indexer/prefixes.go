package main

import (
	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

func prefixesCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "prefixes",
		Short: "Find prefixes with more demand than their holders serve; copy them to further workers",
	}
	cmd.AddCommand(hotCommand(), warmCommand())
	return cmd
}

func hotCommand() *cobra.Command {
	r := &api.HotRequest{}
	return remote.Command(&cobra.Command{
		Use:   "hot --model M",
		Short: "List the prefixes that a further copy would help, and the copies with their use",
		Long: `List the prefixes of a model that a copy on a further worker would help, the largest benefit first: demand, holders, how
much longer requests wait than at the least busy worker, saved time, cost, and the best worker. A second table shows the
copies with the requests that reused them. docs/hot-prefixes.md explains the columns.`,
		Example: `  indexer prefixes hot --model llama
  indexer prefixes hot --model llama --json`,
		Args: cobra.NoArgs,
	}, remote.Request[*api.HotList]{
		Flags: cli.Flags{
			cli.Var(&r.Model, "model", "", "the model (required)"),
			cli.Var(&r.Limit, "limit", api.UsualHot, "most prefixes to list"),
		},
		Check: func(*cobra.Command, []string) error { return r.Check() },
		Send:  remote.Call((*client.Client).HotPrefixes, r), Print: tables.HotPrefixes,
		Columns: []cli.Columns{tables.HotColumns, tables.CopiesColumns},
	})
}

func warmCommand() *cobra.Command {
	prompt := &remote.WarmPrompt{}
	return remote.Command(&cobra.Command{
		Use:   "warm [HASH] --model M --worker W",
		Short: "Compute a prefix on a worker for later requests",
		Long: `Send the worker's engine a completion of one token with a prefix, and wait for the answer. HASH is a hash of
indexer prefixes hot with the tokens kept (--warm-up-memory of the nodes). Without HASH, give the tokens. The copy
continues on the node if this command ends before.`,
		Example: `  indexer prefixes warm 3d7a4f1be2066bd1 --model llama --worker worker-2
  indexer prefixes warm --tokens-file system-prompt.json --model llama --worker worker-2 --timeout 30s`,
		Args: cobra.MaximumNArgs(1),
	}, remote.Request[*api.PrefixCopy]{
		Flags: prompt.Flags(),
		Check: func(_ *cobra.Command, args []string) error { return prompt.Check(args) },
		Send:  remote.Call((*client.Client).Warm, &prompt.Request), Print: tables.PrefixCopy,
	})
}
