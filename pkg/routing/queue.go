package routing

import (
	"errors"
	"fmt"
)

// Queue has the rules for requests that wait while all eligible workers are busy. Names and rules are Dynamo's where
// Dynamo has the rule.
type Queue struct {
	// A rank is busy if its prefill under way is above ThresholdTokens, or above ThresholdFrac times the worker's
	// MaxNumBatchedTokens (10,000,000 if unknown). At least one of the two is required; finite and at least 0.
	ThresholdTokens *float64 `json:"threshold_tokens,omitempty" msgpack:"threshold_tokens,omitempty"`
	ThresholdFrac   *float64 `json:"threshold_frac,omitempty" msgpack:"threshold_frac,omitempty"`

	// Policy is the order of waiting requests: fcfs (the default), lcfs or wspt.
	Policy string `json:"policy,omitempty" msgpack:"policy,omitempty"`

	// MaxWaiting is the limit of waiting requests on a node. Default 1,024; from 1 to 16,384.
	MaxWaiting *int `json:"max_waiting,omitempty" msgpack:"max_waiting,omitempty"`

	// QueueLimits apply to requests without a class.
	QueueLimits `msgpack:",inline"`

	// Classes divide the free capacity. All other requests are in the class default.
	Classes []QueueClass `json:"classes,omitempty" msgpack:"classes,omitempty"`
}

// QueueLimits limit the waiting requests of a class, for each eligible rank. nil: no limit. 0: requests of the class do
// not wait. Finite and at least 0.
type QueueLimits struct {
	MaxRequests     *float64 `json:"max_requests,omitempty" msgpack:"max_requests,omitempty"`
	MaxRawTokens    *float64 `json:"max_raw_tokens,omitempty" msgpack:"max_raw_tokens,omitempty"`
	MaxCachedTokens *float64 `json:"max_cached_tokens,omitempty" msgpack:"max_cached_tokens,omitempty"`
}

// QueueClass is a class of requests: requests that name it, and requests of its family with fewer tokens to compute
// than UncachedBelow. The first matching class counts. A request without a name is of the family "".
type QueueClass struct {
	Name          string   `json:"name" msgpack:"name"`
	Family        string   `json:"family,omitempty" msgpack:"family,omitempty"`
	UncachedBelow *float64 `json:"uncached_below,omitempty" msgpack:"uncached_below,omitempty"` // default: any

	// Quantum is the number of tokens to compute that the class may send in each round. Default 8,192; at least 256.
	Quantum *float64 `json:"quantum,omitempty" msgpack:"quantum,omitempty"`

	Policy      string `json:"policy,omitempty" msgpack:"policy,omitempty"` // default: the queue's
	QueueLimits `msgpack:",inline"`
}

// Most returns the limit of waiting requests on a node.
func (q *Queue) Most() int {
	most := 1024
	set(&most, q.MaxWaiting)
	return most
}

// validate returns all errors of q, which may be nil.
func (q *Queue) validate() error {
	if q == nil {
		return nil
	}
	var x complaints
	if q.ThresholdTokens == nil && q.ThresholdFrac == nil {
		x.add("queue has neither threshold_tokens nor threshold_frac: set one of them, the bound of a busy worker")
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
			x.add("%sname is %q, the name of another class or the reserved name", of, c.Name)
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

// Class returns the index of the class for a name of a class or family and a number of tokens to compute. It returns
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

// Busy reports whether a rank is too busy for further requests.
func (q *Queue) Busy(c *Candidate) bool {
	if !c.HasLoad {
		return false
	}
	active := float64(c.ActivePrefillTokens)
	return q.ThresholdTokens != nil && active > *q.ThresholdTokens ||
		q.ThresholdFrac != nil && active > *q.ThresholdFrac*float64(c.Worker.PrefillCapacity())
}

// allBusy returns a refusal if all remaining candidates are busy.
func (v *View) allBusy(q *Queue, x *Explanation) *Refusal {
	r := &Refusal{Code: AllBusy, Eligible: v.Len(), Explanation: x}
	for i := range v.Len() {
		c := v.At(i)
		if !q.Busy(c) {
			return nil
		}
		r.BestCached = max(r.BestCached, v.cachedTokens(v.effectiveOverlap(c)))
	}
	r.Message = fmt.Sprintf("all %d eligible ranks are busy", r.Eligible)
	return r
}
