package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestRemovalOrder compares the order of removal of three nodes, each with a third of the partitions, with sets of
// blocks: every node counts the blocks that only one worker of all nodes holds, and the loss of each removal.
func TestRemovalOrder(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	nats := harness.StartNATS(t)
	var nodes []string
	for i := range 3 {
		n := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i), "--partitions", "8",
			"--partition-replicas", "1", "--http-listen", "127.0.0.1:0", "--index-shards", fmt.Sprint(i+1))
		nodes = append(nodes, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
	}
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	// Worker i holds the common prompt, a part of one of four prompts, and a unique prompt. The parts of the last two
	// workers of each prompt differ in length, and the last blocks are in host memory only.
	const workers = 12
	ns := harness.OpenNamespace(t, ctx, nats)
	prompt := func(i int) []uint32 {
		return slices.Concat(harness.Tokens(1, 5*harness.BlockSize), harness.Tokens(100_000*(1+i%4), 8*harness.BlockSize))
	}
	holders := map[string]map[events.WorkerID]bool{} // of blocks, by the path
	depth := map[events.WorkerID][4]uint32{}         // of the four prompts
	for i := range workers {
		name := events.WorkerID(fmt.Sprintf("w%02d", i))
		tokens := slices.Concat(prompt(i)[:(7+i/2)*harness.BlockSize],
			harness.Tokens(1_000_000*(1+i), (1+i%3)*harness.BlockSize))
		locals := hasher.Hash(nil, tokens)
		names := make([]events.BlockHash, len(locals))
		for b, local := range locals {
			names[b] = events.BlockHash(1 + b)
			path := fmt.Sprint(locals[:b], local)
			if holders[path] == nil {
				holders[path] = map[events.WorkerID]bool{}
			}
			holders[path][name] = true
		}
		of := depth[name]
		for p := range of {
			for b, local := range hasher.Hash(nil, prompt(p)) {
				if b < len(locals) && locals[b] == local {
					of[p] = uint32(b + 1)
				} else {
					break
				}
			}
		}
		depth[name] = of
		harness.PublishAs(t, ctx, ns, name, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m",
			BlockSize: harness.BlockSize, Events: []events.Event{
				{Kind: events.Stored, Tier: events.Device, Blocks: names, Locals: locals},
				{Kind: events.Stored, Tier: events.Host, Blocks: names[len(names)-2:]},
				{Kind: events.Removed, Tier: events.Device, Blocks: names[len(names)-2:]}}})
		status, text, err := harness.Request(nodes[0], "POST", "/v1/workers", fmt.Sprintf(
			`{"instance":%q,"model":"m","block_size":%d,"events":"none"}`, name, harness.BlockSize))
		if err != nil || status != 200 {
			t.Fatal(status, text, err)
		}
	}
	unique := map[events.WorkerID]uint64{}
	for _, of := range holders {
		for name := range of {
			if len(of) == 1 {
				unique[name]++
			}
		}
	}
	for i, p := range []int{0, 0, 1, 2, 2, 2, 3} { // the demand, on all nodes
		q := api.Query{Model: "m", Tokens: prompt(p)}
		harness.Eventually(t, "all workers are found", func() (bool, string) {
			var a api.Answer
			err := harness.HTTPDo(nodes[i%3], "POST", "/v1/find", api.Query{Model: "m", Tokens: q.Tokens, Diagnostic: true}, &a)
			return err == nil && a.Complete && len(a.Workers) == workers, fmt.Sprintf("%+v, %v", a, err)
		})
		if err := harness.HTTPOnce(nodes[i%3], "POST", "/v1/find", q, &api.Answer{}); err != nil {
			t.Fatal(err)
		}
	}
	demand := [4]uint64{2, 1, 3, 1}
	loss := func(name events.WorkerID, gone map[events.WorkerID]bool) (blocks uint64) {
		for p, n := range demand {
			with, without := uint32(0), uint32(0)
			for o, of := range depth {
				if !gone[o] {
					if with = max(with, of[p]); o != name {
						without = max(without, of[p])
					}
				}
			}
			blocks += n * uint64(with-without)
		}
		return blocks
	}
	for i, node := range nodes {
		harness.Eventually(t, fmt.Sprintf("node %d has the exact order", i), func() (bool, string) {
			var list api.RemovalOrder
			if err := harness.HTTPDo(node, "GET", "/v1/removal_order?model=m", nil, &list); err != nil {
				return false, err.Error()
			}
			if !list.Complete || list.Sample != 7 || list.BlockSample != 1 || len(list.Workers) != workers {
				return false, fmt.Sprintf("%+v", list)
			}
			gone := map[events.WorkerID]bool{}
			for _, w := range list.Workers {
				lost := uint64(w.BlocksPerHour/list.RequestsPerHour*7 + 0.5)
				if w.Unique != unique[w.Worker] || lost != loss(w.Worker, gone) {
					return false, fmt.Sprintf("%+v loses %d after %v; want %d unique and %d lost blocks", w, lost, gone,
						unique[w.Worker], loss(w.Worker, gone))
				}
				gone[w.Worker] = true
			}
			return true, ""
		})
	}
	r := harness.Run(t, "indexer", "workers", "rank-for-removal", "--model", "m", "--nats", nats)
	if r.Code != 0 || !strings.Contains(r.Stdout, "COST S/H") || !strings.Contains(r.Stdout, "7 recorded requests") {
		t.Errorf("rank-for-removal: %+v", r)
	}
	scaling := func(node string) (s api.Scaling) {
		if err := harness.HTTPDo(node, "GET", "/v1/scaling?model=m", nil, &s); err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := scaling(nodes[0]); s.WaitingUncachedTokens != 0 || s.Workers != workers || len(s.Missing) > 0 {
		t.Errorf("without requests: %+v", s)
	}
	// a request with 13 cached blocks and 10 other blocks waits for the first token
	tokens := slices.Concat(prompt(3), harness.Tokens(9_000_000, 10*harness.BlockSize))
	var chosen api.Selection
	if err := harness.HTTPOnce(nodes[0], "POST", "/v1/select", api.SelectRequest{Query: api.Query{Model: "m",
		Tokens: tokens}, RequestID: "r", Book: true}, &chosen); err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		harness.Eventually(t, "every node has the waiting tokens", func() (bool, string) {
			s := scaling(node)
			return s.WaitingUncachedTokens == chosen.EffectivePrefillTokens && chosen.EffectivePrefillTokens > 0 &&
				s.WaitingPerWorker == float64(s.WaitingUncachedTokens)/workers, fmt.Sprintf("%+v, %+v", s, chosen)
		})
	}
	if err := harness.HTTPOnce(nodes[1], "POST", "/v1/prefill_complete", api.RequestRef{Model: "m", RequestID: "r"},
		&api.Done{}); err != nil {
		t.Fatal(err)
	}
	for _, node := range nodes {
		harness.Eventually(t, "nothing waits after the first token", func() (bool, string) {
			s := scaling(node)
			return s.WaitingUncachedTokens == 0, fmt.Sprintf("%+v", s)
		})
	}
}
