package registry

import (
	"slices"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// How many ranks whose leases have expired are remembered, and for how long.
const (
	maxExpired = 1 << 12
	expiredFor = time.Hour
)

// expired remembers the ranks whose leases have expired last, until they come back. Any goroutine may use it.
type expired struct {
	last *lru.Cache[events.RankKey, Worker]
}

func newExpired() expired {
	last, _ := lru.New[events.RankKey, Worker](maxExpired) // whose error is of a size that is not positive
	return expired{last}
}

// note takes a record that was written. renewed is when the one before was; zero: it is not known. A lease that its
// shim has ended, as it was told to stop, is not remembered: nothing is wrong.
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

// ended takes a record that is no more in the bucket: its lease has expired, even if the watch has not shown the mark.
func (x expired) ended(key events.RankKey, w Worker) {
	w.Record.State = Expired
	x.note(key, w.Record, w.Renewed, w.Renewed)
}

// remove forgets a worker.
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

// Expired lists the ranks whose leases have expired within the last hour, and that are not registered now, were not
// drained before and not removed since.
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
