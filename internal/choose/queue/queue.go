package queue

import (
	"cmp"
	"fmt"
	"slices"
)

// Policy is the order of the requests of a class.
type Policy string

// The policies, with the score of a request. The greatest score goes first.
const (
	FCFS Policy = "fcfs" // jump − arrival: first come, first served
	LCFS Policy = "lcfs" // jump + arrival: last come, first served
	WSPT Policy = "wspt" // (1 + jump) / tokens to compute: weighted shortest processing time
)

// Class is a kind of requests with common order, limits and quantum.
type Class struct {
	Name    string
	Policy  Policy
	Quantum float64 // tokens to compute per round; above 0
	Limits  Limits
}

// Limits bound the waiting requests of a class, per eligible rank of the request. nil means no bound. With 0, requests
// never wait.
type Limits struct {
	Requests, RawTokens, CachedTokens *float64
}

// Entry is a waiting request.
type Entry struct {
	Class   int
	Group   uint64  // requests of the same group may go to the same ranks
	Strict  uint32  // strict priority: greater values go before all smaller ones
	Jump    float64 // advantage in seconds, at least 0
	Arrival float64 // seconds
	Raw     uint64  // tokens of the prompt
	Cached  uint64  // cached tokens of the prompt on the best rank
}

// uncached returns the tokens to compute, at least 1.
func (e *Entry) uncached() float64 { return float64(max(e.Raw-min(e.Cached, e.Raw), 1)) }

func (e *Entry) score(p Policy) float64 {
	jump := max(e.Jump, 0)
	switch p {
	case LCFS:
		return jump + e.Arrival
	case WSPT:
		return (1 + jump) / e.uncached()
	default:
		return jump - e.Arrival
	}
}

// Refusal is the error of a request above a limit of the class.
type Refusal struct {
	Class  string
	Limit  string  // requests, raw_tokens or cached_tokens
	Bound  float64 // for the whole class
	Waits  float64 // in the class without the request
	Needed float64 // in the class with the request
}

func (r *Refusal) Error() string {
	if r.Bound == 0 {
		return fmt.Sprintf("requests of class %s never wait: its limit of %s is 0", r.Class, r.Limit)
	}
	return fmt.Sprintf("class %s is full: %v %s with this request, at most %v", r.Class, r.Needed, r.Limit, r.Bound)
}

// waiting is an entry in the queue.
type waiting struct {
	Entry
	id    uint64
	score float64
}

// compare orders a class: the next request is the first. Among equals, the oldest is the first.
func (a *waiting) compare(b *waiting) int {
	return cmp.Or(cmp.Compare(b.Strict, a.Strict), cmp.Compare(b.score, a.score), cmp.Compare(a.id, b.id))
}

// class is a class with the waiting requests.
type class struct {
	Class
	list        []*waiting // in order
	raw, cached uint64
	deficit     float64
}

// Queue has the waiting requests of all classes.
type Queue struct {
	classes []class
	byID    map[uint64]*waiting
	groups  map[uint64]int // the number of waiting requests by group
	last    uint64         // the last id
	turn    int            // the class of the current turn
	fresh   bool           // the class has not received its quantum in this turn
	raw     uint64         // tokens
	cached  uint64         // of them
}

// New returns an empty queue. classes has at least one class.
func New(classes []Class) *Queue {
	q := &Queue{byID: map[uint64]*waiting{}, groups: map[uint64]int{}, fresh: true}
	for _, c := range classes {
		q.classes = append(q.classes, class{Class: c})
	}
	return q
}

// Len returns the number of waiting requests.
func (q *Queue) Len() int { return len(q.byID) }

// Uncached returns the total number of uncached tokens of the waiting prompts.
func (q *Queue) Uncached() uint64 { return q.raw - q.cached }

// Raw returns the total number of tokens of the waiting prompts.
func (q *Queue) Raw() uint64 { return q.raw }

// Waits reports whether any request of the group waits.
func (q *Queue) Waits(group uint64) bool { return q.groups[group] > 0 }

// Add enqueues a request with this number of eligible ranks. The error is a [*Refusal].
func (q *Queue) Add(e Entry, ranks int) (id uint64, err error) {
	c := &q.classes[e.Class]
	for _, l := range []struct {
		name       string
		limit      *float64
		waits, own uint64
	}{
		{"requests", c.Limits.Requests, uint64(len(c.list)), 1},
		{"raw_tokens", c.Limits.RawTokens, c.raw, e.Raw},
		{"cached_tokens", c.Limits.CachedTokens, c.cached, e.Cached},
	} {
		if l.limit == nil {
			continue
		}
		if bound, needed := *l.limit*float64(ranks), float64(l.waits+l.own); bound == 0 || needed > bound {
			return 0, &Refusal{Class: c.Name, Limit: l.name, Bound: bound, Waits: float64(l.waits), Needed: needed}
		}
	}
	q.last++
	w := &waiting{e, q.last, e.score(c.Policy)}
	at, _ := slices.BinarySearchFunc(c.list, w, (*waiting).compare)
	c.list = slices.Insert(c.list, at, w)
	c.raw, c.cached, q.raw = c.raw+e.Raw, c.cached+e.Cached, q.raw+e.Raw
	q.cached += min(e.Cached, e.Raw)
	q.byID[w.id] = w
	q.groups[e.Group]++
	return w.id, nil
}

// Remove removes a request and reports whether it was waiting.
func (q *Queue) Remove(id uint64) bool {
	w := q.byID[id]
	if w == nil {
		return false
	}
	c := &q.classes[w.Class]
	at, _ := slices.BinarySearchFunc(c.list, w, (*waiting).compare)
	c.list = slices.Delete(c.list, at, at+1)
	c.raw, c.cached, q.raw = c.raw-w.Raw, c.cached-w.Cached, q.raw-w.Raw
	q.cached -= min(w.Cached, w.Raw)
	delete(q.byID, id)
	if q.groups[w.Group]--; q.groups[w.Group] == 0 {
		delete(q.groups, w.Group)
	}
	if len(c.list) == 0 {
		c.deficit = 0
	}
	return true
}

// Examine calls try for waiting requests, in order. try reports whether the request went to a worker; Examine then
// removes the request. try must not use the queue.
func (q *Queue) Examine(try func(id uint64) bool) {
	failed := map[uint64]bool{}         // groups
	from := make([]int, len(q.classes)) // per class: all requests before are of failed groups
	next := func(class int) *waiting {
		for list := q.classes[class].list; from[class] < len(list); from[class]++ {
			if w := list[from[class]]; !failed[w.Group] {
				return w
			}
		}
		return nil
	}
	for {
		c := &q.classes[q.turn]
		w, others := next(q.turn), q.others(next)
		switch {
		case w == nil && !others:
			return // the turn stays with the class
		case w == nil:
			q.pass()
			continue
		}
		cost := w.uncached()
		if cost > c.deficit && q.fresh {
			c.deficit += c.Quantum
			q.fresh = false
		}
		if cost > c.deficit && others {
			q.pass()
		} else if !try(w.id) {
			failed[w.Group] = true
		} else {
			c.deficit = max(c.deficit-cost, 0)
			q.Remove(w.id)
		}
	}
}

// others reports whether any class apart from the current one has a request to try. Without others, the deficit does
// not delay requests.
func (q *Queue) others(next func(class int) *waiting) bool {
	for i := range q.classes {
		if i != q.turn && next(i) != nil {
			return true
		}
	}
	return false
}

// pass moves the turn to the next class.
func (q *Queue) pass() {
	q.turn, q.fresh = (q.turn+1)%len(q.classes), true
}
