package server

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// engines has the engines' reports of their load. A report is published on the subject of the worker, and all nodes
// receive the report. It is safe for concurrent use.
type engines struct {
	conn  *jetstream.Conn
	ns    string
	log   *slog.Logger
	table *load.Engines
	fails *load.Penalties
	start time.Time
	asked atomic.Int64  // the last read for a choice, by now()
	wake  chan struct{} // the first choice for a while; capacity 1
	want  func() error  // asks all shims for loads

	loads *load.Service // enters the requests of routers of another make

	quiet     quietSources
	malformed atomic.Uint64 // messages
	warned    atomic.Int64  // time of the last log line about an unreadable report, in nanoseconds
}

func newEngines(conn *jetstream.Conn, ns string, log *slog.Logger) *engines {
	return &engines{conn: conn, ns: ns, log: log, table: load.NewEngines(), fails: load.NewPenalties(),
		start: time.Now(), wake: make(chan struct{}, 1)}
}

func (e *engines) now() time.Duration { return time.Since(e.start) }

// read implements [selection.Engines].
func (e *engines) read(read func(use func(events.RankKey) load.EngineUse)) {
	now := e.now()
	if last := e.asked.Swap(int64(now)); last == 0 || now-time.Duration(last) > wantedFor {
		loop.Wake(e.wake)
	}
	e.table.Read(now, read)
}

const (
	// wantedFor is the time after a choice in which a node asks shims for loads, every wantedEvery.
	wantedFor   = 10 * time.Second
	wantedEvery = 5 * time.Second
)

// demand asks shims for the loads of their engines while the node chooses workers, until ctx ends.
func (e *engines) demand(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-e.wake:
		}
		for e.now()-time.Duration(e.asked.Load()) <= wantedFor {
			if err := e.want(); err != nil {
				e.log.Debug("cannot ask the shims for the loads of their engines", "error", err)
			}
			if !loop.Wait(ctx, wantedEvery) {
				return
			}
		}
	}
}

// add enters reports.
func (e *engines) add(list []api.EngineLoad) { e.table.Add(e.now(), list, e.loads.Booked) }

// mark adds the reports of engines to a list of workers.
func (e *engines) mark(list *api.WorkerList) {
	e.table.Read(e.now(), func(use func(events.RankKey) load.EngineUse) {
		for i := range list.Workers {
			w := &list.Workers[i]
			u := use(events.RankKey{Instance: w.Instance, Rank: w.Rank})
			if r := u.Report(); r != nil {
				w.Reported = &routing.Reported{UsedBlocks: u.UsedBlocks, Capacity: u.TotalBlocks,
					PrefillTokens: u.PrefillTokens, Requests: r.Requests, Source: r.Source, AgeS: r.AgeS}
			}
		}
	})
}

// penalties implements [selection.Penalties].
func (e *engines) penalties(read func(of func(events.WorkerID) *routing.Penalty)) {
	e.fails.Read(e.now(), read)
}

func (e *engines) list() *api.EngineLoads {
	failures := e.fails.List(e.now())
	slices.SortFunc(failures, func(a, b api.WorkerResult) int { return cmp.Compare(a.Worker, b.Worker) })
	return &api.EngineLoads{Loads: e.table.List(e.now()), Results: failures}
}

// ended reports the result of a booked request. A success is of interest only for a worker with failures.
func (e *engines) ended(model, requestID string, result api.Result) {
	var worker events.WorkerID
	e.loads.Read(load.Model{Name: model}, func(t *load.Table) {
		at, _ := t.Where(requestID)
		worker = at.Instance
	})
	if worker == "" || result == api.ResultOK && !e.fails.Failing(worker) {
		return
	}
	err := e.report(&api.EngineLoads{Results: []api.WorkerResult{{Worker: worker, Result: result}}})
	if err != nil {
		e.log.Debug("other nodes do not receive the result of a request", "worker", worker, "result", result, "error", err)
	}
}

func (e *engines) counts() *api.ReportCounts {
	c := e.table.Counts()
	return &api.ReportCounts{Taken: c.Taken, Late: c.Late, Refused: c.Refused, Malformed: e.malformed.Load(),
		Failures: e.fails.Counts(), Penalised: len(e.fails.List(e.now()))}
}

// report enters reports and publishes them to the other nodes. Changes and results of requests need the same order on
// all nodes, so they are entered when they arrive over NATS.
func (e *engines) report(l *api.EngineLoads) error {
	byWorker := map[events.WorkerID]*api.EngineLoads{}
	of := func(worker events.WorkerID) *api.EngineLoads {
		if byWorker[worker] == nil {
			byWorker[worker] = &api.EngineLoads{}
		}
		return byWorker[worker]
	}
	for _, l := range l.Loads {
		of(l.Worker).Loads = append(of(l.Worker).Loads, l)
	}
	for _, r := range l.Requests {
		of(r.Worker).Requests = append(of(r.Worker).Requests, r)
	}
	for _, r := range l.Results {
		of(r.Worker).Results = append(of(r.Worker).Results, r)
	}
	for worker := range byWorker {
		if _, err := jetstream.Names(e.ns).Engine(worker); err != nil {
			return api.Errorf(api.CodeMalformed, "worker: %v", err)
		}
	}
	e.add(l.Loads)
	for worker, loads := range byWorker {
		subject, _ := jetstream.Names(e.ns).Engine(worker) // the subject was valid above
		body, err := api.Marshal(api.MsgPack, loads)
		if err == nil {
			err = e.conn.Send(subject, api.MsgPack, body)
		}
		if err != nil {
			return api.Errorf(api.CodeUnavailable, "this node has the report, but the publication to the other "+
				"nodes failed: %v", err)
		}
	}
	return nil
}

// listen receives reports until ctx ends.
func (e *engines) listen(ctx context.Context) {
	e.conn.KeepSubscribed(ctx, jetstream.Names(e.ns).Engines(), e.receive, func(err error) {
		e.log.Warn("cannot subscribe to engines' load reports; retrying", "error", err, "what_to_do",
			"grant the subject to this user: indexer auth create prints the permissions of every user")
	})
}

// receive enters a message. The report must be of the worker in the subject, because a key permits the subject of a
// single worker.
func (e *engines) receive(r jetstream.Request) {
	form, known := api.ContentType(r.ContentType)
	worker, named := jetstream.Names(e.ns).ParseEngine(r.Subject)
	err := error(api.WrongContentType(r.ContentType))
	var l *api.EngineLoads
	if known && named {
		l, err = api.ReadEngineLoads(form, r.Body)
	}
	if err == nil && (slices.ContainsFunc(l.Loads, func(l api.EngineLoad) bool { return l.Worker != worker }) ||
		slices.ContainsFunc(l.Requests, func(r api.RouterRequest) bool { return r.Worker != worker }) ||
		slices.ContainsFunc(l.Results, func(r api.WorkerResult) bool { return r.Worker != worker })) {
		err = api.Errorf(api.CodeMalformed, "the report names another worker than the subject")
	}
	if err == nil {
		e.add(l.Loads)
		e.enter(l.Requests)
		e.fails.Add(e.now(), l.Results)
		if len(l.Loads)+len(l.Requests)+len(l.Results) == 0 {
			var s *api.SourceReport
			if s, err = api.ReadSourceReport(form, r.Body); err == nil && slices.ContainsFunc(s.Sources, ofStore) {
				err = api.Errorf(api.CodeMalformed, "the report is of a store, on the subject of a worker")
			}
			if err == nil {
				e.quiet.enter(time.Now(), s.Sources)
			}
		}
	}
	if err != nil {
		e.unread(r.Subject, err)
	}
}

// ofStore reports whether a source is of a shared store.
func ofStore(q api.QuietSource) bool { return q.Store != "" }

// unread counts an unreadable report, and logs at most a report a minute.
func (e *engines) unread(subject string, err error) {
	e.malformed.Add(1)
	now, last := time.Now().UnixNano(), e.warned.Load()
	if now-last > int64(time.Minute) && e.warned.CompareAndSwap(last, now) {
		e.log.Warn("a shim's report cannot be read and is skipped", "subject", subject, "error", err, "what_to_do",
			"see docs/routing-bookings.md for the form of loads; end the upgrade if shims and nodes are of different versions")
	}
}

// enter enters changes of requests from other makes of routers.
func (e *engines) enter(list []api.RouterRequest) {
	for len(list) > 0 {
		model := list[0].Model
		n := slices.IndexFunc(list, func(r api.RouterRequest) bool { return r.Model != model })
		if n < 0 {
			n = len(list)
		}
		changes := make([]events.RouterRequest, n)
		for i := range changes {
			r := &list[i]
			changes[i] = events.RouterRequest{Key: events.RankKey{Instance: r.Worker, Rank: r.Rank}, ID: r.RequestID,
				Change: r.Change, PrefillTokens: r.PrefillTokens}
			for _, h := range r.SequenceHashes {
				changes[i].Blocks = append(changes[i].Blocks, events.SeqHash(h))
			}
		}
		e.loads.ReportForeign(load.Model{Name: model}, changes)
		list = list[n:]
	}
}

// memory returns the reports for a starting node.
func (e *engines) memory() shared.Memory {
	return shared.Memory{
		Each: func(yield func([]byte) bool) {
			for list := range slices.Chunk(e.table.List(e.now()), 4096) {
				body, err := api.Marshal(api.MsgPack, &api.EngineLoads{Loads: list})
				if err != nil || !yield(body) {
					return
				}
			}
		},
		Take: func(body []byte) {
			if l, err := api.ReadEngineLoads(api.MsgPack, body); err == nil {
				e.table.Add(e.now(), l.Loads, nil) // the loads are locked
			}
		},
	}
}
