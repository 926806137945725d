//go:build judges

package page

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

const (
	engines = 8  // simulated, gpu-1 and so on
	common  = 24 // blocks of the common prompt of all engines
	own     = 12 // further blocks of every engine's own prompt
)

// zones are the zones of the nodes; the last node has no zone.
var zones = []string{"eu-west-1a", "eu-west-1b", ""}

// world is a cluster of three nodes with simulated engines, and two workers that hold blocks in all tiers.
type world struct {
	*testing.T
	nats  string
	nodes []string // addresses of the HTTP ports
	// the common prefix of all prompts, and a prompt of the workers with all tiers
	system, tiered []uint32
	evicted        []uint32 // a prompt that a worker held earlier
	report         string   // a file with a report of indexer what-if, for TestLooks
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, system: harness.Tokens(1, common*harness.BlockSize),
		tiered: harness.Tokens(100_000, 40*harness.BlockSize), evicted: harness.Tokens(200_000, 20*harness.BlockSize)}
	nats := harness.StartNATS(t)
	w.nats = nats
	var nodes []*harness.Process
	for i, id := range []string{"node-a", "node-b", "node-c"} {
		nodes = append(nodes, harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id,
			"--partition-replicas", "2",
			"--partitions", "8", "--http-listen", "127.0.0.1:0", "--zone", zones[i]))
	}
	for _, n := range nodes {
		w.nodes = append(w.nodes, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
	}
	for i := range engines {
		e := harness.StartSimEngine(t)
		harness.StartSimShim(t, e, nats, fmt.Sprintf("gpu-%d", i+1), "--serving-endpoint",
			fmt.Sprintf("http://10.0.0.%d:8000", i+1))
		for j := range 3 {
			harness.ServePrompt(t, e, append(append([]uint32(nil), w.system[:(common-6*(i%3))*harness.BlockSize]...),
				harness.Tokens(1000*(10*i+j+1), own*(j+1)*harness.BlockSize)...))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	ns := harness.OpenNamespace(t, ctx, nats)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	locals := hasher.Hash(nil, w.tiered)
	for i, worker := range []events.WorkerID{"tiers-1", "tiers-2"} {
		var list []events.Event
		for tier, from := events.Device, 0; tier <= events.External; tier++ {
			to := from + 10 - 3*i
			var names []events.BlockHash
			for b := from; b < to; b++ {
				names = append(names, events.BlockHash(1+b))
			}
			list = append(list, events.Event{Kind: events.Stored, Tier: tier, HasParent: from > 0,
				Parent: events.BlockHash(from), Blocks: names, Locals: locals[from:to]})
			from = to
		}
		if i == 1 {
			var names []events.BlockHash
			for b := range 20 {
				names = append(names, events.BlockHash(1000+b))
			}
			list = append(list, events.Event{Kind: events.Stored, Tier: events.Device, Blocks: names,
				Locals: hasher.Hash(nil, w.evicted)}, events.Event{Kind: events.Removed, Tier: events.Device, Blocks: names})
		}
		harness.PublishAs(t, ctx, ns, worker, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m",
			BlockSize: harness.BlockSize, Events: list})
	}
	for _, node := range w.nodes {
		harness.Eventually(t, "every node has all workers", func() (bool, string) {
			list := w.workers(node)
			held := 0
			for _, worker := range list.Workers {
				if worker.Blocks.Device > 0 && (worker.Record != nil || worker.Lease == nil) {
					held++
				}
			}
			return list.Complete && held == engines+2, fmt.Sprint(list)
		})
	}
	settled(t, nats, 3, 2*8)
	return w
}

// settled waits until each node serves partitions, with the given sum, and no partition moves.
func settled(t *testing.T, nats string, nodes, sum int) {
	t.Helper()
	harness.Eventually(t, "no partition moves", func() (bool, string) {
		r := harness.Run(t, "indexer", "cluster", "--nats", nats, "--json")
		var c api.ClusterStatus
		if err := json.Unmarshal([]byte(r.Stdout), &c); err != nil {
			return false, fmt.Sprintf("%+v, %v", r, err)
		}
		moves, ready := len(c.Nodes) != nodes || len(c.Short) > 0, 0
		for _, n := range c.Nodes {
			moves = moves || len(n.Releasing) > 0 || len(n.Ready) == 0
			ready += len(n.Ready)
		}
		return !moves && ready == sum, r.Stdout
	})
}

// expire starts and kills a worker, and waits until all nodes have the expiry of the lease.
func (w *world) expire(name string) {
	w.Helper()
	e := harness.StartSimEngine(w)
	shim := harness.StartSimShim(w, e, w.nats, name, "--lease", "1s")
	shim.WaitFor("msg=registered")
	harness.ServePrompt(w, e, w.system)
	shim.Kill()
	for _, node := range w.nodes {
		harness.Eventually(w, "every node has "+name+" as expired", func() (bool, string) {
			list := w.workers(node)
			return len(list.Expired) == 1 && len(list.Workers) == engines+2, fmt.Sprint(list)
		})
		harness.Eventually(w, "the tree of prefixes has all other workers", func() (bool, string) {
			var tree api.PrefixTree
			err := harness.HTTPDo(node, "POST", "/v1/prefixes", map[string]any{"model": "m"}, &tree)
			return err == nil && tree.Complete && tree.Ranks == engines+2, fmt.Sprint(tree, err)
		})
	}
}

// traffic routes prompts, reports the reuse of most prompts, and sends queries for some prompts without routing.
func (w *world) traffic(round int) {
	w.Helper()
	for i := range 10 {
		n := 10*round + i
		tail := harness.Tokens(5_000_000+1000*n, (4+i)*harness.BlockSize+i)
		prompt := slices.Concat(w.system, tail)
		switch i {
		case 1, 5:
			prompt = slices.Concat(w.tiered, tail)
		case 2:
			prompt = slices.Concat(w.evicted, tail)
		case 3:
			prompt = tail
		case 4:
			prompt = w.system
		}
		query := map[string]any{"model": "m", "tokens": prompt, "block_size": harness.BlockSize}
		node := w.nodes[n%len(w.nodes)]
		if i == 6 {
			var a api.Answer
			if err := harness.HTTPDo(node, "POST", "/v1/find", query, &a); err != nil {
				w.Fatal(err)
			}
			continue
		}
		id := fmt.Sprint("request-", n)
		query["request_id"] = id
		var s api.Selection
		if err := harness.HTTPDo(node, "POST", "/v1/select", query, &s); err != nil {
			w.Fatal(err)
		}
		if i == 7 {
			continue
		}
		report := api.Report{RequestID: id, CachedTokens: s.CachedTokens * uint64(8+n%3) / 10}
		if err := harness.HTTPDo(node, "POST", "/v1/report", report, &api.Done{}); err != nil {
			w.Fatal(err)
		}
	}
}

func (w *world) get(node, path string, into any) {
	w.Helper()
	if err := harness.HTTPDo(node, "GET", path, nil, into); err != nil {
		w.Fatal(err)
	}
}

func (w *world) workers(node string) (list api.WorkerList) {
	w.get(node, "/v1/workers", &list)
	return list
}

func (w *world) url(view string) string { return "http://" + w.nodes[0] + "/#/" + view }
