package integration

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// statusOfAll is the output of indexer status --json.
type statusOfAll struct {
	Nodes []struct {
		Node, Zone, Error string
		Status            *api.Status
	}
	Problems []string
}

// TestStatusOfAllNodes reads the status of three nodes: every node lists all nodes. A killed node is named, first
// because of the missing reply, then because of the stale record, and the exit status is 1.
func TestStatusOfAllNodes(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	zones := map[string]string{"a": "rack-1", "b": "", "c": "rack-2"}
	serve := func(name string) *harness.Process {
		x := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", name, "--partitions", "2",
			"--http-listen", "", "--zone", zones[name])
		x.WaitFor(`msg=ready`)
		return x
	}
	serve("a")
	serve("b")
	c := serve("c")
	ask := func() (r harness.Result, s statusOfAll) {
		t.Helper()
		r = harness.Run(t, "indexer", "status", "--nats", nats, "--timeout", "60s", "--json")
		if err := json.Unmarshal([]byte(r.Stdout), &s); err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		return r, s
	}
	well := func() (bool, string) { // healthy, and visible to each other
		r, s := ask()
		known := 0
		for _, n := range s.Nodes {
			if n.Status != nil && n.Status.Node == n.Node && n.Zone == zones[n.Node] {
				known += len(n.Status.Cluster.Nodes)
			}
		}
		return r.Code == 0 && len(s.Problems) == 0 && known == 9, r.Stdout + r.Stderr
	}
	harness.Eventually(t, "three nodes are well", well)
	r := harness.Run(t, "indexer", "status", "--nats", nats)
	for _, name := range []string{"a", "b", "c"} {
		if r.Code != 0 || !strings.Contains(r.Stdout, "\n"+name+"  ") {
			t.Errorf("the table lacks %s: %+v", name, r)
		}
	}
	for _, name := range []string{"a", "b", "c"} { // through a random node each
		var s api.Status
		r := harness.Run(t, "indexer", "status", "--nats", nats, "--node", name, "--json")
		if r.Code != 0 || json.Unmarshal([]byte(r.Stdout), &s) != nil || s.Node != name || len(s.Partitions) != 2 {
			t.Errorf("--node %s: %+v", name, r)
		}
	}
	if r := harness.Run(t, "indexer", "top", "--nats", nats, "--once", "--interval", "1ms"); r.Code != 0 ||
		!strings.Contains(r.Stdout, "\nzones   rack-1 1/1  rack-2 1/1  none 1/1\n") {
		t.Errorf("top: %+v", r)
	}
	c.Kill()
	r, s := ask()
	if r.Code != 1 || len(s.Nodes) != 3 || s.Nodes[2].Status != nil || s.Nodes[2].Zone != "rack-2" ||
		!strings.Contains(s.Nodes[2].Error, "node c ") ||
		!strings.Contains(r.Stderr, "node c ") {
		t.Errorf("just after the kill of a node: %+v", r)
	}
	harness.Eventually(t, "the node is listed as gone", func() (bool, string) {
		r, s := ask()
		return r.Code == 1 && len(s.Nodes) == 3 &&
			strings.Contains(s.Nodes[2].Error, "node c is gone"), r.Stdout + r.Stderr
	})
	if r := harness.Run(t, "indexer", "cluster", "--nats", nats); r.Code != 0 || !strings.Contains(r.Stdout, "gone") {
		t.Errorf("cluster: %+v", r)
	}
	r = harness.Run(t, "indexer", "status", "--nats", nats)
	if r.Code != 1 || !strings.Contains(r.Stdout, "NO ANSWER") ||
		!strings.Contains(r.Stdout, "problem: node c is gone") {
		t.Errorf("the table: %+v", r)
	}
	if r := harness.Run(t, "indexer", "status", "--nats", nats, "--node", "c", "--timeout", "60s"); r.Code != 1 ||
		!strings.Contains(r.Stderr, "node c does not answer") && !strings.Contains(r.Stderr, "no answer in time") {
		t.Errorf("--node c: %+v", r)
	}
	serve("c")
	harness.Eventually(t, "all are well again", well)
	if r := harness.Run(t, "indexer", "status", "--nats", loopback.Reserve(t), "--timeout", "1s"); r.Code != 1 ||
		!strings.Contains(r.Stderr, "no NATS server answers") {
		t.Errorf("without NATS: %+v", r)
	}
}
