// Command indexer keeps an index of the KV cache in a fleet of inference workers, and queries the index.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/tools/bench/command"
	"github.com/kvatlas/kvatlas/tools/demo"
	"github.com/kvatlas/kvatlas/tools/routesim"
	"github.com/kvatlas/kvatlas/tools/whatif"
)

func main() { os.Exit(cli.Main(rootCommand())) }

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "indexer",
		Short: "The durable, exact index of KV cache in a fleet of LLM inference workers",
		Long: `indexer keeps an index of the blocks of prompts at inference workers, from the events of engines, and answers
queries over NATS and HTTP.

  indexer demo                         a demonstration without further programs
  indexer simulate --workload capacity-73   the benefit of routing by the index
  indexer serve --data DIR             run an indexer with an embedded NATS server
  indexer query --model M --tokens 1,2,3,...
  indexer workers | status | top
  indexer doctor                       find faults and print remedies`,
	}
	cli.Group(root, serveCommand(), queryCommand(), selectCommand(), loadsCommand(), funnelCommand(),
		capacityCommand(), prefixesCommand(), tenantsCommand(), workersCommand(), sessionsCommand(), statusCommand(),
		topCommand(), clusterCommand(),
		doctorCommand(), snapshotCommand(), recordCommand(), resyncCommand(), forgetCommand(), modelsCommand(),
		namespaceCommand(), dumpCommand(), importCommand(), demo.Command(), command.Command(), routesim.Command(),
		whatif.Command(), probeCommand(), lameDuckCommand(), authCommand(), tokenizerCommand())
	remote.Complete(root)
	return root
}
