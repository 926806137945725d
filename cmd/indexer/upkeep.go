package main

import (
	"context"
	"errors"
	"io"
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func namespaceCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "namespace", Short: "Manage the streams and buckets of a namespace on the " +
		"NATS servers"},
		namespaceDeleteCommand())
}

func namespaceDeleteCommand() *cobra.Command {
	var yes, dry, force bool
	cmd := &cobra.Command{
		Use:   "delete [--namespace NS] [--yes]",
		Short: "Delete all streams and buckets of a namespace on the NATS servers, to uninstall",
		Long: `List the streams and buckets of a namespace: the log, snapshots, registrations, and the namespace's record. With
--yes the command deletes the streams and buckets, with all state of indexers. Without --yes the command changes
nothing.

Stop all indexers and shims first, since running programs create the streams again. While a program answers, the
command deletes nothing unless --force is set. Further namespaces, keys of NATS users and folders of --data stay. The
NATS user needs the rights of an indexer node.`,
		Example: `  indexer namespace delete --namespace prod
  indexer namespace delete --namespace prod --yes`,
	}
	a := remote.StoreFlags(cmd)
	cli.Output[*upkeep.Deletion](cmd)
	cli.Explain(cmd, tables.DeletionColumns)
	return cli.Command(cmd, cli.Flags{
		cli.Var(&yes, "yes", false, "delete; without --yes the command only lists"),
		cli.Var(&dry, "dry-run", false, "only list, as without --yes"),
		cli.Var(&force, "force", false, "delete although an indexer or a shim answers"),
	}, func(wrong *cli.Complaints) {
		wrong.When(yes && dry, "--yes and --dry-run exclude each other")
	}, func(ctx context.Context, _ []string) error {
		if err := a.Check(); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, max(a.Timeout, time.Minute))
		defer cancel()
		conn, err := a.Connect(ctx)
		if err != nil {
			return err
		}
		defer conn.Close()
		d, err := upkeep.DeleteNamespace(ctx, conn, a.Namespace, yes, force, a.Timeout)
		if err != nil {
			return remote.Denied(err)
		}
		err = a.Print(d, func(w io.Writer) { tables.Deletion(w, d) })
		if err == nil && !a.JSON {
			tables.DeletionNote(os.Stderr, d)
		}
		return err
	})
}

func clearCommand() *cobra.Command {
	var rank uint32
	var force bool
	cmd := &cobra.Command{
		Use:   "clear WORKER [--rank N]",
		Short: "Clear the blocks of a worker with an engine gone for good",
		Long: `Write into the log that a worker, or a rank of the worker, holds no blocks and has ended. Use the command for
an engine that will not come back and keeps a partition in the state "resync needed". A worker with a lease needs no
command, since the lease expires. To end the registration of a worker without a shim, use indexer workers remove.

The command refuses a rank with a running shim, unless --force is set. A forced shim begins a new incarnation at the
next event, with the blocks that the engine can repeat. Only NATS needs to run. Exit status 1 if the worker is unknown.`,
		Example: `  indexer workers clear w1
  indexer workers clear w1 --rank 3`,
		Args: cobra.ExactArgs(1),
	}
	a := remote.StoreFlags(cmd)
	cli.Output[clearedRanks](cmd)
	cli.Explain(cmd, tables.ClearedColumns)
	return cli.Command(cmd, append(rankRows(&rank), forceRow(&force, "even if a running shim serves the rank")), nil,
		func(ctx context.Context, args []string) error {
			return clearWorker(ctx, a, events.WorkerID(args[0]), rankOf(cmd, &rank), force)
		})
}

func rankRows(rank *uint32) cli.Flags {
	return cli.Flags{cli.Var(rank, "rank", 0, "this rank alone (default: all ranks in the log)")}
}

func forceRow(force *bool, help string) cli.Flag { return cli.Var(force, "force", false, help) }

// rankOf returns the rank of --rank; nil without the flag.
func rankOf(cmd *cobra.Command, rank *uint32) *events.Rank {
	if !cmd.Flags().Changed("rank") {
		return nil
	}
	return (*events.Rank)(rank)
}

func modelsCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "models", Short: "Manage the registered block sizes of models"},
		removeModelCommand())
}

func removeModelCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "remove MODEL",
		Short: "Remove a model's registered block size, so that the next worker of the model sets it",
		Long: `Remove the registered block size of a model. The first worker of a model sets the block size, and a worker with a
different size is refused, even after the end of the first worker. The command refuses a model with workers, unless
--force is set. An indexer must run to list the workers.`,
		Example: `  indexer models remove llama`,
		Args:    cobra.ExactArgs(1),
	}
	a := remote.StoreFlags(cmd)
	cli.Output[removedModel](cmd)
	return cli.Command(cmd, cli.Flags{forceRow(&force, "even if the model has workers")}, nil,
		func(ctx context.Context, args []string) error { return removeModel(ctx, a, args[0], force) })
}

// forgetCommand is the old command for a worker's blocks and a model's block size.
func forgetCommand() *cobra.Command {
	var rank uint32
	var force bool
	var model string
	cmd := cli.MovedCommand(&cobra.Command{
		Use:   "forget WORKER [--rank N] | --model M",
		Short: "Old name of indexer workers clear and indexer models remove",
		Args:  cobra.MaximumNArgs(1),
	}, "indexer workers clear WORKER or indexer models remove MODEL")
	a := remote.StoreFlags(cmd)
	return cli.Command(cmd, append(rankRows(&rank), forceRow(&force, "even if a running shim serves the rank"),
		cli.Var(&model, "model", "", "the block size of this model"),
	), func(wrong *cli.Complaints) {
		wrong.When((model == "") == (cmd.Flags().NArg() == 0), "give a worker or --model")
		wrong.When(model != "" && cmd.Flags().Changed("rank"), "--rank is of a worker")
	}, func(ctx context.Context, args []string) error {
		if model != "" {
			return removeModel(ctx, a, model, force)
		}
		return clearWorker(ctx, a, events.WorkerID(args[0]), rankOf(cmd, &rank), force)
	})
}

// removedModel and clearedRanks are the JSON output of models remove and workers clear.
type (
	removedModel struct {
		Forgotten *jetstream.Model `json:"forgotten"`
	}
	clearedRanks struct {
		Forgotten []upkeep.ForgottenRank `json:"forgotten"`
	}
)

func removeModel(ctx context.Context, a *remote.Target, model string, force bool) error {
	return a.Reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) error {
		ctx, cancel := context.WithTimeout(ctx, a.Timeout)
		defer cancel()
		was, err := upkeep.ForgetModel(ctx, ns, model, force)
		if err != nil {
			return err
		}
		return a.Print(removedModel{was}, func(w io.Writer) { tables.ForgottenModel(w, was) })
	})
}

func clearWorker(ctx context.Context, a *remote.Target, worker events.WorkerID, rank *events.Rank, force bool) error {
	return a.Reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) error {
		ctx, cancel := context.WithTimeout(ctx, max(a.Timeout, time.Minute))
		defer cancel()
		done, err := upkeep.Forget(ctx, ns, worker, rank, force)
		if done != nil {
			err = errors.Join(a.Print(clearedRanks{done}, func(w io.Writer) { tables.Forgotten(w, done) }), err)
		}
		return err
	})
}

func resyncCommand() *cobra.Command {
	var partition uint32
	var worker events.WorkerID
	cmd := &cobra.Command{
		Use:   "resync (--partition N | --worker ID)",
		Short: "Let shims publish all blocks of engines again",
		Long: `Request a new incarnation from the shims of a partition, or of one worker: the log's state of a rank is
cleared, and the shim reads the engine's replay buffer from the start. Blocks that the buffer no longer has stay
unknown, so request a resync only for doubtful ranks. Indexers send the request themselves after a loss of the log.
Only the shims and NATS need to run. Exit status 1 if no shim answers.`,
		Example: `  indexer resync --worker w1`,
	}
	a := remote.StoreFlags(cmd)
	cli.Output[*upkeep.Resynced](cmd)
	cli.Explain(cmd, tables.ShimsColumns)
	return cli.Command(cmd, cli.Flags{
		cli.Var(&partition, "partition", 0, "all workers of this partition"),
		cli.Var((*string)(&worker), "worker", "", "all ranks of this worker"),
	}, func(wrong *cli.Complaints) {
		wrong.When(cmd.Flags().Changed("partition") == (worker != ""), "give --partition or --worker")
	}, func(ctx context.Context, _ []string) error {
		done, err := remote.ShowStored(ctx, a, func(ctx context.Context, ns *jetstream.Namespace) (*upkeep.Resynced, error) {
			return upkeep.Resync(ctx, ns, partition, worker)
		}, tables.Shims)
		if err != nil {
			return err
		}
		return done.Failure()
	})
}

func probeCommand() *cobra.Command {
	var timeout time.Duration
	var asJSON bool
	return cli.Command(cli.Output[*upkeep.Probed](&cobra.Command{
		Use:   "probe URL",
		Short: "Request an HTTP health endpoint, for health checks without curl",
		Long: `GET a URL. Exit status 0 for the HTTP status 200, else 1 with the answer: a health check for containers with
only the programs of kvatlas. An indexer is alive at /healthz and ready at /readyz. A NATS server answers at /healthz of
the monitoring port.`,
		Example: `  indexer probe http://127.0.0.1:8090/readyz`,
		Args:    cobra.ExactArgs(1),
	}), cli.Flags{
		cli.JSONFlag(&asJSON),
		cli.Var(&timeout, "timeout", 2*time.Second, "how long to wait for the answer", cli.Positive[time.Duration]()),
	}, nil, func(ctx context.Context, args []string) error {
		if err := cli.CheckHTTP(args[0]); err != nil {
			return cli.UsageErrorf("%w", err)
		}
		ctx, cancel := context.WithTimeout(ctx, timeout)
		defer cancel()
		p, err := upkeep.Probe(ctx, args[0])
		if err == nil && asJSON {
			err = cli.PrintJSON(os.Stdout, p)
		}
		if err != nil {
			return err
		}
		return p.Failure()
	})
}

func lameDuckCommand() *cobra.Command {
	var (
		monitor string
		pid     int
		wait    time.Duration
	)
	cmd := &cobra.Command{
		Use:   "lameduck",
		Short: "Let the NATS server of this container hand over before the stop",
		Long: `Let a NATS server enter lame duck mode: the server hands over leaderships, disconnects clients in turn, and
ends. Use the command as the preStop hook of NATS servers on Kubernetes. Without the hook, Kubernetes sends SIGTERM,
and the server ends at once.

Indexers that stop at the same time, for example at an uninstall, need JetStream for the handover. So the command
waits until no indexer is connected to a server of the cluster, for at most --wait.`,
		Example: `  indexer lameduck --pid 1`,
		Args:    cobra.NoArgs,
	}
	logger := cli.LogFlags(cmd.Flags())
	return cli.Command(cmd, cli.Flags{
		cli.Var(&monitor, "monitor", "http://127.0.0.1:8222", "the server's monitoring port", cli.HTTPAddress),
		cli.Var(&pid, "pid", 1, "the server's process id",
			cli.Is(func(pid int) bool { return pid >= 1 }, "is not a process")),
		cli.Var(&wait, "wait", 10*time.Second, "time limit for the disconnect of all servers' indexers; 0: no wait",
			cli.NotNegative[time.Duration]()),
	}, nil, func(ctx context.Context, _ []string) error {
		log, err := logger(os.Stderr)
		if err != nil {
			return err
		}
		return upkeep.LameDuck(ctx, monitor, pid, wait, log)
	})
}
