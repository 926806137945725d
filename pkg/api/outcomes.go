package api

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// Transport is the way by which a request came.
type Transport string

// The ways.
const (
	OverNATS  Transport = "nats" // the subjects that any node may answer on
	OverHTTP  Transport = "http"
	FromNodes Transport = "node" // this node's own subjects: other nodes ask there for their shares of a query
)

// OpOther stands for the operation of a request that was refused before it was known what it asks.
const OpOther = "other"

// What becomes of a request, other than that it is answered ([OutcomeOK]) or refused (its error's [Code]).
const (
	OutcomeOK      = "ok"
	OutcomeExpired = "expired" // nobody waited for the answer any more
	OutcomeUnsent  = "unsent"  // there was an answer, and it could not be sent
)

// Outcome is what a request is counted as that was answered, or refused.
func Outcome(failure *Error) string {
	if failure == nil {
		return OutcomeOK
	}
	return string(failure.Code)
}

// overload says what to do where requests end so, which is this node's trouble and not that of who asks.
var overload = map[string]string{
	string(CodeBusy): "all query workers were busy and their queue was full: " +
		"raise --query-workers or --query-queue, or add nodes",
	OutcomeExpired: "their callers' deadlines passed while they waited: " +
		"raise --query-workers, add nodes, or let clients wait longer",
	OutcomeUnsent: "there were answers, and the connection did not take them: see the log for what became of it",
}

// Overloaded reports whether an outcome is a sign that a node has more to do than it can, and what helps.
func Overloaded(outcome string) (whatToDo string, is bool) {
	whatToDo, is = overload[outcome]
	return whatToDo, is
}

// lately is for how long a problem is one, at least; twice as long at most.
const lately = time.Minute

// Outcomes counts what becomes of requests. The zero value has counted none. Any number of goroutines may use it.
type Outcomes struct {
	mu     sync.RWMutex
	counts map[RequestCount]*atomic.Uint64 // keys have no Count

	late struct { // what [Overloaded] says of, in this span of time and in the one before
		sync.Mutex
		began       time.Time
		now, before map[string]uint64
	}
}

// Count counts a request.
func (o *Outcomes) Count(by Transport, op, outcome string) { o.count(by, op, outcome, time.Now) }

func (o *Outcomes) count(by Transport, op, outcome string, now func() time.Time) {
	key := RequestCount{Transport: by, Operation: op, Outcome: outcome}
	o.mu.RLock()
	n := o.counts[key]
	o.mu.RUnlock()
	if n == nil {
		o.mu.Lock()
		if n = o.counts[key]; n == nil {
			if o.counts == nil {
				o.counts = map[RequestCount]*atomic.Uint64{}
			}
			n = new(atomic.Uint64)
			o.counts[key] = n
		}
		o.mu.Unlock()
	}
	n.Add(1)
	if _, is := Overloaded(outcome); is {
		o.late.Lock()
		o.turn(now())
		o.late.now[outcome]++
		o.late.Unlock()
	}
}

// turn begins a new span of time when it is due. o.late is locked.
func (o *Outcomes) turn(now time.Time) {
	l := &o.late
	switch age := now.Sub(l.began); {
	case age >= 2*lately:
		l.began, l.now, l.before = now, map[string]uint64{}, nil
	case age >= lately:
		l.began, l.now, l.before = now, map[string]uint64{}, l.now
	}
}

// Counts lists what was counted, by transport, operation and outcome.
func (o *Outcomes) Counts() []RequestCount {
	list := []RequestCount{}
	o.mu.RLock()
	for key, n := range o.counts {
		key.Count = n.Load()
		list = append(list, key)
	}
	o.mu.RUnlock()
	slices.SortFunc(list, func(a, b RequestCount) int {
		return cmp.Or(
			cmp.Compare(a.Transport, b.Transport), cmp.Compare(a.Operation, b.Operation), cmp.Compare(a.Outcome,
				b.Outcome),
		)
	})
	return list
}

// Problems says which requests were refused of late for want of room, and what helps.
func (o *Outcomes) Problems(now time.Time) (list []string) {
	o.late.Lock()
	defer o.late.Unlock()
	o.turn(now)
	for outcome, whatToDo := range overload {
		if n := o.late.now[outcome] + o.late.before[outcome]; n > 0 {
			was := strings.Replace(outcome, "busy", "refused as busy", 1)
			list = append(list, fmt.Sprintf("%d requests were %s within the last two minutes: %s", n, was, whatToDo))
		}
	}
	slices.Sort(list)
	return list
}
