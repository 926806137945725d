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
	cmd := remote.Command(&cobra.Command{
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
	}, remote.Request[*api.WorkerList]{
		Send: remote.Get((*client.Client).Workers), Print: tables.Workers,
		Columns: []cli.Columns{tables.WorkersColumns},
	})
	cmd.AddCommand(drainCommand(), undrainCommand(), changeCommand(), registerCommand(), removeCommand(), clearCommand(),
		rankForRemovalCommand())
	return cmd
}

// changing returns a command that changes the worker in the argument. check completes the change before the connection.
func changing(cmd *cobra.Command, worker *events.WorkerID, flags cli.Flags, check func() error,
	change func(context.Context, *client.Client) (*api.Worker, error)) *cobra.Command {
	cmd.Args = cobra.ExactArgs(1)
	return remote.Command(cmd, remote.Request[*api.Worker]{
		Flags: flags,
		Check: func(_ *cobra.Command, args []string) error {
			*worker = events.WorkerID(args[0])
			return check()
		},
		Send: change, Print: tables.Worker, Columns: []cli.Columns{tables.WorkerColumns},
	})
}

// asIs is the check of a change without further conditions.
func asIs() error { return nil }

func drainCommand() *cobra.Command {
	yes := true
	c := &api.WorkerChange{Drain: &yes}
	return changing(&cobra.Command{
		Use:   "drain WORKER",
		Short: "Send no new requests to a worker until undrain, even if the shim restarts",
	}, &c.Instance, cli.Flags{cli.Var(&c.Why, "why", "", "the reason, visible to all users")}, asIs,
		remote.Call((*client.Client).ChangeWorker, c))
}

func undrainCommand() *cobra.Command {
	no := false
	c := &api.WorkerChange{Drain: &no}
	return changing(&cobra.Command{Use: "undrain WORKER", Short: "Let a worker be chosen again"},
		&c.Instance, nil, asIs, remote.Call((*client.Client).ChangeWorker, c))
}

func changeCommand() *cobra.Command {
	c, spec := &api.WorkerChange{}, &cli.WorkerFlags{}
	return changing(&cobra.Command{
		Use:   "change WORKER",
		Short: "Change a worker's record; the values override the shim's values, and omitted values stay",
		Example: `  indexer workers change w1 --role prefill --topology zone=eu-1
  indexer workers change w1 --reset`,
	}, &c.Instance, append(spec.RangeRows("endpoint"),
		cli.Var(&c.Reset, "reset", false, "first remove all earlier changes"),
	), func() (err error) {
		c.WorkerSpec, err = spec.Spec()
		return err
	}, remote.Call((*client.Client).ChangeWorker, c))
}

func registerCommand() *cobra.Command {
	r, spec := &api.WorkerRegistration{}, &cli.WorkerFlags{}
	return changing(&cobra.Command{
		Use:   "register WORKER --model M --block-size N",
		Short: "Register a worker without a shim and without events",
		Example: `  indexer workers register w9 --model llama --block-size 16 --endpoint http://w9:8000
  indexer workers remove w9`,
	}, &r.Instance, append(spec.RangeRows("endpoint"),
		cli.Var(&r.Model, "model", "", "model of the worker (required)"),
		cli.Var(&r.BlockSize, "block-size", 0, "tokens in a block of the worker (required)"),
	), func() (err error) {
		if r.WorkerSpec, err = spec.Spec(); err != nil {
			return err
		}
		r.Events = api.EventsNone
		return r.Check()
	}, remote.Call((*client.Client).RegisterWorker, r))
}

func removeCommand() *cobra.Command {
	var worker events.WorkerID
	return changing(&cobra.Command{
		Use:   "remove WORKER",
		Short: "End the registration of a worker without a shim; or remove a worker with an expired lease from lists",
		Long: `End the registration of a worker without a shim, or remove a worker with an expired lease from lists. For the
blocks of an engine that will not come back, use indexer workers clear.`,
	}, &worker, nil, asIs, func(ctx context.Context, c *client.Client) (*api.Worker, error) {
		return c.RemoveWorker(ctx, worker)
	})
}

func rankForRemovalCommand() *cobra.Command {
	r := &api.RemovalRequest{}
	return remote.Command(&cobra.Command{
		Use:   "rank-for-removal --model M",
		Short: "List a model's workers in the order of removal, by the reuse that each removal loses",
		Long: `List the workers of a model in the order in which they should be drained and removed. For each worker, UNIQUE counts
the blocks that only this worker holds. The other columns are the loss per hour if the worker goes after the workers
above it: requests that lose blocks, blocks to compute again, and the time for that. docs/scaling.md explains it.`,
		Example: `  indexer workers rank-for-removal --model llama
  indexer workers drain "$(indexer workers rank-for-removal --model llama --json | jq -r '.workers[0].worker')"`,
	}, remote.Request[*api.RemovalOrder]{
		Flags: cli.Flags{
			cli.Var(&r.Model, "model", "", "model of the workers (required)", cli.Required[string]("is required")),
			cli.Var(&r.BlockSize, "block-size", 0, "tokens in a block, if the model has several sizes"),
		},
		Send: remote.Call((*client.Client).RemovalOrder, r), Print: tables.RemovalOrder,
		Columns: []cli.Columns{tables.RemovalColumns},
	})
}
