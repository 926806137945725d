package main

import (
	"context"
	"errors"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/ingest/control"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
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
	a := remote.StoreFlags(cmd)
	cmd.Flags().Uint32Var(&partition, "partition", 0, "all workers of this partition")
	cmd.Flags().StringVar(&worker, "worker", "", "this instance, all its ranks")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("partition") == (worker != "") {
			return cli.UsageErrorf("give one of --partition and --worker")
		}
		return a.Reach(cmd.Context(), func(ctx context.Context, ns *jetstream.Namespace) error {
			shims, err := upkeep.Resync(ctx, ns, partition, events.WorkerID(worker))
			if err != nil {
				return err
			}
			err = a.Print(map[string]any{"shims": append([]control.Shim{}, shims...)},
				func(w io.Writer) { tables.Shims(w, shims) })
			if err == nil && len(shims) == 0 {
				err = errors.New("no shim answered")
			}
			return err
		})
	}
	return cmd
}
