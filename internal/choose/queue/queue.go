package queue

import (
	"cmp"
	"fmt"
	"slices"
)

// Policy is how requests of a class are ordered.
type Policy string

// The policies, with the score of a request.
const (
	FCFS Policy = "fcfs" // jump − arrival: first come, first served
	LCFS Policy = "lcfs" // jump + arrival: last come, first served
	WSPT Policy = "wspt" // (1 + jump) / tokens to compute: weighted shortest processing time
)

// Class is a kind of requests that share an order, limits and a part of what becomes free.
type Class struct {
	Name    string
	Policy  Policy
	Quantum float64 // tokens to compute in each round; above 0
	Limits  Limits
}

// Limits bound what waits in a class, for each rank that the request may go to. nil is no bound, 0 lets nobody wait.
type Limits struct {
	Requests, RawTokens, CachedTokens *float64
}

// Entry is a request that waits.
type Entry struct {
	Class   int
	Group   uint64  // of requests that may go to the same ranks
	Strict  uint32  // who has more is before all who have less
	Jump    float64 // seconds, at least 0
	Arrival float64 // seconds
	Raw     uint64  // tokens of the prompt
	Cached  uint64  // the most that a rank has of them
}

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

// Refusal is why a request may not wait.
type Refusal struct {
	Class  string
	Limit  string  // requests, raw_tokens or cached_tokens
	Bound  float64 // of all that waits in the class, this request too
	Waits  float64 // already
	Needed float64 // with this request
}

func (r *Refusal) Error() string {
	if r.Bound == 0 {
		return fmt.Sprintf("requests of class %s never wait: its limit of %s is 0", r.Class, r.Limit)
	}
	return fmt.Sprintf("too much waits in class %s: %v %s with this one, at most %v", r.Class, r.Needed, r.Limit, r.Bound)
}

// waiting is an entry in its place.
type waiting struct {
	Entry
	id    uint64
	score float64
}

// before orders a class: who is next is first. Of equals, who came first.
func (a *waiting) before(b *waiting) int {
	return cmp.Or(cmp.Compare(b.Strict, a.Strict), cmp.Compare(b.score, a.score), cmp.Compare(a.id, b.id))
}

// class is what waits of a class.
type class struct {
	Class
	list        []*waiting // in order
	raw, cached uint64
	deficit     float64
}

// Queue is what waits.
type Queue struct {
	classes []class
	byID    map[uint64]*waiting
	groups  map[uint64]int // how many of each wait
	last    uint64         // id
	turn    int            // the class whose turn it is
	fresh   bool           // it has not got its quantum yet
	raw     uint64
}

// New returns an empty queue. There is one class at least.
func New(classes []Class) *Queue {
	q := &Queue{byID: map[uint64]*waiting{}, groups: map[uint64]int{}, fresh: true}
	for _, c := range classes {
		q.classes = append(q.classes, class{Class: c})
	}
	return q
}

// Len is how many requests wait, Raw how many tokens their prompts have.
func (q *Queue) Len() int    { return len(q.byID) }
func (q *Queue) Raw() uint64 { return q.raw }

// Waits reports whether a request of a group waits.
func (q *Queue) Waits(group uint64) bool { return q.groups[group] > 0 }

// Add lets a request wait that may go to so many ranks. The error is a [*Refusal].
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
	at, _ := slices.BinarySearchFunc(c.list, w, (*waiting).before)
	c.list = slices.Insert(c.list, at, w)
	c.raw, c.cached, q.raw = c.raw+e.Raw, c.cached+e.Cached, q.raw+e.Raw
	q.byID[w.id] = w
	q.groups[e.Group]++
	return w.id, nil
}

// Remove ends the wait of a request, and reports whether it waited.
func (q *Queue) Remove(id uint64) bool {
	w := q.byID[id]
	if w == nil {
		return false
	}
	c := &q.classes[w.Class]
	at, _ := slices.BinarySearchFunc(c.list, w, (*waiting).before)
	c.list = slices.Delete(c.list, at, at+1)
	c.raw, c.cached, q.raw = c.raw-w.Raw, c.cached-w.Cached, q.raw-w.Raw
	delete(q.byID, id)
	if q.groups[w.Group]--; q.groups[w.Group] == 0 {
		delete(q.groups, w.Group)
	}
	if len(c.list) == 0 {
		c.deficit = 0
	}
	return true
}

// Examine tries who can go, in order: go reports whether the request has gone, and then it waits no more. It must not
// use the queue.
func (q *Queue) Examine(try func(id uint64) bool) {
	vain := map[uint64]bool{}           // groups
	from := make([]int, len(q.classes)) // of each class: those before are of groups that were tried in vain
	next := func(class int) *waiting {
		for list := q.classes[class].list; from[class] < len(list); from[class]++ {
			if w := list[from[class]]; !vain[w.Group] {
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
			return // the turn stays where it is
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
			vain[w.Group] = true
		} else {
			c.deficit = max(c.deficit-cost, 0)
			q.Remove(w.id)
		}
	}
}

// others reports whether a class has somebody to try whose turn it is not. Without, a deficit holds nobody back.
func (q *Queue) others(next func(class int) *waiting) bool {
	for i := range q.classes {
		if i != q.turn && next(i) != nil {
			return true
		}
	}
	return false
}

// pass gives the turn to the next class.
func (q *Queue) pass() {
	q.turn, q.fresh = (q.turn+1)%len(q.classes), true
}
