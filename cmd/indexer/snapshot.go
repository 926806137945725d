package main

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func snapshotCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "snapshot", Short: "Work with snapshots"}, snapshotNowCommand(),
		snapshotListCommand(), snapshotVerifyCommand())
}

func snapshotNowCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "now",
		Short: "Write a snapshot of every partition now",
		Long: `Write a snapshot of every partition now. SEQ is the last message of the log that it stands for, SIZE the bytes of all
its chunks, and NEW those of the chunks that were written: one that is as it was in the snapshot before is not written
again.`,
	}
	a := remote.Flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		list, err := remote.Show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.SnapshotList, error) {
			return c.Snapshot(ctx)
		}, tables.Snapshots)
		if err == nil {
			err = survey.Unwritten(list)
		}
		return err
	}
	return cmd
}

func snapshotListCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the snapshots in the bucket",
		Long: `List the snapshots that are in the bucket: two generations of each partition as a rule. They are read from NATS,
whether an indexer runs or not. SEQ is the last message of the log that a snapshot stands for, SIZE the bytes of all its
chunks, NEW those of the chunks that the snapshot before has not.`,
	}
	a := remote.StoreFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := showGenerations(cmd.Context(), a, false)
		return err
	}
	return cmd
}

func snapshotVerifyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Read every snapshot in the bucket, whole, and check it",
		Long: `Read every chunk of every snapshot in the bucket, check it against its manifest and decode it, as an indexer does that
starts. It is read from NATS, whether an indexer runs or not. Exit status 1 if any is not what was written; the line
says which chunk and why. A snapshot that is whole and no longer fits the log (the stream was made anew) is told of
and is no failure.`,
	}
	a := remote.StoreFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		list, err := showGenerations(cmd.Context(), a, true)
		if list == nil {
			return err
		}
		bad := 0
		for _, g := range list.Generations {
			if g.Bad {
				bad++
			}
		}
		if bad > 0 {
			err = errors.Join(err, fmt.Errorf("%d of %d snapshots are not what was written", bad, len(list.Generations)))
		}
		return err
	}
	return cmd
}

// showGenerations prints the snapshots in the bucket. The list is nil if they could not be read.
func showGenerations(ctx context.Context, a *remote.Target, verify bool) (list *api.GenerationList, err error) {
	err = a.Reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) (err error) {
		if list, err = node.Generations(ctx, ns, verify); err != nil {
			return err
		}
		return a.Print(list, func(w io.Writer) { tables.Generations(w, list) })
	})
	return list, err
}
