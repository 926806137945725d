package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

func probeCommand() *cobra.Command {
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "probe URL",
		Short: "Request an HTTP health endpoint, for health checks without curl",
		Long: `GET a URL. Exit status 0 for the HTTP status 200, else 1 with the answer: a health check for containers with
only the programs of kvatlas. An indexer is alive at /healthz and ready at /readyz. A NATS server answers at /healthz of
the monitoring port.`,
		Example: `  indexer probe http://127.0.0.1:8090/readyz`,
		Args:    cobra.ExactArgs(1),
	}
	cmd.Flags().DurationVar(&timeout, "timeout", 2*time.Second, "how long to wait for the answer")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !strings.HasPrefix(args[0], "http://") && !strings.HasPrefix(args[0], "https://") {
			return cli.UsageErrorf("%q is not an http:// or https:// URL", natsurl.Shown(args[0]))
		}
		if timeout <= 0 {
			return cli.UsageErrorf("--timeout %v is not positive", timeout)
		}
		ctx, cancel := context.WithTimeout(cmd.Context(), timeout)
		defer cancel()
		return upkeep.Probe(ctx, args[0])
	}
	return cmd
}
