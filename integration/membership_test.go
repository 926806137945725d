package integration

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/internal/loopback"
)

// TestMembership runs three indexers on one NATS server, which they wait for: they share the partitions; a second one under a name that lives is
// refused; one that is told to end hands over first; and all replicas hold the same while events flow.
func TestMembership(t *testing.T) {
	nats := loopback.Reserve(t)
	serve := func(name string, more ...string) *process {
		return start(t, "indexer", append([]string{"serve", "--nats", nats, "--node-id", name, "--replication", "2", "--partitions", "8", "--http-listen", ""}, more...)...)
	}
	a := serve("a")
	a.waitFor(`no NATS server answers; it is waited for`)
	start(t, "nats-server", "-js", "-sd", filepath.Join(t.TempDir(), "data"), "-a", "127.0.0.1", "-p", nats[strings.LastIndex(nats, ":")+1:])
	a.waitFor(`msg=ready`)
	b, c := serve("b"), serve("c")
	b.waitFor(`msg=ready`)
	c.waitFor(`msg=ready`)

	engine := start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay", "tcp://127.0.0.1:0", "--rate", "200", "--block-size", "16")
	at := engine.waitFor(`endpoint=(\S+) replay=(\S+)`)
	start(t, "worker-shim", "run", "--nats", nats, "--engine", at[1], "--replay", at[2], "--instance", "w1", "--model", "m", "--block-size", "16")

	// settled waits until each partition is ready on so many of so many nodes.
	settled := func(nodes, copies int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d nodes have settled", nodes), func() (bool, string) {
			r := run(t, "indexer", "cluster", "--nats", nats, "--json")
			var status api.ClusterStatus
			if r.code != 0 || json.Unmarshal([]byte(r.stdout), &status) != nil {
				return false, r.stdout + r.stderr
			}
			total := 0
			for _, n := range status.Nodes {
				total += len(n.Ready)
			}
			return len(status.Nodes) == nodes && total == 8*copies && len(status.Short) == 0, r.stdout
		})
	}
	settled(3, 2)
	if r := run(t, "indexer", "serve", "--nats", nats, "--node-id", "a", "--http-listen", ""); r.code != 1 || !strings.Contains(r.stderr, "node a: another process has this node's name, and it lives") {
		t.Errorf("a second a ended with %d and %q", r.code, r.stderr)
	}
	if r := run(t, "indexer", "serve", "--nats", nats, "--node-id", "d", "--partitions", "4", "--http-listen", ""); r.code != 1 || !strings.Contains(r.stderr, "created with 8 partitions and 4 are asked for") {
		t.Errorf("with other partitions it ended with %d and %q", r.code, r.stderr)
	}
	if r := run(t, "indexer", "cluster", "--nats", nats); r.code != 0 || !strings.Contains(r.stdout, "each partition is to be kept by 2") {
		t.Errorf("cluster: %d, %q, %q", r.code, r.stdout, r.stderr)
	}
	eventually(t, "replicas are compared, and equal", func() (bool, string) { // nodes may stand still, or not come to one place
		r := run(t, "indexer", "status", "--verify", "--nats", nats)
		if strings.Contains(r.stdout, "DIFFERS") {
			t.Fatalf("verify: %+v", r)
		}
		return r.code == 0 && strings.Count(r.stdout, " equal") >= 16, r.stdout + r.stderr // more while one is letting go
	})
	eventually(t, "snapshots of all partitions are written", func() (bool, string) {
		var list api.SnapshotList
		r := run(t, "indexer", "snapshot", "now", "--nats", nats, "--json")
		return r.code == 0 && json.Unmarshal([]byte(r.stdout), &list) == nil && len(list.Snapshots) == 8, r.stdout + r.stderr
	})
	b.stop()
	if !strings.Contains(b.saying(), "draining") {
		t.Errorf("b ended without a word:\n%s", b.saying())
	}
	settled(2, 2)
	c.kill()
	c = serve("c") // it may be told to stop while it looks whether its name is free, which it is if that took long
	c.waitFor(`it is looked whether that lives|msg=ready`)
	c.stop()
	settled(1, 1)
}
