package integration

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestEmbeddedNodeIsAMember adds a node to an indexer with an embedded NATS server. The nodes share the partitions, and
// a node with the same name is refused. After a crash, the first node returns at once under its name, without waiting
// for the expiry of its own record.
func TestEmbeddedNodeIsAMember(t *testing.T) {
	t.Parallel()
	data, addr, prompt := t.TempDir(), loopback.Reserve(t), filepath.Join(t.TempDir(), "prompt.json")
	serveA := func() *harness.Indexer {
		return harness.StartIndexer(t, data, addr, "--node-id", "a", "--partition-replicas", "1")
	}
	a := serveA()
	if r := harness.Run(t, "indexer", "cluster", "--nats", addr); r.Code != 0 || !strings.Contains(r.Stdout, "\na ") {
		t.Errorf("a node alone: %+v", r)
	}
	if r := harness.Run(t, "indexer", "serve", "--nats", addr, "--node-id", "a", "--http-listen", ""); r.Code != 1 ||
		!strings.Contains(r.Stderr, "node a: another process uses this node's name, and it is alive") {
		t.Errorf("a second a ended with %d and %q", r.Code, r.Stderr)
	}
	b := harness.Start(t, "indexer", "serve", "--nats", addr, "--node-id", "b", "--http-listen", "")
	shared := func() (bool, string) {
		c := api.ClusterStatus{}
		total := 0
		for _, name := range []string{"a", "b"} { // in the view of both nodes
			r := harness.Run(t, "indexer", "status", "--nats", addr, "--node", name, "--json")
			s := harness.Decode[api.Status](r)
			if s.Cluster == nil || len(s.Cluster.Nodes) != 2 || len(s.Cluster.Gone) > 0 || len(s.Cluster.Short) > 0 {
				return false, r.Stdout + r.Stderr
			}
			c = *s.Cluster
		}
		for _, n := range c.Nodes {
			if len(n.Ready) == 0 || len(n.Ready) == 4 {
				return false, n.Node
			}
			total += len(n.Ready)
		}
		return total == 4, ""
	}
	harness.Eventually(t, "both nodes share the partitions", shared)
	engine := harness.Start(t, "worker-shim", "simulate", "--endpoint", "tcp://127.0.0.1:0", "--replay",
		"tcp://127.0.0.1:0", "--rate", "20", "--print-prompt", prompt)
	at := engine.WaitFor(`endpoint=(\S+) replay=(\S+)`)
	for _, name := range []string{"w1", "w2", "w3", "w4"} {
		harness.Start(t, "worker-shim", "run", "--nats", addr, "--engine", at[1], "--replay", at[2], "--worker", name,
			"--model", "m", "--block-size", "16")
	}
	engine.WaitFor(`the last prompt is written`)
	whole := func() (bool, string) {
		answer := harness.Decode[api.Answer](harness.Run(t, "indexer", "query", "--nats", addr, "--model", "m",
			"--tokens-file", prompt, "--json"))
		return answer.Complete && len(answer.Workers) == 4, ""
	}
	harness.Eventually(t, "workers of both nodes are in answers", whole)
	a.Kill()
	a = serveA()
	if said := a.Said(); strings.Contains(said, "waiting to see whether it is alive") {
		t.Errorf("the node waited for the expiry of its own record:\n%s", said)
	}
	harness.Eventually(t, "both nodes share the partitions again", shared)
	harness.Eventually(t, "answers are whole again", whole)
	a.Stop()
	serveA()
	harness.Eventually(t, "answers are whole after an orderly restart", whole)
	b.Kill() // the record stays and becomes stale
	b = harness.Start(t, "indexer", "serve", "--nats", addr, "--node-id", "b", "--http-listen", "")
	b.WaitFor("msg=ready")
	b.Stop()
	harness.Eventually(t, "the first node has everything", func() (bool, string) {
		r := harness.Run(t, "indexer", "cluster", "--nats", addr, "--json")
		c := harness.Decode[api.ClusterStatus](r)
		return len(c.Nodes) == 1 && len(c.Nodes[0].Ready) == 4, r.Stdout + r.Stderr
	})
}
