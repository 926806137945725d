package main

import (
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

func lameDuckCommand() *cobra.Command {
	var (
		monitor string
		pid     int
		wait    time.Duration
	)
	cmd := &cobra.Command{
		Use:   "lameduck",
		Short: "Let the NATS server of this container hand over before the stop",
		Long: `Let a NATS server enter lame duck mode: the server hands over leaderships, disconnects clients in turn, and
ends. Use the command as the preStop hook of NATS servers on Kubernetes. Without the hook, Kubernetes sends SIGTERM,
and the server ends at once.

Indexers that stop at the same time, for example at an uninstall, need JetStream for the handover. So the command
waits until no indexer is connected to a server of the cluster, for at most --wait.`,
		Example: `  indexer lameduck --pid 1`,
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&monitor, "monitor", "http://127.0.0.1:8222", "the server's monitoring port")
	f.IntVar(&pid, "pid", 1, "the server's process id")
	f.DurationVar(&wait, "wait", 10*time.Second, "time limit for the disconnect of all servers' indexers; 0: no wait")
	logger := cli.LogFlags(f)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		var wrong cli.Complaints
		wrong.When(!strings.HasPrefix(monitor, "http://") && !strings.HasPrefix(monitor, "https://"),
			"--monitor %q is not an http:// or https:// URL", natsurl.Shown(monitor))
		wrong.When(pid < 1, "--pid %d is not a process", pid)
		wrong.When(wait < 0, "--wait %v is negative", wait)
		if err := wrong.Usage(); err != nil {
			return err
		}
		return upkeep.LameDuck(cmd.Context(), monitor, pid, wait, log)
	}
	return cmd
}
