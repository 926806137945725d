package tables

import (
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/kvatlas/kvatlas/internal/operate/dump"
	"github.com/kvatlas/kvatlas/internal/operate/upkeep"
	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// Forgotten prints a line for each rank that holds nothing now.
func Forgotten(w io.Writer, done []upkeep.ForgottenRank) {
	if len(done) == 0 {
		return
	}
	rows := make([][]any, len(done))
	for i, d := range done {
		now := fmt.Sprintf("cleared, at %d in the log", d.Seq)
		if d.Closed {
			now = "closed before; nothing written"
		}
		rows[i] = []any{d.Instance, d.Rank, d.Was, d.LastEvent, now}
	}
	ClearedColumns.Table(w, rows)
}

// ForgottenModel prints the deleted block size of a model.
func ForgottenModel(w io.Writer, was *jetstream.Model) {
	cli.Fprintf(w, "%s had blocks of %d tokens; the next worker of the model decides again\n", was.Name, was.BlockSize)
}

// Deletion prints the streams of a namespace.
func Deletion(w io.Writer, d *upkeep.Deletion) {
	rows := make([][]any, len(d.Streams))
	for i, s := range d.Streams {
		kind := "log"
		if s.Bucket != "" {
			kind = "bucket " + s.Bucket
		}
		rows[i] = []any{s.Name, kind, s.Messages, cli.Bytes(s.Bytes)}
	}
	DeletionColumns.Table(w, rows)
}

// DeletionNote prints whether the streams of a namespace were deleted.
func DeletionNote(w io.Writer, d *upkeep.Deletion) {
	if d.Deleted {
		cli.Fprintf(w, "%s deleted\n", cli.Count(uint64(len(d.Streams)), "stream"))
	} else {
		cli.Fprintln(w, "nothing is deleted; stop the indexers and shims of the namespace, and repeat with --yes")
	}
}

// Shims prints a line for each shim that received a request for a resync.
func Shims(w io.Writer, r *upkeep.Resynced) {
	if len(r.Shims) == 0 {
		return
	}
	rows := make([][]any, len(r.Shims))
	for i, s := range r.Shims {
		replay := "yes"
		if !s.Replay {
			replay = "no"
		}
		rows[i] = []any{s.Instance, s.Rank, s.Incarnation, replay, s.Host, s.PID}
	}
	ShimsColumns.Table(w, rows)
}

// Loaded prints the counts of loaded lines.
func Loaded(w io.Writer, l dump.Loaded) {
	cli.Fprintf(w, "%d lines: %d events of %d ranks published, with %d blocks\n", l.Lines, l.Events, l.Ranks, l.Blocks)
	for _, why := range slices.Sorted(maps.Keys(l.Skipped)) {
		cli.Fprintf(w, "%d lines passed over: unknown %s\n", l.Skipped[why], why)
	}
}
