package routesim

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/trace"
	"github.com/spf13/cobra"
)

// matrixCommand is indexer simulate matrix.
func matrixCommand() *cobra.Command {
	fl := matrixFlags{Matrix: Matrix{Routing: routing.DefaultConfig()}}
	cmd := &cobra.Command{
		Use:   "matrix",
		Short: "Compare ways to choose workers on all workloads, at several loads, with and without a host tier",
		Long: `Run arms on nine workloads: Mooncake's traces conversation, toolagent and synthetic, agents with long sessions, single
turns, one hot prefix, workers that leave and join, and two mixes of llm-d. Each workload runs at each load, with and
without a host tier, with each seed. The result is a table for each of these cells, with medians over the seeds.

A load is a share of the rate that the fleet could serve if all of its memory were one cache.

Traces are read from NAME_trace.jsonl in the folder --traces. Without a file, a workload of the same shape is generated,
and the table says so.

With --subject, the best of the other arms is the measure for an arm: TTFT mean at most 1.02 and p99 at most 1.05 times
the best, reuse at most a point below sticky. The mean of requests with a real prefix must be 25 % below that of
dynamo-1-1, the default of Dynamo: requests of which earlier ones had a quarter of the prompt. Oracles do not count.`,
		Example: `  indexer simulate matrix --traces mooncake/FAST25-release/traces > matrix.md
  indexer simulate matrix --workloads agents,hot-prefix --load 0.7 --host 0 --seeds 1 --arms sticky,dynamo-1-1,dynamo-4-4`,
		Args: cobra.NoArgs,
	}
	cli.Output[[]Cell](cmd)
	f := cmd.Flags()
	f.StringSliceVar(&fl.arms, "arms", []string{"rivals"}, `arms of indexer simulate; "rivals" selects all other routers`)
	f.StringSliceVar(&fl.only, "workloads", nil, "workloads to run (default: all)")
	f.StringVar(&fl.subject, "subject", "", "arm to judge against the other arms; runs in addition")
	f.StringVar(&fl.traces, "traces", "", "folder with Mooncake's traces")
	f.IntVar(&fl.requests, "requests", 1200, "requests of a workload; the mixes of llm-d have 1,500 and 498 at every rate")
	f.IntVar(&fl.Seeds, "seeds", 5, "number of seeds")
	f.Float64SliceVar(&fl.Loads, "load", []float64{0.4, 0.6, 0.8}, "loads")
	f.Float64SliceVar(&fl.Hosts, "host", []float64{0, 2},
		"sizes of the host tier, as multiples of the device memory, not in tokens; 0: none")
	f.BoolVar(&fl.asJSON, "json", false, "print the result as JSON, and no progress")
	f.BoolVar(&fl.quiet, "quiet", false, "print no progress")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := fl.complete(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		return fl.run(cmd.Context())
	}
	return cmd
}

// matrixFlags are the flags of the command matrix, and the matrix.
type matrixFlags struct {
	Matrix
	arms, only      []string
	subject, traces string
	requests        int
	asJSON, quiet   bool
}

// complete checks the flags and completes the matrix.
func (fl *matrixFlags) complete() error {
	if fl.subject != "" {
		fl.arms = append(fl.arms, fl.subject)
	}
	var errs []error
	var err error
	if fl.Arms, err = ParseArms(fl.arms); err != nil {
		errs = append(errs, fmt.Errorf("--arms: %w", err))
	}
	fl.Subject = Arm(fl.subject)
	files, err := readTraces(fl.traces)
	if err != nil {
		errs = append(errs, fmt.Errorf("--traces: %w", err))
	}
	if fl.requests < 20 || fl.requests > 1_000_000 {
		errs = append(errs, fmt.Errorf("--requests %d is not from 20 to 1,000,000", fl.requests))
	}
	if fl.Seeds < 1 || fl.Seeds > 1000 {
		errs = append(errs, fmt.Errorf("--seeds %d is not from 1 to 1,000", fl.Seeds))
	}
	for _, x := range fl.Loads {
		if !(x > 0 && x <= 10) {
			errs = append(errs, fmt.Errorf("--load %v is not above 0 and at most 10", x))
		}
	}
	for _, x := range fl.Hosts {
		if !(x >= 0 && x <= 1000) {
			errs = append(errs, fmt.Errorf("--host %v is not from 0 to 1,000", x))
		}
	}
	fl.Workloads = MatrixWorkloads(fl.requests, files)
	for _, name := range fl.only {
		if !slices.ContainsFunc(fl.Workloads, func(w MatrixWorkload) bool { return w.Name == name }) {
			errs = append(errs, fmt.Errorf("--workloads: there is no %q", name))
		}
	}
	if fl.only != nil {
		fl.Workloads = slices.DeleteFunc(fl.Workloads, func(w MatrixWorkload) bool {
			return !slices.Contains(fl.only, w.Name)
		})
	}
	return errors.Join(errs...)
}

// run prints the cells of the matrix.
func (fl *matrixFlags) run(ctx context.Context) error {
	if !fl.asJSON && !fl.quiet {
		var lock sync.Mutex
		fl.Progress = func(done, of int) {
			lock.Lock()
			defer lock.Unlock()
			fmt.Fprintf(os.Stderr, "%d of %d cells\n", done, of)
		}
	}
	cells, err := fl.Run(ctx)
	if err != nil {
		return err
	}
	if fl.asJSON {
		return cli.PrintJSON(os.Stdout, cells)
	}
	return fl.Markdown(os.Stdout, cells)
}

// readTraces reads Mooncake's traces in a folder by name. An empty folder name gives no traces.
func readTraces(folder string) (map[string][]trace.Request, error) {
	list := map[string][]trace.Request{}
	if folder == "" {
		return list, nil
	}
	files, err := filepath.Glob(filepath.Join(folder, "*_trace.jsonl"))
	if err == nil && files == nil {
		err = fmt.Errorf("%s has no file NAME_trace.jsonl: %w", folder, fs.ErrNotExist)
	}
	if err != nil {
		return nil, err
	}
	for _, file := range files {
		name := strings.TrimSuffix(filepath.Base(file), "_trace.jsonl")
		if list[strings.TrimPrefix(name, "mooncake_")], err = trace.ReadFile(file, 0); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// measuredCommand is indexer simulate measured.
func measuredCommand() *cobra.Command {
	var seeds, fit int
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "measured",
		Short: "Compare the simulator with a measured run of four vLLM servers on a single GPU",
		Long: `Simulate the run of docs/measurements/2026-11-gpu.md and print simulated figures beside the measured ones. Each arm runs
twice: with the recorded choices of the measured run, which tests the engines, and with choices of its own. The arms
random and sticky always follow the record. Figures are medians over the seeds.

With --fit, the constants of the engines are fitted to four of the twelve arms, and printed.`,
		Args: cobra.NoArgs,
	}
	cli.Output[[]Compared](cmd)
	f := cmd.Flags()
	f.IntVar(&seeds, "seeds", 5, "number of seeds")
	f.IntVar(&fit, "fit", 0, "rounds of a fit of the engines' constants; 0: no fit")
	f.BoolVar(&asJSON, "json", false, "print the result as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if fit < 0 || fit > 1000 {
			return cli.UsageErrorf("--fit %d is not from 0 to 1,000", fit)
		}
		if fit > 0 {
			e, left, err := MeasuredH200().Fit(cmd.Context(), VLLMOnH200(), fit, (*MeasuredArm).fitted)
			if err != nil {
				return err
			}
			return cli.PrintJSON(os.Stdout, map[string]any{"engine": e, "error": left})
		}
		if seeds < 1 || seeds > 1000 {
			return cli.UsageErrorf("--seeds %d is not from 1 to 1,000", seeds)
		}
		list, err := MeasuredH200().Compare(cmd.Context(), seeds)
		if err != nil {
			return err
		}
		if asJSON {
			return cli.PrintJSON(os.Stdout, list)
		}
		var rows [][]any
		for _, x := range list {
			row := []any{x.Measured.Arm, x.Measured.Rate}
			for _, q := range []struct {
				format string
				of     func(*MeasuredArm) float64
			}{{"%.1f%%", func(a *MeasuredArm) float64 { return 100 * a.Reuse }},
				{"%.0f", func(a *MeasuredArm) float64 { return a.TTFTMean }},
				{"%.0f", func(a *MeasuredArm) float64 { return a.TTFTP50 }},
				{"%.0f", func(a *MeasuredArm) float64 { return a.TTFTP99 }}} {
				row = append(row, fmt.Sprintf(q.format+" | "+q.format+" | "+q.format, q.of(&x.Measured), q.of(&x.Recorded),
					q.of(&x.Own)))
			}
			rows = append(rows, row)
		}
		fmt.Println("measured | simulated with the recorded choices | simulated with simulated choices")
		return cli.Table(os.Stdout, []string{"ARM", "RATE", "REUSE", "TTFT mean, ms", "p50", "p99"}, rows)
	}
	return cmd
}
