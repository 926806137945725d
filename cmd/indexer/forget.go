package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/cli"
	"github.com/kvatlas/kvatlas/internal/control"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

// forgottenRank is what was done with one rank, in JSON.
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
	cmd := &cobra.Command{
		Use:   "forget WORKER [--rank N]",
		Short: "Say for a worker whose engine is gone for good that it holds nothing",
		Long: `Write into the log that a worker, or one rank of it, holds nothing, and that nothing follows. It is for an engine that will not
come back and whose partition waits for it: "resync needed" ends then. A worker with a lease needs no help, its lease expires.

While a shim that lives serves the rank nothing is done, unless it is forced: then that shim begins anew with what its engine can still say as
soon as it publishes. Nothing but NATS need run. Exit status 1 if nothing is known of the worker.`,
		Example: `  indexer forget w1
  indexer forget w1 --rank 3`,
	}
	a := askingFlags(cmd)
	cmd.Args = cobra.ExactArgs(1)
	cmd.Flags().Uint32Var(&rank, "rank", 0, "this rank alone (default: all that the log knows)")
	cmd.Flags().BoolVar(&force, "force", false, "even if a shim that lives serves it")
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
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
				err = errors.Join(cli.Table(os.Stdout, []string{"INSTANCE", "RANK", "INCARNATION", "LAST EVENT", "NOW"}, rows), err)
			}
			return err
		})
	}
	return cmd
}

// forget closes ranks one after the other, up to the first that cannot be. None is if a shim serves one of them, unless by force.
func forget(ctx context.Context, ns *jetstream.Namespace, worker events.WorkerID, ranks []events.Rank, force bool) (done []forgottenRank, err error) {
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
		done = append(done, forgottenRank{worker, r, f.Was.Incarnation, f.Was.LastID, f.Incarnation == 0, f.Incarnation, f.Seq})
	}
	return done, nil
}
