package integration

import (
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestDeadline pauses a node of two with a part of the partitions each. Queries with a deadline get the part of the
// other node, with the names of the missing partitions, until the other node has taken over.
func TestDeadline(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	var nodes []*harness.Indexer
	for i := range 2 {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--partition-replicas", "1", "--http-listen", "127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes = append(nodes, x)
	}
	const workers = 6
	prompt := harness.Tokens(1, 4*harness.BlockSize)
	for i := range workers {
		e := harness.StartSimEngine(t)
		harness.StartSimShim(t, e, nats, fmt.Sprint("w", i))
		harness.ServePrompt(t, e, prompt)
		nodes[0].WaitDepth(t, "m", prompt, fmt.Sprint("w", i), 4)
	}
	ctx := harness.Context(t)
	c, err := client.HTTP([]string{"http://" + nodes[0].HTTP}, client.Options{Absent: time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	partition := map[string]events.Partition{}
	list, err := c.Workers(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range list.Workers {
		partition[string(w.Instance)] = w.Partition
	}
	harness.Eventually(t, "a worker is where only the second node looks", func() (bool, string) {
		status, err := c.Status(ctx)
		if err != nil {
			return false, err.Error()
		}
		own := func(node string, p events.Partition) bool {
			return slices.ContainsFunc(status.Cluster.Nodes, func(n api.NodeStatus) bool {
				return n.Node == node && (slices.Contains(n.Ready, p) || slices.Contains(n.Releasing, p))
			})
		}
		for _, p := range partition {
			if own("n1", p) && !own("n0", p) {
				return true, ""
			}
		}
		return false, fmt.Sprintf("%+v", status.Cluster)
	})
	query := api.Query{Model: "m", Tokens: prompt, DeadlineMS: 300}
	if err := nodes[1].Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	defer nodes[1].Cmd.Process.Signal(syscall.SIGCONT)
	partial := 0
	harness.Eventually(t, "another node serves the partition", func() (bool, string) {
		a, err := c.Find(ctx, &query)
		if err != nil { // the machine was paused
			return false, err.Error()
		}
		held := map[string]bool{}
		for _, o := range a.Workers {
			held[string(o.Instance)] = true
		}
		for w, p := range partition {
			if held[w] == slices.Contains(a.Missing, p) {
				t.Fatalf("%s of partition %d: %+v", w, p, a)
			}
		}
		if a.Complete != (len(a.Missing) == 0) {
			t.Fatalf("%+v", a)
		}
		if a.Complete {
			return true, ""
		}
		partial++
		s, err := c.Select(ctx, &api.SelectRequest{Query: query})
		if client.CodeOf(err) == api.CodeUnknownModel || err == nil && s.Worker == "" {
			t.Fatalf("%+v, %v", s, err)
		}
		return false, fmt.Sprintf("%+v", a)
	})
	t.Logf("%d answers were partial", partial)
}
