package main

import (
	"context"
	"errors"
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
		Long: `Write a snapshot of every partition now. SEQ is the snapshot's last message of the log, SIZE the bytes of all
chunks, and NEW the bytes of the written chunks. Unchanged chunks of the earlier snapshot are not written again.`,
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
		Long: `List the snapshots in the bucket: usually two generations per partition. The command reads NATS, so no indexer
needs to run. SEQ is the snapshot's last message of the log, SIZE the bytes of all chunks, and NEW the bytes of chunks
that the earlier snapshot lacks.`,
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
		Short: "Read and check every snapshot in the bucket completely",
		Long: `Read every chunk of every snapshot in the bucket, compare the chunk with the manifest and decode the chunk, as
a starting indexer does. The command reads NATS,
	so no indexer needs to run. Exit status 1 if a snapshot differs from the
written data. The line names the chunk and the reason. An intact snapshot that no longer fits the log (the stream was
recreated) is reported and is no failure.`,
	}
	a := remote.StoreFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		list, err := showGenerations(cmd.Context(), a, true)
		if list == nil {
			return err
		}
		return errors.Join(err, survey.Damaged(list))
	}
	return cmd
}

// showGenerations prints the snapshots in the bucket. The list is nil if the bucket could not be read.
func showGenerations(ctx context.Context, a *remote.Target, verify bool) (list *api.GenerationList, err error) {
	err = a.Reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) (err error) {
		if list, err = node.Generations(ctx, ns, verify); err != nil {
			return err
		}
		return a.Print(list, func(w io.Writer) { tables.Generations(w, list) })
	})
	return list, err
}
