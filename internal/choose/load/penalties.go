package load

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

const (
	// firstPenalty is the penalty after a failure. The penalty doubles with every failure after the end of the last
	// penalty, up to longestPenalty. Failures during a penalty are of earlier requests and do not prolong the
	// penalty.
	firstPenalty   = time.Second
	longestPenalty = 10 * time.Second

	// penaltyMemory is the time after a penalty in which a failure doubles the penalty.
	penaltyMemory = time.Minute

	maxPenalties = 1 << 16 // workers
)

// Penalties has the workers with failed requests. A worker is penalised from a failure until the end of the penalty or
// until a success, whichever is first. Routers report failures and successes to a node, and the node passes the reports
// on to all nodes. All times count from the same moment. Penalties is safe for concurrent use.
type Penalties struct {
	known atomic.Int64 // len(workers): choices without a failed worker do not lock

	mu      sync.Mutex
	workers map[events.WorkerID]*failing
	counts  map[api.Result]uint64
}

// failing is a worker with failures since the last success.
type failing struct {
	failures uint64
	last     time.Duration // of the last failure
	reason   api.Result    // of the last failure
	length   time.Duration
	until    time.Duration
}

// NewPenalties returns a table without failures.
func NewPenalties() *Penalties {
	return &Penalties{workers: map[events.WorkerID]*failing{}, counts: map[api.Result]uint64{}}
}

// Add adds results, each with its own age.
func (p *Penalties) Add(now time.Duration, results []api.WorkerResult) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := range results {
		r := &results[i]
		age := time.Duration(min(r.AgeMS, uint64(penaltyMemory/time.Millisecond))) * time.Millisecond
		p.add(now-age, r)
	}
	for worker, f := range p.workers {
		if now >= f.until+penaltyMemory {
			delete(p.workers, worker)
		}
	}
	p.known.Store(int64(len(p.workers)))
}

func (p *Penalties) add(at time.Duration, r *api.WorkerResult) {
	f := p.workers[r.Worker]
	if r.Result == api.ResultOK {
		if f != nil && at >= f.last {
			delete(p.workers, r.Worker)
		}
		return
	}
	p.counts[r.Result]++
	if f == nil {
		if len(p.workers) >= maxPenalties {
			return
		}
		f = &failing{length: firstPenalty / 2}
		p.workers[r.Worker] = f
	}
	f.failures++
	if at >= f.last {
		f.last, f.reason = at, r.Result
	}
	if at >= f.until {
		f.length = min(2*f.length, longestPenalty)
		f.until = at + f.length
	}
}

// Any reports whether a worker has a failure since its last success.
func (p *Penalties) Any() bool { return p.known.Load() > 0 }

// Failing reports whether the worker has a failure since the last success.
func (p *Penalties) Failing(worker events.WorkerID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.workers[worker] != nil
}

// Read calls read with a function that returns the penalty of a worker, or nil. The function is invalid afterwards.
// Without failures, Read does not call read.
func (p *Penalties) Read(now time.Duration, read func(of func(events.WorkerID) *routing.Penalty)) {
	if !p.Any() {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	read(func(worker events.WorkerID) *routing.Penalty {
		f := p.workers[worker]
		if f == nil || now >= f.until {
			return nil
		}
		return &routing.Penalty{Failures: f.failures, Reason: string(f.reason), LeftS: (f.until - now).Seconds()}
	})
}

// List returns the last failure of each penalised worker, in no order.
func (p *Penalties) List(now time.Duration) (list []api.WorkerResult) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for worker, f := range p.workers {
		if now < f.until {
			list = append(list, api.WorkerResult{Worker: worker, Result: f.reason,
				AgeMS: uint64(max(now-f.last, 0) / time.Millisecond)})
		}
	}
	return list
}

// Counts returns the number of failures by result.
func (p *Penalties) Counts() map[string]uint64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	counts := map[string]uint64{}
	for _, r := range api.Results {
		if r != api.ResultOK {
			counts[string(r)] = p.counts[r]
		}
	}
	return counts
}
