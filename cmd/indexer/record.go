package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/spf13/cobra"
)

func recordCommand() *cobra.Command {
	return cli.Group(&cobra.Command{Use: "record", Short: "Work with recorded requests",
		Long: `Work with the requests that indexers record with --record: as keyed hashes, without tokens or text. docs/recording.md
describes the fields and the permissions.`}, recordStatusCommand(), recordExportCommand())
}

// recordStatus is the state of the recording on all nodes, in the form of the JSON output.
type recordStatus struct {
	On      bool                 `json:"on"` // on some node
	Nodes   []recordNode         `json:"nodes"`
	Stream  *api.RecordingStream `json:"stream,omitempty"` // of all nodes
	Records uint64               `json:"records"`
	Dropped uint64               `json:"dropped"`
}

type recordNode struct {
	Node  string               `json:"node"`
	On    bool                 `json:"on"`
	Error string               `json:"error,omitempty"` // the node does not answer
	State *api.RecordingStatus `json:"state,omitempty"` // nil: off
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
	a := askingFlags(cmd)
	cmd.RunE = func(cmd *cobra.Command, _ []string) error {
		_, err := show(cmd.Context(), a, func(ctx context.Context, c *client.Client) (*recordStatus, error) {
			report, err := survey.Nodes(ctx, c)
			if err != nil {
				return nil, err
			}
			return recordStatusOf(report), nil
		}, printRecordStatus)
		return err
	}
	return cmd
}

func recordStatusOf(report *survey.Report) *recordStatus {
	s := &recordStatus{Nodes: []recordNode{}}
	for _, n := range report.Nodes {
		node := recordNode{Node: n.Node, Error: n.Error}
		if n.Status != nil && n.Status.Recording != nil {
			node.On, node.State = true, n.Status.Recording
			s.On, s.Stream = true, cmp.Or(s.Stream, node.State.Stream)
			s.Records, s.Dropped = s.Records+node.State.Records, s.Dropped+node.State.Dropped
		}
		s.Nodes = append(s.Nodes, node)
	}
	return s
}

func printRecordStatus(w io.Writer, s *recordStatus) {
	rows := make([][]any, len(s.Nodes))
	for i, n := range s.Nodes {
		switch {
		case n.Error != "":
			rows[i] = []any{n.Node, "NO ANSWER", "", "", "", ""}
		case n.State == nil:
			rows[i] = []any{n.Node, "off", "", "", "", ""}
		default:
			state := "on"
			if n.State.Failing != "" {
				state = "FAILING"
			}
			rows[i] = []any{n.Node, state, n.State.Records, n.State.Stored, n.State.Dropped,
				cli.Bytes(n.State.WaitingBytes)}
		}
	}
	cli.Table(w, []string{"NODE", "RECORDING", "RECORDS", "STORED", "DROPPED", "WAITING"}, rows)
	for _, n := range s.Nodes {
		if n.State != nil && n.State.Failing != "" {
			cli.Fprintf(w, "node %s cannot store records: %s\n", n.Node, n.State.Failing)
		}
	}
	switch x := s.Stream; {
	case !s.On:
		cli.Fprintln(w, "requests are not recorded; indexer serve --record turns it on")
	case x == nil:
		cli.Fprintln(w, "the stream does not answer")
	default:
		oldest := "none"
		if x.Oldest != nil {
			oldest = time.Since(*x.Oldest).Round(time.Second).String() + " ago"
		}
		cli.Fprintf(w, "stream: %s of at most %s, kept for %v, the oldest %s\n", cli.Bytes(x.Bytes),
			cli.Bytes(uint64(x.MaxBytes)), time.Duration(x.MaxAgeMS)*time.Millisecond, oldest)
	}
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
	a := connectFlags(cmd)
	f := cmd.Flags()
	f.StringVar(&since, "since", "", "first arrival: a duration before now, such as 1h, or a time (RFC 3339); empty: all")
	f.StringVar(&until, "until", "", "end of arrivals, in the same forms; empty: now")
	f.StringVar(&model, "model", "", "only requests of this model; empty: all")
	f.StringVar(&format, "format", string(recording.Mooncake), "format of the lines: mooncake or json")
	f.Uint32Var(&blockTokens, "block-tokens", recording.MooncakeTokens,
		"tokens of a hash id, a multiple of --record-span; give the same to indexer simulate")
	f.StringVar(&output, "output", "", "file to write; empty: standard output")
	cmd.RunE = func(cmd *cobra.Command, _ []string) (err error) {
		var wrong cli.Complaints
		filter := recording.Filter{Model: model}
		now := time.Now()
		filter.Since, err = moment(since, now)
		wrong.About("--since", err)
		filter.Until, err = moment(until, now)
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
		return a.exportRecords(cmd.Context(), to, filter, recording.Format(format), blockTokens)
	}
	return cmd
}

// moment reads a time, or a duration before now. The empty text is the zero time.
func moment(text string, now time.Time) (time.Time, error) {
	if text == "" {
		return time.Time{}, nil
	}
	if d, err := time.ParseDuration(text); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	at, err := time.Parse(time.RFC3339, text)
	if err != nil {
		return at, fmt.Errorf("%q is neither a duration such as 1h nor a time such as 2026-11-27T08:00:00Z", text)
	}
	return at, nil
}

func (a *asking) exportRecords(ctx context.Context, to io.Writer, filter recording.Filter, format recording.Format,
	blockTokens uint32) error {
	e, err := recording.NewExporter(to, format, blockTokens)
	if err != nil {
		return err
	}
	if err := a.check(); err != nil {
		return err
	}
	opening, cancel := context.WithTimeout(ctx, a.timeout)
	defer cancel()
	conn, err := a.nats.Connect(opening, "kvatlas indexer", a.timeout)
	if err != nil {
		return denied(err)
	}
	defer conn.Close()
	sum, err := recording.Read(ctx, jetstream.OpenRecording(conn, a.namespace), filter, e.Write)
	if errors.Is(err, jetstream.ErrNotFound) {
		return fmt.Errorf("namespace %q has no recorded requests: start indexers with --record", a.namespace)
	}
	if err = errors.Join(denied(err), e.Flush()); err != nil {
		return err
	}
	cli.Fprintf(os.Stderr, "%s exported, %d of them without a known length of the answer; nodes had dropped %d records\n",
		cli.Count(e.Requests, "request"), e.WithoutOutput, sum.Dropped)
	if sum.Unreadable > 0 {
		return fmt.Errorf("%s could not be read, the first: %w", cli.Count(sum.Unreadable, "batch"), sum.Why)
	}
	return nil
}
