package tables

import (
	"io"
	"time"

	"github.com/kvatlas/kvatlas/internal/serve/cli"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Sessions prints a line for each session.
func Sessions(w io.Writer, list *api.SessionList) {
	switch {
	case !list.Affinity:
		cli.Fprintln(w, "session affinity is off; set session_affinity in the file of --routing-config")
	case len(list.Sessions) == 0:
		cli.Fprintln(w, "no session has a worker")
	default:
		boundSessions(w, list)
	}
}

// Session prints the lines of one session, and its blocks on each worker.
func Session(w io.Writer, list *api.SessionList) {
	Sessions(w, list)
	cli.Fprintln(w)
	if len(list.Held) > 0 {
		rows := make([][]any, len(list.Held))
		for i, h := range list.Held {
			rows[i] = []any{h.Model, h.Worker, h.Rank, h.Blocks, h.Device, h.Host, h.Disk, h.External}
		}
		HeldColumns.Table(w, rows)
	} else {
		cli.Fprintln(w, "blocks: not known; no engine has announced the session_id in its events")
	}
	if list.Unknown > 0 {
		cli.Fprintf(w, "%s may have older blocks of the session, which are not known\n",
			cli.Count(uint64(list.Unknown), "further rank"))
	}
	if n := len(list.Missing); n > 0 {
		cli.Fprintf(w, "%s without an answer: further workers may have blocks of the session\n",
			cli.Count(uint64(n), "partition"))
	}
}

func boundSessions(w io.Writer, list *api.SessionList) {
	now := time.Now()
	rows := make([][]any, len(list.Sessions))
	for i, s := range list.Sessions {
		rows[i] = []any{s.ID, s.Model, s.Worker, s.Rank, max(now.Sub(s.LastUse), 0).Round(time.Second),
			max(s.Expires.Sub(now), 0).Round(time.Second)}
	}
	SessionsColumns.Table(w, rows)
	if more := uint64(list.Total - len(list.Sessions)); more > 0 {
		cli.Fprintf(w, "%s more; raise --limit\n", cli.Count(more, "session"))
	}
}

// EndedSessions prints the ended sessions.
func EndedSessions(w io.Writer, list *api.SessionList) {
	if len(list.Sessions) == 0 {
		cli.Fprintln(w, "the session has no worker; nothing has ended")
	}
	for _, s := range list.Sessions {
		cli.Fprintf(w, "%s of %s was on %s/%d; its next request is chosen freely\n", s.ID, s.Model, s.Worker, s.Rank)
	}
}
