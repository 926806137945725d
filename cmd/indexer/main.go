// Command indexer keeps the index of where KV cache lies in a fleet of inference workers, and asks it.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/tools/bench/command"
	"github.com/kvatlas/kvatlas/tools/demo"
	"github.com/kvatlas/kvatlas/tools/routesim"
)

func main() { os.Exit(cli.Main(rootCommand())) }

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "indexer",
		Short: "The durable, exact index of where KV cache lies in a fleet of LLM inference workers",
		Long: `indexer keeps, from the events of inference engines, the index of which worker holds how much of which prompt, and
answers queries about it over NATS and HTTP.

  indexer demo                         see it at work, with nothing else installed
  indexer simulate --workload capacity-73   what routing by it is worth
  indexer serve --data DIR             run it, with a NATS server of its own
  indexer query --model M --tokens 1,2,3,...
  indexer workers | status | top
  indexer doctor                       what is wrong, and what mends it`,
	}
	return cli.Group(root, serveCommand(), queryCommand(), selectCommand(), loadsCommand(), funnelCommand(),
		workersCommand(), statusCommand(), topCommand(), clusterCommand(), doctorCommand(),
		snapshotCommand(), recordCommand(), resyncCommand(), forgetCommand(), namespaceCommand(), dumpCommand(),
		loadCommand(), demo.Command(), command.Command(), routesim.Command(), probeCommand(), lameDuckCommand(),
		authCommand(), tokenizerCommand())
}
