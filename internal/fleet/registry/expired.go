package registry

import (
	"slices"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Limits of the list of expired ranks.
const (
	maxExpired = 1 << 12
	expiredFor = time.Hour
)

// expired has the ranks with recently expired leases until the ranks return. expired is safe for concurrent use.
type expired struct {
	last *lru.Cache[events.RankKey, Worker]
}

func newExpired() expired {
	last, _ := lru.New[events.RankKey, Worker](maxExpired) // an error means a size that is not positive
	return expired{last}
}

// note processes a written record. renewed is the time of the previous record; zero means unknown. The end of a lease
// by a stopped shim is not recorded.
func (x expired) note(key events.RankKey, r Record, renewed, written time.Time) {
	if r.State != Expired || r.endedByShim() {
		x.last.Remove(key)
		return
	}
	if renewed.IsZero() {
		renewed = written.Add(-r.Lease())
	}
	if !x.last.Contains(key) {
		x.last.Add(key, Worker{Record: r, Renewed: renewed})
	}
}

// ended processes a record that is missing from the bucket: the lease has expired, even if the watch missed the mark.
func (x expired) ended(key events.RankKey, w Worker) {
	w.Record.State = Expired
	x.note(key, w.Record, w.Renewed, w.Renewed)
}

// remove removes a worker.
func (x expired) remove(instance events.WorkerID) {
	for _, key := range x.last.Keys() {
		if key.Instance == instance {
			x.last.Remove(key)
		}
	}
}

func (x expired) has(instance events.WorkerID) bool {
	return slices.ContainsFunc(x.last.Keys(), func(key events.RankKey) bool { return key.Instance == instance })
}

// Expired returns the ranks with leases that expired within the last hour. Expired omits ranks that are registered now,
// were drained before, or were removed since.
func (r *Registry) Expired(now time.Time) (list []api.ExpiredWorker) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, key := range r.expired.last.Keys() {
		w, _ := r.expired.last.Peek(key)
		if now.Sub(w.Renewed.Add(w.Record.Lease())) > expiredFor {
			r.expired.last.Remove(key)
			continue
		}
		_, registered := r.workers[key]
		o := r.operators.known[key.Instance]
		if !registered && (o == nil || o.Drain == nil && o.Declared == nil) {
			list = append(list, api.ExpiredWorker{Instance: key.Instance, Rank: key.Rank, Model: w.Record.Model,
				Lease: w.lease()})
		}
	}
	slices.SortFunc(list, func(a, b api.ExpiredWorker) int {
		return api.RankPlace{Instance: a.Instance, Rank: a.Rank}.Compare(api.RankPlace{Instance: b.Instance, Rank: b.Rank})
	})
	return list
}
