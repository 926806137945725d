package server

import (
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// engines is what this node knows of how full engines say that they are, and how nodes tell each other: each report is
// published on the subject of its worker, where all nodes hear it. It may be called from any goroutine.
type engines struct {
	conn  *jetstream.Conn
	ns    string
	log   *slog.Logger
	table *load.Engines
	start time.Time

	malformed atomic.Uint64 // messages
	warned    time.Time     // of the goroutine that listens
}

func newEngines(conn *jetstream.Conn, ns string, log *slog.Logger) *engines {
	return &engines{conn: conn, ns: ns, log: log, table: load.NewEngines(), start: time.Now()}
}

func (e *engines) now() time.Duration { return time.Since(e.start) }

// read implements [selection.Engines].
func (e *engines) read(read func(use func(events.RankKey) load.EngineUse)) {
	e.table.Read(e.now(), read)
}

func (e *engines) list() *api.EngineLoads { return &api.EngineLoads{Loads: e.table.List(e.now())} }

func (e *engines) counts() *api.ReportCounts {
	c := e.table.Counts()
	return &api.ReportCounts{Taken: c.Taken, Late: c.Late, Refused: c.Refused, Malformed: e.malformed.Load()}
}

// report enters reports here and tells the other nodes.
func (e *engines) report(l *api.EngineLoads) error {
	byWorker := map[events.WorkerID][]api.EngineLoad{}
	for _, of := range l.Loads {
		byWorker[of.Worker] = append(byWorker[of.Worker], of)
	}
	for worker := range byWorker {
		if _, err := jetstream.EngineSubject(e.ns, worker); err != nil {
			return api.Errorf(api.CodeMalformed, "worker: %v", err)
		}
	}
	e.table.Take(e.now(), l.Loads)
	for worker, loads := range byWorker {
		subject, _ := jetstream.EngineSubject(e.ns, worker) // it was good just now
		body, err := api.Marshal(api.MsgPack, &api.EngineLoads{Loads: loads})
		if err == nil {
			err = e.conn.Send(subject, api.MsgPack, body)
		}
		if err != nil {
			return api.Errorf(api.CodeUnavailable, "this node knows it now; the others could not be told: %v", err)
		}
	}
	return nil
}

// listen hears reports until ctx ends.
func (e *engines) listen(ctx context.Context) {
	e.conn.KeepSubscribed(ctx, jetstream.EngineSubjects(e.ns), e.heard, func(err error) {
		e.log.Warn("how full engines are cannot be heard; it is tried again", "error", err, "what_to_do",
			"grant it to this user: indexer auth example prints what each user needs")
	})
}

// heard takes a message. Whoever may publish for one worker says nothing of another.
func (e *engines) heard(r jetstream.Request) {
	form, known := api.ContentType(r.ContentType)
	worker, named := jetstream.ParseEngineSubject(e.ns, r.Subject)
	err := error(api.WrongContentType(r.ContentType))
	var l *api.EngineLoads
	if known && named {
		l, err = api.ReadEngineLoads(form, r.Body)
	}
	if err == nil && slices.ContainsFunc(l.Loads, func(l api.EngineLoad) bool { return l.Worker != worker }) {
		err = api.Errorf(api.CodeMalformed, "it is of another worker than its subject")
	}
	if err == nil {
		e.table.Take(e.now(), l.Loads)
		return
	}
	e.malformed.Add(1)
	if time.Since(e.warned) > time.Minute {
		e.warned = time.Now()
		e.log.Warn("a report of how full an engine is cannot be read; it is passed over", "subject", r.Subject, "error", err,
			"what_to_do", "see docs/routing.md for its form")
	}
}

// ask takes over what another node knows. It is tried once: engines report again soon.
func (e *engines) ask(ctx context.Context, other *client.Client) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	if l, err := other.EngineLoads(ctx); err == nil {
		e.table.Take(e.now(), l.Loads)
	}
}
