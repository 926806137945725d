package server

import (
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// quietSources are the sources of many ranks that have published no event since their shims began, as these report. Any
// goroutine may use it.
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

// warnings has a line for each source, by name.
func (q *quietSources) warnings(now time.Time) (list []string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.expire(now)
	for _, key := range slices.Sorted(maps.Keys(q.last)) {
		s := q.last[key]
		list = append(list, fmt.Sprintf("no event since the start from %s; what to do: %s", &s.QuietSource, s.Advice))
	}
	return list
}

// warnQuiet adds to a status the sources that have not spoken. One node of a cluster does.
func (s *Server) warnQuiet(status *api.Status) {
	if p, err := jetstream.PartitionOf("", s.ns.Partitions()); err == nil && s.views.Now().Writes(p) {
		status.Warnings = append(status.Warnings, s.engines.quiet.warnings(time.Now())...)
	}
}
