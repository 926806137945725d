package main

import (
	"context"
	"crypto/rand"
	"fmt"
	"os"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

func resyncCommand() *cobra.Command {
	var partition uint32
	var worker string
	cmd := &cobra.Command{
		Use:   "resync (--partition N | --worker ID)",
		Short: "Have shims say again what their engines hold",
		Long: `Ask the shims of a partition, or of one worker, to begin a new incarnation: what the log knows of the rank is cleared,
and the engine's replay buffer is read from its start. What that no longer has is not known from then on, so ask only
for what is in doubt. Indexers ask by themselves when the log has lost something. Nothing but the shims and NATS need
run. Exit status 1 if no shim answers.`,
		Example: `  indexer resync --worker w1`,
	}
	a := storeFlags(cmd)
	cmd.Flags().Uint32Var(&partition, "partition", 0, "all workers of this partition")
	cmd.Flags().StringVar(&worker, "worker", "", "this instance, all its ranks")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("partition") == (worker != "") {
			return cli.UsageErrorf("give one of --partition and --worker")
		}
		return a.reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
			p, err := events.Partition(partition), error(nil)
			if worker != "" {
				p, err = ns.PartitionOf(events.WorkerID(worker))
			} else if partition >= ns.Partitions() {
				err = cli.UsageErrorf("there is no partition %d: there are %d, from 0", partition, ns.Partitions())
			}
			if err != nil {
				return err
			}
			shims, err := control.ResyncAll(ctx, ns, p, events.WorkerID(worker), control.ResyncRequest{ID: rand.Text()})
			if err != nil {
				return err
			}
			if a.json {
				err = cli.PrintJSON(os.Stdout, map[string]any{"shims": append([]control.Shim{}, shims...)})
			} else if len(shims) > 0 {
				rows := make([][]any, len(shims))
				for i, s := range shims {
					replay := "yes"
					if !s.Replay {
						replay = "no"
					}
					rows[i] = []any{s.Instance, s.Rank, s.Incarnation, replay, s.Host, s.PID}
				}
				err = cli.Table(os.Stdout, []string{"WORKER", "RANK", "INCARNATION", "REPLAY", "HOST", "PROCESS"},
					rows)
			}
			if err == nil && len(shims) == 0 {
				err = fmt.Errorf("no shim answered")
			}
			return err
		})
	}
	return cmd
}
