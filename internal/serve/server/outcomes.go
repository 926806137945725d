package server

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// overload has the outcomes caused by this node, with the reason and the remedy.
var overload = map[string]struct{ why, do string }{
	string(api.CodeBusy): {"all query workers were busy and their queue was full",
		"raise --query-workers or --query-queue, or add nodes"},
	ops.Expired: {"their callers' deadlines passed while they waited",
		"raise --query-workers, add nodes, or let clients wait longer"},
	ops.Unsent: {"there were answers, and the connection did not take them",
		"see the log for what became of it; clients must read their answers"},
}

// lately is the least time for which a problem is reported. The greatest time is double.
const lately = time.Minute

// outcomes counts the outcomes of requests. The zero value is empty. It is safe for concurrent use.
type outcomes struct {
	mu     sync.RWMutex
	counts map[api.RequestCount]*atomic.Uint64 // keys have no Count

	late struct { // outcomes of overload in this time span and in the span before
		sync.Mutex
		began       time.Time
		now, before map[string]uint64
	}
}

// Count counts a request.
func (o *outcomes) Count(by api.Transport, op, outcome string) { o.count(by, op, outcome, time.Now) }

func (o *outcomes) count(by api.Transport, op, outcome string, now func() time.Time) {
	key := api.RequestCount{Transport: by, Operation: op, Outcome: outcome}
	o.mu.RLock()
	n := o.counts[key]
	o.mu.RUnlock()
	if n == nil {
		o.mu.Lock()
		if n = o.counts[key]; n == nil {
			if o.counts == nil {
				o.counts = map[api.RequestCount]*atomic.Uint64{}
			}
			n = new(atomic.Uint64)
			o.counts[key] = n
		}
		o.mu.Unlock()
	}
	n.Add(1)
	if _, is := overload[outcome]; is {
		o.late.Lock()
		o.turn(now())
		o.late.now[outcome]++
		o.late.Unlock()
	}
}

// turn begins a new time span when due. The caller holds the lock of o.late.
func (o *outcomes) turn(now time.Time) {
	l := &o.late
	switch age := now.Sub(l.began); {
	case age >= 2*lately:
		l.began, l.now, l.before = now, map[string]uint64{}, nil
	case age >= lately:
		l.began, l.now, l.before = now, map[string]uint64{}, l.now
	}
}

// Counts lists the counts by transport, operation and outcome.
func (o *outcomes) Counts() []api.RequestCount {
	list := []api.RequestCount{}
	o.mu.RLock()
	for key, n := range o.counts {
		key.Count = n.Load()
		list = append(list, key)
	}
	o.mu.RUnlock()
	slices.SortFunc(list, func(a, b api.RequestCount) int {
		return cmp.Or(
			cmp.Compare(a.Transport, b.Transport), cmp.Compare(a.Operation, b.Operation),
			cmp.Compare(a.Outcome, b.Outcome),
		)
	})
	return list
}

// Problems describes recently refused requests with the remedy.
func (o *outcomes) Problems(now time.Time) (list []string) {
	o.late.Lock()
	defer o.late.Unlock()
	o.turn(now)
	for outcome, about := range overload {
		if n := o.late.now[outcome] + o.late.before[outcome]; n > 0 {
			was := strings.NewReplacer("busy", "refused as busy", "expired", "not answered in time").Replace(outcome)
			requests := "requests were"
			if n == 1 {
				requests = "request was"
			}
			list = append(list, fmt.Sprintf("%d %s %s within the last two minutes: %s; what to do: %s", n, requests,
				was, about.why, about.do))
		}
	}
	slices.Sort(list)
	return list
}

// refusalsEvery is the least time between two log lines about refused requests.
const refusalsEvery = 10 * time.Second

// logRefusals logs refused requests until ctx ends.
func logRefusals(ctx context.Context, outcomes *outcomes, log *slog.Logger) {
	before := map[api.RequestCount]uint64{}
	for ctx.Err() == nil {
		loop.Wait(ctx, refusalsEvery)
		before = sayRefusals(before, outcomes.Counts(), log)
	}
}

// sayRefusals logs the number of refused requests since before, with the remedy of every outcome, and returns the new
// counts.
func sayRefusals(
	before map[api.RequestCount]uint64, counts []api.RequestCount, log *slog.Logger,
) (now map[api.RequestCount]uint64) {
	now = make(map[api.RequestCount]uint64, len(counts))
	said := map[string]uint64{}
	for _, c := range counts {
		key := c
		key.Count = 0
		now[key] = c.Count
		if _, is := overload[c.Outcome]; is {
			said[c.Outcome] += c.Count - before[key]
		}
	}
	for outcome, n := range said {
		if n > 0 {
			log.Warn("requests were not answered", "outcome", outcome, "requests", n, "why", overload[outcome].why,
				"what_to_do", overload[outcome].do)
		}
	}
	return now
}
