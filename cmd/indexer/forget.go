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
		Short: "Clear the blocks of a worker with an engine gone for good; or let a model change the block size",
		Long: `Write into the log that a worker, or a rank of the worker, holds no blocks and has ended. Use the command for
an engine that will not come back and keeps a partition in the state "resync needed". A worker with a lease needs no
command, since the lease expires.

The command refuses a rank with a running shim, unless --force is set. A forced shim begins a new incarnation at the
next event, with the blocks that the engine can repeat. Only NATS needs to run. Exit status 1 if the worker is unknown.

With --model, the command removes the registered block size of the model. The first worker of a model sets the block
size, and a worker with a different size is refused, even after the end of the first worker. The command refuses a
model with workers, unless --force is set. An indexer must run to list the workers.`,
		Example: `  indexer forget w1
  indexer forget w1 --rank 3
  indexer forget --model llama`,
	}
	a := remote.StoreFlags(cmd)
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVar(&model, "model", "", "the block size of this model")
	cmd.Flags().Uint32Var(&rank, "rank", 0, "this rank alone (default: all ranks in the log)")
	cmd.Flags().BoolVar(&force, "force", false, "even if a running shim serves the rank")
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
