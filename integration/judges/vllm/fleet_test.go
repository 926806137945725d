//go:build realvllm

package vllm

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/tools/pyenv"
	"github.com/kvatlas/kvatlas/tools/routesim"
)

// Flags of TestFleet. With an interpreter, the fleet runs on GPUs.
var (
	fleetPython   = flag.String("fleet.python", "", "interpreter with a vLLM for GPUs; empty: the pinned vLLM on the CPU")
	fleetEngines  = flag.Int("fleet.engines", 0, "engines; 0: two on the CPU, four on GPUs")
	fleetGPUs     = flag.String("fleet.gpus", "0", "GPUs for the engines in turn, such as 0,1,2,3")
	fleetRequests = flag.Int("fleet.requests", 0, "requests of an arm; 0: 120 on the CPU, 1,200 on GPUs")
	fleetRates    = flag.String("fleet.rates", "", "loads of the arms: shares of the calibrated rate such as 0.85,1.2, "+
		"or requests per second such as =24.5,=34.6; empty: 0.7 on the CPU, 0.85 and 1.2 on GPUs")
	fleetArms = flag.String("fleet.arms", "", "arms to run, separated by commas; empty: all")
	fleetArgs = flag.String("fleet.engine-args", "", "further arguments of the engines, separated by spaces")
	fleetOut  = flag.String("fleet.out", "", "folder for the file requests.jsonl with a line for every request; empty: none")
)

// profile is the size of a fleet with the parameters of the engines.
type profile struct {
	engines, requests int
	model             model
	server            server
	span              int // tokens of a hash id of the workload
	output            int // tokens of an answer
	rates             []string
}

// tiny is a fleet for two busy cores.
func tiny(t *testing.T) profile {
	return profile{engines: 2, requests: 120, span: 16, output: 4, rates: []string{"0.7"},
		model: model{name: "m", blocks: 160, config: models[0].config},
		server: server{pyenv.VLLM(t), blockSize, []string{"--enforce-eager", "--max-model-len", "2048",
			"--max-num-batched-tokens", "256", "--max-num-seqs", "8"}, cpuEnvironment}}
}

// large is four servers with the shape of Llama 3.2 3B and caches for a fifth of the workload. Engines on a shared GPU
// get a fixed cache size, so that no engine measures the memory of another.
func large(python string) profile {
	const blocks, block, batch = 4500, 16, 8192
	cache := blocks * block * 28 * 2 * 8 * 128 * 2 // bytes: 28 layers, keys and values, 8 heads of 128 numbers of 2 bytes
	return profile{engines: 4, requests: 1200, span: routesim.MeasuredH200().BlockTokens, output: 16,
		rates: []string{"0.85", "1.2"},
		model: model{name: "m", blocks: blocks, config: map[string]any{
			"architectures": []string{"LlamaForCausalLM"}, "model_type": "llama", "hidden_act": "silu",
			"hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28, "num_attention_heads": 24,
			"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128_256, "max_position_embeddings": 131_072,
			"rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": true, "torch_dtype": "bfloat16",
		}},
		server: server{python, block, []string{"--dtype", "bfloat16", "--max-model-len", "8448", "--max-num-seqs", "128",
			"--max-num-batched-tokens", fmt.Sprint(batch), "--gpu-memory-utilization", "0.2",
			"--kv-cache-memory-bytes", fmt.Sprint(cache),
			// Only decode steps use CUDA graphs, and nothing is compiled: an engine starts within a minute.
			"--compilation-config", `{"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY",` +
				`"cudagraph_capture_sizes":[1,2,4,8,16,32,64,128]}`},
			[]string{"VLLM_USE_FLASHINFER_SAMPLER=0", "VLLM_USE_DEEP_GEMM=0", "PYTHONHASHSEED=0", "OMP_NUM_THREADS=2"}}}
}

// fleet is several engines with a shim and a twin each, and an indexer.
type fleet struct {
	t *testing.T
	profile
	at      []*engine
	twins   []*twin
	indexer *harness.Indexer
	clients fleetClients
	prompts []conversation
	gaps    []float64  // between arrivals, at a request per second
	fences  *generator // of prompts that no arm sends
}

// conversation is a prompt with its conversation.
type conversation struct {
	prompt
	session int
}

// TestFleet sends the same requests at the same moments with every routing method. It compares kvatlas's answer for
// every request with the announced events and the reuse of the chosen engine.
func TestFleet(t *testing.T) {
	p := tiny(t)
	if *fleetPython != "" {
		p = large(*fleetPython)
	}
	if *fleetEngines > 0 {
		p.engines = *fleetEngines
	}
	if *fleetRequests > 0 {
		p.requests = *fleetRequests
	}
	if *fleetRates != "" {
		p.rates = strings.Split(*fleetRates, ",")
	}
	p.server.args = append(p.server.args, strings.Fields(*fleetArgs)...)
	arms := ways
	if *fleetArms != "" {
		arms = nil
		for _, name := range strings.Split(*fleetArms, ",") {
			i := slices.IndexFunc(ways, func(w way) bool { return w.name == name })
			if i < 0 {
				t.Fatalf("no arm is named %q", name)
			}
			arms = append(arms, ways[i])
		}
	}
	f := newFleet(t, p)
	report := newFleetReport(t, *fleetOut)
	t.Cleanup(func() { t.Logf("\n%s", report) })
	capacity := f.calibrate()
	report.note("%d engines; %.1f requests/s served when chosen at random by %d callers", p.engines, capacity,
		callers*p.engines)
	for _, r := range p.rates {
		rate := 0.0
		share, absolute := strings.CutPrefix(r, "=")
		v, err := strconv.ParseFloat(share, 64)
		if rate = v * capacity; absolute {
			rate = v
		}
		if err != nil || rate <= 0 {
			t.Fatalf("the load %q is neither a share such as 0.85 nor a rate such as =24.5", r)
		}
		for i := range arms {
			f.run(&arms[i], rate, report)
		}
	}
}

// newFleet starts the indexer, the shims and the engines, and makes the workload.
func newFleet(t *testing.T, p profile) *fleet {
	f := &fleet{t: t, profile: p, clients: newFleetClients(),
		fences: newGenerator(1<<32, 1<<32, p.server.blockSize, false)}
	f.makePrompts()
	f.indexer = harness.StartIndexer(t, filepath.Join(t.TempDir(), "data"), "")
	var waits []func()
	gpus := strings.Split(*fleetGPUs, ",")
	for i := range p.engines {
		own := p.server
		if *fleetPython != "" {
			own.env = append(slices.Clone(own.env), "CUDA_VISIBLE_DEVICES="+gpus[i%len(gpus)])
		}
		e := newPlace(t, p.model, own)
		harness.Start(t, "worker-shim", "run", "--nats", f.indexer.NATS, "--worker", workerName(i),
			"--engine", "tcp://"+e.events, "--replay", "tcp://"+e.replay, "--model", p.model.name,
			"--block-size", fmt.Sprint(own.blockSize), "--serving-endpoint", "http://"+e.http,
			"--total-kv-blocks", fmt.Sprint(p.model.blocks))
		of, opened, _ := newListener(t, e.events, own.blockSize)
		f.at, f.twins, waits = append(f.at, e), append(f.twins, of), append(waits, opened)
	}
	for _, e := range f.at { // all at once: a start takes a minute or more
		e.begin()
	}
	for i, e := range f.at {
		e.awaitHealth()
		waits[i]()
	}
	f.settle()
	return f
}

// workerName returns the name of engine i.
func workerName(i int) string { return fmt.Sprint("w", i+1) }

// makePrompts makes the requests of the measured run, with span tokens for every hash id. The tokens depend only on the
// id.
func (f *fleet) makePrompts() {
	m := routesim.MeasuredH200()
	f.gaps = m.Gaps
	vocabulary := vocabulary
	if v, ok := f.model.config["vocab_size"].(int); ok {
		vocabulary = v
	}
	tokens := map[int][]uint32{}
	for _, r := range m.Requests[:min(f.requests, len(m.Requests))] {
		c := conversation{session: r[0]}
		for runs := r[2:]; len(runs) > 0; runs = runs[2:] {
			for id := runs[0]; id < runs[0]+runs[1]; id++ {
				if tokens[id] == nil {
					random := rand.New(rand.NewPCG(uint64(id), 3))
					for range f.span {
						tokens[id] = append(tokens[id], uint32(10+random.IntN(vocabulary-10)))
					}
				}
				c.tokens = append(c.tokens, tokens[id]...)
			}
		}
		c.tokens = c.tokens[:min(len(c.tokens), max(r[1]*f.span/m.BlockTokens, 1))]
		f.prompts = append(f.prompts, c)
	}
}

// reset empties the caches, and waits until kvatlas and the twins have the engines' clear events.
func (f *fleet) reset() {
	f.t.Helper()
	deadline := time.Now().Add(harness.Patience)
	for i, e := range f.at {
		for {
			if err := e.post("/reset_prefix_cache", nil, nil); err != nil {
				f.t.Fatal(err)
			}
			f.fence(i)
			if f.twins[i].fullBlocks() == 1 { // the fence's
				break
			}
			if time.Now().After(deadline) {
				f.t.Fatalf("engine %d still holds %d blocks after a reset", i, f.twins[i].fullBlocks())
			}
		}
	}
	f.settle()
}

// fence waits until the twin of an engine has all earlier events: see stage.fence.
func (f *fleet) fence(i int) {
	f.t.Helper()
	r := request{prompt: prompt{tokens: f.fences.tokens(f.server.blockSize)}, maxTokens: 1, n: 1}
	if _, err := f.at[i].complete(r); err != nil {
		f.t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(context.Background(), harness.Patience)
	defer cancel()
	if err := f.twins[i].wait(ctx, func() bool { return f.twins[i].holdsAll(r.prompt) }); err != nil {
		f.t.Fatal(err)
	}
}

// settle waits until kvatlas and the twins have all events of the engines.
func (f *fleet) settle() {
	f.t.Helper()
	for i := range f.at {
		f.fence(i)
	}
	harness.Eventually(f.t, "kvatlas has all events", func() (bool, string) {
		known, err := f.known()
		for i := range known {
			_, _, events := f.twins[i].now()
			if err != nil || known[i] != events {
				return false, fmt.Sprintf("engine %d: %d of %d events, %v", i, known[i], events, err)
			}
		}
		return err == nil, fmt.Sprint(err)
	})
}

// known returns kvatlas's number of events of every engine. An incarnation begins with an event of the shim.
func (f *fleet) known() ([]int, error) {
	var list api.WorkerList
	known := make([]int, len(f.at))
	if err := f.ask("GET", "/v1/workers", nil, &list); err != nil {
		return known, err
	}
	for _, w := range list.Workers {
		for i := range f.at {
			if string(w.Instance) == workerName(i) {
				known[i] = int(w.LastEvent) - 1
			}
		}
	}
	return known, nil
}

// callers is the number of running requests on an engine in a calibration.
const callers = 12

// calibrate returns the requests per second of the fleet with cold caches and random engines.
func (f *fleet) calibrate() float64 {
	f.reset()
	random := &arm{fleet: f, way: &way{name: "calibration", choose: atRandom}, random: rand.New(rand.NewPCG(*seed, 5))}
	random.prepare()
	var next int
	var mu sync.Mutex
	var all sync.WaitGroup
	begun := time.Now()
	n := max(len(f.prompts)/2, 1)
	for range callers * len(f.at) {
		all.Go(func() {
			for {
				mu.Lock()
				i := next
				next++
				mu.Unlock()
				if i >= n {
					return
				}
				random.serve(i)
			}
		})
	}
	all.Wait()
	rate := float64(n) / time.Since(begun).Seconds()
	if random.judge(); f.t.Failed() {
		f.t.FailNow() // so would all arms
	}
	return rate
}

// run serves all requests with a routing method, and judges the results.
func (f *fleet) run(w *way, rate float64, report *fleetReport) {
	f.reset()
	a := &arm{fleet: f, way: w, rate: rate, random: rand.New(rand.NewPCG(*seed, 5))}
	a.prepare()
	var all sync.WaitGroup
	begun := time.Now()
	at := 0.0
	for i := range f.prompts {
		time.Sleep(time.Until(begun.Add(time.Duration(at * float64(time.Second)))))
		all.Go(func() { a.serve(i) })
		at += f.gaps[i] / rate
	}
	all.Wait()
	a.judge()
	report.add(a)
	if w.policy != "" {
		a.checkBookings()
	}
}
