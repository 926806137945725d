package integration

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestMembership runs three indexers on a NATS server that starts later. They share the partitions. A second indexer
// with a live name is refused. A stopping indexer hands over first. All replicas are equal during events.
func TestMembership(t *testing.T) {
	t.Parallel()
	nats := loopback.Reserve(t)
	serve := func(name string, more ...string) *harness.Process {
		return harness.Start(t, "indexer", append([]string{"serve", "--nats", nats, "--node-id", name, "--partition-replicas",
			"2", "--partitions", "8", "--http-listen", ""}, more...)...)
	}
	a := serve("a")
	a.WaitFor(`waiting for a NATS server; none answers`)
	harness.Start(t, "nats-server", "-js", "-sd", filepath.Join(t.TempDir(), "data"), "-a", "127.0.0.1", "-p",
		nats[strings.LastIndex(nats, ":")+1:])
	a.WaitFor(`msg=ready`)
	b, c := serve("b"), serve("c")
	b.WaitFor(`msg=ready`)
	c.WaitFor(`msg=ready`)

	engine := harness.Start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay",
		"tcp://127.0.0.1:0", "--rate", "50", "--block-size", "16")
	at := engine.WaitFor(`endpoint=(\S+) replay=(\S+)`)
	harness.Start(t, "worker-shim", "run", "--nats", nats, "--engine", at[1], "--replay", at[2], "--worker", "w1",
		"--model", "m", "--block-size", "16")

	// settled waits until every partition is ready on the given number of nodes.
	settled := func(nodes, copies int) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("%d nodes have settled", nodes), func() (bool, string) {
			r := harness.Run(t, "indexer", "cluster", "--nats", nats, "--json")
			var status api.ClusterStatus
			if r.Code != 0 || json.Unmarshal([]byte(r.Stdout), &status) != nil {
				return false, r.Stdout + r.Stderr
			}
			total := 0
			for _, n := range status.Nodes {
				total += len(n.Ready)
			}
			return len(status.Nodes) == nodes && total == 8*copies && len(status.Short) == 0, r.Stdout
		})
	}
	settled(3, 2)
	if r := harness.Run(t, "indexer", "serve", "--nats", nats, "--node-id", "a", "--http-listen", ""); r.Code != 1 ||
		!strings.Contains(r.Stderr, "node a: another process uses this node's name, and it is alive") {
		t.Errorf("a second a ended with %d and %q", r.Code, r.Stderr)
	}
	if r := harness.Run(t, "indexer", "serve", "--nats", nats, "--node-id", "d", "--partitions", "4", "--http-listen",
		""); r.Code != 1 || !strings.Contains(r.Stderr, "created with 8 partitions, and 4 are configured") {
		t.Errorf("with another number of partitions the indexer ended with %d and %q", r.Code, r.Stderr)
	}
	if r := harness.Run(t, "indexer", "cluster", "--nats", nats); r.Code != 0 ||
		!strings.Contains(r.Stdout, "each partition is to be kept by 2") {
		t.Errorf("cluster: %d, %q, %q", r.Code, r.Stdout, r.Stderr)
	}
	// nodes may be paused, or at different positions
	harness.Eventually(t, "replicas are compared, and equal", func() (bool, string) {
		r := harness.Run(t, "indexer", "status", "--verify", "--nats", nats)
		if strings.Contains(r.Stdout, "DIFFERS") {
			t.Fatalf("verify: %+v", r)
		}
		// more during a handover
		return r.Code == 0 && strings.Count(r.Stdout, " equal") >= 16, r.Stdout + r.Stderr
	})
	harness.Eventually(t, "snapshots of all partitions are written", func() (bool, string) {
		var list api.SnapshotList
		r := harness.Run(t, "indexer", "snapshot", "now", "--nats", nats, "--json")
		return r.Code == 0 && json.Unmarshal([]byte(r.Stdout), &list) == nil &&
			len(list.Snapshots) == 8, r.Stdout + r.Stderr
	})
	b.Stop()
	if !strings.Contains(b.Said(), "draining") {
		t.Errorf("b ended without a log line:\n%s", b.Said())
	}
	settled(2, 2)
	c.Kill()
	c = serve("c") // the node may stop during the check of its name, and the name is then free
	c.WaitFor(`waiting to see whether it is alive|msg=ready`)
	c.Stop()
	settled(1, 1)
}
