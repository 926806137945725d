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
		Short: "Let shims publish all blocks of engines again",
		Long: `Request a new incarnation from the shims of a partition, or of one worker: the log's state of a rank is
cleared, and the shim reads the engine's replay buffer from the start. Blocks that the buffer no longer has stay
unknown, so request a resync only for doubtful ranks. Indexers send the request themselves after a loss of the log.
Only the shims and NATS need to run. Exit status 1 if no shim answers.`,
		Example: `  indexer resync --worker w1`,
	}
	a := remote.StoreFlags(cmd)
	cmd.Flags().Uint32Var(&partition, "partition", 0, "all workers of this partition")
	cmd.Flags().StringVar(&worker, "worker", "", "all ranks of this instance")
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		if cmd.Flags().Changed("partition") == (worker != "") {
			return cli.UsageErrorf("give --partition or --worker")
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
