// Package command provides the command indexer bench. Package tools/bench and the packages below do the work.
package command

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/bench"
	"github.com/kvatlas/kvatlas/tools/bench/cluster"
	"github.com/kvatlas/kvatlas/tools/bench/durable"
	"github.com/kvatlas/kvatlas/tools/corpus"
	"github.com/kvatlas/kvatlas/tools/trace"
	"github.com/spf13/cobra"
)

// Command returns indexer bench with all subcommands.
func Command() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "bench", Short: "Measure the index and make corpora"},
		indexcommand(), durablecommand(), clustercommand(), selectcommand(), corpuscommand())
}

func indexcommand() *cobra.Command {
	var o bench.Options
	var mode string
	cmd := &cobra.Command{
		Use:   "index --corpus FILE --mode events|queries|mixed|load|memory|snapshot",
		Short: "Measure the index on a corpus, in this process",
		Long: `Measure the index on a corpus from bench corpus:

  events    stores and removals as fast as possible, a first and a second pass
  queries   after all events, every query: percentiles of the latency, and queries per second
  mixed     all operations in order on one thread, and the digest of all answers
  load      queries beside a writer at full speed
  memory    resident bytes for each holding
  snapshot  an image of all ranks into memory and back, and clears`,
		Args: cobra.NoArgs,
	}
	cli.Output[bench.Report](cmd)
	f := cmd.Flags()
	f.StringVar(&o.File, "corpus", "", "corpus file (required)")
	f.StringVar(&mode, "mode", string(bench.Mixed), "what to measure")
	f.IntVar(&o.Window, "window", 0,
		"tokens of a sliding window beside every worker's prefix, as with a hybrid model; 0: none")
	f.IntVar(&o.Writers, "writers", 1, "indexes, with a writer and a share of the workers for each index")
	f.IntVar(&o.Readers, "readers", 1, "goroutines that query")
	f.BoolVar(&o.JSON, "json", false, "print a JSON object")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		o.Mode = bench.Mode(mode)
		if err := o.Validate(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		if err := readable("--corpus", o.File); err != nil {
			return err
		}
		return asUsage(bench.RunIndex(cmd.Context(), o, os.Stdout))
	}
	return cmd
}

func durablecommand() *cobra.Command {
	var o durable.Options
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "durable --corpus FILE",
		Short: "Measure log, replay, snapshots and restore with a corpus, on a NATS server in this process",
		Args:  cobra.NoArgs,
	}
	cli.Output[*durable.Report](cmd)
	f := cmd.Flags()
	f.StringVar(&o.File, "corpus", "", "corpus file (required)")
	f.Uint32Var(&o.Partitions, "partitions", 8, "shares of the log")
	f.IntVar(&o.Shards, "index-shards", 1, "indexes of the node, as of indexer serve")
	f.DurationVar(&o.Sync, "sync-interval", 0,
		"longest delay from an acknowledgement to the disk; 0 syncs before every acknowledgement")
	f.BoolVar(&o.Accounts, "accounts", false, "give shims and the node NATS accounts, as indexer auth create does")
	f.BoolVar(&asJSON, "json", false, "print a JSON object")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if o.File == "" {
			return cli.UsageErrorf("--corpus is missing")
		}
		if o.Partitions == 0 || o.Partitions > jetstream.MaxPartitions {
			return cli.UsageErrorf("--partitions %d is not from 1 to %d", o.Partitions, jetstream.MaxPartitions)
		}
		if o.Sync < 0 {
			return cli.UsageErrorf("--sync-interval %v is negative", o.Sync)
		}
		if err := readable("--corpus", o.File); err != nil {
			return err
		}
		r, err := durable.Run(cmd.Context(), o, func(step string) { fmt.Fprintln(os.Stderr, step, "...") })
		if err != nil {
			return asUsage(err)
		}
		if asJSON {
			return cli.PrintJSON(os.Stdout, r)
		}
		delay := func(d durable.Delay) string {
			return fmt.Sprintf("p50 %.0f, p99 %.0f, worst %.0f µs of %d", d.P50, d.P99, d.Max, d.N)
		}
		return cli.Table(os.Stdout, []string{r.Corpus, fmt.Sprintf("%d blocks, %d holdings at the end", r.Blocks,
			r.Holdings)}, [][]any{
			{"publish, acknowledged", fmt.Sprintf("%.2f s, %.2f M blocks/s, %s of log", r.PublishSeconds,
				r.PublishBlocksPer/1e6, cli.Bytes(r.LogBytes))},
			{"replay of the log alone", fmt.Sprintf("%.2f s, %.2f M blocks/s", r.ReplaySeconds,
				r.ReplayBlocksPerS/1e6)},
			{"first snapshot", fmt.Sprintf("%.2f s, %s, %.2f bytes per holding", r.SnapshotSeconds,
				cli.Bytes(r.SnapshotBytes), r.BytesPerHolding)},
			{"written when nothing changed", cli.Bytes(r.UnchangedBytes)},
			{"written after a change of a single worker", fmt.Sprintf("%s, %.1f%%", cli.Bytes(r.OneWorkerBytes),
				100*r.OneWorkerShare)},
			{"restore", fmt.Sprintf("%.2f s, %.2f M holdings/s", r.RestoreSeconds, r.RestoreHoldingsPerS/1e6)},
			{"query", delay(r.Idle.Query)},
			{"query during a snapshot", delay(r.Snapshot.Query)},
			{"event, until acknowledged by the log", delay(r.Idle.Publish)},
			{"the same during a snapshot", delay(r.Snapshot.Publish)},
			{"event, from the log to answers", delay(r.Idle.Apply)},
			{"the same during a snapshot", delay(r.Snapshot.Apply)},
		})
	}
	return cmd
}

func clustercommand() *cobra.Command {
	o := cluster.Defaults()
	var asJSON bool
	var role, data, config, url string
	cmd := &cobra.Command{
		Use:   "cluster",
		Short: "Measure queries, events and the failure of a node on three nodes, beside a single node and bare NATS",
		Long: `Measure the costs of a cluster in a single run on this machine. A NATS server, the nodes and an echo run as separate
processes. The ratios come first, with their bounds.`,
		Args: cobra.NoArgs,
	}
	cli.Output[*cluster.Report](cmd)
	f := cmd.Flags()
	f.IntVar(&o.Workers, "workers", o.Workers, "workers that announce blocks")
	f.IntVar(&o.Blocks, "blocks", o.Blocks, "blocks of every worker, half of them equal on all workers")
	f.IntVar(&o.Queries, "queries", o.Queries, "queries, and as many bare requests")
	f.Uint32Var(&o.Partitions, "partitions", o.Partitions, "shares of the log")
	f.BoolVar(&o.Accounts, "accounts", false, "give every role a NATS account, as indexer auth create does")
	f.BoolVar(&asJSON, "json", false, "print a JSON object")
	f.StringVar(&role, "role", "", "run a process beside the nodes (for internal use)")
	f.StringVar(&data, "data", "", "data folder of the process")
	f.StringVar(&config, "nats-config", "", "NATS configuration of the process")
	f.StringVar(&url, "url", "", "its NATS server")
	for _, name := range []string{"role", "data", "nats-config", "url"} {
		f.Lookup(name).Hidden = true
	}
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if role != "" {
			return cluster.RunRole(cmd.Context(), role, data, config, url, os.Stdout)
		}
		if err := o.Validate(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		var err error
		if o.Program, err = os.Executable(); err != nil {
			return err
		}
		r, err := cluster.Run(cmd.Context(), o, func(step string) { fmt.Fprintln(os.Stderr, step, "...") })
		if err != nil {
			return err
		}
		if asJSON {
			return cli.PrintJSON(os.Stdout, r)
		}
		return cli.Table(os.Stdout, []string{"three nodes, two replicas", fmt.Sprintf("%d workers, %d holdings",
			r.Workers, r.Holdings)}, clusterRows(r))
	}
	return cmd
}

func selectcommand() *cobra.Command {
	o := cluster.SelectDefaults()
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "select",
		Short: "Measure the selection of workers in process, on three nodes and beside Dynamo",
		Long: `Measure selections of workers with bookings in a single run on this machine:

  - in this process, by stage, alternating between the policies kvatlas and dynamo
  - on three nodes, alternating with bare requests of equal sizes, with a comparison of the nodes' choices
  - on a single node over HTTP and NATS with many callers. With --dynamo, a Python with ai-dynamo-runtime
    (pip install ai-dynamo-runtime==1.6.1), NVIDIA Dynamo's selection service runs beside

Figures are medians of the rounds. The ratios come first, with their goals.`,
		Args: cobra.NoArgs,
	}
	cli.Output[*cluster.SelectReport](cmd)
	f := cmd.Flags()
	f.IntVar(&o.Workers, "workers", o.Workers, "workers; half of them hold 64 blocks")
	f.IntVar(&o.Blocks, "blocks", o.Blocks, "blocks of a prompt, as hashes; half of the prompts begin with the 64 blocks")
	f.IntVar(&o.Copies, "partition-replicas", o.Copies,
		"number of nodes that keep a partition; below 3, every choice waits for another node")
	cli.OldFlag(f, "replication", "partition-replicas")
	f.IntVar(&o.UnderWay, "under-way", o.UnderWay, "number of booked requests at any time")
	f.IntVar(&o.Callers, "callers", o.Callers, "concurrent callers of the single node, over a single connection to NATS")
	f.IntVar(&o.Decisions, "decisions", o.Decisions, "decisions in a round")
	f.IntVar(&o.Rounds, "rounds", o.Rounds, "rounds; every contender runs in every round")
	f.BoolVar(&o.Accounts, "accounts", false, "give every role a NATS account, as indexer auth create does")
	f.StringVar(&o.Dynamo, "dynamo", "", "Python interpreter with ai-dynamo-runtime")
	f.BoolVar(&asJSON, "json", false, "print a JSON object")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := o.Validate(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		var err error
		if o.Program, err = os.Executable(); err != nil {
			return err
		}
		cli.SaveMemory(cli.IndexerRoom) // the measured decisions in this process use the settings of the server
		r, err := cluster.RunSelect(cmd.Context(), o, func(step string) { fmt.Fprintln(os.Stderr, step, "...") })
		if err != nil {
			return err
		}
		if asJSON {
			return cli.PrintJSON(os.Stdout, r)
		}
		return cli.Table(os.Stdout, []string{"choosing a worker", fmt.Sprintf("%d workers, %d blocks, %d under way",
			o.Workers, o.Blocks, o.UnderWay)}, selectRows(r))
	}
	return cmd
}

func corpuscommand() *cobra.Command {
	job := corpus.Job{Options: corpus.Defaults()}
	asJSON := false
	cmd := &cobra.Command{
		Use:   "corpus --out FILE [--trace FILE]",
		Short: "Make a corpus: the events and queries of a fleet serving a trace",
		Long: `Make a corpus: the events of a fleet of workers serving a trace, with the router's query before every request. Equal
flags give equal bytes.`,
		Example: `  indexer bench corpus --out conv64.bin
  indexer bench corpus --out holes64.bin --evict random --trace conversation_trace.jsonl`,
		Args: cobra.NoArgs,
	}
	cli.Output[corpus.Header](cmd)
	f := cmd.Flags()
	f.StringVar(&job.Out, "out", "corpus.bin", "file to make")
	f.StringVar(&job.Trace, "trace", "", "trace in Mooncake's format (default: a generated trace of the same shape)")
	f.Uint64Var(&job.Seed, "seed", 0, "seed of the generated trace")
	f.IntVar(&job.Workers, "workers", job.Workers, "workers sharing the requests")
	f.IntVar(&job.Capacity, "capacity", job.Capacity, "capacity of a worker in blocks")
	f.IntVar(&job.BlockSize, "block-size", job.BlockSize, "tokens per block; divides 512")
	f.IntVar(&job.Requests, "requests", job.Requests, "use only the first N requests (0: all)")
	f.IntVar(&job.Repeat, "repeat", job.Repeat, "serve the trace N times with different contents")
	f.BoolVar(&job.Everyone, "everyone", job.Everyone, "every worker serves every request: all workers hold all blocks")
	f.StringVar((*string)(&job.Evict), "evict", string(job.Evict),
		"lru: tails first, no holes; random: any block, with holes and second copies; holes: without second copies")
	f.StringVar((*string)(&job.Names), "names", string(job.Names),
		"shared: a block has the same engine hash on all workers; private: every worker has different hashes")
	f.Float64Var(&job.Sticky, "sticky", job.Sticky,
		"share of requests sent to the last worker of the longest prefix")
	f.BoolVar(&asJSON, "json", false, "print the counts of the corpus as JSON")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if err := job.Validate(); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		if err := readable("--trace", job.Trace); err != nil {
			return err
		}
		h, err := corpus.Run(cmd.Context(), job, os.Stderr)
		if err != nil || !asJSON {
			return asUsage(err)
		}
		return cli.PrintJSON(os.Stdout, h)
	}
	return cmd
}

// clusterRows returns the rows of a measurement of a cluster, the ratios first.
func clusterRows(r *cluster.Report) (rows [][]any) {
	times := func(t cluster.Times) string {
		return fmt.Sprintf("p50 %.0f, p99 %.0f, worst %.0f µs of %d", t.P50, t.P99, t.Max, t.N)
	}
	taken := func(t cluster.Taken) string {
		return fmt.Sprintf("%.2f M blocks/s of a core (%.2f M applied in %.2f s, %.2f s of processor time)",
			t.PerCPU/1e6, float64(t.Blocks)/1e6, t.Seconds, t.CPU)
	}
	restored := func(t cluster.Restored) string {
		return fmt.Sprintf("%.2f M holdings/s (%.2f M in %.3f s)", t.Rate/1e6, float64(t.Holdings)/1e6, t.Seconds)
	}
	rows = [][]any{
		{"query p50, to a bare request", fmt.Sprintf("%.2f (at most 2.5)", r.QueryP50)},
		{"query p99, to a bare request", fmt.Sprintf("%.2f (at most 4)", r.QueryP99)},
		{"events per used core, to a single node", fmt.Sprintf("%.2f (at least 0.8)", r.Ingest)},
		{"a node is killed: queries whole again", fmt.Sprintf("after %.3f s (at most 1)", r.WholeAgain)},
		{"restored replicas, to a restore", fmt.Sprintf("%.2f", r.Rereplication)},
		{"query over three nodes", times(r.Query)},
		{"bare request-reply", fmt.Sprintf("%s; %d bytes, %d back", times(r.Bare), r.Asked, r.Answered)},
		{"the same over three relays", fmt.Sprintf("%s: %.2f times", times(r.Relay), r.RelayP50)},
		{"events, one node", taken(r.One)},
		{"events, three nodes", taken(r.Three)},
		{"queries after the kill", fmt.Sprintf("%d, %d incomplete, longest complete query %.0f ms", r.FailQueries,
			r.NotWhole, 1e3*r.FailLongest)},
		{"two replicas again", fmt.Sprintf("after %.1f s; the other nodes begin to restore after %.1f s", r.Redundant,
			r.Believed)},
		{"restore of a single node", restored(r.Restore)},
		{"restore by the two remaining nodes", restored(r.Rereplicated)},
	}
	for _, form := range r.Forms {
		rows = append(rows, []any{"one node, " + form.Name, fmt.Sprintf(
			"%.2f of a bare request (at most 1.3; rounds %.2f); p50 %.0f and %.0f µs; %d bytes, %d back", form.Ratio,
			form.Rounds, form.Query.P50, form.Bare.P50, form.Asked, form.Answered)})
	}
	return rows
}

// selectRows returns the rows of a measurement of selections, the ratios first.
func selectRows(r *cluster.SelectReport) (rows [][]any) {
	times := func(t cluster.Times) string {
		return fmt.Sprintf("p50 %.1f, p99 %.1f µs of %d", t.P50, t.P99, t.N)
	}
	rate := func(r cluster.Rate) string {
		return fmt.Sprintf("%.0f/s, %.0f per second of processor time, %s", r.PerSecond, r.PerCPU, times(r.Times))
	}
	rows = [][]any{
		{"three nodes, booked, p50 to a bare request", fmt.Sprintf("%.2f (at most 2.5)", r.SelectP50)},
	}
	for i, p := range r.Policies {
		goal := [2]string{" (at most 60)", " (at least 15000)"}
		if i > 0 {
			goal = [2]string{}
		}
		rows = append(rows,
			[]any{p.Policy + ": decision in process", fmt.Sprintf("p50 %.1f, p99 %.1f µs%s", p.DecisionP50, p.DecisionP99,
				goal[0])},
			[]any{p.Policy + ": booked in process, two at a time", fmt.Sprintf("%.0f/s%s, %.0f per second of "+
				"processor time", p.PerSecond, goal[1], p.PerCPU)})
	}
	for _, a := range r.Agreements {
		rows = append(rows, []any{a.Policy + ": three nodes agree", fmt.Sprintf("on %.1f%% of %d prompts, on "+
			"%.1f%% at once, on all after %.1f ms; costs differ by %.3f%% (p50), %.3f%% (p99), %.3f%% (most)",
			100*a.Agreed, a.Prompts, 100*a.AtOnce, a.Longest, 100*a.P50, 100*a.P99, 100*a.Most)})
	}
	if r.Dynamo != nil {
		rows = append(rows,
			[]any{"decisions/s to Dynamo, HTTP", fmt.Sprintf("%.2f (at least 1.5)", r.HTTPRate)},
			[]any{"decisions/s to Dynamo, NATS", fmt.Sprintf("%.2f (at least 3)", r.NATSRate)},
			[]any{"p99 to Dynamo, HTTP", fmt.Sprintf("%.2f (below 1)", r.HTTPP99)},
			[]any{"p99 to Dynamo, NATS", fmt.Sprintf("%.2f (below 1)", r.NATSP99)})
	}
	rows = append(rows, []any{"three nodes, booked", times(r.Select)},
		[]any{"bare request-reply", fmt.Sprintf("%s; %d bytes, %d back", times(r.Bare), r.Asked, r.Answered)})
	for _, p := range r.Policies {
		for _, stage := range p.Stages {
			rows = append(rows, []any{p.Policy + ", in process: " + stage.Name, times(stage.Times)})
		}
	}
	rows = append(rows, []any{"one node, HTTP", rate(r.HTTP)}, []any{"one node, NATS", rate(r.NATS)})
	if r.Dynamo != nil {
		rows = append(rows, []any{"Dynamo, HTTP", rate(*r.Dynamo)})
	}
	return rows
}

// asUsage converts an error in the content of a given file to a usage error.
func asUsage(err error) error {
	if errors.Is(err, corpus.ErrFormat) || errors.Is(err, trace.ErrFormat) {
		return cli.UsageErrorf("%w", err)
	}
	return err
}

// readable refuses an unreadable file. what names the file in the error. An empty path is valid.
func readable(what, path string) error {
	if path == "" {
		return nil
	}
	f, err := os.Open(path)
	if err == nil {
		_, err = f.Read(make([]byte, 1)) // a folder can be opened
		f.Close()
	}
	if err != nil && err != io.EOF {
		return cli.UsageErrorf("%s: %w", what, err)
	}
	return nil
}
