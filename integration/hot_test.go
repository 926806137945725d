package integration

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/tools/openaisim"
)

// TestHotPrefixes runs three nodes and eight engines that serve completions. An operator copies a prefix by its tokens.
// Then requests on all nodes make another prefix hot: a node copies it to a further worker without an operator, later
// requests reuse the copy, and all nodes report the copy with the same use.
func TestHotPrefixes(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	nats := harness.StartNATS(t)
	var nodes []string
	var clients []*client.Client
	for i := range 3 {
		n := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i), "--partitions", "8",
			"--partition-replicas", "1", "--http-listen", "127.0.0.1:0", "--warm-up", "60")
		nodes = append(nodes, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
		c := harness.Ask(t, nodes[i])
		clients = append(clients, c)
	}
	const workers, common = 8, 320 // blocks of the hot prefix
	popular := harness.Tokens(1, common*harness.BlockSize)
	for i := range workers {
		sim := harness.StartSimEngine(t)
		engine, err := openaisim.Start("127.0.0.1:0", openaisim.Options{Model: "m", BlockSize: harness.BlockSize, Tokens: 1,
			Serve: sim.Serve})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(engine.Kill)
		harness.StartSimShim(t, sim, nats, fmt.Sprint("w", i), "--serving-endpoint", "http://"+engine.Addr)
		harness.ServePrompt(t, sim, harness.Tokens(1_000_000+100*i, harness.BlockSize))
		if i == 0 {
			harness.ServePrompt(t, sim, popular)
		}
	}
	depths := func(tokens []uint32) (of map[string]uint32, found int) {
		of = map[string]uint32{}
		a, err := clients[0].Find(ctx, &api.Query{Model: "m", Tokens: tokens, Diagnostic: true, Idle: true})
		if err != nil {
			return of, 0
		}
		for _, o := range a.Workers {
			of[string(o.Instance)] = o.Device
		}
		return of, len(a.Workers)
	}
	for i, c := range clients {
		harness.Eventually(t, fmt.Sprintf("node %d may choose all workers", i), func() (bool, string) {
			s, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: popular[:harness.BlockSize], Explain: true}})
			return err == nil && s.Candidates == workers, fmt.Sprintf("%+v %v", s, err)
		})
	}
	harness.Eventually(t, "eight workers, and the first holds the prefix", func() (bool, string) {
		of, n := depths(popular)
		var list api.HotList
		err := harness.HTTPDo(nodes[2], "GET", "/v1/prefixes/hot?model=m", nil, &list)
		return n == workers && of["w0"] == common && err == nil && len(list.Missing) == 0, fmt.Sprint(of, list, err)
	})

	manual := harness.Tokens(500_000, 20*harness.BlockSize+3)
	request := &api.WarmRequest{Model: "m", Worker: "w7", Tokens: manual}
	made, err := clients[1].Warm(ctx, request)
	if err != nil || made.Blocks != 20 || made.Computed != 20*harness.BlockSize || made.Worker != "w7" {
		t.Fatalf("%+v, %v", made, err)
	}
	harness.Eventually(t, "the copy is in the index", func() (bool, string) {
		of, _ := depths(manual)
		return of["w7"] == 20, fmt.Sprint(of)
	})
	for what, refused := range map[string]struct {
		r    api.WarmRequest
		want api.Code
	}{
		"a second copy":     {*request, api.CodeConflict},
		"an unknown worker": {api.WarmRequest{Model: "m", Worker: "w9", Tokens: manual}, api.CodeUnknownWorker},
		"an unknown hash":   {api.WarmRequest{Model: "m", Worker: "w1", Hash: "00000000000000ab"}, api.CodeUnknownRequest},
		"half a block":      {api.WarmRequest{Model: "m", Worker: "w1", Tokens: manual[:7]}, api.CodeMalformed},
	} {
		if _, err := clients[0].Warm(ctx, &refused.r); client.CodeOf(err) != refused.want {
			t.Errorf("%s: %v", what, err)
		}
	}

	// Four requests for the prefix are always under way, so they wait at the holder, and a copy would help them.
	n := 0
	var under []string
	ask := func() {
		id := fmt.Sprint("r", n)
		tail := harness.Tokens(10_000_000+10_000*n, 64*harness.BlockSize)
		if _, err := clients[n%3].Select(ctx, &api.SelectRequest{RequestID: id, Book: true,
			Query: api.Query{Model: "m", Tokens: slices.Concat(popular, tail)}}); err != nil {
			t.Fatal(err)
		}
		if under = append(under, id); len(under) > 4 {
			err := clients[n%3].Free(ctx, "m", under[0])
			if code := client.CodeOf(err); code != "" && code != api.CodeUnknownRequest {
				t.Fatal(err)
			}
			under = under[1:]
		}
		n++
	}
	var list api.HotList
	var automatic *api.PrefixCopy
	harness.Eventually(t, "a node copies the prefix, and requests reuse the copy", func() (bool, string) {
		ask()
		if err := harness.HTTPDo(nodes[n%3], "GET", "/v1/prefixes/hot?model=m", nil, &list); err != nil {
			return false, err.Error()
		}
		automatic = nil
		for i := range list.Copies {
			if c := &list.Copies[i]; c.Automatic && c.Blocks == common && c.Requests > 0 && c.SavedMS > 0 {
				automatic = c
			}
		}
		return automatic != nil, fmt.Sprintf("%d requests: %+v", n, list)
	})
	if automatic.Worker == "w0" || automatic.Reused != automatic.Requests*automatic.Computed || automatic.Computed == 0 {
		t.Errorf("%+v", automatic)
	}
	if of, _ := depths(popular); of[string(automatic.Worker)] != common {
		t.Errorf("the copy on %s is not in the index: %v", automatic.Worker, of)
	}
	for _, node := range nodes {
		var other api.HotList
		if err := harness.HTTPDo(node, "POST", "/v1/prefixes/hot", &api.HotRequest{Model: "m"}, &other); err != nil {
			t.Fatal(err)
		}
		if len(other.Copies) < len(list.Copies) || other.Automatic != 60 || len(other.Missing) != 0 {
			t.Errorf("node %s: %+v, another node: %+v", node, other, list)
		}
	}
	r := harness.Run(t, "indexer", "prefixes", "hot", "--nats", nats, "--model", "m")
	if r.Code != 0 || !strings.Contains(r.Stdout, automatic.Hash) || !strings.Contains(r.Stdout, "warm-up") {
		t.Errorf("%+v", r)
	}
	sum := 0
	for _, node := range nodes {
		_, text, err := harness.Request(node, "GET", "/metrics", "")
		if err != nil {
			t.Fatal(err)
		}
		sum += strings.Count(text, "kvatlas_prefix_copies_total{outcome=\"made\"}")
	}
	if sum != 3 {
		t.Errorf("%d nodes count copies", sum)
	}
}
