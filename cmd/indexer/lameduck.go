package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

// indexerConnection begins the name of an indexer's connection to NATS.
const indexerConnection = "kvatlas indexer "

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
until no indexer is connected to the server, for as long as --wait says.`,
		Example: `  indexer lameduck --pid 1`,
		Args:    cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&monitor, "monitor", "http://127.0.0.1:8222", "the server's monitoring port")
	f.IntVar(&pid, "pid", 1, "the server's process id")
	f.DurationVar(&wait, "wait", 10*time.Second, "how long to wait for indexers to disconnect; 0: not at all")
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
		return lameDuck(cmd.Context(), monitor, pid, wait, log)
	}
	return cmd
}

// lameDuck waits until no indexer is connected to the server, or for wait, and signals the server.
func lameDuck(ctx context.Context, monitor string, pid int, wait time.Duration, log *slog.Logger) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for waiting.Err() == nil {
		n, err := connectedIndexers(waiting, monitor)
		if err != nil && waiting.Err() == nil {
			log.Warn("the connections of the NATS server cannot be read; it is not waited for indexers", "error", err,
				"what_to_do", "see that --monitor is the server's monitoring port")
		}
		if err != nil || n == 0 {
			break
		}
		loop.Wait(waiting, 200*time.Millisecond)
	}
	// SIGUSR2 is lame duck mode, as in nats-server --signal ldm, which needs pgrep.
	if err := syscall.Kill(pid, syscall.SIGUSR2); err != nil {
		return fmt.Errorf("signal the NATS server, process %d (--pid): %w", pid, err)
	}
	return nil
}

// connectedIndexers returns how many indexers a NATS server has connections of.
func connectedIndexers(ctx context.Context, monitor string) (n int, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(monitor, "/")+"/connz?limit=65536", nil)
	if err != nil {
		return 0, fmt.Errorf("%q cannot be read as a URL", jetstream.ShownAddress(monitor))
	}
	reply, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer reply.Body.Close()
	var list struct{ Connections []struct{ Name string } }
	if reply.StatusCode != http.StatusOK {
		return 0, fmt.Errorf("%s: %s", req.URL.Redacted(), reply.Status)
	}
	if err := json.NewDecoder(reply.Body).Decode(&list); err != nil {
		return 0, fmt.Errorf("%s: %w", req.URL.Redacted(), err)
	}
	for _, c := range list.Connections {
		if strings.HasPrefix(c.Name, indexerConnection) {
			n++
		}
	}
	return n, nil
}
