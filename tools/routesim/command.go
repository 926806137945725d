package routesim

import (
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/trace"
	"github.com/spf13/cobra"
)

// flags are what the command is given.
type flags struct {
	trace, workload, svg    string
	requests, workers       int
	arms, disturb           []string
	routers                 []int
	rates, ratios           []float64
	seed                    uint64
	blockSize, capacity     int
	host, store             int
	scale                   float64
	tableTokens, tableDepth int
	asJSON, quiet           bool
}

// Command is indexer simulate: it compares ways to choose workers on a simulated fleet.
func Command() *cobra.Command {
	var fl flags
	cmd := &cobra.Command{
		Use:   "simulate --workload capacity-73|capacity-37 | --trace FILE",
		Short: "Compare ways to choose workers, on a simulated fleet",
		Long: `Simulate a fleet of engines in virtual time, route a workload through it in several ways, and print what each
way comes to: how much of the prompts was reused, times to the first token, throughput, and where reuse was lost.
Nothing else is needed; a run takes seconds.

Workloads: two mixes that llm-d has published figures for, and request traces in Mooncake's format. With --rate, a
mix has one stage for each rate after its warm-up, and a trace is run once at each rate. With --ratio, everything is
run once for each amount of KV memory.

Arms:

  random, round-robin        know nothing
  least-load                 the requests under way
  approx-ttl, approx-lru     guess from what each router sent where
  exact-own                  an index in each router, from the engines' events
  exact-restart              the same, and all routers are restarted half-way
  exact-shared               one index and one table of requests under way for all routers, as kvatlas has
  oracle                     what is true of caches and load

From approx-ttl on all choose by the policy dynamo. --disturb adds, half-way: router (all restart), engine (one
crashes), cache (all engines forget theirs).`,
		Example: `  indexer simulate --workload capacity-73 --svg plot.svg
  indexer simulate --trace conversation_trace.jsonl --workers 16 --routers 1,4 --rate 3,6,12
  indexer simulate --workload capacity-73 --rate 20 --ratio 0.5,1,2,4 --arms approx-lru,exact-shared`,
		Args: cobra.NoArgs,
	}
	f := cmd.Flags()
	f.StringVar(&fl.workload, "workload", "", "capacity-73 or capacity-37")
	f.StringVar(&fl.trace, "trace", "", "file of requests in Mooncake's format")
	f.IntVar(&fl.requests, "requests", 0, "how many requests of the trace; 0: all")
	f.IntVar(&fl.workers, "workers", 0, "simulated engines; 0: as many as the workload was published with, or 8")
	f.StringSliceVar(&fl.arms, "arms", names(Arms), "ways to choose")
	f.IntSliceVar(&fl.routers, "routers", []int{1}, "numbers of routers, for arms to which it matters")
	f.Float64SliceVar(&fl.rates, "rate", nil, "requests per second (default: as published, or as in the trace)")
	f.Float64SliceVar(&fl.ratios, "ratio", nil,
		"KV memory of the fleet by the workload's working set (default: --capacity)")
	f.StringSliceVar(&fl.disturb, "disturb", nil, "what happens half-way: router, engine, cache")
	f.Uint64Var(&fl.seed, "seed", 1, "seed of arrivals and of random choices")
	f.IntVar(&fl.blockSize, "block-size", 64, "tokens in a block; divides 512")
	f.IntVar(&fl.capacity, "capacity", 0, "tokens of KV memory of one engine; 0: the workload's, or 307,328")
	f.IntVar(&fl.host, "host", 0, "tokens that one engine's host memory holds of what leaves its device")
	f.IntVar(&fl.store, "store", 0, "tokens that a store shared by all engines holds")
	f.Float64Var(&fl.scale, "prefill-load-scale", 0,
		"weight of prefill against decode in the policy dynamo (default 1 for traces, 8 for the mixes)")
	f.IntVar(&fl.tableTokens, "table-tokens", -1,
		"tokens that approx-lru believes a worker holds; 0: its capacity (default for the mixes as published, else 0)")
	f.IntVar(&fl.tableDepth, "table-depth", -1,
		"tokens of a prompt that approx-ttl and approx-lru look at; 0: all (default for the mixes as published, else 0)")
	f.StringVar(&fl.svg, "svg", "", "write a plot of TTFT and hit rate to this file")
	f.BoolVar(&fl.asJSON, "json", false, "print the result as one JSON object, and no progress")
	f.BoolVar(&fl.quiet, "quiet", false, "print no progress")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o, err := fl.options(f.Changed("prefill-load-scale"))
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
		if !fl.asJSON && !fl.quiet {
			o.Progress = progress(os.Stderr, time.Now)
		}
		rep, err := Compare(cmd.Context(), o)
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
	return cmd
}

// options checks everything and reads the workload.
func (fl *flags) options(scaled bool) (o Options, err error) {
	var errs []error
	fail := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	for _, n := range []struct {
		name          string
		value, lo, hi int
	}{{"requests", fl.requests, 0, 1 << 30}, {"workers", fl.workers, 0, 1024}, {"capacity", fl.capacity, 0, 1 << 30},
		{"host", fl.host, 0, 1 << 30}, {"store", fl.store, 0, 1 << 34}, {"table-tokens", fl.tableTokens, -1, 1 << 30},
		{"table-depth", fl.tableDepth, -1, 1 << 30}} {
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
	if fl.ratios != nil && fl.capacity > 0 {
		fail("--ratio and --capacity are two ways to say the same")
	}
	if err := trace.CheckBlockSize(fl.blockSize); err != nil {
		fail("--block-size: %w", err)
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
	case fl.workload != "" && fl.workload != "capacity-73" && fl.workload != "capacity-37":
		fail("--workload: there is no %q; there are capacity-73 and capacity-37", fl.workload)
	case fl.workload != "" && fl.requests > 0:
		fail("--requests says nothing without --trace")
	}
	o.Routing = routing.DefaultConfig()
	if scaled {
		o.Routing.PrefillLoadScale = fl.scale
		if err := o.Routing.Validate(); err != nil {
			fail("--prefill-load-scale: %w", err)
		}
	}
	if len(errs) > 0 {
		return o, errors.Join(errs...)
	}
	if o.Workloads, err = fl.workloads(); err != nil {
		return o, err
	}
	for i := range o.Workloads {
		e := &o.Workloads[i].Engine
		if e.Host, e.Store = fl.host, fl.store; fl.capacity > 0 {
			e.Capacity = fl.capacity
		}
	}
	if !scaled {
		o.Routing.PrefillLoadScale = o.Workloads[0].PrefillLoadScale
	}
	o.Workers, o.Routers, o.Ratios, o.Seed = fl.workers, fl.routers, fl.ratios, fl.seed
	o.TableTokens, o.TableDepth = fl.tableTokens, fl.tableDepth
	return o, nil
}

func (fl *flags) workloads() ([]Workload, error) {
	switch fl.workload {
	case "capacity-73":
		return []Workload{Capacity73(fl.seed, fl.blockSize, fl.rates)}, nil
	case "capacity-37":
		return []Workload{Capacity37(fl.seed, fl.blockSize, fl.rates)}, nil
	}
	reqs, err := trace.ReadFile(fl.trace, fl.requests)
	if err != nil {
		return nil, fmt.Errorf("--trace: %w", err)
	}
	rates := fl.rates
	if rates == nil {
		rates = []float64{0}
	}
	var list []Workload
	for _, r := range rates {
		w, err := FromTrace("trace", reqs, fl.blockSize, r)
		if err != nil {
			return nil, fmt.Errorf("--trace: %s: %w", fl.trace, err)
		}
		list = append(list, w)
	}
	return list, nil
}

func names(arms []Arm) (list []string) {
	for _, a := range arms {
		list = append(list, string(a))
	}
	return list
}

// progress writes a line at once, for each new arm, and every two seconds.
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
