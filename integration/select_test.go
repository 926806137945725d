package integration

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// TestSelect runs three nodes that choose among two engines with events and a worker without events. A request goes to
// the worker with the prefix, until its load is too high. All nodes have a booking of a node, and drained workers are
// not chosen.
func TestSelect(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	nodes := make([]*harness.Indexer, 3)
	for i := range nodes {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--http-listen", "127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes[i] = x
	}
	one, two := harness.StartSimEngine(t), harness.StartSimEngine(t)
	harness.StartSimShim(t, one, nats, "w1", "--serving-endpoint", "http://w1:8000")
	harness.StartSimShim(t, two, nats, "w2")
	prompt := harness.Tokens(1, 10*harness.BlockSize)
	harness.ServePrompt(t, one, prompt[:6*harness.BlockSize])
	harness.ServePrompt(t, two, harness.Tokens(9000, harness.BlockSize))
	nodes[0].WaitDepth(t, "m", prompt, "w1", 6)
	if status, text, err := harness.Request(nodes[1].HTTP, "POST", "/v1/workers", fmt.Sprintf(
		`{"instance":"w3","model":"m","block_size":%d,"events":"none"}`, harness.BlockSize)); err != nil || status != 200 {
		t.Fatal(status, text, err)
	}
	ctx := harness.Context(t)
	var asks []*client.Client
	for _, x := range nodes {
		c := harness.Ask(t, x.HTTP)
		asks = append(asks, c)
	}
	over, err := client.NATS(connectNATS(t, "nats://"+nats), "default", client.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer over.Close()
	request := func(id string) *api.SelectRequest {
		return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}, RequestID: id, Book: id != "",
			Policy: "dynamo"}
	}
	for i, c := range append(asks, over) {
		harness.Eventually(t, fmt.Sprintf("client %d gets three workers, and w1", i), func() (bool, string) {
			s, err := c.Select(ctx, request(""))
			return err == nil && s.Candidates == 3 && s.Worker == "w1" && s.Endpoint == "http://w1:8000" && s.Device == 6 &&
				s.CachedTokens == 6*harness.BlockSize && s.Complete, fmt.Sprintf("%+v %v", s, err)
		})
	}

	// In blocks, w1 costs 10 - 6 of prefill and 10 of decode; a booking there adds 4 of prefill, and shares its blocks
	// with the next request. The other workers cost 10 + 10.
	s, err := asks[0].Select(ctx, request("r1"))
	if err != nil || s.Worker != "w1" || !s.Booked || s.Cost != 14 {
		t.Fatalf("%+v, %v", s, err)
	}
	same := func(want api.RankLoad) {
		t.Helper()
		for i, c := range append(asks, over) {
			harness.Eventually(t, fmt.Sprintf("client %d gets the load", i), func() (bool, string) {
				list, err := c.Loads(ctx, "m")
				return err == nil && len(list.Models) == 1 && len(list.Models[0].Ranks) == 3 &&
					reflect.DeepEqual(list.Models[0].Ranks[0], want), fmt.Sprintf("%+v %v", list, err)
			})
		}
	}
	same(api.RankLoad{Worker: "w1", ActivePrefillTokens: 4 * harness.BlockSize, ActiveBlocks: 10, ActiveRequests: 1})
	if _, err := asks[1].Select(ctx, request("r1")); client.CodeOf(err) != api.CodeConflict {
		t.Errorf("the id again, on another node: %v", err)
	}
	if s, err = asks[1].Select(ctx, request("r2")); err != nil || s.Worker != "w1" || s.Cost != 18 {
		t.Fatalf("%+v, %v", s, err)
	}
	same(api.RankLoad{Worker: "w1", ActivePrefillTokens: 8 * harness.BlockSize, ActiveBlocks: 10, ActiveRequests: 2})
	if s, err = asks[2].Select(ctx, request("")); err != nil || s.Worker == "w1" || s.Cost != 20 {
		t.Fatalf("%+v, %v", s, err) // w1 costs 22 now
	}
	p, err := over.PotentialLoads(ctx, &api.PotentialRequest{Prompt: api.Prompt{Model: "m", Tokens: prompt}})
	want := []api.PotentialLoad{
		{Worker: "w1", PotentialPrefillTokens: 12 * harness.BlockSize, PotentialDecodeBlocks: 10, ActiveRequests: 2},
		{Worker: "w2", PotentialPrefillTokens: 10 * harness.BlockSize, PotentialDecodeBlocks: 10},
		{Worker: "w3", PotentialPrefillTokens: 10 * harness.BlockSize, PotentialDecodeBlocks: 10},
	}
	if err != nil || !reflect.DeepEqual(p.Ranks, want) {
		t.Errorf("%+v, %v", p, err)
	}

	// A booking on a node is ended on another node, and the bookings of a killed node stay.
	nodes[0].Kill()
	if err := asks[2].PrefillComplete(ctx, "m", "r1"); err != nil {
		t.Error(err)
	}
	fraction := 0.5
	output := &api.RequestRef{Model: "m", RequestID: "r2", DecayFraction: &fraction}
	if err := asks[1].OutputBlock(ctx, output); err != nil {
		t.Error(err)
	}
	asks = asks[1:]
	// the output block weighs a half, and so rounds up
	same(api.RankLoad{Worker: "w1", ActivePrefillTokens: 4 * harness.BlockSize, ActiveBlocks: 11, ActiveRequests: 2})
	for _, id := range []string{"r1", "r2"} {
		if err := over.Free(ctx, "m", id); err != nil {
			t.Error(err)
		}
	}
	same(api.RankLoad{Worker: "w1"})

	// By hand.
	file := filepath.Join(t.TempDir(), "prompt.json")
	if err := os.WriteFile(file, []byte("["+harness.CommaList(prompt)+"]"), 0o600); err != nil {
		t.Fatal(err)
	}
	r := harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens-file", file, "--explain",
		"--policy", "dynamo")
	if r.Code != 0 || !strings.Contains(r.Stdout, "worker w1 rank 0 at http://w1:8000, by dynamo from 3 candidates") ||
		!strings.Contains(r.Stdout, "-6.000") {
		t.Errorf("select --explain: %+v", r)
	}
	if r := harness.Run(t, "indexer", "workers", "drain", "w1", "--nats", nats); r.Code != 0 {
		t.Fatalf("drain: %+v", r)
	}
	for i, c := range append(asks, over) {
		harness.Eventually(t, fmt.Sprintf("client %d gets another worker", i), func() (bool, string) {
			s, err := c.Select(ctx, request(""))
			return err == nil && s.Worker != "w1", fmt.Sprintf("%+v %v", s, err)
		})
	}
	r = harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens-file", file, "--pin", "w1",
		"--explain", "--json")
	if r.Code != 1 || !strings.Contains(r.Stdout, `"no_workers"`) || !strings.Contains(r.Stdout, "drain") {
		t.Errorf("select of a drained worker: %+v", r)
	}
	if r := harness.Run(t, "indexer", "loads", "--nats", nats); r.Code != 0 || !strings.Contains(r.Stdout, "w1") {
		t.Errorf("loads: %+v", r)
	}
	if r := harness.Run(t, "indexer", "select", "--nats", nats, "--model", "m", "--tokens-file", file, "--policy",
		"best"); r.Code != 1 || !strings.Contains(r.Stderr, "least_load") {
		t.Errorf("select with an unknown policy: %+v", r)
	}
}
