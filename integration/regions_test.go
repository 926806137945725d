package integration

import (
	"context"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/fleet/regions"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// region is a NATS server with JetStream, nodes and engines.
type region struct {
	name, nats string
	nodes      []*harness.Process
	asks       []*client.Client
	engines    []*enginesim.Engine
}

// leafUser is the NATS user of leaf nodes: it may exchange only digests.
const leafUser = `{ user: region, password: secret, permissions: {
      publish: "kv.v1.default.regions.>", subscribe: "kv.v1.default.regions.>" } }`

// startRegion starts the NATS server of a region. leafnodes is its part of the configuration.
func startRegion(t *testing.T, name, leaf, leafnodes string) *region {
	t.Helper()
	dir, addr := t.TempDir(), loopback.Reserve(t)
	config := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 1TB, domain: %s }\nno_auth_user: kv\n"+
		"authorization { users: [\n    { user: kv, password: kv }\n    %s\n] }\nleafnodes { %s }\n",
		addr, filepath.Join(dir, "js"), name, leaf, leafnodes)
	path := filepath.Join(dir, "nats.conf")
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", path).WaitFor(`Server is ready`)
	return &region{name: name, nats: addr}
}

// add starts nodes and engines of the region.
func (r *region) add(t *testing.T, nodes, engines int, serve ...string) {
	t.Helper()
	for i := range nodes {
		n := harness.Start(t, "indexer", append([]string{"serve", "--nats", r.nats, "--node-id", fmt.Sprint(r.name, i),
			"--partitions", "4", "--partition-replicas", "1", "--http-listen", "127.0.0.1:0", "--region", r.name,
			"--region-interval", "200ms", "--region-max-age", "4s"}, serve...)...)
		ask := harness.Ask(t, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
		r.nodes, r.asks = append(r.nodes, n), append(r.asks, ask)
	}
	for i := range engines {
		e := harness.StartSimEngine(t)
		harness.StartSimShim(t, e, r.nats, fmt.Sprint(r.name, "-w", i))
		r.engines = append(r.engines, e)
	}
}

// held is the longest prefix of a prompt in an engine of the region.
func (r *region) held(prompt []uint32) (blocks int) {
	for _, e := range r.engines {
		blocks = max(blocks, e.Hit(prompt))
	}
	return blocks
}

// findRegions returns the regions' prefixes of a prompt by name.
func findRegions(ctx context.Context, ask *client.Client, prompt []uint32) (map[string]api.RegionPrefix, error) {
	a, err := ask.Find(ctx, &api.Query{Model: "m", Tokens: prompt, Regions: true, Diagnostic: true})
	if err != nil {
		return nil, err
	}
	return byRegion(a.Regions), nil
}

func byRegion(list []api.RegionPrefix) map[string]api.RegionPrefix {
	of := map[string]api.RegionPrefix{}
	for _, p := range list {
		of[p.Region] = p
	}
	return of
}

// regionsWorld has three regions: b and c are leaf nodes of a, over links with delays.
type regionsWorld struct {
	ctx    context.Context
	all    []*region // a, b, c
	toB    *harness.Link
	rng    *rand.Rand
	served [][]uint32

	asked, longer int // awaited prefixes of other regions, and those with false positives
}

func startRegions(t *testing.T, ctx context.Context) *regionsWorld {
	t.Helper()
	w := &regionsWorld{ctx: ctx, rng: rand.New(rand.NewPCG(31, 7))}
	leaf := loopback.Reserve(t)
	a := startRegion(t, "a", leafUser, fmt.Sprintf("listen: %q, no_advertise: true", leaf))
	w.toB = harness.StartLink(t, leaf, 60*time.Millisecond)
	toC := harness.StartLink(t, leaf, 25*time.Millisecond)
	remote := func(link *harness.Link) string {
		return fmt.Sprintf("reconnect: 1, remotes: [ { url: \"nats-leaf://region:secret@%s\" } ]", link.Addr)
	}
	b := startRegion(t, "b", "", remote(w.toB))
	c := startRegion(t, "c", "", remote(toC))
	w.all = []*region{a, b, c}
	a.add(t, 3, 4, "--region-price", "b=40", "--region-price", "c=90")
	b.add(t, 1, 2, "--region-price", "a=40")
	c.add(t, 1, 2)
	return w
}

// serve serves requests of random sessions on random engines of each region.
func (w *regionsWorld) serve(t *testing.T, n int) {
	for range n {
		prompt := harness.Tokens(w.rng.IntN(1<<20), (1+w.rng.IntN(12))*harness.BlockSize)
		if len(w.served) > 0 && w.rng.IntN(2) == 0 {
			other := w.served[w.rng.IntN(len(w.served))]
			prompt = append(other[:len(other):len(other)], prompt...)
			prompt = prompt[:min(len(prompt), 30*harness.BlockSize)]
		}
		w.served = append(w.served, prompt)
		engines := w.all[w.rng.IntN(len(w.all))].engines
		harness.ServePrompt(t, engines[w.rng.IntN(len(engines))], prompt)
	}
}

// await waits until each node reports the true prefixes of prompts in each region. Longer prefixes count as false
// positives.
func (w *regionsWorld) await(t *testing.T, what string, prompts [][]uint32) {
	t.Helper()
	harness.Eventually(t, what, func() (bool, string) {
		asked, longer := 0, 0
		for _, at := range w.all {
			for _, ask := range at.asks {
				for i, prompt := range prompts {
					got, err := findRegions(w.ctx, ask, prompt)
					if err != nil {
						return false, fmt.Sprint(at.name, err)
					}
					for _, of := range w.all {
						p, truth := got[of.name], of.held(prompt)
						blocks := int(p.Blocks)
						if p.State != api.RegionComplete || blocks < truth || p.Local && blocks != truth ||
							int(p.Tokens) != blocks*harness.BlockSize || p.Local != (of == at) ||
							p.DigestBlocks != p.HeldBlocks {
							return false, fmt.Sprintf("prompt %d, region %s has %d blocks: %s reports %+v", i, of.name, truth,
								at.name, p)
						}
						if !p.Local {
							if asked++; blocks > truth {
								longer++
							}
						}
					}
				}
			}
		}
		w.asked, w.longer = w.asked+asked, w.longer+longer
		return true, ""
	})
}

// TestRegions runs three regions with eight engines and five nodes, over links with delays. Each node reports the true
// prefix of each region, except for false positives at the expected rate. A cut changes no local answer, and makes the
// other side unknown. After the cut, each region has the digests of the others again. Removed blocks, and regions
// without nodes, disappear.
func TestRegions(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	w := startRegions(t, ctx)
	a, b, c := w.all[0], w.all[1], w.all[2]
	w.serve(t, 300)
	sample := append([][]uint32{harness.Tokens(1<<21, 40*harness.BlockSize)}, w.served[:60]...)
	w.await(t, "each node reports the prefixes of all regions", sample)
	w.measure(t)

	load, failed := w.load(t)
	got, err := findRegions(ctx, a.asks[1], sample[1])
	if err != nil || got["b"].PriceMS == nil || *got["b"].PriceMS != 40 || *got["c"].PriceMS != 90 ||
		got["a"].PriceMS != nil || got["b"].FalsePositiveRate <= 0 || got["a"].FalsePositiveRate != 0 {
		t.Errorf("prices and rates: %+v, %v", got, err)
	}
	choice, err := a.asks[2].Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
		Tokens: sample[1], Regions: true}})
	if err != nil || len(choice.Regions) != 3 ||
		!reflect.DeepEqual(byRegion(choice.Regions)["b"].PriceMS, got["b"].PriceMS) {
		t.Errorf("the choice has %+v, %v", choice, err)
	}

	w.checkTable(t, sample[1])

	w.toB.Cut()
	state := func(what string, ask *client.Client, want map[string]api.RegionState) {
		t.Helper()
		harness.Eventually(t, what, func() (bool, string) {
			got, err := findRegions(ctx, ask, sample[1])
			is := map[string]api.RegionState{}
			for name, p := range got {
				is[name] = p.State
			}
			return reflect.DeepEqual(is, want), fmt.Sprintf("%+v %v", got, err)
		})
	}
	state("b is unknown in a", a.asks[0], map[string]api.RegionState{"a": "complete", "b": "unknown",
		"c": "complete"})
	state("a and c are unknown in b", b.asks[0], map[string]api.RegionState{"b": "complete", "a": "unknown",
		"c": "unknown"})
	status, err := a.asks[0].Status(ctx)
	if err != nil || !strings.Contains(fmt.Sprint(status.Warnings), "the blocks of region b are unknown") {
		t.Errorf("%v %v", status.Warnings, err)
	}
	cut := harness.Tokens(1<<22, 9*harness.BlockSize)
	harness.ServePrompt(t, b.engines[0], cut)
	for _, r := range w.all {
		for _, ask := range r.asks {
			if p, err := findRegions(ctx, ask, sample[2]); err != nil || p[r.name].Blocks < uint32(r.held(sample[2])) {
				t.Errorf("%s during the cut: %+v, %v", r.name, p, err)
			}
		}
	}
	w.toB.Heal()
	load()
	if n := failed.Load(); n > 0 {
		t.Errorf("%d local queries failed", n)
	}
	w.await(t, "each node reports the prefixes after the cut", append(sample, cut))

	for _, e := range a.engines {
		if err := e.Clear(); err != nil {
			t.Fatal(err)
		}
	}
	w.await(t, "removed blocks are no longer reported", sample)
	c.nodes[0].Stop()
	state("c is unknown without nodes", a.asks[0], map[string]api.RegionState{"a": "complete", "b": "complete",
		"c": "unknown"})
	t.Logf("%d true prefixes of other regions, %d with false positives", w.asked, w.longer)
}

// checkTable compares the table of a node's region with the answer to a program, except for the ages.
func (w *regionsWorld) checkTable(t *testing.T, prompt []uint32) {
	t.Helper()
	a := w.all[0]
	harness.Eventually(t, "the table has the prefixes of all regions", func() (bool, string) {
		out := harness.Run(t, "indexer", "query", "--nats", a.nats, "--model", "m", "--tokens",
			strings.Trim(harness.JSONList(prompt), "[]"), "--regions")
		got, err := findRegions(w.ctx, a.asks[0], prompt)
		if err != nil || out.Code != 0 {
			return false, fmt.Sprintf("%+v %v", out, err)
		}
		lines := map[string][]string{}
		for line := range strings.Lines(out.Stdout) {
			if words := strings.Fields(line); len(words) > 0 {
				lines[words[0]] = words
			}
		}
		price := map[string][]string{"a": {"-", "here"}, "b": {"40", "ms"}, "c": {"90", "ms"}}
		for name, p := range got {
			words := lines[name]
			want := append([]string{name, fmt.Sprint(p.Blocks), fmt.Sprint(p.Tokens)}, price[name]...)
			if len(words) <= len(want) || !reflect.DeepEqual(words[:len(want)], want) ||
				words[len(words)-1] != string(p.State) {
				return false, fmt.Sprintf("%v, want %v and %s\n%s", words, want, p.State, out.Stdout)
			}
		}
		return len(got) == 3 && len(lines["REGION"]) == 7, out.Stdout
	})
}

// measure asks c for prompts without a block anywhere. The three nodes of a, and the node of b, have one digest each.
func (w *regionsWorld) measure(t *testing.T) {
	t.Helper()
	const prompts, digests = 1500, 4
	longer := 0
	for i := range prompts {
		got, err := findRegions(w.ctx, w.all[2].asks[0], harness.Tokens(1<<23+i, harness.BlockSize))
		if err != nil {
			t.Fatal(err)
		}
		longer += int(got["a"].Blocks + got["b"].Blocks)
	}
	want := float64(prompts) * digests * regions.FalsePositives
	t.Logf("%d false positives in %d lookups in digests (%.2f %%), want about %.1f", longer, prompts*digests,
		100*float64(longer)/(prompts*digests), want)
	if math.Abs(float64(longer)-want) > 5*math.Sqrt(want) {
		t.Errorf("%d false positives, want about %.1f", longer, want)
	}
}

// load asks all nodes and serves prompts on the engines of a until the returned function is called. Each node and each
// engine has at most 100 requests a second. Local answers may not fail.
func (w *regionsWorld) load(t *testing.T) (stop func(), failed *atomic.Uint64) {
	t.Helper()
	ctx, cancel := context.WithCancel(w.ctx)
	failed = &atomic.Uint64{}
	var all sync.WaitGroup
	for _, r := range w.all {
		for _, ask := range r.asks {
			all.Go(func() {
				harness.Load(ctx, func(i int) {
					a, err := ask.Find(ctx, &api.Query{Model: "m", Tokens: w.served[i%100], Diagnostic: true})
					if ctx.Err() == nil && (err != nil || !a.Complete) {
						failed.Add(1)
					}
				})
			})
		}
	}
	for i, e := range w.all[0].engines {
		all.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(i), 3))
			harness.Load(ctx, func(int) {
				if _, err := e.Serve(harness.Tokens(rng.IntN(1<<20), 8*harness.BlockSize), nil); err != nil {
					failed.Add(1)
				}
			})
		})
	}
	return func() { cancel(); all.Wait() }, failed
}

// TestRegionsWithWrongConfigurations: a node reports that NATS passes on more than digests. A request for regions needs
// a region.
func TestRegionsWithWrongConfigurations(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t)
	leaf := loopback.Reserve(t)
	a := startRegion(t, "a", "{ user: region, password: secret }", fmt.Sprintf("listen: %q, no_advertise: true", leaf))
	b := startRegion(t, "b", "", fmt.Sprintf("remotes: [ { url: \"nats-leaf://region:secret@%s\" } ]", leaf))
	a.add(t, 1, 0)
	b.add(t, 1, 0)
	warns := func(what string, ask *client.Client, text string) {
		t.Helper()
		harness.Eventually(t, what, func() (bool, string) {
			s, err := ask.Status(ctx)
			return err == nil && strings.Contains(fmt.Sprint(s.Warnings), text), fmt.Sprint(s, err)
		})
	}
	warns("a hears requests of b", a.asks[0], "requests of region b reach this region")
	warns("b hears requests of a", b.asks[0], "requests of region a reach this region")
	a.nodes[0].WaitFor(`requests reach other regions.*what_to_do`)

	none := harness.StartIndexer(t, t.TempDir(), loopback.Reserve(t))
	_, failure := none.Query(t, "--model", "m", "--tokens", "1", "--regions")
	if failure == nil || !strings.Contains(failure.Message, "--region") {
		t.Errorf("without a region: %+v", failure)
	}
}
