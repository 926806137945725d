package routing

import (
	"errors"
	"fmt"
)

// Queue is whether requests wait while all workers that they may go to have enough to compute. Names and rules are
// Dynamo's, where it has them.
type Queue struct {
	// A rank is busy when its prefill under way is above ThresholdTokens, or above ThresholdFrac times the worker's
	// MaxNumBatchedTokens (10,000,000 where that is not known). One of them is needed; finite and at least 0.
	ThresholdTokens *float64 `json:"threshold_tokens,omitempty" msgpack:"threshold_tokens,omitempty"`
	ThresholdFrac   *float64 `json:"threshold_frac,omitempty" msgpack:"threshold_frac,omitempty"`

	// Policy is the order in which requests go: fcfs (the default), lcfs or wspt.
	Policy string `json:"policy,omitempty" msgpack:"policy,omitempty"`

	// MaxWaiting is how many requests may wait on a node. Default 1,024; from 1 to 16,384.
	MaxWaiting *int `json:"max_waiting,omitempty" msgpack:"max_waiting,omitempty"`

	// QueueLimits are of requests that belong to no class.
	QueueLimits `msgpack:",inline"`

	// Classes share out what becomes free. Requests that belong to none of them are the class default.
	Classes []QueueClass `json:"classes,omitempty" msgpack:"classes,omitempty"`
}

// QueueLimits bound what waits in a class, for each rank that a request may go to. nil is no bound, 0 lets nobody wait;
// finite and at least 0.
type QueueLimits struct {
	MaxRequests     *float64 `json:"max_requests,omitempty" msgpack:"max_requests,omitempty"`
	MaxRawTokens    *float64 `json:"max_raw_tokens,omitempty" msgpack:"max_raw_tokens,omitempty"`
	MaxCachedTokens *float64 `json:"max_cached_tokens,omitempty" msgpack:"max_cached_tokens,omitempty"`
}

// QueueClass is a kind of requests: those that name it, and those of its family with fewer tokens to compute than
// UncachedBelow. The first that fits counts. A request that names nothing is of the family "".
type QueueClass struct {
	Name          string   `json:"name" msgpack:"name"`
	Family        string   `json:"family,omitempty" msgpack:"family,omitempty"`
	UncachedBelow *float64 `json:"uncached_below,omitempty" msgpack:"uncached_below,omitempty"` // default: any

	// Quantum is how many tokens to compute the class may send in each round. Default 8,192; at least 256.
	Quantum *float64 `json:"quantum,omitempty" msgpack:"quantum,omitempty"`

	Policy      string `json:"policy,omitempty" msgpack:"policy,omitempty"` // default: the queue's
	QueueLimits `msgpack:",inline"`
}

// Most is how many requests may wait on a node.
func (q *Queue) Most() int {
	most := 1024
	set(&most, q.MaxWaiting)
	return most
}

// DefaultQuantum is the quantum of classes that have none.
const DefaultQuantum = 8192

// validate complains of what is wrong with q, which may be nil.
func (q *Queue) validate() error {
	if q == nil {
		return nil
	}
	var x complaints
	if q.ThresholdTokens == nil && q.ThresholdFrac == nil {
		x.add("queue has neither threshold_tokens nor threshold_frac: one of them says when a worker is busy")
	}
	x.least0("queue.threshold_tokens", q.ThresholdTokens)
	x.least0("queue.threshold_frac", q.ThresholdFrac)
	x.policy("queue.policy", q.Policy)
	if n := q.MaxWaiting; n != nil && (*n < 1 || *n > 16_384) {
		x.add("queue.max_waiting is %d: it must be from 1 to 16384", *n)
	}
	q.QueueLimits.validate("queue.", &x)
	names := map[string]bool{"default": true}
	for i := range q.Classes {
		c := &q.Classes[i]
		of := fmt.Sprintf("queue.classes[%d].", i)
		switch {
		case c.Name == "":
			x.add("%sname is missing", of)
		case names[c.Name]:
			x.add("%sname is %q, which another class has, or the one of all other requests", of, c.Name)
		}
		names[c.Name] = true
		x.least0(of+"uncached_below", c.UncachedBelow)
		if v := c.Quantum; v != nil && !(*v >= 256 && *v <= 1e12) {
			x.add("%squantum is %v: it must be at least 256, and finite", of, *v)
		}
		x.policy(of+"policy", c.Policy)
		c.QueueLimits.validate(of, &x)
	}
	return errors.Join(x...)
}

func (l *QueueLimits) validate(of string, x *complaints) {
	x.least0(of+"max_requests", l.MaxRequests)
	x.least0(of+"max_raw_tokens", l.MaxRawTokens)
	x.least0(of+"max_cached_tokens", l.MaxCachedTokens)
}

func (x *complaints) policy(name, is string) {
	if is != "" && is != "fcfs" && is != "lcfs" && is != "wspt" {
		x.add("%s is %q: it must be \"fcfs\", \"lcfs\" or \"wspt\"", name, is)
	}
}

// Class is the index of the class of a request that names a class or family and has so many tokens to compute;
// len(q.Classes) for the class default.
func (q *Queue) Class(name string, uncached uint64) int {
	for i := range q.Classes {
		if name != "" && q.Classes[i].Name == name {
			return i
		}
	}
	for i := range q.Classes {
		c := &q.Classes[i]
		if c.Family == name && (c.UncachedBelow == nil || float64(uncached) < *c.UncachedBelow) {
			return i
		}
	}
	return len(q.Classes)
}

// Busy reports whether a rank has so much to compute that requests wait rather than go there.
func (q *Queue) Busy(c *Candidate) bool {
	if !c.HasLoad {
		return false
	}
	active := float64(c.ActivePrefillTokens)
	return q.ThresholdTokens != nil && active > *q.ThresholdTokens ||
		q.ThresholdFrac != nil && active > *q.ThresholdFrac*float64(c.Worker.PrefillCapacity())
}

// allBusy is a refusal if all candidates that are left are busy.
func (v *View) allBusy(q *Queue, x *Explanation) *Refusal {
	r := &Refusal{Code: AllBusy, Eligible: v.Len(), Explanation: x}
	for i := range v.Len() {
		c := v.At(i)
		if !q.Busy(c) {
			return nil
		}
		r.BestCached = max(r.BestCached, v.cachedTokens(v.effectiveOverlap(c)))
	}
	r.Message = fmt.Sprintf("all %d ranks that may be chosen are busy", r.Eligible)
	return r
}
