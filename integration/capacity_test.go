package integration

import (
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// routedPrompt is a request of TestCapacity.
type routedPrompt struct {
	worker events.WorkerID
	reused int      // blocks, by the engine
	blocks []string // every block with all blocks before it
}

// hitRate returns the share of the blocks of the last requests that hit in simulated LRU caches, one for each name that
// of returns for a worker.
func hitRate(list []routedPrompt, counted, size int, of func(events.WorkerID) events.WorkerID) float64 {
	caches := map[events.WorkerID][]string{} // the most recently used block is the last one
	hits, all := 0, 0
	for i, q := range list {
		cache := caches[of(q.worker)]
		for _, b := range q.blocks {
			if i >= len(list)-counted {
				if all++; slices.Contains(cache, b) {
					hits++
				}
			}
		}
		for _, b := range slices.Backward(q.blocks) {
			cache = slices.DeleteFunc(cache, func(x string) bool { return x == b })
			cache = append(cache, b)
		}
		caches[of(q.worker)] = cache[max(0, len(cache)-size):]
	}
	return float64(hits) / float64(all)
}

// scrapeCurve waits until the metrics of the first node have a tier of the model's curve, and checks that the other
// nodes have none.
func scrapeCurve(t *testing.T, fleet *harness.Fleet, tier *api.CapacityTier) {
	t.Helper()
	var want []string
	for name, value := range map[string]float64{"hit_ratio": tier.Share, "doubled_gain_ratio": tier.Doubled,
		"last_loss_ratio": tier.Last} {
		want = append(want, fmt.Sprintf("kvatlas_capacity_%s{model=\"m\",tier=%q} %v\n", name, tier.Tier, value))
	}
	scrape := func(node *harness.Indexer) string {
		_, text, err := harness.Request(node.HTTP, http.MethodGet, "/metrics", "")
		if err != nil {
			t.Fatal(err)
		}
		return text
	}
	harness.Eventually(t, "the first node has the curve in its metrics", func() (bool, string) {
		text := scrape(fleet.Nodes[0])
		return !slices.ContainsFunc(want, func(line string) bool { return !strings.Contains(text, line) }),
			fmt.Sprint(want, text)
	})
	for _, node := range fleet.Nodes[1:] {
		if strings.Contains(scrape(node), "kvatlas_capacity_") {
			t.Error("another node has the curve in its metrics")
		}
	}
}

// TestCapacity sends requests to three nodes with eight engines in turn. Every node's curves are the hit rates of
// simulated caches with the requests of all nodes.
func TestCapacity(t *testing.T) {
	t.Parallel()
	const size, room, workers = harness.BlockSize, 40, 8
	fleet := harness.StartFleet(t, harness.FleetConfig{Nodes: 3, Workers: workers, Capacity: room})
	asks := fleet.Asks
	ctx := harness.Context(t)
	r := rand.New(rand.NewPCG(1, 2))
	var sent []routedPrompt
	for i := range 600 {
		var tokens api.Tokens
		var q routedPrompt
		prefix := ""
		for depth := range 4 + r.IntN(9) {
			choice := r.IntN(1 + depth/2)
			prefix += fmt.Sprint(choice, ".")
			q.blocks = append(q.blocks, prefix)
			tokens = append(tokens, harness.Tokens(1000*depth+100*choice, size)...)
		}
		s, err := asks[i%len(asks)].Select(ctx, &api.SelectRequest{Query: api.Query{Model: "m", BlockSize: size,
			Tokens: tokens}})
		if err != nil {
			t.Fatal(err)
		}
		if q.reused, err = fleet.Engines[s.Worker].Serve(tokens, nil); err != nil {
			t.Fatal(err)
		}
		q.worker = s.Worker
		sent = append(sent, q)
	}
	total := 0
	for _, q := range sent {
		total += len(q.blocks)
	}
	counted, blocks, reused := len(sent), total, 0 // of the later half: whole requests
	for ; total-blocks < total/2; counted-- {
		blocks -= len(sent[len(sent)-counted].blocks)
	}
	for _, q := range sent[len(sent)-counted:] {
		reused += q.reused
	}
	for i, c := range asks {
		var got *api.Capacity
		var err error
		harness.Eventually(t, fmt.Sprintf("node %d has the requests of all nodes", i), func() (bool, string) {
			got, err = c.Capacity(ctx, &api.CapacityRequest{Model: "m"})
			return err == nil && int(got.Blocks) == blocks, fmt.Sprintf("%+v, %v", got, err)
		})
		if counted < 200 || got.Rate != 1 || len(got.Nodes) != 3 || got.Missing != nil || len(got.Points) < 10 ||
			!got.Routed || got.Dropped != 0 || got.Skipped != 0 {
			t.Fatalf("node %d, %d requests: %+v", i, counted, got)
		}
		all := func(events.WorkerID) events.WorkerID { return "" }
		each := func(w events.WorkerID) events.WorkerID { return w }
		for _, p := range got.Points {
			if want := hitRate(sent, counted, int(p.Blocks), all); math.Abs(p.Shared-want) > 1e-9 {
				t.Errorf("node %d: %d blocks hit %v, want %v", i, p.Blocks, p.Shared, want)
			}
			if p.Blocks%uint64(got.Workers) != 0 {
				continue
			}
			want := hitRate(sent, counted, int(p.Blocks)/got.Workers, each)
			if math.Abs(*p.Routed-want) > 1e-9 {
				t.Errorf("node %d: %d blocks of %d workers hit %v, want %v", i, p.Blocks, got.Workers, *p.Routed, want)
			}
		}
		if len(got.Tiers) != 1 || got.Tiers[0].Tier != "device" || got.Tiers[0].Blocks != workers*room ||
			got.Tiers[0].Source != api.CapacityRegistered || len(got.Advice) < 2 ||
			!strings.HasPrefix(got.Advice[0], "doubling device memory adds ") {
			t.Errorf("node %d: %+v, %q", i, got.Tiers, got.Advice)
			continue
		}
		if want := float64(reused) / float64(blocks); math.Abs(got.Tiers[0].Share-want) > 1e-9 {
			t.Errorf("node %d: the device memory hits %v, but the engines reused %v", i, got.Tiers[0].Share, want)
		}
	}
	got, err := asks[0].Capacity(ctx, &api.CapacityRequest{Model: "m"})
	if err != nil {
		t.Fatal(err)
	}
	scrapeCurve(t, fleet, &got.Tiers[0])
	out := harness.Run(t, "indexer", "capacity", "--nats", fleet.NATS, "--model", "m")
	if out.Code != 0 || !strings.Contains(out.Stdout, "doubling device memory adds ") ||
		!strings.Contains(out.Stdout, "AS ROUTED") {
		t.Errorf("%+v", out)
	}
	for path, says := range map[string]string{
		"/v1/capacity?model=m": `"points":[{"blocks":`, "/v1/capacity?model=nobody": "unknown_model",
		"/v1/capacity": "missing_model",
	} {
		if _, text, err := harness.Request(fleet.Nodes[0].HTTP, http.MethodGet, path, ""); err != nil ||
			!strings.Contains(text, says) {
			t.Errorf("%s: %s, %v", path, text, err)
		}
	}
}
