package harness

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// Fleet has nodes and simulated engines with shims, which run until the end of the test. The workers w0, w1, … have the
// model m.
type Fleet struct {
	NATS    string
	Spaces  []string // namespaces: one for all nodes, or one for each node
	Nodes   []*Indexer
	Asks    []*client.Client // of each node, over HTTP
	Engines map[events.WorkerID]*enginesim.Engine
}

// Ask returns a client of a node's HTTP port. A node answers or refuses within 5 s, so the client repeats a request
// only after 10 s: a recording has every request once, also on a busy machine.
func Ask(t testing.TB, address string) *client.Client {
	t.Helper()
	c, err := client.HTTP([]string{"http://" + address}, client.Options{HedgeAfter: 10 * time.Second})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// FleetConfig configures a Fleet.
type FleetConfig struct {
	Nodes, Workers int
	Capacity, Host int      // of an engine on the device and in host memory, in blocks of [BlockSize] tokens
	Serve, Shim    []string // further flags of nodes and shims

	// Separate gives each node a namespace, with a shim for each engine: the nodes share no index and no loads.
	Separate bool
}

// StartFleet starts nodes and engines, and waits until every node may choose every worker.
func StartFleet(t testing.TB, c FleetConfig) *Fleet {
	t.Helper()
	f := &Fleet{NATS: StartNATS(t), Spaces: []string{"default"}, Engines: map[events.WorkerID]*enginesim.Engine{}}
	if c.Separate {
		f.Spaces = nil
		for i := range c.Nodes {
			f.Spaces = append(f.Spaces, fmt.Sprint("router", i))
		}
	}
	for i := range c.Nodes {
		x := &Indexer{NATS: f.NATS, Process: Start(t, "indexer", append([]string{"serve", "--nats", f.NATS, "--namespace",
			f.Spaces[i%len(f.Spaces)], "--node-id", fmt.Sprint("n", i), "--partitions", "4", "--http-listen",
			"127.0.0.1:0"}, c.Serve...)...)}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		ask := Ask(t, x.HTTP)
		f.Nodes, f.Asks = append(f.Nodes, x), append(f.Asks, ask)
	}
	for i := range c.Workers {
		name := fmt.Sprint("w", i)
		e, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: BlockSize, Capacity: c.Capacity,
			Host: c.Host})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Crash)
		f.Engines[events.WorkerID(name)] = e
		for _, space := range f.Spaces {
			StartSimShim(t, e, f.NATS, name, append([]string{"--namespace", space, "--total-kv-blocks",
				fmt.Sprint(c.Capacity)}, c.Shim...)...)
		}
	}
	ctx := Context(t)
	for i, ask := range f.Asks {
		Eventually(t, fmt.Sprintf("node %d may choose all workers", i), func() (bool, string) {
			p, err := ask.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: Tokens(1, BlockSize), Explain: true}})
			return err == nil && p.Candidates == c.Workers, fmt.Sprintf("%+v %v", p, err)
		})
	}
	return f
}

// AwaitRecords waits until the nodes have stored the given number of records.
func (f *Fleet) AwaitRecords(t testing.TB, want uint64) {
	t.Helper()
	Eventually(t, fmt.Sprintf("%d records are stored", want), func() (bool, string) {
		stored, states := uint64(0), ""
		for _, space := range f.Spaces {
			s := IndexerJSON[struct {
				Nodes []struct {
					State *struct{ Stored, Dropped uint64 }
				}
			}](t, f.NATS, "record status --namespace "+space)
			for _, n := range s.Nodes {
				if n.State != nil {
					stored += n.State.Stored
				}
			}
			states += fmt.Sprintf("%+v\n", s)
		}
		return stored == want, states
	})
}
