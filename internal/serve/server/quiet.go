package server

import (
	"context"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// quietSources are the sources that their shims do not hear, as these report. Any goroutine may use it.
type quietSources struct {
	mu   sync.Mutex
	last map[string]quietSource // by [api.QuietSource.Key]
}

type quietSource struct {
	api.QuietSource
	until time.Time
}

// enter notes reports.
func (q *quietSources) enter(now time.Time, list []api.QuietSource) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.expire(now)
	if q.last == nil {
		q.last = map[string]quietSource{}
	}
	for _, s := range list {
		key := s.Key()
		_, known := q.last[key]
		switch {
		case s.Spoke:
			delete(q.last, key)
		case known || len(q.last) < api.MaxQuietSources:
			q.last[key] = quietSource{s, now.Add(api.QuietSourceLife)}
		}
	}
}

func (q *quietSources) expire(now time.Time) {
	maps.DeleteFunc(q.last, func(_ string, s quietSource) bool { return !s.until.After(now) })
}

// list returns the sources, sorted by their keys.
func (q *quietSources) list(now time.Time) (list []api.QuietSource) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.expire(now)
	for _, key := range slices.Sorted(maps.Keys(q.last)) {
		list = append(list, q.last[key].QuietSource)
	}
	return list
}

// addQuietSources adds to a status the sources that are not heard. One node of a cluster does.
func (s *Server) addQuietSources(status *api.Status) {
	if p, err := jetstream.PartitionOf("", s.ns.Partitions()); err != nil || !s.views.Now().Writes(p) {
		return
	}
	status.QuietSources = s.engines.quiet.list(time.Now())
	for i := range status.QuietSources {
		q := &status.QuietSources[i]
		lines := &status.Warnings
		if q.Severe() {
			lines = &status.Problems
		}
		*lines = append(*lines, q.Line())
	}
}

// listenStores receives the reports of stores' shims until ctx ends.
func (e *engines) listenStores(ctx context.Context) {
	e.conn.KeepSubscribed(ctx, jetstream.StoreSourceSubjects(e.ns), e.heardStore, func(err error) {
		e.log.Warn("the reports of stores' shims cannot be heard; it is tried again", "error", err, "what_to_do",
			"grant it to this user: indexer auth example prints what each user needs")
	})
}

// heardStore enters a report of a store's shim. A report of another store than its subject's is refused.
func (e *engines) heardStore(r jetstream.Request) {
	form, known := api.ContentType(r.ContentType)
	store, named := jetstream.ParseStoreSourceSubject(e.ns, r.Subject)
	err := error(api.WrongContentType(r.ContentType))
	var report *api.SourceReport
	if known && named {
		report, err = api.ReadSourceReport(form, r.Body)
	}
	if err == nil && slices.ContainsFunc(report.Sources, func(q api.QuietSource) bool { return q.Store != store }) {
		err = api.Errorf(api.CodeMalformed, "it is of another store than its subject")
	}
	if err != nil {
		e.unread(r.Subject, err)
		return
	}
	e.quiet.enter(time.Now(), report.Sources)
}
