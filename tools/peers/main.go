// Command peers compares the index with other indexes on the same files: SMG (ChainIndex of the crate kv-index) and
// NVIDIA Dynamo (the pooled concurrent radix tree and the plain radix tree of dynamo-kv-router).
//
//	go run ./tools/peers                                    # all corpora from the generator's seed 0, five rounds
//	go run ./tools/peers --trace conversation_trace.jsonl   # the corpora of a trace in Mooncake's format
//	go run ./tools/peers --corpora conv64 --modes events,queries:2 --rounds 9
//
// The command builds the Rust harness with cargo and the indexer with go, and makes missing corpora in the user's cache
// folder (about 1 GB in total). Then it runs every measurement in a separate process, in sequence. In a round, all
// indexes run in turn, so other work of the machine affects all indexes. The output has medians, with ratios first. A
// ratio above 1 means that this index is better.
//
// `indexer bench index` defines the modes. The harness (harness/src/measure.rs) implements the same modes, and both
// print a JSON object with the same names. The number after a mode is the number of threads: writers for events,
// readers for queries.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"

	"github.com/kvatlas/kvatlas/tools/corpus"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "peers:", err)
		os.Exit(1)
	}
}

// flags are the program's, parsed and checked.
type flags struct {
	corpora []corpus.Named
	modes   []mode
	peers   []string
	ours    string
	trace   string
	seed    uint64
	rounds  int
	cache   string
	raw     string
}

// mode is a kind of measurement with a number of threads.
type mode struct {
	name    string
	threads int
}

func (m mode) String() string {
	if m.threads > 1 {
		return fmt.Sprintf("%s:%d", m.name, m.threads)
	}
	return m.name
}

// args returns the flags for the mode's threads, or nil for a single thread.
func (m mode) args() []string {
	switch {
	case m.threads <= 1:
		return nil
	case m.name == "events":
		return []string{"--writers", strconv.Itoa(m.threads)}
	default:
		return []string{"--readers", strconv.Itoa(m.threads)}
	}
}

var peerNames = []string{"chainindex", "chainindex+mimalloc", "pool-crtc", "radixtree"}

func parse(args []string) (f flags, err error) {
	set := flag.NewFlagSet("peers", flag.ContinueOnError)
	names := []string{}
	for _, n := range corpus.TheNamed() {
		names = append(names, n.Name)
	}
	corpora := set.String("corpora", strings.Join(names, ","), "corpora to run")
	modes := set.String("modes", "events,queries,queries:2,load,mixed,memory",
		"modes: events[:WRITERS], queries[:READERS], load, mixed, memory")
	peers := set.String("peers", strings.Join(peerNames, ","), "peers to run")
	set.StringVar(&f.ours, "ours", "",
		"our command, with {corpus}, {mode} and {threads} to be filled in; \"none\" runs the peers alone (default: the indexer, built from ./cmd/indexer)")
	set.StringVar(&f.trace, "trace", "",
		"trace in Mooncake's format for the corpora (default: a generated trace)")
	set.Uint64Var(&f.seed, "seed", 0, "seed of the generated trace")
	set.IntVar(&f.rounds, "rounds", 5, "measurements of every kind")
	set.StringVar(&f.cache, "cache", "",
		"folder for corpora and built programs (default: kvatlas in the user's cache folder)")
	set.StringVar(&f.raw, "raw", os.DevNull, "file to write every single measurement to, as JSON lines")
	if err := set.Parse(args); err != nil {
		return f, err
	}
	if set.NArg() > 0 {
		return f, fmt.Errorf("unknown argument %q", set.Arg(0))
	}
	if f.rounds < 1 {
		return f, fmt.Errorf("rounds: %d, want at least 1", f.rounds)
	}
	for name := range strings.SplitSeq(*corpora, ",") {
		i := slices.Index(names, name)
		if i < 0 {
			return f, fmt.Errorf("corpus %q: unknown; there are %s", name, strings.Join(names, ", "))
		}
		f.corpora = append(f.corpora, corpus.TheNamed()[i])
	}
	for name := range strings.SplitSeq(*modes, ",") {
		m, err := parseMode(name)
		if err != nil {
			return f, err
		}
		f.modes = append(f.modes, m)
	}
	for name := range strings.SplitSeq(*peers, ",") {
		if name == "" {
			continue
		}
		if !slices.Contains(peerNames, name) {
			return f, fmt.Errorf("peer %q: unknown; there are %s", name, strings.Join(peerNames, ", "))
		}
		f.peers = append(f.peers, name)
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

func parseMode(text string) (mode, error) {
	name, threads, several := strings.Cut(text, ":")
	m := mode{name, 1}
	if !slices.ContainsFunc(metrics, func(x metric) bool { return x.mode == name }) {
		return m, fmt.Errorf("mode %q: unknown; there are events, queries, load, mixed, memory", text)
	}
	if several {
		n, err := strconv.Atoi(threads)
		if err != nil || n < 1 || name != "events" && name != "queries" {
			return m, fmt.Errorf("mode %q: only events and queries may have a number of threads, from 1", text)
		}
		m.threads = n
	}
	return m, nil
}

func run(ctx context.Context, args []string) error {
	f, err := parse(args)
	if err != nil {
		return err
	}
	indexes, err := build(ctx, f)
	if err != nil {
		return err
	}
	raw, err := os.OpenFile(f.raw, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return err
	}
	defer raw.Close()
	fmt.Printf("%s/%s, %d CPUs, %s; medians of %d rounds; ratios: above 1 %s is better\n",
		runtime.GOOS, runtime.GOARCH, runtime.NumCPU(), runtime.Version(), f.rounds, us)
	for _, named := range f.corpora {
		path, header, err := prepare(ctx, f, named, os.Stderr)
		if err != nil {
			return err
		}
		results, err := measure(ctx, indexes, path, f.modes, f.rounds, raw, os.Stderr)
		if err != nil {
			return err
		}
		fmt.Printf("\n%s: %s; %d holdings\n", named.Name, named.About, header.LiveAtEnd)
		if err := results.print(os.Stdout, header); err != nil {
			return err
		}
	}
	return raw.Close()
}
