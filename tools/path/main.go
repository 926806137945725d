// Command path measures the whole way of an event, from an engine's socket to the answer, and puts NVIDIA Dynamo's
// standalone indexer beside it.
//
//	go run ./tools/path                                   # 1.3 M blocks of one engine, five rounds
//	go run ./tools/path --workers 8 --blocks 2600000
//
// One Python process with real libzmq (publisher.py) is the engines. For kvatlas there is a worker-shim process for
// each engine, and one indexer with the NATS server and the index in it: every block is in the log, acknowledged,
// before it is in the index. Dynamo's indexer hears the same messages itself and keeps no log; it is installed from its
// wheel (integration/python/dynamo.txt) into the user's cache folder. All of it shares the machine.
//
// A run's time is that from the first message's sending until a query for the last block of every engine finds it; then
// whole prompts are asked for, which must be there to the last block. Within a round all take their turn before the
// next round begins, so that what else the machine does hits all alike. Medians are printed, ratios first: above 1
// kvatlas is the faster one.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "path:", err)
		os.Exit(1)
	}
}

// flags are the program's, parsed and checked.
type flags struct {
	workers, blocks, rounds int
	contenders              []contender
	cache                   string
}

// contender is one that is measured.
type contender struct {
	name  string
	peer  bool
	syncs time.Duration // how long the log may keep what it acknowledged from the disk; 0: not at all
}

var contenders = []contender{
	{name: "kvatlas"},
	{name: "kvatlas-2m", syncs: 2 * time.Minute},
	{name: "dynamo", peer: true},
}

func parse(args []string) (f flags, err error) {
	set := flag.NewFlagSet("path", flag.ContinueOnError)
	var names []string
	for _, c := range contenders {
		names = append(names, c.name)
	}
	only := set.String("only", strings.Join(names, ","),
		"whom to measure: kvatlas with every batch forced to the disk, kvatlas-2m with the disk every two minutes, dynamo")
	set.IntVar(&f.workers, "workers", 1, "engines")
	set.IntVar(&f.blocks, "blocks", 1_310_720, "blocks that they announce, all different")
	set.IntVar(&f.rounds, "rounds", 5, "measurements of each kind")
	set.StringVar(&f.cache, "cache", "", "folder for what is built (default: kvatlas in the user's cache folder)")
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if set.NArg() > 0 {
		return f, fmt.Errorf("unknown argument %q", set.Arg(0))
	}
	if f.rounds < 1 || f.workers < 1 || f.workers > 64 || f.blocks < f.workers*message*chain {
		return f, fmt.Errorf("want at least one round, 1 to 64 workers, and %d blocks for each", message*chain)
	}
	for name := range strings.SplitSeq(*only, ",") {
		i := slices.Index(names, name)
		if i < 0 {
			return f, fmt.Errorf("%q is unknown; there are %s", name, strings.Join(names, ", "))
		}
		f.contenders = append(f.contenders, contenders[i])
	}
	if f.cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return f, fmt.Errorf("no --cache is named: %w", err)
		}
		f.cache = filepath.Join(dir, "kvatlas", "bench")
	}
	return f, nil
}

func run(ctx context.Context, args []string, out io.Writer) error {
	f, err := parse(args)
	if err != nil {
		return err
	}
	b, err := build(ctx, f)
	if err != nil {
		return err
	}
	defer b.engines.stop()
	results := map[string][]result{}
	for round := range f.rounds {
		for _, c := range f.contenders {
			r, err := b.measure(ctx, c)
			if err != nil {
				return fmt.Errorf("%s: %w", c.name, err)
			}
			fmt.Fprintf(os.Stderr, "round %d: %-10s %.2f M blocks/s\n", round+1, c.name, r.perSecond/1e6)
			results[c.name] = append(results[c.name], r)
		}
	}
	fmt.Fprintf(out,
		"%s/%s, %d CPUs, %s; %d engines, %d blocks; medians of %d rounds, in brackets the least and the most\n",
		runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), runtime.Version(), f.workers, b.engines.blocks, f.rounds)
	return table(out, f.contenders, results)
}

// table prints a line for each contender.
func table(out io.Writer, all []contender, results map[string][]result) error {
	t := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "\tto dynamo\tM blocks/s\t\tsending, s\tCPU µs/block: engines\tshims\tindexer\t")
	peer := middle(results["dynamo"], rate)
	for _, c := range all {
		rs := results[c.name]
		ratio := "–"
		if m := middle(rs, rate); peer > 0 && !c.peer {
			ratio = fmt.Sprintf("%.2f", m/peer)
		}
		rates := make([]float64, len(rs))
		for i, r := range rs {
			rates[i] = r.perSecond / 1e6
		}
		fmt.Fprintf(t, "%s\t%s\t%.2f\t(%.2f to %.2f)\t%.2f\t%.2f\t%.2f\t%.2f\t\n", c.name, ratio, middle(rs, rate)/1e6,
			slices.Min(rates), slices.Max(rates),
			middle(rs, func(r result) float64 { return r.sending }), middle(rs,
				func(r result) float64 { return r.engines }),
			middle(rs, func(r result) float64 { return r.shims }), middle(rs,
				func(r result) float64 { return r.indexer }))
	}
	return t.Flush()
}

func rate(r result) float64 { return r.perSecond }

// middle is the median of a figure; 0 if there are none.
func middle(rs []result, of func(result) float64) float64 {
	if len(rs) == 0 {
		return 0
	}
	xs := make([]float64, len(rs))
	for i, r := range rs {
		xs[i] = of(r)
	}
	slices.Sort(xs)
	return (xs[(len(xs)-1)/2] + xs[len(xs)/2]) / 2
}
