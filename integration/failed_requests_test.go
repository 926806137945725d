package integration

import (
	"fmt"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestFailedRequests: a retry excludes a worker, over HTTP and NATS. A failure that a router reports to one node
// penalises the worker on all nodes, until a first token. Without another worker, the penalised one is chosen.
func TestFailedRequests(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	ctx := harness.Context(t)
	var nodes []*client.Client
	addresses := []string{}
	for i := range 2 {
		p := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i), "--partitions", "4",
			"--http-listen", "127.0.0.1:0")
		addresses = append(addresses, p.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		c := harness.Ask(t, addresses[i])
		p.WaitFor(`msg=ready`)
		nodes = append(nodes, c)
	}
	over, err := client.NATS(connectNATS(t, "nats://"+nats), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	for _, worker := range []events.WorkerID{"w1", "w2"} {
		if _, err := nodes[0].RegisterWorker(ctx, &api.WorkerRegistration{Instance: worker, Model: "m",
			BlockSize: harness.BlockSize, WorkerSpec: api.WorkerSpec{Events: api.EventsNone}}); err != nil {
			t.Fatal(err)
		}
	}
	request := func(excluded ...events.WorkerID) *api.SelectRequest {
		return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: harness.Tokens(1, harness.BlockSize),
			Explain: true}, Excluded: excluded}
	}
	for i, c := range []*client.Client{nodes[0], nodes[1], over} { // over NATS any node answers
		name := []string{"node 0", "node 1", "NATS"}[i]
		for _, pair := range [][2]events.WorkerID{{"w1", "w2"}, {"w2", "w1"}} {
			harness.Eventually(t, name+" knows both workers", func() (bool, string) {
				s, err := c.Select(ctx, request(pair[0]))
				return err == nil && s.Worker == pair[1] && len(s.Explanation.Dropped) == 1 &&
					s.Explanation.Dropped[0].Filter == "excluded_workers", fmt.Sprint(s, err)
			})
		}
		_, err := c.Select(ctx, request("w1", "w2"))
		if client.CodeOf(err) != api.CodeNoWorkers || !strings.Contains(err.Error(), "excluded_workers 2") {
			t.Errorf("%s: both are excluded: %v", name, err)
		}
	}
	// dropped waits until all nodes penalise the worker, or no node does. again is called meanwhile.
	dropped := func(want bool, again func(n int)) {
		t.Helper()
		for i, c := range nodes {
			n := 0
			harness.Eventually(t, fmt.Sprintf("node %d: penalised %v", i, want), func() (bool, string) {
				n++
				again(n)
				s, err := c.Select(ctx, request())
				if err != nil {
					return false, err.Error()
				}
				is := false
				for _, d := range s.Explanation.Dropped {
					is = is || d.Worker == "w1" && d.Filter == "penalty" && strings.Contains(d.Reason, "the last one: timeout")
				}
				return is == want && (!is || s.Worker == "w2"), fmt.Sprintf("%+v", s.Explanation.Dropped)
			})
		}
	}
	book := func(id string) {
		t.Helper()
		r := request()
		r.RequestID, r.Book, r.Workers = id, true, []events.WorkerID{"w1"} // penalised or not, it is the only one
		if s, err := nodes[0].Select(ctx, r); err != nil || s.Worker != "w1" {
			t.Fatalf("%+v, %v", s, err)
		}
	}
	next := 0
	dropped(true, func(int) {
		next++
		book(fmt.Sprint("failed", next))
		if err := nodes[0].FreeResult(ctx, "m", fmt.Sprint("failed", next), api.ResultTimeout); err != nil {
			t.Fatal(err)
		}
	})
	_, text, err := harness.Request(addresses[1], "GET", "/metrics", "")
	if err != nil || !strings.Contains(text, `kvatlas_request_failures_total{reason="timeout"} `) ||
		strings.Contains(text, `kvatlas_request_failures_total{reason="timeout"} 0`) {
		t.Errorf("the failures are not counted: %v", err)
	}
	dropped(false, func(n int) {
		if n > 1 {
			return
		}
		next++
		book(fmt.Sprint("served", next))
		if err := nodes[0].PrefillComplete(ctx, "m", fmt.Sprint("served", next)); err != nil {
			t.Fatal(err)
		}
	})
	dropped(true, func(int) {
		if err := over.ReportResult(ctx, "w1", api.ResultTimeout); err != nil {
			t.Fatal(err)
		}
	})
	dropped(false, func(int) {
		if err := over.ReportResult(ctx, "w1", api.ResultOK); err != nil {
			t.Fatal(err)
		}
	})
}
