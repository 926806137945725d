package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/escape"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

// forgottenRank is the result for one rank, in JSON.
type forgottenRank struct {
	Instance    events.WorkerID    `json:"instance"`
	Rank        events.Rank        `json:"rank"`
	Was         events.Incarnation `json:"was"`
	LastEvent   events.EventID     `json:"last_event"`
	Closed      bool               `json:"closed_before"`         // then nothing was written
	Incarnation events.Incarnation `json:"incarnation,omitempty"` // that was begun and closed
	Seq         events.StreamSeq   `json:"seq,omitempty"`         // where in the log
}

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
	a := storeFlags(cmd)
	cmd.Args = cobra.MaximumNArgs(1)
	cmd.Flags().StringVar(&model, "model", "", "the block size of this model")
	cmd.Flags().Uint32Var(&rank, "rank", 0, "this rank alone (default: all that the log knows)")
	cmd.Flags().BoolVar(&force, "force", false, "even if a shim that lives serves it")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if (model == "") == (len(args) == 0) {
			return cli.UsageErrorf("give a worker or --model")
		}
		if model != "" {
			if cmd.Flags().Changed("rank") {
				return cli.UsageErrorf("--rank is of a worker")
			}
			return a.reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
				return forgetModel(ctx, a, ns, model, force)
			})
		}
		return a.reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
			ctx, cancel := context.WithTimeout(ctx, max(a.timeout, time.Minute))
			defer cancel()
			worker := events.WorkerID(args[0])
			ranks := []events.Rank{events.Rank(rank)}
			if !cmd.Flags().Changed("rank") {
				var err error
				if ranks, err = shim.RanksOf(ctx, ns, worker); err != nil {
					return err
				}
			}
			if len(ranks) == 0 {
				return fmt.Errorf("nothing is known of worker %s", worker)
			}
			done, err := forget(ctx, ns, worker, ranks, force)
			if err == nil && !force && !cmd.Flags().Changed("rank") { // by force, a shim may still need its claims
				err = registry.Unclaim(ctx, ns, worker)
			}
			if a.json {
				return errors.Join(cli.PrintJSON(os.Stdout, map[string]any{"forgotten": done}), err)
			}
			if len(done) > 0 {
				rows := make([][]any, len(done))
				for i, d := range done {
					what := fmt.Sprintf("forgotten, at %d in the log", d.Seq)
					if d.Closed {
						what = "closed before; nothing written"
					}
					rows[i] = []any{d.Instance, d.Rank, d.Was, d.LastEvent, what}
				}
				err = errors.Join(cli.Table(os.Stdout, []string{"WORKER", "RANK", "INCARNATION", "LAST EVENT", "NOW"},
					rows), err)
			}
			return err
		})
	}
	return cmd
}

// forget closes ranks one after the other, up to the first that cannot be. None is if a shim serves one of them, unless
// by force.
func forget(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, ranks []events.Rank,
	force bool) (done []forgottenRank, err error) {
	done = []forgottenRank{}
	for _, r := range ranks {
		if force {
			break
		}
		living, err := control.Who(ctx, ns, events.RankKey{Instance: worker, Rank: r})
		if err != nil {
			return done, err
		}
		if living != nil {
			return done, fmt.Errorf("a shim serves %s: %v; stop it first, or use --force", living.Key(), living)
		}
	}
	for _, r := range ranks {
		key := events.RankKey{Instance: worker, Rank: r}
		f, err := shim.Forget(ctx, ns, key, force)
		if err != nil {
			return done, fmt.Errorf("forget %s: %w", key, err)
		}
		done = append(done, forgottenRank{worker, r, f.Was.Incarnation, f.Was.LastID, f.Incarnation == 0, f.Incarnation,
			f.Seq})
	}
	return done, nil
}

// forgetModel lets the next worker of a model decide on its block size.
func forgetModel(ctx context.Context, a *asking, ns *jetstream.Namespace, model string, force bool) error {
	ctx, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	if !force {
		c, err := client.NATS(ns.Conn().NATS(), a.namespace, client.Options{})
		if err != nil {
			return err
		}
		list, err := c.Workers(ctx)
		if err != nil {
			return fmt.Errorf("who serves %q is not known: %w", model, err)
		}
		if !list.Complete {
			return fmt.Errorf("who serves %q is not known: partitions %v cannot be looked at", model, list.Missing)
		}
		for _, w := range list.Workers {
			if w.Model == model {
				return fmt.Errorf("worker %s/%d serves %q with blocks of %d tokens; stop its shim, then indexer forget %s, "+
					"or use --force", w.Instance, w.Rank, model, w.BlockSize, escape.Operand(string(w.Instance)))
			}
		}
	}
	was, err := ns.ForgetModel(ctx, model)
	if errors.Is(err, jetstream.ErrNotFound) {
		return fmt.Errorf("no worker has registered the model %q", model)
	}
	if err != nil {
		return err
	}
	if a.json {
		return cli.PrintJSON(os.Stdout, map[string]any{"forgotten": was})
	}
	cli.Fprintf(os.Stdout, "%s had blocks of %d tokens; its next worker decides anew\n", was.Name, was.BlockSize)
	return nil
}
