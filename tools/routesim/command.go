package routesim

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/trace"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// flags are the flags of the command.
type flags struct {
	trace, workload, svg    string
	format                  string
	requests, workers       int
	arms, disturb           []string
	routers                 []int
	rates, ratios           []float64
	seed                    uint64
	blockSize, capacity     int
	host, store             int
	tableTokens, tableDepth int
	blockTokens, output     int
	singleTurns             bool
	engine                  string
	enginesPerGPU           int
	speeds, capacities      []float64
	changes                 []string
	routing                 routing.Config
	asJSON, quiet           bool
}

// armList describes the arms.
const armList = `
  random, round-robin            know nothing
  least-load, least-requests     the least work (blocks and prompt tokens) or the fewest requests under way
  power-of-two                   the requests under way of two random workers
  sticky, sticky-head            one worker for a session id, or for the first 1,024 tokens of a prompt
  bounded-hash                   consistent hashing of the session id with bounded loads (1.25)
  cache-aware                    cache_aware of SGLang's and of vLLM's router
  vllm-consistent-hash, vllm-power-of-two
                                 of vLLM's router
  llm-d, llm-d-precise           llm-d's scorers: prefixes guessed, or from events
  approx-ttl, approx-lru         guess from what each router sent where
  exact-own                      an index in each router, from the engines' events
  exact-restart                  the same, and all routers are restarted half-way
  exact-shared                   one index and one table of requests under way for all routers: the knowledge of
                                 kvatlas, with the policy dynamo
  dynamo-SCALE-CREDIT            exact-shared with these weights of prefill and of overlap
  policy:NAME, own:NAME          exact-shared or exact-own with another policy
  prompt-sessions                policy:kvatlas with sessions recognised by their prompts
  oracle                         the true state of caches and load
  oracle-greedy                  the worker with the first token first, by the true state
`

// Command returns indexer simulate, which compares routing methods on a simulated fleet.
func Command() *cobra.Command {
	var fl flags
	cmd := &cobra.Command{
		Use:   "simulate --workload NAME | --trace FILE",
		Short: "Compare ways to choose workers, on a simulated fleet",
		Long: `Simulate a fleet of engines in virtual time, route a workload through it in several ways, and print the
result of each way: reused prompt tokens, times to the first token, throughput, and where reuse was lost. Nothing else
is needed; a run takes seconds.

Workloads: two mixes that llm-d has published figures for, generated workloads, the requests of a measured run of vLLM
servers, and request traces of several forms: Mooncake's, which indexer record export writes, and those of the
benchmarks of vLLM and llm-d (docs/recording.md). A trace may have a session_id for each request; else conversations are
recognised by their prompts.

With --rate, a mix has one stage for each rate after its warm-up, and another workload is run once at each rate. The
times of a trace keep their pattern: all are multiplied by one factor. Without --rate, they stay as they are. With
--ratio, everything is run once for each amount of KV memory.

Arms:
` + armList + `
"rivals" stands for the arms of other routers and the simple arms. approx-ttl and the arms below it choose by the policy
dynamo, but for policy:NAME, own:NAME, prompt-sessions and oracle-greedy. --disturb adds, half-way: router (all restart), engine (one crashes), cache (all engines
forget theirs).`,
		Example: `  indexer simulate --workload capacity-73 --svg plot.svg
  indexer simulate --trace conversation_trace.jsonl --workers 16 --routers 1,4 --rate 3,6,12
  indexer simulate --workload capacity-73 --rate 20 --ratio 0.5,1,2,4 --arms approx-lru,exact-shared
  indexer simulate --workload agents --rate 2 --arms rivals --change 60:1:leave,120:1:join --speed 1,1,0.5`,
		Args: cobra.NoArgs,
	}
	fl.add(cmd.Flags())
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		return fl.run(cmd.Context(), cmd.Flags().Changed("prefill-load-scale"))
	}
	cli.Output[*Report](cmd)
	cli.Define(cmd, "Arms", armList)
	cmd.AddCommand(matrixCommand(), measuredCommand())
	return cmd
}

// add adds the flags of the command.
func (fl *flags) add(f *pflag.FlagSet) {
	f.StringVar(&fl.workload, "workload", "", "a workload: "+strings.Join(workloadNames(), ", "))
	f.StringVar(&fl.trace, "trace", "", "file of requests; see --trace-format")
	f.StringVar(&fl.format, "trace-format", "",
		"form of --trace: "+strings.Join(names(trace.Formats), ", ")+"; empty: detected from the file (docs/recording.md)")
	f.IntVar(&fl.requests, "requests", 0, "requests of the trace or of a generated workload; 0: all, or 1,500")
	f.IntVar(&fl.workers, "workers", 0, "simulated engines; 0: as many as the workload was published with, 8 for a trace")
	f.StringSliceVar(&fl.arms, "arms", names(Arms), "ways to choose: names of the list of arms")
	f.IntSliceVar(&fl.routers, "routers", []int{1}, "numbers of routers, for arms whose result depends on the number")
	f.Float64SliceVar(&fl.rates, "rate", nil,
		"requests per second; all times of a trace are scaled to this mean (default: as published, or as in the trace)")
	f.Float64SliceVar(&fl.ratios, "ratio", nil,
		"KV memory of the fleet, divided by the workload's working set; in place of --capacity")
	f.StringSliceVar(&fl.disturb, "disturb", nil, "disturbance in the middle of the run: router, engine, cache")
	f.Uint64Var(&fl.seed, "seed", 1, "seed of generated arrivals, of ties and of random choices")
	f.IntVar(&fl.blockSize, "block-size", 0, "tokens in a block; divides 512 (default 64, with --engine vllm-h200 16)")
	f.IntVar(&fl.capacity, "capacity", 0, "tokens of an engine's KV memory; 0: the workload's, or 307,328")
	f.IntVar(&fl.host, "host", 0, "capacity of an engine's host memory for evicted blocks, in tokens")
	f.IntVar(&fl.store, "store", 0, "capacity of the shared store of all engines, in tokens")
	fl.weights(f)
	f.IntVar(&fl.tableTokens, "table-tokens", -1,
		"assumed capacity of a worker in approx-lru, in tokens; 0: the real capacity (default for the mixes as published, else 0)")
	f.IntVar(&fl.tableDepth, "table-depth", -1,
		"length of the prompt's head for approx-ttl and approx-lru, in tokens; 0: all (default for the mixes as published, else 0)")
	f.IntVar(&fl.blockTokens, "block-tokens", 0,
		"prompt tokens of a hash id in the trace; 0: 512, in vllm-timed 16, in weka as in the file")
	f.IntVar(&fl.output, "output-tokens", 0, "tokens of every answer; 0: as in the workload")
	f.BoolVar(&fl.singleTurns, "single-turns", false, "keep only the first request of every session")
	f.StringVar(&fl.engine, "engine", "", "constants of the engines: qwen3-32b or vllm-h200 (default: the workload's)")
	f.IntVar(&fl.enginesPerGPU, "engines-per-gpu", 0, "engines on a shared GPU, with time slices; 0: the engine's")
	f.Float64SliceVar(&fl.speeds, "speed", nil, "speed factors of the workers; repeated for further workers")
	f.Float64SliceVar(&fl.capacities, "capacity-factor", nil,
		"KV memory factors of the workers; repeated for further workers")
	f.StringSliceVar(&fl.changes, "change", nil,
		"departures and arrivals of workers, as SECONDS:WORKER:leave or SECONDS:WORKER:join; workers are numbered from 0")
	f.StringVar(&fl.svg, "svg", "",
		"write a plot of TTFT p90 and hit rate over the rate, or over several --ratio, to this file")
	f.BoolVar(&fl.asJSON, "json", false, "print the result as a JSON object, without progress")
	f.BoolVar(&fl.quiet, "quiet", false, "print no progress")
}

// run compares the arms and prints the result. scaled reports whether the weight of prefill is given.
func (fl *flags) run(ctx context.Context, scaled bool) error {
	silent := fl.asJSON || fl.quiet
	notes := io.Discard
	if !silent {
		notes = os.Stderr
	}
	o, err := fl.options(scaled, notes)
	if err != nil {
		return cli.UsageErrorf("%w", err)
	}
	var plot *os.File
	if fl.svg != "" {
		if plot, err = os.Create(fl.svg); err != nil {
			return cli.UsageErrorf("--svg: %w", err)
		}
		defer plot.Close()
	}
	if !silent {
		o.Progress = progress(os.Stderr, time.Now)
	}
	rep, err := Compare(ctx, o)
	if errors.Is(err, ErrTooLong) {
		return cli.UsageErrorf("--capacity or --ratio: %w", err)
	} else if err != nil {
		return err
	}
	if plot != nil {
		if err := rep.SVG(plot); err != nil {
			return err
		}
		if err := plot.Close(); err != nil {
			return err
		}
	}
	if fl.asJSON {
		return cli.PrintJSON(os.Stdout, rep)
	}
	return rep.Print(os.Stdout)
}

// weights adds a flag for every weight of the policies.
func (fl *flags) weights(f *pflag.FlagSet) {
	c := &fl.routing
	*c = routing.DefaultConfig()
	add := func(v *float64, name, what string) { f.Float64Var(v, name, *v, what) }
	f.Float64Var(&c.PrefillLoadScale, "prefill-load-scale", 0,
		"weight of prefill against decode in the policy dynamo (default 1, for the mixes 8)")
	add(&c.OverlapScoreCredit, "overlap-score-credit", "worth of a block on the device, in blocks of prefill")
	add(&c.OverlapScoreCreditDecay, "overlap-score-credit-decay", "decay of the credit on workers with more prefill")
	add(&c.DecodeActiveRequestWeight, "decode-active-request-weight", "cost of a running request, in blocks")
	add(&c.HostCacheHitWeight, "host-cache-hit-weight", "worth of a block in host memory")
	add(&c.DiskCacheHitWeight, "disk-cache-hit-weight", "worth of a block on disk or in an external store")
	add(&c.SharedCacheMultiplier, "shared-cache-multiplier", "worth of a block in the shared store")
	add(&c.RouterTemperature, "router-temperature", "0: the smallest cost; above: workers of like cost are drawn")
}

// checkNumbers returns an error for each number out of its range.
func (fl *flags) checkNumbers() (errs []error) {
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, n := range []struct {
		name          string
		value, lo, hi int
	}{{"requests", fl.requests, 0, 1 << 30}, {"workers", fl.workers, 0, 1024}, {"capacity", fl.capacity, 0, 1 << 30},
		{"host", fl.host, 0, 1 << 30}, {"store", fl.store, 0, 1 << 34}, {"table-tokens", fl.tableTokens, -1, 1 << 30},
		{"table-depth", fl.tableDepth, -1, 1 << 30}, {"block-tokens", fl.blockTokens, 0, 1 << 20},
		{"output-tokens", fl.output, 0, 1 << 20}, {"engines-per-gpu", fl.enginesPerGPU, 0, 1024}} {
		if n.value < n.lo || n.value > n.hi {
			fail("--%s %d is not from %d to %d", n.name, n.value, n.lo, n.hi)
		}
	}
	for _, n := range fl.routers {
		if n < 1 || n > 1024 {
			fail("--routers %d is not from 1 to 1024", n)
		}
	}
	if len(fl.routers) == 0 {
		fail("--routers is empty")
	}
	for _, x := range fl.rates {
		if !(x > 0 && x <= 1e5) {
			fail("--rate %v is not above 0 and at most 100,000", x)
		}
	}
	for _, x := range fl.ratios {
		if !(x > 0 && x <= 1000) {
			fail("--ratio %v is not above 0 and at most 1,000", x)
		}
	}
	for _, l := range []struct {
		name   string
		values []float64
	}{{"speed", fl.speeds}, {"capacity-factor", fl.capacities}} {
		for _, x := range l.values {
			if !(x > 0.01 && x <= 100) {
				fail("--%s %v is not above 0.01 and at most 100", l.name, x)
			}
		}
	}
	return errs
}

// options checks all flags and reads the workload. It writes the detected format of a trace to notes, and doubts about
// the trace.
func (fl *flags) options(scaled bool, notes io.Writer) (o Options, err error) {
	errs := fl.checkNumbers()
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	changes, err := parseChanges(fl.changes)
	if err != nil {
		fail("--change: %w", err)
	}
	if fl.engine != "" && engines[fl.engine] == nil {
		fail("--engine: there is no %q; there are qwen3-32b and vllm-h200", fl.engine)
	}
	if fl.ratios != nil && fl.capacity > 0 {
		fail("--ratio and --capacity exclude each other")
	}
	given := fl.blockSize != 0
	if !given {
		if fl.blockSize = 64; fl.engine == "vllm-h200" {
			fl.blockSize = VLLMOnH200().BlockSize
		}
	}
	if err := trace.CheckBlockSize(fl.blockSize); err != nil {
		fail("--block-size: %w", err)
	}
	if fl.format != "" && !slices.Contains(trace.Formats, trace.Format(fl.format)) {
		fail("--trace-format: there is no %q; there are %s", fl.format, strings.Join(names(trace.Formats), ", "))
	}
	if o.Arms, err = ParseArms(fl.arms); err != nil {
		fail("--arms: %w", err)
	} else if len(o.Arms) == 0 {
		fail("--arms is empty")
	}
	for _, d := range fl.disturb {
		if !slices.Contains(Disturbances, Disturbance(d)) {
			fail("--disturb: there is no %q; there are %v", d, Disturbances)
		}
		o.Disturb = append(o.Disturb, Disturbance(d))
	}
	switch {
	case fl.workload == "" && fl.trace == "":
		fail("neither --workload nor --trace is given")
	case fl.workload != "" && fl.trace != "":
		fail("--workload and --trace are two workloads")
	case fl.workload != "" && !slices.Contains(workloadNames(), fl.workload):
		fail("--workload: there is no %q; there are %s", fl.workload, strings.Join(workloadNames(), ", "))
	case strings.HasPrefix(fl.workload, "capacity-") && fl.requests > 0:
		fail("--requests has no effect on the mixes of llm-d: --rate sets their length")
	}
	o.Routing = fl.routing
	if err := o.Routing.Validate(); err != nil {
		for _, line := range strings.Split(err.Error(), "\n") {
			fail("--%s", strings.ReplaceAll(line, "_", "-"))
		}
	}
	if len(errs) > 0 {
		return o, errors.Join(errs...)
	}
	reqs, err := fl.traced(given, notes)
	if err != nil {
		return o, err
	}
	if o.Workloads, err = fl.workloads(reqs); err != nil {
		return o, err
	}
	for i := range o.Workloads {
		fl.amend(&o.Workloads[i], changes)
	}
	if !scaled {
		o.Routing.PrefillLoadScale = o.Workloads[0].PrefillLoadScale
	}
	o.Workers, o.Routers, o.Ratios, o.Seed = fl.workers, fl.routers, fl.ratios, fl.seed
	o.TableTokens, o.TableDepth = fl.tableTokens, fl.tableDepth
	return o, nil
}

// traced reads the requests of --trace; nil without a trace. given reports whether the block size is given. Otherwise
// the block size is at most the size in the trace.
func (fl *flags) traced(given bool, notes io.Writer) ([]trace.Request, error) {
	if fl.trace == "" {
		return nil, nil
	}
	reqs, err := readTrace(fl.trace, fl.format, fl.requests, &fl.blockTokens, fl.seed, notes)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	for _, line := range doubts(reqs, fl.output > 0) {
		fmt.Fprintf(notes, "%s: %s\n", fl.trace, line)
	}
	if !given && trace.CheckBlockSize(fl.blockTokens) == nil {
		fl.blockSize = min(fl.blockSize, fl.blockTokens)
	}
	if fl.blockTokens%fl.blockSize != 0 {
		return nil, fmt.Errorf("--block-tokens: %d tokens of a hash id are no multiple of the block size %d", fl.blockTokens,
			fl.blockSize)
	}
	return reqs, nil
}

// amend changes a workload as the flags say.
func (fl *flags) amend(w *Workload, changes []Change) {
	if fl.engine != "" {
		size := w.Engine.BlockSize
		w.Engine = engines[fl.engine]()
		w.Engine.BlockSize = size
	}
	if fl.enginesPerGPU > 0 {
		w.Engine.EnginesPerGPU = fl.enginesPerGPU
	}
	w.Speeds, w.Capacities = fl.speeds, fl.capacities
	if changes != nil {
		w.Changes = changes
	}
	if fl.singleTurns {
		w.SingleTurns()
	}
	if fl.output > 0 {
		w.setOutput(fl.output)
	}
	e := &w.Engine
	if e.Host, e.Store = fl.host, fl.store; fl.capacity > 0 {
		e.Capacity = fl.capacity
	}
}

// engines are the selectable engines.
var engines = map[string]func() Engine{"qwen3-32b": Defaults, "vllm-h200": VLLMOnH200}

// measuredName is the workload of the measured run.
const measuredName = "measured-h200"

// workloadNames returns the workloads without a file.
func workloadNames() []string {
	list := []string{"capacity-73", "capacity-37", measuredName}
	for _, x := range generated {
		list = append(list, x.name)
	}
	return list
}

// workloads returns the workload once for every rate.
func (fl *flags) workloads(reqs []trace.Request) (list []Workload, err error) {
	switch fl.workload {
	case "capacity-73":
		return []Workload{Capacity73(fl.seed, fl.blockSize, fl.rates)}, nil
	case "capacity-37":
		return []Workload{Capacity37(fl.seed, fl.blockSize, fl.rates)}, nil
	}
	rates := fl.rates
	if rates == nil {
		rates = []float64{0}
	}
	for _, r := range rates {
		w, err := fl.atRate(reqs, r)
		if err != nil {
			return nil, err
		}
		list = append(list, w)
	}
	return list, nil
}

// atRate returns the workload at a rate; 0 is the workload's own rate.
func (fl *flags) atRate(reqs []trace.Request, rate float64) (Workload, error) {
	if fl.workload == "" {
		w, err := FromTraceScaled("trace", reqs, fl.blockTokens, fl.blockSize, rate)
		if err != nil {
			err = fmt.Errorf("--trace: %s: %w", fl.trace, err)
		}
		return w, err
	}
	if fl.workload == measuredName {
		m := MeasuredH200()
		if rate == 0 {
			rate = m.Arms[0].Rate
		}
		n := fl.requests
		if n == 0 {
			n = len(m.Requests)
		}
		return m.Workload(rate, n), nil
	}
	n := fl.requests
	if n == 0 {
		n = 1500
	}
	i := slices.IndexFunc(generated, func(x sessions) bool { return x.name == fl.workload })
	e := MatrixEngine()
	e.BlockSize = fl.blockSize
	w := generated[i].workload(fl.seed, n, e)
	if rate > 0 {
		w = w.AtRate(rate)
	}
	return w, nil
}

// parseChanges reads SECONDS:WORKER:leave and SECONDS:WORKER:join, and sorts the changes by time.
func parseChanges(texts []string) (list []Change, err error) {
	for _, text := range texts {
		var c Change
		part := strings.Split(text, ":")
		bad := len(part) != 3 || part[2] != "leave" && part[2] != "join"
		if !bad {
			at, err1 := strconv.ParseFloat(part[0], 64)
			w, err2 := strconv.Atoi(part[1])
			c = Change{At: at, Worker: w, Up: part[2] == "join"}
			bad = err1 != nil || err2 != nil || !(at >= 0 && at <= 1e9) || w < 0
		}
		if bad {
			return nil, fmt.Errorf("%q is not SECONDS:WORKER:leave or SECONDS:WORKER:join", text)
		}
		list = append(list, c)
	}
	slices.SortStableFunc(list, func(a, b Change) int { return cmp.Compare(a.At, b.At) })
	return list, nil
}

func names[T ~string](texts []T) (list []string) {
	for _, t := range texts {
		list = append(list, string(t))
	}
	return list
}

// progress writes a line at the start, for every new arm, and every two seconds.
func progress(w io.Writer, clock func() time.Time) func(string, int, int) {
	begun, last, before := clock(), time.Time{}, ""
	return func(what string, done, of int) {
		now := clock()
		if what == before && now.Sub(last) < 2*time.Second {
			return
		}
		last, before = now, what
		fmt.Fprintf(w, "%5.1fs  %-28s %d of %d requests of all runs\n", now.Sub(begun).Seconds(), what, done, of)
	}
}
