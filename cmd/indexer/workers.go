package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/spf13/cobra"
)

// leaseAge and leaseLeft return the time since the renewal of a lease, and the time until its expiry.
func leaseAge(l *api.Lease, now time.Time) string {
	if l == nil {
		return "-"
	}
	return max(now.Sub(l.Renewed), 0).Round(time.Second).String()
}

func leaseLeft(l *api.Lease, now time.Time) string {
	switch {
	case l == nil:
		return "never"
	case l.State != string(registry.Held):
		return l.State
	}
	left := max(l.Expires.Sub(now), 0).Round(time.Second).String()
	if l.Stopped != nil {
		left += ", shim stopped"
	}
	return left
}

// engineStands describes the state of a rank's engine, and its start.
func engineStands(w *api.WorkerInfo, now time.Time) string {
	said := string(w.Engine)
	switch {
	case w.Engine == "":
		said = "-"
	case w.Engine != api.EngineConnected && w.EngineSince != nil:
		said += " " + max(now.Sub(*w.EngineSince), 0).Round(time.Second).String()
	}
	if w.CatchingUp {
		said += ", catching up"
	}
	return said
}

func workersCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "workers",
		Short: "List the workers, what they hold and whether they may be chosen; change, drain and remove them",
		Long: `List the workers that the log knows or that are registered, and what they hold. STATE says whether a worker may be
chosen for new requests; what keeps it from that is said below the table. So is whose lease has expired within the
last hour: until it is back or "workers remove" was said, if it was not drained before. --json has all that is
registered of each.`,
		Example: `  indexer workers
  indexer workers drain w1 --why "new driver"
  indexer workers undrain w1
  indexer workers change w1 --role decode --taint gpu=h100`,
	}
	cmd.AddCommand(drainCommand(), undrainCommand(), changeCommand(), registerCommand(), removeCommand())
	a := askingFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.WorkerList, error) {
			return c.Workers(ctx)
		}, printWorkers)
		return err
	}
	return cmd
}

func printWorkers(w io.Writer, list *api.WorkerList) {
	if !list.Complete {
		cli.Fprintf(w, "INCOMPLETE: partitions %v could not be looked at; see indexer status\n", list.Missing)
	}
	defer printExpired(w, list.Expired, time.Now())
	if len(list.Workers) == 0 {
		cli.Fprintln(w, "no worker has announced anything yet; feed one with worker-shim run")
		return
	}
	rows := make([][]any, len(list.Workers))
	for i, k := range list.Workers {
		seen := "-"
		if !k.LastSeen.IsZero() {
			seen = k.LastSeen.UTC().Format(time.RFC3339)
		}
		rows[i] = []any{k.Instance, k.Rank, k.Model, k.BlockSize, k.Partition, k.Blocks.Device, k.Blocks.Host,
			k.Blocks.Disk, k.Blocks.External,
			max(k.Pending, k.Parked), k.LastEvent, seen, leaseAge(k.Lease, time.Now()), leaseLeft(k.Lease, time.Now()),
			engineStands(&k, time.Now()), stateOf(k.Record)}
	}
	cli.Table(w, []string{"WORKER", "RANK", "MODEL", "BLOCK SIZE", "PARTITION", "DEVICE", "HOST", "DISK",
		"EXTERNAL", "PENDING", "LAST EVENT", "LAST SEEN", "LEASE AGE", "EXPIRES", "ENGINE", "STATE"}, rows)
	printReasons(w, list.Workers)
}

// printExpired prints the leases that have expired within the last hour.
func printExpired(w io.Writer, list []api.ExpiredWorker, now time.Time) {
	for i := range list {
		k := &list[i]
		cli.Fprintf(w, "%s/%d is gone: its shim, process %d on %s, renewed the lease last %s ago; what it held is cleared\n",
			k.Instance, k.Rank, k.Lease.PID, k.Lease.Host, leaseAge(&k.Lease, now))
	}
}

// stateOf is a rank's state, and its role if that is not the usual one.
func stateOf(r *api.WorkerRecord) string {
	switch {
	case r == nil:
		return "-"
	case r.Role == api.RoleAggregated || r.Role == "":
		return string(r.State)
	}
	return fmt.Sprintf("%s, %s", r.State, r.Role)
}

// printReasons prints the reasons why workers are not schedulable, once for all ranks of a worker with the same reason.
func printReasons(w io.Writer, list []api.WorkerInfo) {
	said := map[string]bool{}
	for _, k := range list {
		if k.Record == nil || len(k.Record.Reasons) == 0 {
			continue
		}
		line := fmt.Sprintf("%s is %s: %s", k.Instance, k.Record.State, strings.Join(k.Record.Reasons, "; "))
		if !said[line] {
			said[line] = true
			cli.Fprintln(w, line)
		}
	}
}

// printWorker prints the registration of a worker.
func printWorker(w io.Writer, k *api.Worker) {
	if len(k.Ranks) == 0 {
		cli.Fprintf(w, "%s: nothing is registered of it now\n", k.Instance)
		return
	}
	rows := make([][]any, len(k.Ranks))
	list := make([]api.WorkerInfo, len(k.Ranks))
	for i := range k.Ranks {
		r := &k.Ranks[i]
		rows[i] = []any{k.Instance, r.Rank, k.Model, r.Role, orDash(r.Endpoint), known(r.TotalKVBlocks),
			known(r.MaxBatchedTokens), orDash(strings.Join(r.Taints, ",")), orDash(domains(r.TopologyDomains)),
			orDash(strings.Join(r.LoRAAdapters, ",")), r.State}
		list[i] = api.WorkerInfo{Instance: k.Instance, Record: &r.WorkerRecord}
	}
	cli.Table(w, []string{"WORKER", "RANK", "MODEL", "ROLE", "ENDPOINT", "KV BLOCKS", "BATCHED TOKENS",
		"TAINTS", "DOMAINS", "ADAPTERS", "STATE"}, rows)
	printReasons(w, list)
}

// known formats a number; 0 is unknown.
func known[T uint32 | uint64](n T) string {
	if n == 0 {
		return "-"
	}
	return fmt.Sprint(n)
}

func orDash(text string) string {
	if text == "" {
		return "-"
	}
	return text
}

func domains(m map[string]string) string {
	var list []string
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, name+"="+m[name])
	}
	return strings.Join(list, ",")
}

// changing requests a change of the worker in the argument, and prints the result.
func changing(cmd *cobra.Command,
	change func(context.Context, *client.Client, events.WorkerID) (*api.Worker, error)) *cobra.Command {
	a := askingFlags(cmd)
	cmd.Args = cobra.ExactArgs(1)
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		_, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.Worker, error) {
			return change(ctx, c, events.WorkerID(args[0]))
		}, printWorker)
		return err
	}
	return cmd
}

func drainCommand() *cobra.Command {
	var why string
	cmd := changing(&cobra.Command{
		Use:   "drain WORKER",
		Short: "Give a worker nothing new, until undrain, whatever becomes of its shim",
	}, func(ctx context.Context, c *client.Client, worker events.WorkerID) (*api.Worker, error) {
		yes := true
		return c.ChangeWorker(ctx, &api.WorkerChange{Instance: worker, Drain: &yes, Why: why})
	})
	cmd.Flags().StringVar(&why, "why", "", "the reason, which others see")
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
		Short: "Change a worker's record; these values override those of its shim, and omitted ones stay",
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
	cmd.Flags().BoolVar(&c.Reset, "reset", false, "first forget what was changed before")
	return cmd
}

func registerCommand() *cobra.Command {
	r := &api.WorkerRegistration{}
	var spec *cli.WorkerFlags
	cmd := changing(&cobra.Command{
		Use:   "register WORKER --model M --block-size N",
		Short: "Register a worker that has no shim: nobody hears what it holds",
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
	cmd.Flags().StringVar(&r.Model, "model", "", "model that the worker serves (required)")
	cmd.Flags().Uint32Var(&r.BlockSize, "block-size", 0, "tokens in one of its blocks (required)")
	return cmd
}

func removeCommand() *cobra.Command {
	return changing(&cobra.Command{
		Use:   "remove WORKER",
		Short: "End the registration of a worker that has no shim of its own; or name one no more whose lease has expired",
	}, func(ctx context.Context, c *client.Client, worker events.WorkerID) (*api.Worker, error) {
		return c.RemoveWorker(ctx, worker)
	})
}
