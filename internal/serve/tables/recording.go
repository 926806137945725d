package tables

import (
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/operate/survey"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
)

// Recording prints the state of the recording of requests.
func Recording(w io.Writer, s *survey.RecordingReport) {
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
	RecordingColumns.Table(w, rows)
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
