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

// maxQuietSources is the largest number of silent sources on a node.
const maxQuietSources = 256

// quietSources are the silent sources by the reports of their shims. It is safe for concurrent use.
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
		case known || len(q.last) < maxQuietSources:
			q.last[key] = quietSource{s, now.Add(api.QuietSourceLife)}
		}
	}
}

func (q *quietSources) expire(now time.Time) {
	maps.DeleteFunc(q.last, func(_ string, s quietSource) bool { return !s.until.After(now) })
}

// list returns the sources, sorted by key.
func (q *quietSources) list(now time.Time) (list []api.QuietSource) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.expire(now)
	for _, key := range slices.Sorted(maps.Keys(q.last)) {
		list = append(list, q.last[key].QuietSource)
	}
	return list
}

// addQuietSources adds the silent sources to a status. A single node of the cluster adds them.
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
	e.conn.KeepSubscribed(ctx, jetstream.Names(e.ns).StoreSources(), e.receiveStore, func(err error) {
		e.log.Warn("cannot subscribe to the reports of stores' shims; retrying", "error", err, "what_to_do",
			"grant the subject to this user: indexer auth create prints the permissions of every user")
	})
}

// receiveStore enters a report of a store's shim. A report must be of the store in the subject.
func (e *engines) receiveStore(r jetstream.Request) {
	form, known := api.ContentType(r.ContentType)
	store, named := jetstream.Names(e.ns).ParseStoreSource(r.Subject)
	err := error(api.WrongContentType(r.ContentType))
	var report *api.SourceReport
	if known && named {
		report, err = api.ReadSourceReport(form, r.Body)
	}
	if err == nil && slices.ContainsFunc(report.Sources, func(q api.QuietSource) bool { return q.Store != store }) {
		err = api.Errorf(api.CodeMalformed, "the report names another store than the subject")
	}
	if err != nil {
		e.unread(r.Subject, err)
		return
	}
	e.quiet.enter(time.Now(), report.Sources)
}
