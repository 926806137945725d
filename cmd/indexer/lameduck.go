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
		return lameDuck(cmd.Context(), monitor, pid, wait, log)
	}
	return cmd
}

// lameDuck waits until no indexer is connected to a server of the cluster, or for wait, and signals the server.
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

// connectedIndexers returns how many indexers are connected to a NATS server or to a server that it has routes to.
func connectedIndexers(ctx context.Context, monitor string) (n int, err error) {
	var own struct{ Connections []struct{ Name string } }
	if err := readMonitor(ctx, monitor, "/connz?limit=65536", &own); err != nil {
		return 0, err
	}
	for _, c := range own.Connections {
		if strings.HasPrefix(c.Name, indexerConnection) {
			n++
		}
	}
	// An indexer subscribes to subjects with its name until it has handed over. Routes show subscriptions elsewhere.
	var others struct {
		Routes []struct {
			Subjects []string `json:"subscriptions_list"`
		}
	}
	if err := readMonitor(ctx, monitor, "/routez?subs=1", &others); err != nil {
		return 0, err
	}
	nodes := map[string]bool{}
	for _, r := range others.Routes {
		for _, subject := range r.Subjects {
			if node, ok := jetstream.ParseNodeSubject(subject); ok {
				nodes[node] = true
			}
		}
	}
	return n + len(nodes), nil
}

// readMonitor decodes an answer of a NATS server's monitoring port.
func readMonitor(ctx context.Context, monitor, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(monitor, "/")+path, nil)
	if err != nil {
		return fmt.Errorf("%q cannot be read as a URL", jetstream.ShownAddress(monitor))
	}
	reply, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer reply.Body.Close()
	if reply.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", req.URL.Redacted(), reply.Status)
	}
	return json.NewDecoder(reply.Body).Decode(into)
}
