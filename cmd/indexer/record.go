package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

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
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show whether requests are recorded, how many, and how much was dropped",
		Long: `Show for each node whether requests are recorded, the records since its start, and the records that the node had to
drop. The line below shows the stream of all nodes.`,
		Example: `  indexer record status
  indexer record status --json`,
	}
	a := remote.Flags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := remote.Show(cmd.Context(), a, survey.Recording, tables.Recording)
		return err
	}
	return cmd
}

func recordExportCommand() *cobra.Command {
	var since, until, model, format, output string
	var blockTokens uint32
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
	f := cmd.Flags()
	f.StringVar(&since, "since", "", "first arrival: a duration before now, such as 1h, or a time (RFC 3339); empty: all")
	f.StringVar(&until, "until", "", "end of arrivals, in the same forms; empty: now")
	f.StringVar(&model, "model", "", "only requests of this model; empty: all")
	f.StringVar(&format, "format", string(recording.Mooncake), "format of the lines: mooncake or json; --json is short for the latter")
	f.Uint32Var(&blockTokens, "block-tokens", recording.MooncakeTokens,
		"tokens of a hash id, a multiple of --record-span; give the same to indexer simulate")
	f.StringVar(&output, "output", "", "file to write; empty: standard output")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		if a.JSON {
			format = string(recording.JSON)
		}
		var wrong cli.Complaints
		filter := recording.Filter{Model: model}
		now := time.Now()
		filter.Since, err = recording.ParseMoment(since, now)
		wrong.About("--since", err)
		filter.Until, err = recording.ParseMoment(until, now)
		wrong.About("--until", err)
		wrong.When(blockTokens == 0, "--block-tokens is 0")
		wrong.When(!filter.Until.IsZero() && !filter.Since.Before(filter.Until), "--until is not after --since")
		_, err = recording.NewExporter(io.Discard, recording.Format(format), blockTokens)
		wrong.About("--format", err)
		if err := wrong.Usage(); err != nil {
			return err
		}
		to := os.Stdout
		if output != "" {
			if to, err = os.Create(output); err != nil {
				return cli.UsageErrorf("--output: %w", err)
			}
			defer func() { err = errors.Join(err, to.Close()) }()
		}
		return exportRecords(cmd.Context(), a, to, filter, recording.Format(format), blockTokens)
	}
	return cmd
}

// exportRecords writes the selected requests to a writer, and the counts to standard error.
func exportRecords(ctx context.Context, a *remote.Target, to io.Writer, filter recording.Filter,
	format recording.Format, blockTokens uint32) error {
	return a.ReachNATS(ctx, func(_ context.Context, conn *jetstream.Conn) error {
		e, sum, err := recording.Export(ctx, jetstream.OpenRecording(conn, a.Namespace), filter, to, format, blockTokens)
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
