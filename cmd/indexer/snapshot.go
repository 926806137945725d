package main

import (
	"context"
	"errors"

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
	return remote.Command(&cobra.Command{
		Use:   "now",
		Short: "Write a snapshot of every partition now",
		Long: `Write a snapshot of every partition now. SEQ is the snapshot's last message of the log, SIZE the bytes of all
chunks, and NEW the bytes of the written chunks. Unchanged chunks of the earlier snapshot are not written again.`,
	}, remote.Request[*api.SnapshotList]{
		Send: remote.Get((*client.Client).Snapshot), Print: tables.Snapshots, Judge: survey.Unwritten,
		Columns: []cli.Columns{tables.SnapshotsColumns},
	})
}

func snapshotListCommand() *cobra.Command {
	return generationsCommand(&cobra.Command{
		Use:   "list",
		Short: "List the snapshots in the bucket",
		Long: `List the snapshots in the bucket: usually two generations per partition. The command reads NATS, so no indexer
needs to run. SEQ is the snapshot's last message of the log, SIZE the bytes of all chunks, and NEW the bytes of chunks
that the earlier snapshot lacks.`,
	}, false)
}

func snapshotVerifyCommand() *cobra.Command {
	return generationsCommand(&cobra.Command{
		Use:   "verify",
		Short: "Read and check every snapshot in the bucket completely",
		Long: `Read every chunk of every snapshot in the bucket, compare the chunk with the manifest and decode the chunk, as
a starting indexer does. The command reads NATS,
	so no indexer needs to run. Exit status 1 if a snapshot differs from the
written data. The line names the chunk and the reason. An intact snapshot that no longer fits the log (the stream was
recreated) is reported and is no failure.`,
	}, true)
}

// generationsCommand returns a command that lists the snapshots in the bucket. With verify, it also reads them.
func generationsCommand(cmd *cobra.Command, verify bool) *cobra.Command {
	a := remote.StoreFlags(cmd)
	cli.Output[*api.GenerationList](cmd)
	cli.Explain(cmd, tables.GenerationsColumns)
	return cli.Command(cmd, nil, nil, func(ctx context.Context, _ []string) error {
		read := func(ctx context.Context, ns *jetstream.Namespace) (*api.GenerationList, error) {
			return node.Generations(ctx, ns, verify)
		}
		list, err := remote.ShowStored(ctx, a, read, tables.Generations)
		if list == nil || !verify {
			return err
		}
		return errors.Join(err, survey.Damaged(list))
	})
}
