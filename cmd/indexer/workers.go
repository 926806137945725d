package main

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func workersCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "workers",
		Short: "List the workers with blocks and states; change, drain and remove workers",
		Long: `List the workers in the log and in registrations, with the workers' blocks. STATE shows whether a worker may
be chosen for new requests. Lines below the table explain obstacles, and list leases expired within the last hour:
until the return of the worker or "workers remove", except for workers drained before. --json has all registered
facts.`,
		Example: `  indexer workers
  indexer workers drain w1 --why "new driver"
  indexer workers undrain w1
  indexer workers change w1 --role decode --taint gpu=h100`,
	}
	cmd.AddCommand(drainCommand(), undrainCommand(), changeCommand(), registerCommand(), removeCommand(),
		rankForRemovalCommand())
	a := remote.Flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.WorkerList, error) {
			return c.Workers(ctx)
		}, tables.Workers)
		return err
	}
	return cmd
}

// changing requests a change of the worker in the argument, and prints the result.
func changing(cmd *cobra.Command,
	change func(context.Context, *client.Client, events.WorkerID) (*api.Worker, error)) *cobra.Command {
	a := remote.Flags(cmd)
	cmd.Args = cobra.ExactArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Worker, error) {
			return change(ctx, c, events.WorkerID(args[0]))
		}, tables.Worker)
		return err
	}
	return cmd
}

func drainCommand() *cobra.Command {
	var why string
	cmd := changing(&cobra.Command{
		Use:   "drain WORKER",
		Short: "Send no new requests to a worker until undrain, even if the shim restarts",
	}, func(ctx context.Context, c *client.Client, worker events.WorkerID) (*api.Worker, error) {
		yes := true
		return c.ChangeWorker(ctx, &api.WorkerChange{Instance: worker, Drain: &yes, Why: why})
	})
	cmd.Flags().StringVar(&why, "why", "", "the reason, visible to all users")
	return cmd
}

func undrainCommand() *cobra.Command {
	return changing(&cobra.Command{Use: "undrain WORKER", Short: "Let a worker be chosen again"},
		func(ctx context.Context, c *client.Client, worker events.WorkerID) (*api.Worker, error) {
			no := false
			return c.ChangeWorker(ctx, &api.WorkerChange{Instance: worker, Drain: &no})
		})
}

func changeCommand() *cobra.Command {
	c := &api.WorkerChange{}
	var spec *cli.WorkerFlags
	cmd := changing(&cobra.Command{
		Use:   "change WORKER",
		Short: "Change a worker's record; the values override the shim's values, and omitted values stay",
		Example: `  indexer workers change w1 --role prefill --topology zone=eu-1
  indexer workers change w1 --reset`,
	}, func(ctx context.Context, asked *client.Client, worker events.WorkerID) (*api.Worker, error) {
		said, err := spec.Spec()
		if err != nil {
			return nil, err
		}
		c.Instance, c.WorkerSpec = worker, *said
		return asked.ChangeWorker(ctx, c)
	})
	spec = cli.AddWorkerFlags(cmd.Flags(), "endpoint")
	spec.AddRange(cmd.Flags())
	cmd.Flags().BoolVar(&c.Reset, "reset", false, "first remove all earlier changes")
	return cmd
}

func registerCommand() *cobra.Command {
	r := &api.WorkerRegistration{}
	var spec *cli.WorkerFlags
	cmd := changing(&cobra.Command{
		Use:   "register WORKER --model M --block-size N",
		Short: "Register a worker without a shim and without events",
		Example: `  indexer workers register w9 --model llama --block-size 16 --endpoint http://w9:8000
  indexer workers remove w9`,
	}, func(ctx context.Context, asked *client.Client, worker events.WorkerID) (*api.Worker, error) {
		said, err := spec.Spec()
		if err != nil {
			return nil, err
		}
		r.Instance, r.WorkerSpec = worker, *said
		r.Events = api.EventsNone
		if err := r.Check(); err != nil {
			return nil, cli.UsageErrorf("%w", err)
		}
		return asked.RegisterWorker(ctx, r)
	})
	spec = cli.AddWorkerFlags(cmd.Flags(), "endpoint")
	spec.AddRange(cmd.Flags())
	cmd.Flags().StringVar(&r.Model, "model", "", "model of the worker (required)")
	cmd.Flags().Uint32Var(&r.BlockSize, "block-size", 0, "tokens in a block of the worker (required)")
	return cmd
}

func removeCommand() *cobra.Command {
	return changing(&cobra.Command{
		Use:   "remove WORKER",
		Short: "End the registration of a worker without a shim; or remove a worker with an expired lease from lists",
	}, func(ctx context.Context, c *client.Client, worker events.WorkerID) (*api.Worker, error) {
		return c.RemoveWorker(ctx, worker)
	})
}

func rankForRemovalCommand() *cobra.Command {
	r := &api.RemovalRequest{}
	cmd := &cobra.Command{
		Use:   "rank-for-removal --model M",
		Short: "List a model's workers in the order of removal, by the reuse that each removal loses",
		Long: `List the workers of a model in the order in which they should be drained and removed. For each worker, UNIQUE counts
the blocks that only this worker holds. The other columns are the loss per hour if the worker goes after the workers
above it: requests that lose blocks, blocks to compute again, and the time for that. docs/scaling.md explains it.`,
		Example: `  indexer workers rank-for-removal --model llama
  indexer workers drain "$(indexer workers rank-for-removal --model llama --json | jq -r '.workers[0].worker')"`,
	}
	a := remote.Flags(cmd)
	cmd.Flags().StringVar(&r.Model, "model", "", "model of the workers (required)")
	cmd.Flags().Uint32Var(&r.BlockSize, "block-size", 0, "tokens in a block, if the model has several sizes")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if r.Model == "" {
			return cli.UsageErrorf("--model is required")
		}
		_, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.RemovalOrder, error) {
			return c.RemovalOrder(ctx, r)
		}, tables.RemovalOrder)
		return err
	}
	return cmd
}
