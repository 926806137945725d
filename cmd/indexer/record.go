package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/internal/serve/remote"
	"github.com/kvatlas/kvatlas/internal/serve/tables"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

func recordCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "record", Short: "Work with recorded requests",
		Long: `Work with the requests that indexers record with --record: as keyed hashes, without tokens or text. docs/recording.md
describes the fields and the permissions.`}, recordStatusCommand(), recordExportCommand())
}

func recordStatusCommand() *cobra.Command {
	return remote.Command(&cobra.Command{
		Use:   "status",
		Short: "Show whether requests are recorded, how many, and how much was dropped",
		Long: `Show for each node whether requests are recorded, the records since its start, and the records that the node had to
drop. The line below shows the stream of all nodes.`,
		Example: `  indexer record status
  indexer record status --json`,
	}, remote.Request[*survey.RecordingReport]{
		Send: survey.Recording, Print: tables.Recording, Columns: []cli.Columns{tables.RecordingColumns},
	})
}

func recordExportCommand() *cobra.Command {
	x := &recording.ExportSettings{}
	var output string
	cmd := &cobra.Command{
		Use:   "export [--since 1h] [--until 10m] [--model M] [--format mooncake|json]",
		Short: "Write recorded requests as a trace",
		Long: `Write recorded requests, in order of arrival, as a trace: in Mooncake's format, which indexer simulate --trace and the
benchmarks of vLLM read, or with all fields as JSON. Each request is a line. Ids of prompts and sessions are numbers that
count from 0 in each export.

The command reads JetStream, whether an indexer runs or not. The NATS user needs the rights of an analyst (indexer auth
add --analyst NAME) or of a node. Counts of skipped and dropped records go to standard error. Exit status 1 if a batch
cannot be read.`,
		Example: `  indexer record export --since 1h --model llama > trace.jsonl
  indexer simulate --trace trace.jsonl --workers 8
  indexer record export --since 2026-11-27T08:00:00Z --format json`,
	}
	a := remote.StoreFlags(cmd)
	cli.Output[recording.Line](cmd)
	return cli.Command(cmd, cli.Flags{
		cli.Var(&x.Since, "since", "",
			"first arrival: a duration before now, such as 1h, or a time (RFC 3339); empty: all"),
		cli.Var(&x.Until, "until", "", "end of arrivals, in the same forms; empty: now"),
		cli.Var(&x.Model, "model", "", "only requests of this model; empty: all"),
		cli.Var((*string)(&x.Format), "format", string(recording.Mooncake),
			"format of the lines: mooncake or json; --json is short for the latter"),
		cli.Var(&x.Tokens, "block-tokens", recording.MooncakeTokens,
			"tokens of a hash id, a multiple of --record-span; give the same to indexer simulate"),
		cli.Var(&output, "output", "", "file to write; empty: standard output"),
	}, func(wrong *cli.Complaints) {
		if a.JSON {
			x.Format = recording.JSON
		}
		x.Check(wrong)
	}, func(ctx context.Context, _ []string) (err error) {
		to := os.Stdout
		if output != "" {
			if to, err = os.Create(output); err != nil {
				return cli.UsageErrorf("--output: %w", err)
			}
			defer func() { err = errors.Join(err, to.Close()) }()
		}
		return exportRecords(ctx, a, to, x)
	})
}

// exportRecords writes the selected requests to a writer, and the counts to standard error.
func exportRecords(ctx context.Context, a *remote.Target, to io.Writer, x *recording.ExportSettings) error {
	return a.ReachNATS(ctx, func(_ context.Context, conn *jetstream.Conn) error {
		e, sum, err := x.Export(ctx, jetstream.OpenRecording(conn, a.Namespace), to)
		if errors.Is(err, jetstream.ErrNotFound) {
			return fmt.Errorf("namespace %q has no recorded requests: start indexers with --record", a.Namespace)
		}
		if err != nil {
			return remote.Denied(err)
		}
		cli.Fprintf(os.Stderr, "%s exported, %d of them without a known length of the answer; nodes had dropped %d records\n",
			cli.Count(e.Requests, "request"), e.WithoutOutput, sum.Dropped)
		if sum.Unreadable > 0 {
			return fmt.Errorf("%s could not be read, the first: %w", cli.Count(sum.Unreadable, "batch"), sum.Why)
		}
		return nil
	})
}
