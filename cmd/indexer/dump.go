package main

import (
	"context"
	"errors"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/dump"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
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
		Short: "Print the blocks of workers, as router events",
		Long: `Print the blocks of workers on standard output, a router event of NVIDIA Dynamo per line:
{"worker_id":...,"storage_tier":...,"event":{...}}. The source is the newest snapshot of every partition in the bucket,
so no indexer needs to run. Standard error has the position of the snapshots in the log. With --now, a running indexer
writes new snapshots first. indexer load reads the lines. Dynamo ignores the further fields of lines: the groups of a
hybrid model and the groups' blocks.`,
		Example: `  indexer dump --now | indexer load --model llama --block-size 16 --namespace copy`,
	}
	a := remote.StoreFlags(cmd)
	if err := cmd.Flags().MarkHidden("json"); err != nil { // always JSON
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
			return dump.Print(ctx, ns, events.WorkerID(worker), os.Stdout, os.Stderr)
		})
	}
	return cmd
}

func loadCommand() *cobra.Command {
	id, worker := shim.Identity{}, ""
	cmd := &cobra.Command{
		Use:   "load --model M --block-size N [--worker ID] [FILE]",
		Short: "Publish router events from a file, or standard input",
		Long: `Publish router events, in the format of indexer dump and NVIDIA Dynamo (JSON, one per line), to the log. Every
rank in the file begins a new incarnation, which clears the rank's earlier blocks. The command refuses a rank with a
running shim. The rank's next shim begins a new incarnation. A line without a router event ends the command with exit
status 2 and the line's number. Earlier lines may be published by then.

With --worker all lines belong to the given worker, and need no worker_id. {"event_id":...,"data":{...}} and
{"events":[...],"shutdown":false}, the events of Dynamo's workers (KvCacheEvent, KvCacheEvents), are read too.`,
		Example: `  indexer load --model llama --block-size 16 dump.ndjson`,
	}
	a := remote.StoreFlags(cmd)
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVar(&worker, "worker", "", "the worker of all lines; default: every line names the worker")
	cmd.Flags().StringVar(&id.Model, "model", "", "model of the workers (required)")
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
			return a.Print(loaded, func(w io.Writer) { tables.Loaded(w, &loaded) })
		})
	}
	return cmd
}
