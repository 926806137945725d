package main

import (
	"context"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/operate/dump"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func dumpCommand() *cobra.Command {
	var worker events.WorkerID
	var now bool
	cmd := &cobra.Command{
		Use:   "dump [--worker ID]",
		Short: "Print the blocks of workers, as router events",
		Long: `Print the blocks of workers on standard output, a router event of NVIDIA Dynamo per line:
{"worker_id":...,"storage_tier":...,"event":{...}}. The source is the newest snapshot of every partition in the bucket,
so no indexer needs to run. Standard error has the position of the snapshots in the log. With --now, a running indexer
writes new snapshots first. indexer import reads the lines. Dynamo ignores the further fields of lines: the groups of a
hybrid model and the groups' blocks.`,
		Example: `  indexer dump --now | indexer import --model llama --block-size 16 --namespace copy`,
	}
	a := remote.StoreFlags(cmd)
	cmd.Flags().Lookup("json").Usage = "no effect: the output is always JSON, an object per line"
	cli.OutputForm(cmd, "{worker_id: string, storage_tier: string, event: {event_id: number, data: value, "+
		"dp_rank: number}} per line")
	return cli.Command(cmd, cli.Flags{
		cli.Var((*string)(&worker), "worker", "", "this worker only"),
		cli.Var(&now, "now", false, "have the running indexer write snapshots first"),
	}, nil, func(ctx context.Context, _ []string) error {
		if now {
			list, err := remote.Ask(ctx, a, remote.Get((*client.Client).Snapshot))
			if err == nil {
				err = survey.Unwritten(list)
			}
			if err != nil {
				return err
			}
		}
		return a.Reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) error {
			return dump.Print(ctx, ns, worker, os.Stdout, os.Stderr)
		})
	})
}

func importCommand() *cobra.Command {
	var id shim.Identity
	var worker events.WorkerID
	cmd := cli.OldCommand(&cobra.Command{
		Use:   "import --model M --block-size N [--worker ID] [FILE]",
		Short: "Publish router events from a file, or standard input",
		Long: `Publish router events, in the format of indexer dump and NVIDIA Dynamo (JSON, one per line), to the log. Every
rank in the file begins a new incarnation, which clears the rank's earlier blocks. The command refuses a rank with a
running shim. The rank's next shim begins a new incarnation. A line without a router event ends the command with exit
status 2 and the line's number. Earlier lines may be published by then.

With --worker all lines belong to the given worker, and need no worker_id. {"event_id":...,"data":{...}} and
{"events":[...],"shutdown":false}, the events of Dynamo's workers (KvCacheEvent, KvCacheEvents), are read too.`,
		Example: `  indexer import --model llama --block-size 16 dump.ndjson`,
		Args:    cobra.MaximumNArgs(1),
	}, "load")
	a := remote.StoreFlags(cmd)
	cli.Output[dump.Loaded](cmd)
	return cli.Command(cmd, cli.Flags{
		cli.Var((*string)(&worker), "worker", "", "the worker of all lines; default: every line names the worker"),
		cli.Var(&id.Model, "model", "", "model of the workers (required)", cli.Required[string]("is missing")),
		cli.Var(&id.BlockSize, "block-size", 0, "tokens in a block (required)",
			cli.Between[uint32](1, events.MaxBlockSize)),
	}, nil, func(ctx context.Context, args []string) error {
		in, err := remote.OpenInput(append(args, "-")[0])
		if err != nil {
			return cli.UsageErrorf("%w", err)
		}
		defer in.Close()
		_, err = remote.ShowStored(ctx, a, func(ctx context.Context, ns *jetstream.Namespace) (dump.Loaded, error) {
			return dump.Load(ctx, ns, in, id, worker)
		}, tables.Loaded)
		return err
	})
}
