package main

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func forgetCommand() *cobra.Command {
	var rank uint32
	var force bool
	var model string
	cmd := &cobra.Command{
		Use:   "forget WORKER [--rank N] | --model M",
		Short: "Say for a worker whose engine is gone for good that it holds nothing; or let a model have another block size",
		Long: `Write into the log that a worker, or one rank of it, holds nothing, and that nothing follows. It is for an engine that
will not come back and whose partition waits for it: "resync needed" ends then. A worker with a lease needs no help,
its lease expires.

While a shim that lives serves the rank nothing is done, unless it is forced: then that shim begins anew with what its
engine can still say as soon as it publishes. Nothing but NATS need run. Exit status 1 if nothing is known of the
worker.

With --model it is the model's block size that is forgotten: the first worker of a model decides on it, and who
differs is refused, also after that worker has gone. While a worker of the model is known nothing is done, unless it
is forced; an indexer must run, for it knows them.`,
		Example: `  indexer forget w1
  indexer forget w1 --rank 3
  indexer forget --model llama`,
	}
	a := remote.StoreFlags(cmd)
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVar(&model, "model", "", "the block size of this model")
	cmd.Flags().Uint32Var(&rank, "rank", 0, "this rank alone (default: all that the log knows)")
	cmd.Flags().BoolVar(&force, "force", false, "even if a shim that lives serves it")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if (model == "") == (len(args) == 0) {
			return cli.UsageErrorf("give a worker or --model")
		}
		if model != "" && cmd.Flags().Changed("rank") {
			return cli.UsageErrorf("--rank is of a worker")
		}
		return a.Reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
			if model != "" {
				ctx, cancel := context.WithTimeout(ctx, a.Timeout)
				defer cancel()
				was, err := upkeep.ForgetModel(ctx, ns, model, force)
				if err != nil {
					return err
				}
				return a.Print(map[string]any{"forgotten": was}, func(w io.Writer) { tables.ForgottenModel(w, was) })
			}
			ctx, cancel := context.WithTimeout(ctx, max(a.Timeout, time.Minute))
			defer cancel()
			var only *events.Rank
			if cmd.Flags().Changed("rank") {
				only = (*events.Rank)(&rank)
			}
			done, err := upkeep.Forget(ctx, ns, events.WorkerID(args[0]), only, force)
			if done != nil {
				err = errors.Join(a.Print(map[string]any{"forgotten": done}, func(w io.Writer) { tables.Forgotten(w, done) }), err)
			}
			return err
		})
	}
	return cmd
}
