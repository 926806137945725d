package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/kvatlas/kvatlas/internal/index/node"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
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
	a := askingFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		list, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*api.SnapshotList, error) {
			return c.Snapshot(ctx)
		}, func(w io.Writer, list *api.SnapshotList) {
			rows := make([][]any, len(list.Snapshots))
			for i, s := range list.Snapshots {
				rows[i] = []any{s.Partition, s.Generation, s.Seq, cli.Bytes(s.Bytes), cli.Bytes(s.Written)}
			}
			cli.Table(w, []string{"PARTITION", "GENERATION", "SEQ", "SIZE", "NEW"}, rows)
		})
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
	a := storeFlags(cmd)
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
	a := storeFlags(cmd)
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
func showGenerations(ctx context.Context, a *asking, verify bool) (list *api.GenerationList, err error) {
	err = a.reach(ctx, func(ctx context.Context, ns *jetstream.Namespace) (err error) {
		switch list, err = node.Generations(ctx, ns, verify); {
		case err != nil:
			return err
		case a.json:
			return cli.PrintJSON(os.Stdout, list)
		}
		return printed(os.Stdout, func(w io.Writer) { tables.Generations(w, list) })
	})
	return list, err
}
