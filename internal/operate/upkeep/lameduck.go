package upkeep

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/natsurl"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// IndexerConnection begins the name of an indexer's connection to NATS.
const IndexerConnection = "kvatlas indexer "

// LameDuck starts the lame duck mode of a NATS server, the process pid. Before, it waits until the servers of the
// cluster have no connections of indexers, or for wait. monitor is the URL of the server's monitoring port.
func LameDuck(ctx context.Context, monitor string, pid int, wait time.Duration, log *slog.Logger) error {
	waiting, cancel := context.WithTimeout(ctx, wait)
	defer cancel()
	for waiting.Err() == nil {
		n, err := connectedIndexers(waiting, monitor)
		if err != nil && waiting.Err() == nil {
			log.Warn("cannot read the connections of the NATS server; the command does not wait for indexers", "error", err,
				"what_to_do", "check that --monitor is the server's monitoring port")
		}
		if err != nil || n == 0 {
			break
		}
		loop.Wait(waiting, 200*time.Millisecond)
	}
	// SIGUSR2 starts lame duck mode, as nats-server --signal ldm does, without pgrep.
	if err := syscall.Kill(pid, syscall.SIGUSR2); err != nil {
		return fmt.Errorf("signal the NATS server, process %d (--pid): %w", pid, err)
	}
	return nil
}

// connectedIndexers returns the number of indexers with a connection to a NATS server, or to a server on its routes.
func connectedIndexers(ctx context.Context, monitor string) (n int, err error) {
	var own struct{ Connections []struct{ Name string } }
	if err := readMonitor(ctx, monitor, "/connz?limit=65536", &own); err != nil {
		return 0, err
	}
	for _, c := range own.Connections {
		if strings.HasPrefix(c.Name, IndexerConnection) {
			n++
		}
	}
	// An indexer subscribes to subjects with the indexer's name until the end of the handover. Routes list subscriptions
	// on other servers.
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

// readMonitor reads an answer of a NATS server's monitoring port.
func readMonitor(ctx context.Context, monitor, path string, into any) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, strings.TrimSuffix(monitor, "/")+path, nil)
	if err != nil {
		return fmt.Errorf("%q cannot be read as a URL", natsurl.Shown(monitor))
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
