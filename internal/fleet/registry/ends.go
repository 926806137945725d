package registry

import (
	"sync"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// endsAtOnce is the maximum number of leases of a partition that end at the same time.
const endsAtOnce = 4

// ends ends leases in the background, separately for each partition, so a blocked log delays no other partition. The
// zero value is ready. ends is safe for concurrent use.
type ends struct {
	mu    sync.Mutex
	known map[events.RankKey]bool // ranks that wait or are being ended
	of    map[events.Partition]*endQueue
	all   sync.WaitGroup
}

type endQueue struct {
	waiting []lease
	workers int
}

type lease struct {
	key events.RankKey
	end func()
}

// add queues a call of end for a rank, unless the rank is queued already.
func (e *ends) add(p events.Partition, key events.RankKey, end func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.known[key] {
		return
	}
	if e.known == nil {
		e.known, e.of = map[events.RankKey]bool{}, map[events.Partition]*endQueue{}
	}
	e.known[key] = true
	q := e.of[p]
	if q == nil {
		q = &endQueue{}
		e.of[p] = q
	}
	q.waiting = append(q.waiting, lease{key, end})
	if q.workers < endsAtOnce {
		q.workers++
		e.all.Go(func() { e.work(p, q) })
	}
}

func (e *ends) work(p events.Partition, q *endQueue) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for len(q.waiting) > 0 {
		next := q.waiting[0]
		q.waiting = q.waiting[1:]
		e.mu.Unlock()
		next.end()
		e.mu.Lock()
		delete(e.known, next.key)
	}
	if q.workers--; q.workers == 0 {
		delete(e.of, p)
	}
}

// wait waits for all queued calls.
func (e *ends) wait() { e.all.Wait() }
