package integration

import (
	"context"
	"fmt"
	"maps"
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// TestFunnel runs three nodes, and loses tokens for every cause of the funnel. Every request goes to the next node, so
// nodes must query each other's records.
func TestFunnel(t *testing.T) {
	t.Parallel()
	const size = harness.BlockSize
	nats := harness.StartNATS(t)
	nodes := make([]*harness.Indexer, 3)
	var asks []*client.Client
	for i := range nodes {
		x := &harness.Indexer{NATS: nats, Process: harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id",
			fmt.Sprint("n", i), "--partitions", "4", "--partition-replicas", "1", "--http-listen", "127.0.0.1:0")}
		x.HTTP = x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		nodes[i] = x
		c := harness.Ask(t, x.HTTP)
		asks = append(asks, c)
	}
	ctx := harness.Context(t)
	ns := harness.OpenNamespace(t, ctx, nats)

	small, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: size, Capacity: 40})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(small.Crash)
	large, third := harness.StartSimEngine(t), harness.StartSimEngine(t)
	harness.StartSimShim(t, small, nats, "w1")
	harness.StartSimShim(t, large, nats, "w2")
	dying := harness.StartSimShim(t, third, nats, "w3", "--lease", "2s")
	prompt := func(n, blocks, rest int) api.Tokens {
		return harness.Tokens(n*100_000, blocks*size+rest)
	}

	turn := 0
	next := func() *client.Client { turn++; return asks[turn%len(asks)] }
	funnel := func(model string) *api.Funnel { // waits until all earlier requests are recorded
		c, f := next(), (*api.Funnel)(nil)
		harness.Eventually(t, "all nodes answer in time", func() (bool, string) {
			var err error
			f, err = c.Funnel(ctx, &api.FunnelRequest{Model: model, Since: "30m"})
			return err == nil && len(f.Missing) == 0 && len(f.Nodes) == len(nodes), fmt.Sprintf("%+v, %v", f, err)
		})
		return f
	}
	// holds waits until a worker holds the given number of a prompt's blocks on all nodes. Queries with explain are not
	// recorded.
	holds := func(model string, p api.Tokens, worker events.WorkerID, blocks uint32) {
		t.Helper()
		for i, c := range asks {
			harness.Eventually(t, fmt.Sprintf("node %d sees %d blocks of %s", i, blocks, worker), func() (bool, string) {
				a, err := c.Find(ctx, &api.Query{Model: model, BlockSize: size, Tokens: p, Explain: true})
				if err != nil || !a.Complete {
					return false, fmt.Sprintf("%+v %v", a, err)
				}
				held := uint32(0)
				for _, o := range a.Workers {
					if o.Instance == worker {
						held = o.Device + o.Host
					}
				}
				return held == blocks, fmt.Sprintf("%+v", a.Workers)
			})
		}
	}
	want := map[string]map[api.FunnelCause]float64{}
	steps := map[string][5]float64{}
	lose := func(model string, of [5]int, lost map[api.FunnelCause]int) {
		if want[model] == nil {
			want[model] = map[api.FunnelCause]float64{}
		}
		sum := steps[model]
		for i, n := range of {
			sum[i] += float64(n)
		}
		steps[model] = sum
		for cause, n := range lost {
			if want[model][cause] += float64(n); want[model][cause] == 0 {
				delete(want[model], cause)
			}
		}
		f, have := funnel(model), map[api.FunnelCause]float64{}
		for i, step := range f.Steps {
			if float64(step.Tokens) != sum[i] {
				t.Errorf("%s: %v tokens are %s, want %v", model, step.Tokens, step.Step, sum[i])
			}
			for _, l := range step.Lost {
				have[l.Cause] += float64(l.Tokens)
			}
		}
		if !maps.Equal(have, want[model]) {
			t.Fatalf("%s after %v:\nlost %v\nwant %v", model, lost, have, want[model])
		}
	}
	find := func(q api.Query) {
		t.Helper()
		if q.BlockSize == 0 {
			q.BlockSize = size
		}
		if _, err := next().Find(ctx, &q); err != nil {
			t.Fatal(err)
		}
	}
	selects := func(id string, p api.Tokens, workers ...events.WorkerID) *api.Selection {
		t.Helper()
		s, err := next().Select(ctx, &api.SelectRequest{RequestID: id, Policy: "dynamo",
			Query: api.Query{Model: "m", BlockSize: size, Tokens: p, Workers: workers}})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	report := func(id string, cached uint64) {
		t.Helper()
		if err := next().Report(ctx, &api.Report{RequestID: id, CachedTokens: cached}); err != nil {
			t.Fatal(err)
		}
	}
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d may choose three workers", i), func() (bool, string) {
			p, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: prompt(99, 1, 0), Explain: true}})
			return err == nil && p.Candidates == 3, fmt.Sprintf("%+v %v", p, err)
		})
	}
	type lost = map[api.FunnelCause]int

	// from asked to seen
	one := prompt(1, 10, 8)
	selects("a1", one, "w1")
	lose("m", [5]int{168}, lost{api.CauseNew: 160, api.CausePartialBlock: 8})
	harness.ServePrompt(t, small, one)
	holds("m", one, "w1", 10)
	salted := prompt(2, 4, 0)
	find(api.Query{Model: "m", Tokens: salted, CacheSalt: "a"})
	lose("m", [5]int{64}, lost{api.CauseNew: 64})
	for _, other := range []api.Query{{CacheSalt: "b"}, {LoRA: "l"}, {LoRA: "l", CacheSalt: "c"}} {
		other.Model, other.Tokens = "m", salted
		find(other) // of another tenant, without a report
		lose("m", [5]int{64}, lost{api.CauseNew: 64})
	}
	for _, same := range []api.Query{{LoRA: "k"}, {LoRA: "l", CacheSalt: "a"}, {LoRA: "k", CacheSalt: "c"}} {
		same.Model, same.Tokens = "m", salted
		find(same)
		lose("m", [5]int{64}, lost{api.CauseOtherSpace: 64})
	}

	// from selected to reused
	selects("a2", one, "w1")
	lose("m", [5]int{168, 160, 160, 160}, lost{api.CausePartialBlock: 8, api.CauseNotReported: 160})
	report("a2", 144)
	lose("m", [5]int{4: 144}, lost{api.CauseNotReported: -160, api.CauseLastBlock: 16})
	longer := append(one[:160:160], prompt(3, 2, 0)...)
	selects("a3", longer, "w1")
	lose("m", [5]int{192, 160, 160, 160}, lost{api.CauseNew: 32, api.CauseNotReported: 160})
	for i, c := range asks { // every node lists the requests of all nodes
		list, err := c.Recorded(ctx, &api.RecordedRequest{Model: "m", Limit: 2})
		if err != nil || len(list.Requests) != 2 || !list.More || list.Missing != nil || list.Requests[1].RequestID != "a2" {
			t.Fatalf("node %d lists %+v, %v", i, list, err)
		}
		got, err := c.Recorded(ctx, &api.RecordedRequest{Model: "m", ID: list.Requests[0].ID})
		if err != nil || len(got.Requests) != 1 {
			t.Fatalf("node %d shows %+v, %v", i, got, err)
		}
		r := got.Requests[0]
		if r.RequestID != "a3" || r.Worker != "w1" || r.Selected != 10 || r.Held != 10 || r.Blocks != 12 ||
			r.ISLTokens != 192 || r.Decision != "best" {
			t.Errorf("node %d shows %+v", i, r)
		}
		var hashes api.Hashes
		for _, text := range r.Hashes {
			h, err := strconv.ParseUint(text, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			hashes = append(hashes, h)
		}
		a, err := c.Find(ctx, &api.Query{Model: "m", BlockSize: size, Hashes: hashes, Explain: true})
		if err != nil || a.Blocks != 12 || a.Workers[0].Instance != "w1" || a.Workers[0].Device != 10 {
			t.Errorf("query by hashes: %+v, %v", a, err)
		}
		_, err = c.Recorded(ctx, &api.RecordedRequest{Model: "m", ID: "1-n0"})
		if client.CodeOf(err) != api.CodeUnknownRequest {
			t.Errorf("a request that is no longer kept: %v", err)
		}
	}
	report("a3", 128)
	lose("m", [5]int{4: 128}, lost{api.CauseNotReported: -160, api.CauseEngine: 32})
	if err := next().Report(ctx, &api.Report{RequestID: "a3"}); client.CodeOf(err) != api.CodeUnknownRequest {
		t.Errorf("a second report: %v", err)
	}
	selects("a4", one, "w1")
	other := prompt(4, 40, 0)
	harness.ServePrompt(t, small, other)
	holds("m", one, "w1", 0)
	report("a4", 0)
	lose("m", [5]int{168, 160, 160, 160}, lost{api.CausePartialBlock: 8, api.CauseEvictedLate: 160})

	// from seen to held
	find(api.Query{Model: "m", Tokens: one})
	lose("m", [5]int{168, 160}, lost{api.CausePartialBlock: 8, api.CauseEvicted: 160})
	holds("m", other, "w1", 40)
	find(api.Query{Model: "m", Tokens: other})
	lose("m", [5]int{640, 640, 640}, lost{api.CauseNotRouted: 640})
	if err := small.Clear(); err != nil {
		t.Fatal(err)
	}
	holds("m", other, "w1", 0)
	find(api.Query{Model: "m", Tokens: other})
	lose("m", [5]int{640, 640}, lost{api.CauseCleared: 640})
	never := prompt(5, 6, 0)
	selects("b1", never, "w2")
	lose("m", [5]int{96}, lost{api.CauseNew: 96})
	find(api.Query{Model: "m", Tokens: never})
	lose("m", [5]int{96, 96}, lost{api.CauseNeverStored: 96})
	mistaken, instead := prompt(6, 5, 0), prompt(7, 5, 0)
	selects("b2", mistaken, "w2")
	lose("m", [5]int{80}, lost{api.CauseNew: 80})
	harness.ServePrompt(t, large, instead)
	holds("m", instead, "w2", 5)
	find(api.Query{Model: "m", Tokens: mistaken})
	lose("m", [5]int{80, 80}, lost{api.CauseTokens: 80})
	gone := prompt(8, 7, 0)
	harness.ServePrompt(t, third, gone)
	holds("m", gone, "w3", 7)
	third.Crash()
	dying.Kill()
	holds("m", gone, "w3", 0)
	find(api.Query{Model: "m", Tokens: gone})
	lose("m", [5]int{112, 112}, lost{api.CauseWorkerGone: 112})

	// from held to selected
	shared := prompt(9, 10, 0)
	harness.ServePrompt(t, large, shared[:96])
	holds("m", shared, "w2", 6)
	find(api.Query{Model: "m", Tokens: shared[:96], Workers: []events.WorkerID{"w1"}})
	lose("m", [5]int{96, 96}, lost{api.CauseNotAllowed: 96})
	heavy := prompt(12, 20, 0)
	if _, err := next().Select(ctx, &api.SelectRequest{RequestID: "heavy", Book: true,
		Query: api.Query{Model: "m", Tokens: heavy, Workers: []events.WorkerID{"w2"}}}); err != nil {
		t.Fatal(err)
	}
	lose("m", [5]int{320}, lost{api.CauseNew: 320})
	for i, c := range asks { // all nodes have the same load of w2
		harness.Eventually(t, fmt.Sprintf("node %d has the load of w2", i), func() (bool, string) {
			list, err := c.Loads(ctx, "m")
			return err == nil && len(list.Models) == 1 && list.Models[0].Requests == 1, fmt.Sprintf("%+v %v", list, err)
		})
	}
	if s := selects("", shared[:96]); s.Worker != "w1" {
		t.Fatalf("%+v", s)
	}
	lose("m", [5]int{96, 96, 96}, lost{api.CauseLoad: 96})
	if r := harness.Run(t, "indexer", "workers", "drain", "w2", "--nats", nats); r.Code != 0 {
		t.Fatalf("drain: %+v", r)
	}
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d chooses w2 no more", i), func() (bool, string) {
			s, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: prompt(99, 1, 0), Explain: true}})
			if err != nil {
				return false, err.Error()
			}
			for _, d := range s.Explanation.Dropped {
				if d.Worker == "w2" {
					return true, ""
				}
			}
			return false, fmt.Sprintf("%+v", s)
		})
	}
	selects("", shared[:96])
	lose("m", [5]int{96, 96, 96}, lost{api.CauseNotEligible: 96})

	// Another model with events as from shims: with tiers and block sizes that the simulated engines do not have.
	hasher, err := events.NewHasher(32, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	wide := prompt(10, 6, 0)
	locals := hasher.Hash(nil, wide)
	stored := func(size uint32, tier events.Tier, locals []events.LocalHash) *events.Batch {
		e := events.Event{Kind: events.Stored, Tier: tier, Locals: locals}
		for i := range locals {
			e.Blocks = append(e.Blocks, events.BlockHash(1000*size)+events.BlockHash(i))
		}
		return &events.Batch{Incarnation: 1, FirstID: 1, Model: "x", BlockSize: size, Events: []events.Event{e}}
	}
	harness.PublishAs(t, ctx, ns, "x1", stored(32, events.Device, locals))
	if hasher, err = events.NewHasher(size, events.Space{}); err != nil {
		t.Fatal(err)
	}
	low := prompt(11, 8, 0)
	harness.PublishAs(t, ctx, ns, "x3", stored(size, events.Device, hasher.Hash(nil, low)))
	holds("x", low, "x3", 8)
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d has both block sizes", i), func() (bool, string) {
			a, err := c.Find(ctx, &api.Query{Model: "x", BlockSize: 32, Tokens: wide, Explain: true})
			return err == nil && len(a.Workers) == 1 && a.Workers[0].Device == 3, fmt.Sprintf("%+v %v", a, err)
		})
	}
	find(api.Query{Model: "x", BlockSize: size, Tokens: wide})
	lose("x", [5]int{96}, lost{api.CauseOtherBlockSize: 96})
	// A registration selects a block size.
	if status, text, err := harness.Request(nodes[1].HTTP, "POST", "/v1/workers", fmt.Sprintf(
		`{"instance":"x2","model":"x","block_size":%d,"events":"none"}`, size)); err != nil || status != 200 {
		t.Fatal(status, text, err)
	}
	harness.PublishAs(t, ctx, ns, "x2", stored(size, events.Host, hasher.Hash(nil, low[:64])))
	holds("x", low, "x2", 4)
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d may choose x2", i), func() (bool, string) {
			s, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "x",
				BlockSize: size, Tokens: low}})
			return err == nil, fmt.Sprintf("%+v %v", s, err)
		})
	}
	if s, err := next().Select(ctx, &api.SelectRequest{RequestID: "d1", Query: api.Query{Model: "x",
		BlockSize: size, Tokens: low}}); err != nil || s.Worker != "x2" || s.Host != 4 {
		t.Fatalf("%+v, %v", s, err)
	}
	report("d1", 0)
	lose("x", [5]int{128, 128, 128, 64}, lost{api.CauseWorkerUnknown: 64, api.CauseLowerTier: 64})
	candidates := func(n int) {
		t.Helper()
		for i, c := range asks {
			harness.Eventually(t, fmt.Sprintf("node %d may choose %d workers", i, n), func() (bool, string) {
				s, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "x",
					BlockSize: size, Tokens: low, Explain: true}})
				return err == nil && s.Candidates == n, fmt.Sprintf("%+v %v", s, err)
			})
		}
	}
	if status, text, err := harness.Request(nodes[1].HTTP, "POST", "/v1/workers", fmt.Sprintf(
		`{"instance":"x3","model":"x","block_size":%d,"events":"none"}`, size)); err != nil || status != 200 {
		t.Fatal(status, text, err)
	}
	candidates(2)
	if status, text, err := harness.Request(nodes[0].HTTP, "DELETE", "/v1/workers/x3", ""); err != nil || status != 200 {
		t.Fatal(status, text, err)
	}
	candidates(1)
	if s, err := next().Select(ctx, &api.SelectRequest{RequestID: "d2", Query: api.Query{Model: "x",
		BlockSize: size, Tokens: low}}); err != nil || s.Worker != "x2" {
		t.Fatalf("%+v, %v", s, err)
	}
	report("d2", 0)
	lose("x", [5]int{128, 128, 128, 64}, lost{api.CauseWorkerGone: 64, api.CauseLowerTier: 64})

	// The output for people and programs.
	for model := range want {
		f := funnel(model)
		asked := steps[model][0]
		for i, step := range f.Steps {
			unknown := step.Step == api.StepReused && f.Reported == 0
			if unknown != (step.Share == nil) || unknown != step.NotReported {
				t.Fatalf("%s: %d reports, %+v", model, f.Reported, step)
			}
			if !unknown && math.Abs(*step.Share-steps[model][i]/asked) > 0.01 {
				t.Errorf("%s: the share of %s is %v", model, step.Step, *step.Share)
			}
			for _, l := range step.Lost {
				if l.Cause == api.CauseEvicted && (len(l.Workers) != 1 || l.Workers[0].Worker != "w1" ||
					l.Workers[0].Tier != "device") {
					t.Errorf("evicted: %+v", l)
				}
			}
		}
		buckets := uint64(0)
		for _, b := range f.Buckets {
			buckets += b.Asked
		}
		if float64(buckets) != asked {
			t.Errorf("%s: the buckets have %d tokens of %v", model, buckets, asked)
		}
	}
	r := harness.Run(t, "indexer", "funnel", "--nats", nats, "--model", "m")
	if r.Code != 0 || !strings.Contains(r.Stdout, "tokenizer_mismatch") || !strings.Contains(r.Stdout, "w1 device 160") {
		t.Errorf("%+v", r)
	}
	for path, says := range map[string]string{
		"/v1/funnel?model=m&since=10m": `"step":"reused"`, "/v1/funnel?model=nobody": "unknown_model",
		"/v1/funnel": "missing_model", "/v1/funnel?model=m&since=2h": "no more than 1h0m0s is kept",
		"/v1/funnel?modell=m":   "accepts the parameters model and since once",
		"/v1/funnel?model=%ff":  "the URL's parameter model is not valid UTF-8",
		"/v1/funnel?model=m {}": "parameters in the URL and a body",
	} {
		path, body, _ := strings.Cut(path, " ")
		if _, text, err := harness.Request(nodes[0].HTTP, http.MethodGet, path, body); err != nil ||
			!strings.Contains(text, says) {
			t.Errorf("%s: %s, %v", path, text, err)
		}
	}
	asked, held := 0.0, map[string]float64{}
	for _, x := range nodes {
		_, text, err := harness.Request(x.HTTP, http.MethodGet, "/metrics", "")
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(text) {
			var n float64
			if _, err := fmt.Sscanf(line, `kvatlas_route_asked_tokens_total{model="m"} %g`, &n); err == nil {
				asked += n
			}
			for _, of := range []string{"best", "selected"} {
				for _, tier := range []string{"device", "host", "disk", "external"} {
					if _, err := fmt.Sscanf(line, "kvatlas_route_"+of+`_cached_tokens_total{model="x",tier="`+tier+`"} %g`,
						&n); err == nil {
						held[of+" "+tier] += n
					}
				}
			}
		}
	}
	if asked != steps["m"][0] {
		t.Errorf("the metrics have %v tokens asked, want %v", asked, steps["m"][0])
	}
	tiers := map[string]float64{"best device": steps["x"][2], "best host": 0, "best disk": 0, "best external": 0,
		"selected device": 0, "selected host": steps["x"][3], "selected disk": 0, "selected external": 0}
	if !maps.Equal(held, tiers) {
		t.Errorf("the metrics have %v, want %v", held, tiers)
	}
}
