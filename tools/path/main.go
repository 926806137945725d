// Command path measures the whole path of an event, from an engine's socket to the answer, beside NVIDIA Dynamo's
// standalone indexer.
//
//	go run ./tools/path                                   # 1.3 M blocks of one engine, five rounds
//	go run ./tools/path --workers 8 --blocks 2600000
//
// A Python process with real libzmq (publisher.py) simulates the engines. For kvatlas, every engine has a worker-shim
// process, and a single indexer contains the NATS server and the index. A block is acknowledged by the log before the
// block is in the index. Dynamo's indexer reads the same messages directly and has no log. Its wheel
// (integration/python/dynamo.txt) is installed into the user's cache folder. All processes share the machine.
//
// A run lasts from the first sent message until a query finds the last block of every engine. Then queries check whole
// prompts to the last block. In a round, all contenders run in turn, so other work of the machine affects all
// contenders. The output has medians, with ratios first. A ratio above 1 means that kvatlas is faster.
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

// contender is a measured program.
type contender struct {
	name string
	peer bool
	// longest delay from an acknowledgement of the log to the disk; 0 syncs before every acknowledgement
	syncs time.Duration
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
		"contenders: kvatlas (syncs every batch to the disk), kvatlas-2m (syncs every two minutes), dynamo")
	set.IntVar(&f.workers, "workers", 1, "engines")
	set.IntVar(&f.blocks, "blocks", 1_310_720, "number of announced blocks, all different")
	set.IntVar(&f.rounds, "rounds", 5, "measurements of every contender")
	set.StringVar(&f.cache, "cache", "", "folder for built programs (default: kvatlas in the user's cache folder)")
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if set.NArg() > 0 {
		return f, fmt.Errorf("unknown argument %q", set.Arg(0))
	}
	if f.rounds < 1 || f.workers < 1 || f.workers > 64 || f.blocks < f.workers*message*chain {
		return f, fmt.Errorf("want at least one round, 1 to 64 workers, and %d blocks for every worker", message*chain)
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

// table prints a row for every contender.
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
