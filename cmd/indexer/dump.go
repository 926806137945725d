package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/dump"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func dumpCommand() *cobra.Command {
	var worker string
	var now bool
	cmd := &cobra.Command{
		Use:   "dump [--worker ID]",
		Short: "Print what workers hold, as router events",
		Long: `Print what workers hold on standard output, one router event of NVIDIA Dynamo a line:
{"worker_id":...,"storage_tier":...,"event":{...}}. It is taken from the newest snapshot of each partition in the
bucket, whether an indexer runs or not, and so belongs to the place in the log that is said on standard error; with
--now a running indexer writes snapshots first. indexer load takes it back in. Dynamo ignores what lines have beside
its own fields: of a hybrid model, what its groups serve and hold.`,
		Example: `  indexer dump --now | indexer load --model llama --block-size 16 --namespace copy`,
	}
	a := remote.StoreFlags(cmd)
	if err := cmd.Flags().MarkHidden("json"); err != nil { // it is JSON anyway
		panic(err)
	}
	cmd.Flags().StringVar(&worker, "worker", "", "this instance only")
	cmd.Flags().BoolVar(&now, "now", false, "have the running indexer write snapshots first")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if now {
			list, err := remote.Ask(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.SnapshotList, error) {
				return c.Snapshot(ctx)
			})
			if err == nil {
				err = survey.Unwritten(list)
			}
			if err != nil {
				return err
			}
		}
		return a.Reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
			out := bufio.NewWriterSize(os.Stdout, 1<<16)
			ranks, missing := 0, 0
			err := dump.Write(ctx, ns, events.WorkerID(worker), out, func(d dump.Dumped) {
				if !d.Known {
					missing++
					return
				}
				ranks += d.Ranks
				cli.Fprintf(os.Stderr, "partition %d: %d events of %d ranks, as of %d in its log", d.Partition,
					d.Events, d.Ranks, d.Seq)
				if d.Pending > 0 {
					cli.Fprintf(os.Stderr, "; left out: %d blocks that wait for their parents", d.Pending)
				}
				cli.Fprintln(os.Stderr)
			})
			if missing > 0 {
				cli.Fprintf(os.Stderr, "partitions without a snapshot: %d\n", missing)
			}
			if err = errors.Join(err, out.Flush()); err == nil && worker != "" && ranks == 0 {
				err = fmt.Errorf("no snapshot knows the worker %q", worker)
			}
			return err
		})
	}
	return cmd
}

func loadCommand() *cobra.Command {
	id, worker := shim.Identity{}, ""
	cmd := &cobra.Command{
		Use:   "load --model M --block-size N [--worker ID] [FILE]",
		Short: "Publish router events from a file, or standard input",
		Long: `Publish router events, as indexer dump and NVIDIA Dynamo write them (JSON, one a line), to the log. Each rank in them
begins a new incarnation, which clears what was known of it; a rank that a running shim serves is refused. The shim
that serves it next begins anew. A line that is no router event ends it with exit status 2 and the line's number; what
lines before it say may be published.

With --worker all lines are of that worker, and need not name it: {"event_id":...,"data":{...}} and
{"events":[...],"shutdown":false}, as Dynamo's workers say it of themselves (KvCacheEvent, KvCacheEvents), are read
too.`,
		Example: `  indexer load --model llama --block-size 16 dump.ndjson`,
	}
	a := remote.StoreFlags(cmd)
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVar(&worker, "worker", "", "the worker that all lines are of; default: each names its own")
	cmd.Flags().StringVar(&id.Model, "model", "", "model that the workers serve (required)")
	cmd.Flags().Uint32Var(&id.BlockSize, "block-size", 0, "tokens in a block (required)")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if id.Model == "" {
			return cli.UsageErrorf("--model is missing")
		}
		if id.BlockSize == 0 || id.BlockSize > events.MaxBlockSize {
			return cli.UsageErrorf("--block-size %d is not from 1 to %d", id.BlockSize, events.MaxBlockSize)
		}
		in := os.Stdin
		if len(args) == 1 && args[0] != "-" {
			f, err := os.Open(args[0])
			if err != nil {
				return cli.UsageErrorf("%w", err)
			}
			defer f.Close()
			in = f
		}
		return a.Reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
			loaded, err := dump.Load(ctx, ns, in, id, events.WorkerID(worker))
			if errors.Is(err, dump.ErrLine) {
				return cli.UsageErrorf("%w", err)
			}
			if err != nil {
				return err
			}
			if a.JSON {
				return cli.PrintJSON(os.Stdout, loaded)
			}
			cli.Fprintf(os.Stdout, "%d lines: %d events of %d ranks published, with %d blocks\n", loaded.Lines, loaded.Events,
				loaded.Ranks, loaded.Blocks)
			for _, why := range slices.Sorted(maps.Keys(loaded.Skipped)) {
				cli.Fprintf(os.Stdout, "%d lines passed over: unknown %s\n", loaded.Skipped[why], why)
			}
			return nil
		})
	}
	return cmd
}
