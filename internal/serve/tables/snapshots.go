package tables

import (
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Snapshots prints a line for each snapshot that was written.
func Snapshots(w io.Writer, list *api.SnapshotList) {
	rows := make([][]any, len(list.Snapshots))
	for i, s := range list.Snapshots {
		rows[i] = []any{s.Partition, s.Generation, s.Seq, cli.Bytes(s.Bytes), cli.Bytes(s.Written)}
	}
	SnapshotsColumns.Table(w, rows)
}

// Generations prints a line for each snapshot in the bucket, and the reasons why snapshots are unusable.
func Generations(w io.Writer, list *api.GenerationList) {
	if len(list.Generations) == 0 {
		cli.Fprintln(w, "the bucket has no snapshots")
		return
	}
	rows := make([][]any, len(list.Generations))
	for i, g := range list.Generations {
		state := "usable"
		switch {
		case g.Bad && len(g.BadChunks) == 0, !g.Bad && g.Unusable != "":
			state = g.Unusable
		case g.Bad:
			state = "BAD"
		case g.Verified:
			state = "ok"
		}
		age := "unknown"
		if !g.Created.IsZero() {
			age = time.Since(g.Created).Round(time.Second).String() + " ago"
		}
		rows[i] = []any{g.Partition, g.Generation, g.Seq, age, g.Ranks, g.Holdings, g.Chunks, cli.Bytes(g.Bytes),
			cli.Bytes(g.New), state}
	}
	GenerationsColumns.Table(w, rows)
	for _, g := range list.Generations {
		if g.Why != "" {
			cli.Fprintf(w, "partition %d, generation %d: %s: %s\n", g.Partition, g.Generation, g.Unusable, g.Why)
		}
		for _, c := range g.BadChunks {
			cli.Fprintf(w, "partition %d, generation %d: %s: %s\n", g.Partition, g.Generation, c.Reason, c.Why)
		}
	}
}
