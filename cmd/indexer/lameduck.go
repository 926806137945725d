package main

import (
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func lameDuckCommand() *cobra.Command {
	var (
		monitor string
		pid     int
		wait    time.Duration
	)
	cmd := &cobra.Command{
		Use:   "lameduck",
		Short: "Have the NATS server of this container hand over before it stops",
		Long: `Have a NATS server enter lame duck mode: it hands over what it leads, lets its clients go one by one, and ends. This is the
preStop hook of NATS servers on Kubernetes, which sends SIGTERM otherwise, at which they end at once.

Indexers that stop at the same time, as when everything is uninstalled, need JetStream to hand over. So this waits
until no indexer is connected to a server of the cluster, for as long as --wait says.`,
		Example: `  indexer lameduck --pid 1`,
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&monitor, "monitor", "http://127.0.0.1:8222", "the server's monitoring port")
	f.IntVar(&pid, "pid", 1, "the server's process id")
	f.DurationVar(&wait, "wait", 10*time.Second, "how long to wait for the indexers of all servers to disconnect; 0: not at all")
	logger := cli.LogFlags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		var wrong cli.Complaints
		wrong.When(!strings.HasPrefix(monitor, "http://") && !strings.HasPrefix(monitor, "https://"),
			"--monitor %q is not an http:// or https:// URL", jetstream.ShownAddress(monitor))
		wrong.When(pid < 1, "--pid %d is not a process", pid)
		wrong.When(wait < 0, "--wait %v is negative", wait)
		if err := wrong.Usage(); err != nil {
			return err
		}
		return upkeep.LameDuck(cmd.Context(), monitor, pid, wait, log)
	}
	return cmd
}
