package demo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/tools/trace"
	"github.com/spf13/cobra"
)

// Command returns indexer demo, which runs the demonstration and prints a table.
func Command() *cobra.Command {
	var fl flags
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Demonstrate engines, shims and an indexer, with a crash in the middle",
		Long: `Demonstrate the product on this machine without further software. Simulated engines with real ZeroMQ sockets announce
events as vLLM does. Every engine has a shim. The indexer runs in a separate process on a NATS server with file
storage. The demonstration serves a request trace. For every request, it queries the indexer for the longest prefix,
compares the answer with a naive twin, and serves the request on the best worker. In the middle of the trace, the
indexer is killed and restarted.

With --l3 the engines put evicted blocks into a shared store: a built-in Mooncake master or, with --l3-python, a real
master with a real client. The answers then include the blocks in the store and the blocks that a worker would load by
the rules of SGLang's HiCache. The demonstration compares them too.

Times to the first token are simulated in virtual time, because the engines compute nothing: the same requests, chosen
by kvatlas, by sticky sessions and by the least load, on engines with the measured speed of vLLM.

Standard error shows the progress: a changing line on a terminal, otherwise a line every two seconds.

The exit status is 0 only if every answer was equal to the twin's and no event is missing.`,
		Example: `  indexer demo
  indexer demo --trace conversation_trace.jsonl --requests 500 --json`,
		Args: cobra.NoArgs,
	}
	cli.Output[*Result](cmd)
	f := cmd.Flags()
	f.StringVar(&fl.traceFile, "trace", "",
		"file of requests in Mooncake's format (default: a trace of the same shape is generated)")
	f.IntVar(&fl.requests, "requests", 1000, "how many requests to serve")
	f.IntVar(&fl.cfg.Engines, "engines", 8, "simulated engines")
	f.IntVar(&fl.cfg.BlockSize, "block-size", 16, "tokens in a block; divides 512")
	f.IntVar(&fl.cfg.Capacity, "capacity", 10_000, "capacity of an engine in blocks")
	f.Uint64Var(&fl.cfg.Seed, "seed", 1, "seed of the generated trace and of the random routing")
	f.BoolVar(&fl.l3, "l3", false, "the engines share a store of evicted blocks")
	f.StringVar(&fl.l3Config.Python, "l3-python", "",
		"with --l3: a Python interpreter with the package mooncake-transfer-engine, for a real Mooncake master and client")
	f.DurationVar(&fl.l3Config.Timeout, "l3-limit", 0,
		"with --l3: longest wait of an answer for the store (default: no limit)")
	f.BoolVar(&fl.asJSON, "json", false, "print the result as a JSON object, without progress")
	f.BoolVar(&fl.quiet, "quiet", false, "print no progress")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := fl.check(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		return fl.run(cmd.Context())
	}
	return cmd
}

// flags are the flags of the command.
type flags struct {
	traceFile string
	requests  int
	asJSON    bool
	quiet     bool
	cfg       Config
	l3        bool
	l3Config  L3Config
}

// check returns an error for invalid flags, and completes the configuration.
func (fl *flags) check() error {
	var errs []error
	for _, n := range []struct {
		name          string
		value, lo, hi int
	}{{"requests", fl.requests, 2, 1 << 30}, {"engines", fl.cfg.Engines, 1, 256}, {"capacity", fl.cfg.Capacity, 1,
		1 << 30}} {
		if n.value < n.lo || n.value > n.hi {
			errs = append(errs, fmt.Errorf("--%s %d is not from %d to %d", n.name, n.value, n.lo, n.hi))
		}
	}
	if err := trace.CheckBlockSize(fl.cfg.BlockSize); err != nil {
		errs = append(errs, fmt.Errorf("--block-size: %w", err))
	}
	switch {
	case fl.l3:
		fl.cfg.L3 = &fl.l3Config
	case fl.l3Config != L3Config{}:
		errs = append(errs, errors.New("--l3-python and --l3-limit need --l3"))
	}
	return errors.Join(errs...)
}

// run runs the demonstration and prints the result.
func (fl *flags) run(ctx context.Context) error {
	var err error
	if !fl.asJSON && !fl.quiet {
		fl.cfg.Progress = progress(os.Stderr, isTerminal(os.Stderr))
		fl.cfg.Progress(Progress{Stage: "reading the requests", Of: fl.requests})
	}
	if fl.cfg.Requests, err = requestsOf(fl.traceFile, fl.requests, fl.cfg.Seed); err != nil {
		return err
	}
	if fl.cfg.Program, err = os.Executable(); err != nil {
		return err
	}
	result, err := Run(ctx, fl.cfg)
	if fl.cfg.Progress != nil && isTerminal(os.Stderr) {
		fmt.Fprint(os.Stderr, "\r\033[K")
	}
	if err != nil {
		return err
	}
	if fl.asJSON {
		err = cli.PrintJSON(os.Stdout, result)
	} else {
		err = printResult(os.Stdout, result, fl.cfg)
	}
	if err == nil && !result.Good() {
		err = fmt.Errorf("answers or events are wrong: %d of %d answers equal, %d events lost %s",
			result.AnswersEqual, result.AnswersChecked, result.EventsLost, result.FirstDifference)
	}
	return err
}

func requestsOf(file string, n int, seed uint64) ([]trace.Request, error) {
	if file == "" {
		return trace.Generate(trace.Options{Seed: seed, Requests: n, Clump: 1}), nil
	}
	list, err := trace.ReadFile(file, n)
	if err != nil {
		return nil, cli.UsageErrorf("--trace: %w", err)
	}
	if len(list) < 2 {
		return nil, cli.UsageErrorf("--trace: %s has %d requests; the demonstration needs two", file, len(list))
	}
	return list, nil
}

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// progress prints the progress of the demonstration: on a terminal as a changing line, otherwise as a line for every
// stage and every two seconds.
func progress(w io.Writer, terminal bool) func(Progress) {
	every, before, after := 2*time.Second, "", "\n"
	if terminal {
		every, before, after = 100*time.Millisecond, "\r\033[K", ""
	}
	begun, last, stage := time.Now(), time.Time{}, ""
	return func(p Progress) {
		if p.Stage == stage && time.Since(last) < every {
			return
		}
		last, stage = time.Now(), p.Stage
		fmt.Fprintf(w, "%s%5.1fs  %-22s  %d of %d requests  %d blocks announced  %.0f%% hits  %d of %d answers right%s",
			before, time.Since(begun).Seconds(), p.Stage, p.Requests, p.Of, p.Blocks, 100*p.Hits, p.Equal, p.Checked,
			after)
	}
}

// hitRate formats the share of prompt blocks held by the chosen worker, and the work of the busiest worker over the
// mean.
func hitRate(rate, imbalance float64) string {
	return fmt.Sprintf("%.1f%%, %.2f x the mean", 100*rate, imbalance)
}

func printResult(w io.Writer, r *Result, cfg Config) error {
	rows := [][]any{
		{"blocks announced", r.BlocksAnnounced},
		{"blocks applied", r.BlocksApplied},
		{"blocks per second", fmt.Sprintf("%.0f", r.BlocksPerS)},
		{"hit rate, busiest worker, routed by select", hitRate(r.HitRate, r.Imbalance)},
		{"  routed to the least load", hitRate(r.HitRateLeastLoad, r.ImbalanceLeastLoad)},
		{"  routed at random", hitRate(r.HitRateRandom, r.ImbalanceRandom)},
		{"query p50, p99", fmt.Sprintf("%.0f µs, %.0f µs", r.QueryP50, r.QueryP99)},
		{"select and book p50, p99", fmt.Sprintf("%.0f µs, %.0f µs", r.SelectP50, r.SelectP99)},
		{"snapshot", cli.Bytes(r.SnapshotBytes)},
		{"killed and restarted", fmt.Sprintf("%d time, ready again after %.0f ms", r.Restarts, r.RestoreMS)},
		{"events announced, lost", fmt.Sprintf("%d, %d", r.EventsAnnounced, r.EventsLost)},
		{"answers checked against the naive twin", fmt.Sprintf("%d of %d equal", r.AnswersEqual, r.AnswersChecked)},
	}
	if l := r.L3; l != nil {
		rows = append(rows,
			[]any{"pages in the shared store", fmt.Sprintf("%d (%s master)", l.PagesStored,
				strings.TrimSuffix(l.Master, "_master"))},
			[]any{"prefill without the store, with it", fmt.Sprintf("%d tokens, %d tokens", l.TokensMissed,
				l.TokensMissed-l.TokensLoaded)},
			[]any{"query p50, p99 without the store, with it", fmt.Sprintf("%.0f µs, %.0f µs; %.0f µs, %.0f µs",
				l.WithoutP50, l.WithoutP99, r.QueryP50, r.QueryP99)},
			[]any{"  the longest, partial answers", fmt.Sprintf("%.0f µs, %d of %d", l.Longest, l.Partial,
				r.AnswersChecked)},
			[]any{"saved by the store", fmt.Sprintf("%.1f%%, in %d of %d requests",
				100*float64(l.TokensLoaded)/float64(max(1, l.TokensMissed)), l.Requests, r.Requests)},
		)
	}
	err := cli.Table(w, []string{"kvatlas demo", fmt.Sprintf("%d requests in %.1f s", r.Requests, r.Seconds)}, rows)
	if err == nil && r.TTFT != nil {
		err = r.TTFT.print(w, cfg.Engines)
	}
	if err != nil {
		return err
	}
	return printNext(w, cfg.Program)
}
