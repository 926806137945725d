package routesim

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/trace"
)

// config returns a run of an arm.
func config(w Workload, arm Arm, routers int) Config {
	c := Config{Workload: w, Arm: arm, Routers: routers, Workers: w.Workers, Seed: 1, EventLag: 5e-3,
		Routing: routing.DefaultConfig(), TableTokens: w.TableTokens, TableDepth: w.TableDepth}
	if w.PrefillLoadScale > 0 {
		c.Routing.PrefillLoadScale = w.PrefillLoadScale
	}
	return c
}

func simulate(t *testing.T, c Config) *Run {
	t.Helper()
	r, err := Simulate(t.Context(), c)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// TestConservation checks all arms with all disturbances. Every request ends with all tokens. Memory and bookings are
// empty at the end. Every prompt token was computed, reused or loaded, and indexes have the content of the engines.
func TestConservation(t *testing.T) {
	t.Parallel()
	for seed := range uint64(testkit.Rounds(6)) {
		for _, arm := range slices.Concat(Arms, Rivals) {
			for i, disturb := range [][]Disturbance{nil, nil, {RestartRouters}, {RestartEngine}, {ResetCaches}, Disturbances} {
				rng := rand.New(rand.NewPCG(seed, 4))
				cfg := small(rng)
				if seed%2 == 1 {
					cfg.EnginesPerGPU, cfg.ShareLoss, cfg.PrefillHost, cfg.Attention = 2, 0.1, 1e-2, 1e-6
					cfg.Delay, cfg.Reply, cfg.Ahead, cfg.ReservePrompt = 1e-2, 1e-2, true, true
				}
				if seed%3 == 1 {
					cfg.Host, cfg.HostRate = cfg.Capacity, 1e9
				}
				if seed%3 == 2 {
					cfg.Store, cfg.PullDelay, cfg.PullRate = 4*cfg.Capacity, 1e-3, 1e6
				}
				w := randomWorkload(rng, cfg, 120)
				w.Workers = 3
				if seed%2 == 1 {
					w.Clients = 10
				}
				if i == 1 {
					end := w.Duration()
					w.Changes = []Change{{0.2 * end, 2, true}, {0.4 * end, 1, false}, {0.5 * end, 0, false}, {0.7 * end, 2, false},
						{0.8 * end, 0, true}}
				}
				c := config(w, arm, 2)
				c.Disturb = disturb
				s, err := newSim(c)
				if err == nil {
					err = s.loop(t.Context(), 120)
				}
				if err != nil {
					t.Fatalf("seed %d, %s, %v: %v", seed, arm, disturb, err)
				}
				s.check(t)
				run := s.run
				run.close(s)
				if run.Total.Requests != 120 {
					t.Fatalf("seed %d, %s, %v: %d requests ended", seed, arm, disturb, run.Total.Requests)
				}
				computed, output, prompts, saved := 0, 0, 0, 0
				for _, e := range s.engines {
					computed, output = computed+e.computedTokens, output+e.outputTokens
				}
				for _, r := range s.all {
					prompts, saved, output = prompts+r.prompt.Tokens, saved+r.reused+r.loaded, output-r.output
				}
				crashed := slices.Contains(disturb, RestartEngine) || w.Changes != nil
				again := run.Preemptions > 0 || crashed
				if output != 0 && !crashed {
					t.Fatalf("seed %d, %s, %v: %d tokens of output too many", seed, arm, disturb, output)
				}
				if computed+saved != prompts && !again || computed+saved < prompts {
					t.Fatalf("seed %d, %s, %v: %d tokens computed, %d saved, of %d", seed, arm, disturb, computed, saved,
						prompts)
				}
			}
		}
	}
}

// check checks an idle fleet after a run.
func (s *sim) check(t *testing.T) {
	t.Helper()
	for w, e := range s.engines {
		if e.pool.pinned != 0 || e.live.used != 0 || e.requests != 0 || e.owed != 0 || e.decoding != 0 || e.context != 0 ||
			len(e.coming)+len(e.waiting)+len(e.running)+len(e.prefill)+len(e.ends) != 0 {
			t.Fatalf("%s: engine %d is not empty: %d pinned, %d live, %d requests, %d owed", s.Arm, w, e.pool.pinned,
				e.live.used, e.requests, e.owed)
		}
		for i, r := range s.fleet.routers {
			if l := &r.loads[w]; l.prefill != 0 || l.requests != 0 || l.tokens != 0 || l.active.used != 0 {
				t.Fatalf("%s: router %d still has %d tokens, %d requests, %d blocks on worker %d", s.Arm, i, l.prefill,
					l.requests, l.active.used, w)
			}
			if r.tables != nil && r.tables[w].lru != nil && r.tables[w].lru.pinned != 0 {
				t.Fatalf("%s: router %d still leases %d blocks", s.Arm, i, r.tables[w].lru.pinned)
			}
		}
	}
	if s.Arm != ArmExactShared && s.Arm != ArmExactOwn || slices.Contains(s.Disturb, RestartRouters) &&
		s.Arm == ArmExactOwn {
		return
	}
	s.now = never
	s.deliver()
	var a radix.Answer
	for _, r := range s.all {
		s.fleet.index.Match(0, r.prompt.locals(), nil, &a)
		var got [8]uint32
		for _, o := range a.Ranks {
			got[slices.Index(s.fleet.ranks, o.Rank)] = o.Depth[0]
		}
		for w, e := range s.engines {
			if want := prefix(r.prompt.blocks, e.pool.held); int(got[w]) != want {
				t.Fatalf("%s: the index has %d blocks on worker %d, the engine has %d", s.Arm, got[w], w, want)
			}
		}
	}
}

// TestDeterminism checks that a configuration always gives the same run, and another seed another run.
func TestDeterminism(t *testing.T) {
	t.Parallel()
	testkit.Sequential(t)
	workload := func(seed uint64) Workload { return Capacity73(seed, 64, []float64{20}) }
	if !testkit.Whole {
		workload = func(seed uint64) Workload {
			rng := rand.New(rand.NewPCG(seed, 4))
			w := randomWorkload(rng, small(rng), 500)
			w.Workers = 3
			return w
		}
	}
	for _, arm := range slices.Concat(Arms, Rivals) {
		c := config(workload(3), arm, 3)
		c.Disturb = Disturbances
		a, b := simulate(t, c), simulate(t, c)
		if !reflect.DeepEqual(a, b) {
			t.Errorf("%s: %+v and then %+v", arm, a, b)
		}
		c.Workload, c.Seed = workload(4), 4
		if d := simulate(t, c); reflect.DeepEqual(a, d) {
			t.Errorf("%s: another seed changes nothing", arm)
		}
	}
}

// TestCapacity73 checks that the arms have the published order on the published mix, and the same order of losses.
func TestCapacity73(t *testing.T) {
	t.Parallel()
	testkit.Sequential(t)
	w := Capacity73(1, 64, nil)
	arms := Arms
	if !testkit.Whole { // the arms that are compared below
		arms = []Arm{ArmRandom, ArmLeastLoad, ArmApproxTTL, ArmApproxLRU, ArmExactRestart, ArmExactShared, ArmOracle}
	}
	rep, err := Compare(t.Context(), Options{Workloads: []Workload{w}, Arms: arms, Routers: []int{1, 4}, Seed: 1,
		Routing: config(w, ArmOracle, 1).Routing, TableTokens: -1, TableDepth: -1})
	if err != nil {
		t.Fatal(err)
	}
	if rep.WorkingSet != 1_804_800 || rep.Workers != 8 {
		t.Errorf("working set %d tokens on %d workers", rep.WorkingSet, rep.Workers)
	}
	by := map[Arm][]*Run{}
	for _, r := range rep.Points[0].Runs {
		by[r.Arm] = append(by[r.Arm], r)
		f := &r.Funnel
		steps := []float64{1, f.Offered, f.Capacity, f.Perfect, f.Chosen, f.Reused, 0}
		if !slices.IsSortedFunc(steps, func(a, b float64) int { return int(1e12 * (b - a)) }) {
			t.Errorf("%s, %d routers: the funnel widens: %v", r.Arm, r.Routers, steps)
		}
		if f.Reused != r.Total.HitRate {
			t.Errorf("%s: %v reused, a hit rate of %v", r.Arm, f.Reused, r.Total.HitRate)
		}
		if r.Total.Requests != 16_334 || r.Total.TTFTP50 > r.Total.TTFTP90 || r.Total.TTFTP90 > r.Total.TTFTP99 {
			t.Errorf("%s: %+v", r.Arm, r.Total)
		}
	}
	better := func(a, b *Run) {
		t.Helper()
		if a.Total.HitRate <= b.Total.HitRate || a.Total.TTFTP90 >= b.Total.TTFTP90 ||
			a.Total.OutputPerS <= b.Total.OutputPerS {
			t.Errorf("%s, %d routers, is not better than %s, %d: %+v, %+v", a.Arm, a.Routers, b.Arm, b.Routers, a.Total,
				b.Total)
		}
	}
	better(by[ArmApproxLRU][0], by[ArmRandom][0])
	better(by[ArmApproxLRU][0], by[ArmLeastLoad][0])
	better(by[ArmExactShared][0], by[ArmApproxLRU][0])
	better(by[ArmExactShared][0], by[ArmApproxTTL][0])
	better(by[ArmExactShared][0], by[ArmExactRestart][0])
	better(by[ArmExactShared][1], by[ArmExactRestart][1])
	better(by[ArmApproxLRU][0], by[ArmApproxLRU][1]) // four tables guess worse than a single table
	if a, b := by[ArmExactShared][0], by[ArmExactShared][1]; a.Total.HitRate != b.Total.HitRate {
		t.Errorf("the result of shared state depends on the number of routers: %v and %v", a.Total, b.Total)
	}
	if o, x := by[ArmOracle][0], by[ArmExactShared][0]; o.Total.HitRate < x.Total.HitRate-0.02 {
		t.Errorf("the oracle reuses %v, exact knowledge %v", o.Total.HitRate, x.Total.HitRate)
	}
	if len(rep.Published) != 4 {
		t.Errorf("published: %+v", rep.Published)
	}
	for _, b := range rep.Published { // the same regime, whatever the constants
		if x := b.OutputPerS[1] / b.OutputPerS[0]; x < 0.5 || x > 2 {
			t.Errorf("%s: %v tokens per second are published, the simulation has %v", b.Theirs, b.OutputPerS[0], b.OutputPerS[1])
		}
	}
}

// TestAmpleMemory checks that exact knowledge has no advantage over a router with whole prompts if every worker has
// ample memory.
func TestAmpleMemory(t *testing.T) {
	testkit.Sequential(t)
	w := Capacity73(1, 64, []float64{20})
	rep, err := Compare(t.Context(), Options{Workloads: []Workload{w}, Arms: []Arm{ArmApproxLRU, ArmExactShared},
		Routers: []int{1}, Ratios: []float64{0.5, 4}, Seed: 1, Routing: routing.DefaultConfig()})
	if err != nil {
		t.Fatal(err)
	}
	if x := rep.Points[1].Exact; len(x) != 1 || !x[0].Nothing {
		t.Errorf("with four times the memory: %+v", x)
	}
	if a, b := rep.Points[0].Runs[1].Funnel, rep.Points[1].Runs[1].Funnel; a.Capacity >= b.Capacity || a.Offered !=
		b.Offered {
		t.Errorf("less memory allows no less: %+v, %+v", a, b)
	}
}

// TestBound compares the bounds with a naive unbounded cache and a naive cache with knowledge of the future.
func TestBound(t *testing.T) {
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 5))
		cfg := small(rng)
		cfg.Capacity = cfg.BlockSize * (5 + rng.IntN(60))
		w := randomWorkload(rng, cfg, 60)
		got := Bound(&w, 1)
		list := w.Stages[0].Arrivals
		room := cfg.Capacity / cfg.BlockSize
		seen, cache := map[events.BlockHash]bool{}, map[events.BlockHash]bool{}
		offered, allowed, tokens := 0, 0, 0
		for i, a := range list {
			tokens += a.Prompt.Tokens
			usable := (a.Prompt.Tokens - 1) / cfg.BlockSize
			for j, n := range a.Prompt.Names {
				if seen[n] && j < usable {
					offered++
				}
				if cache[n] && j < usable {
					allowed++
				}
				seen[n], cache[n] = true, true
			}
			next := func(n events.BlockHash) (at, depth int) {
				for k, b := range list[i+1:] {
					if d := slices.Index(b.Prompt.Names, n); d >= 0 {
						return k, d
					}
				}
				return 1 << 30, 0
			}
			for len(cache) > room {
				var worst events.BlockHash
				worstAt, worstDepth := -1, 0
				for n := range cache {
					if at, depth := next(n); at > worstAt || at == worstAt && depth > worstDepth {
						worst, worstAt, worstDepth = n, at, depth
					}
				}
				delete(cache, worst)
			}
		}
		if x := float64(offered*cfg.BlockSize) / float64(tokens); x != got.Offered {
			t.Errorf("seed %d: offered %v, want %v", seed, got.Offered, x)
		}
		if x := float64(allowed*cfg.BlockSize) / float64(tokens); x != got.Capacity {
			t.Errorf("seed %d: allowed %v, want %v", seed, got.Capacity, x)
		}
		if got.LRU > got.Capacity || got.Capacity > got.Offered || seed == 0 && got.LRU == 0 {
			t.Errorf("seed %d: %+v", seed, got)
		}
		if got.Distinct != len(seen)*cfg.BlockSize {
			t.Errorf("seed %d: %d distinct, want %d", seed, got.Distinct, len(seen)*cfg.BlockSize)
		}
	}
}

// TestTrace checks that prompts of a trace share tokens as far as their ids are equal, at every block size.
func TestTrace(t *testing.T) {
	reqs := []trace.Request{{Timestamp: 1000, InputLength: 1030, OutputLength: 0, HashIDs: []uint64{0, 1, 2}},
		{Timestamp: 2000, InputLength: 1500, OutputLength: 7, HashIDs: []uint64{0, 1, 9}},
		{Timestamp: 3000, InputLength: 0, OutputLength: 7, HashIDs: nil}}
	for _, size := range []int{16, 64, 512} {
		w, err := FromTrace("t", reqs, size, 0)
		if err != nil {
			t.Fatal(err)
		}
		a := w.Stages[0].Arrivals
		p, q := a[0].Prompt, a[1].Prompt
		if len(p.Names) != 1030/size || len(q.Names) != 1500/size || a[2].Prompt.Tokens != 1 || a[0].Output != 1 {
			t.Errorf("block size %d: %d and %d blocks", size, len(p.Names), len(q.Names))
		}
		same := 0
		for same < len(p.Names) && p.Names[same] == q.Names[same] && p.blocks[same] == q.blocks[same] {
			same++
		}
		if same != 1024/size {
			t.Errorf("block size %d: %d blocks are the same", size, same)
		}
		if a[0].At != 0 || a[2].At != 2 || w.Stages[0].Rate != 1.5 {
			t.Errorf("times %v … %v at %v requests per second", a[0].At, a[2].At, w.Stages[0].Rate)
		}
	}
	if w, _ := FromTrace("t", reqs, 64, 3); w.Stages[0].Arrivals[2].At != 1 {
		t.Errorf("at twice the rate the last comes at %v", w.Stages[0].Arrivals[2].At)
	}
	slices.Reverse(reqs)
	if _, err := FromTrace("t", reqs, 64, 0); err == nil {
		t.Error("a trace with decreasing times is accepted")
	}
}

// TestCommand checks the output, and that an error for bad input names the flag.
func TestCommand(t *testing.T) {
	dir := t.TempDir()
	traces := filepath.Join(dir, "traces")
	if err := os.Mkdir(traces, 0o700); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(traces, "conversation_trace.jsonl")
	f, err := os.Create(file)
	if err == nil {
		err = trace.Write(f, trace.Generate(trace.Options{Seed: 1, Requests: 200, Clump: 10}))
	}
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	run := func(args ...string) (string, error) {
		old := os.Stdout
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		os.Stdout = w
		defer func() { os.Stdout = old }()
		text := make(chan string)
		go func() {
			b, _ := io.ReadAll(r)
			text <- string(b)
		}()
		cmd := Command()
		cmd.SilenceErrors, cmd.SilenceUsage = true, true
		cmd.SetArgs(append(args, "--quiet"))
		err = cmd.ExecuteContext(t.Context())
		w.Close()
		return <-text, err
	}
	plot := filepath.Join(dir, "plot.svg")
	text, err := run("--trace", file, "--rate", "5,50", "--routers", "1,2", "--svg", plot)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"ARM", "exact-shared", "policy:kvatlas", "WHERE REUSE IS LOST",
		"What exact shared knowledge buys", "50.00 requests/s"} {
		if !strings.Contains(text, want) {
			t.Errorf("the output lacks %q:\n%s", want, text)
		}
	}
	svg, err := os.ReadFile(plot)
	if err != nil {
		t.Fatal(err)
	}
	for d := xml.NewDecoder(strings.NewReader(string(svg))); ; {
		if _, err := d.Token(); err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("the plot is no XML: %v", err)
		}
	}
	if n := strings.Count(string(svg), "<polyline"); n != 2*(4+6*2) || strings.Contains(string(svg), "NaN") {
		t.Errorf("%d lines in the plot", n)
	}
	_, err = run("--trace", file, "--rate", "5,50", "--ratio", "2,4,8", "--arms", "sticky,oracle", "--svg", plot)
	if err != nil {
		t.Fatal(err)
	}
	if svg, err = os.ReadFile(plot); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"sticky, 5/s", "sticky, 50/s", "oracle, 5/s", "oracle, 50/s"} {
		if strings.Count(string(svg), ">"+name+"<") != 1 {
			t.Errorf("the plot of several ratios and rates has no line %q", name)
		}
	}
	if points := strings.Count(string(svg), "<circle"); points != 2*4*3 {
		t.Errorf("%d points in the plot of several ratios and rates", points)
	}
	text, err = run("--trace", file, "--requests", "50", "--arms", "oracle", "--json")
	var rep Report
	if err == nil {
		err = json.Unmarshal([]byte(text), &rep)
	}
	if err != nil || len(rep.Points) != 1 || rep.Points[0].Runs[0].Total.Requests != 50 {
		t.Errorf("%v: %s", err, text)
	}
	text, err = run("--workload", "agents", "--requests", "100", "--arms", "rivals", "--workers", "3", "--rate", "2",
		"--output-tokens", "9", "--speed", "1,0.5", "--capacity-factor", "1,2", "--change", "9:1:leave,5:2:join",
		"--engine", "vllm-h200", "--engines-per-gpu", "2", "--overlap-score-credit", "4", "--block-size", "16",
		"--single-turns", "--json")
	if err == nil {
		rep = Report{}
		err = json.Unmarshal([]byte(text), &rep)
	}
	if err != nil || rep.Routing.OverlapScoreCredit != 4 || len(rep.Points[0].Runs) != len(Rivals) {
		t.Errorf("%v: %s", err, text)
	}
	sampled := filepath.Join(dir, "sample.json")
	if err := os.WriteFile(sampled, []byte(`{"scale": 4, "requests": [[7, 300, [0, 1, 2]], [7, 500, [0, 1, 2, 3]],
		["x", 129, [0, 9]]]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	text, err = run("--trace", sampled, "--engine", "vllm-h200", "--workers", "1", "--rate", "1", "--arms", "sticky",
		"--json")
	if err == nil {
		rep = Report{}
		err = json.Unmarshal([]byte(text), &rep)
	}
	// the second request finds the 18 whole blocks of the first, the third finds the blocks of hash id 0
	if f := rep.Points[0].Runs[0].Total; err != nil || f.Requests != 3 || f.PromptTokens != 929 ||
		math.Abs(f.HitRate-float64(288+128)/929) > 1e-9 {
		t.Errorf("%v: %s", err, text)
	}
	checkDetected(t, dir, run)
	text, err = run("matrix", "--workloads", "agents", "--requests", "60", "--seeds", "1", "--load", "0.5", "--host",
		"0,1", "--arms", "sticky,random", "--subject", "dynamo-4-4", "--json")
	var cells []Cell
	if err == nil {
		err = json.Unmarshal([]byte(text), &cells)
	}
	if err != nil || len(cells) != 2 || len(cells[0].Arms) != 3 || cells[1].Host != 1 {
		t.Errorf("%v: %s", err, text)
	}
	text, err = run("matrix", "--workloads", "conversation", "--requests", "60", "--seeds", "1", "--load", "0.5",
		"--host", "0", "--arms", "sticky", "--traces", traces)
	if err != nil || !strings.Contains(text, "sessions of Mooncake's trace") || !strings.Contains(text, "| sticky |") {
		t.Errorf("%v: %s", err, text)
	}
	for _, bad := range []struct{ want, args string }{
		{"--arms", "matrix --arms best"},
		{"--traces", "matrix --traces " + filepath.Join(dir, "none")},
		{"--requests", "matrix --requests 1"},
		{"--seeds", "matrix --seeds 0"},
		{"--load", "matrix --load 0"},
		{"--host", "matrix --host -1"},
		{"--workloads", "matrix --workloads agent"},
		{"--workload", "--arms random"},
		{"--workload", "--workload capacity-74"},
		{"--trace", "--trace " + dir + "/none"},
		{"--trace", "--trace " + plot},
		{"--trace", "--workload capacity-73 --trace " + file},
		{"--arms", "--workload capacity-73 --arms best"},
		{"--routers", "--workload capacity-73 --routers 0"},
		{"--rate", "--workload capacity-73 --rate -1"},
		{"--rate", "--workload capacity-73 --rate NaN"},
		{"--ratio", "--workload capacity-73 --ratio 0"},
		{"--ratio", "--workload capacity-73 --ratio 1 --capacity 1000"},
		{"--workers", "--workload capacity-73 --workers -1"},
		{"--block-size", "--workload capacity-73 --block-size 100"},
		{"--disturb", "--workload capacity-73 --disturb rain"},
		{"--prefill-load-scale", "--workload capacity-73 --prefill-load-scale=-1"},
		{"--capacity", "--workload capacity-73 --capacity 1000"},
		{"--requests", "--workload capacity-73 --requests 5"},
		{"--svg", "--workload capacity-73 --svg " + dir},
		{"--overlap-score-credit", "--workload capacity-73 --overlap-score-credit=-1"},
		{"--host-cache-hit-weight", "--workload capacity-73 --host-cache-hit-weight 2"},
		{"--output-tokens", "--workload agents --output-tokens -1"},
		{"--block-tokens", "--trace " + file + " --block-tokens 100"},
		{"--engine", "--workload agents --engine steam"},
		{"--speed", "--workload agents --speed 0"},
		{"--capacity-factor", "--workload agents --capacity-factor -1"},
		{"--change", "--workload agents --change 1:leave"},
		{"--change", "--workload agents --change 1:0:sleep"},
	} {
		_, err := run(strings.Fields(bad.args)...)
		var usage interface{ Unwrap() error }
		if err == nil || !strings.Contains(err.Error(), bad.want) || !errors.As(err, &usage) ||
			reflect.TypeOf(err) != reflect.TypeOf(cli.UsageErrorf("")) {
			t.Errorf("%s: %v", bad.args, err)
		}
	}
}

// checkDetected: the command names the detected format of a trace, and rejects ids of another size.
func checkDetected(t *testing.T, dir string, run func(...string) (string, error)) {
	t.Helper()
	var lines strings.Builder
	for i := range 50 { // ids of 64 tokens
		fmt.Fprintf(&lines, `{"timestamp": %d, "input_length": 640, "output_length": 3, "hash_ids": [0,1,2,3,4,5,6,7,8,%d]}
`, 100*i, 9+i)
	}
	file := filepath.Join(dir, "small.jsonl")
	if err := os.WriteFile(file, []byte(lines.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := run("--trace", file, "--arms", "sticky"); err == nil ||
		!strings.Contains(err.Error(), "about 64 tokens: give the number with --block-tokens") {
		t.Errorf("ids of 64 tokens are read as ids of 512: %v", err)
	}
	if _, err := run("--trace", file, "--arms", "sticky", "--block-tokens", "64"); err != nil {
		t.Error(err)
	}
	for format, want := range map[string]string{
		"":         file + " is read as mooncake, with 64 tokens a hash id (--trace-format, --block-tokens)\n",
		"mooncake": "",
	} {
		var notes strings.Builder
		tokens := 64
		if _, err := readTrace(file, format, 0, &tokens, 1, &notes); err != nil || notes.String() != want {
			t.Errorf("format %q: %q, %v", format, notes.String(), err)
		}
	}
}

// TestDoubts: a trace without answers, or with ids that do not stand for all earlier tokens, gives a note.
func TestDoubts(t *testing.T) {
	chained := []trace.Request{{HashIDs: []uint64{1, 2, 3}}, {HashIDs: []uint64{1, 2, 4}}, {HashIDs: []uint64{5}}}
	plain := []trace.Request{{OutputLength: 1, HashIDs: []uint64{1, 2, 3}}, {HashIDs: []uint64{2, 3}},
		{HashIDs: []uint64{4, 3}}}
	for _, x := range []struct {
		list    []trace.Request
		outputs bool
		want    string
	}{
		{chained, true, ""}, {chained, false, "every answer has one token"},
		{plain, false, "2 of 4 hash ids follow different ids"},
	} {
		got := strings.Join(doubts(x.list, x.outputs), "\n")
		if !strings.Contains(got, x.want) || (got == "") != (x.want == "") || strings.Contains(got, "\n") {
			t.Errorf("%q, want %q", got, x.want)
		}
	}
	file := filepath.Join(t.TempDir(), "t.jsonl")
	if err := os.WriteFile(file, []byte(`{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [1,2]}
{"timestamp": 500, "input_length": 600, "output_length": 0, "hash_ids": [3,2]}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	var notes strings.Builder
	fl := flags{trace: file, blockSize: 64}
	if _, err := fl.traced(false, &notes); err != nil || !strings.Contains(notes.String(), "one token") ||
		!strings.Contains(notes.String(), "1 of 3 hash ids") {
		t.Errorf("%q, %v", notes.String(), err)
	}
}

// TestProgress checks for a line at the start, for every arm, and every two seconds.
func TestProgress(t *testing.T) {
	var out strings.Builder
	now := time.Unix(1000, 0)
	tell := progress(&out, func() time.Time { return now })
	for i := range 100 {
		tell("one", i, 200)
		now = now.Add(100 * time.Millisecond)
	}
	tell("two", 100, 200)
	if n := strings.Count(out.String(), "\n"); n != 6 {
		t.Errorf("%d lines:\n%s", n, out.String())
	}
}
