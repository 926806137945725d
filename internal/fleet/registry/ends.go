package registry

import (
	"sync"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// endsAtOnce is how many leases of a partition are ended at the same time.
const endsAtOnce = 4

// ends ends leases in the background, for each partition by itself: one whose log takes nothing holds up no other. The
// zero value is ready. Any goroutine may use it.
type ends struct {
	mu    sync.Mutex
	known map[events.RankKey]bool // that wait or are being ended
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

// add has end called for a rank, unless it is to be called for the rank already.
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

// wait waits until all are called.
func (e *ends) wait() { e.all.Wait() }
