package routing

import (
	"cmp"
	"errors"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// AffinityMode selects the result for a request if the worker of the session is excluded.
type AffinityMode string

// The modes.
const (
	SoftAffinity AffinityMode = "soft" // the session moves to another worker
	HardAffinity AffinityMode = "hard" // the request is refused
)

// AffinitySource is the source of a request's affinity.
type AffinitySource string

// The sources.
const (
	AffinityByTarget  AffinitySource = "affinity_target" // named by the request; default of a Request without a source
	AffinityBySession AffinitySource = "session_id"      // the session of the id has a binding
	AffinityByPrompt  AffinitySource = "prompt"          // the prompt continues the last prompt of a session
)

// AffinityEffect is the effect of a request's affinity on the choice.
type AffinityEffect struct {
	By     AffinitySource  `json:"by" msgpack:"by"`
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Rank   *events.Rank    `json:"rank,omitempty" msgpack:"rank,omitempty"` // nil: any of the worker

	// Decided: the affinity dropped other candidates before the policy compared costs. If false, the worker was
	// excluded (Dropped has the reason), or no other candidate remained.
	Decided bool `json:"decided" msgpack:"decided"`

	// Cheapest is the cheapest candidate of the policy without the affinity. It is nil if the affinity did not decide,
	// or is hard: the pin drops candidates before their costs are calculated.
	Cheapest *Cheapest `json:"cheapest,omitempty" msgpack:"cheapest,omitempty"`
}

// Cheapest is a candidate with the smallest cost.
type Cheapest struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Rank   events.Rank     `json:"rank" msgpack:"rank"`
	Cost   float64         `json:"cost" msgpack:"cost"`
}

// cheapest returns the cheapest remaining candidate; nil if the policy has no costs.
func (v *View) cheapest(s *Selector, scratch *Scratch) *Cheapest {
	if len(s.policy.Scorers) == 0 {
		return nil
	}
	defer func() { v.terms, v.expected, v.crowd = nil, nil, crowd{} }() // values of these candidates only
	cost := make([]float64, v.Len())
	for _, scorer := range s.policy.Scorers {
		scratch.score = grown(scratch.score, v.Len())
		scorer.Score(v, scratch.score)
		for i, c := range scratch.score {
			cost[i] += c
		}
	}
	best := 0
	for i, c := range cost {
		if c < cost[best] {
			best = i
		}
	}
	c := v.At(best)
	return &Cheapest{Worker: c.Worker.ID, Rank: c.Rank, Cost: cost[best]}
}

// affinity records the effect of the request's affinity, before the filter f drops candidates.
func (x *Explanation) affinity(v *View, f Filter, s *Selector, scratch *Scratch) {
	r := v.Request
	target := r.Affinity
	if f != affinity && f != pinned || f == pinned && r.AffinityBy == "" {
		return
	}
	if f == pinned {
		target = r.Pin
	}
	if target == nil {
		return
	}
	x.Affinity = &AffinityEffect{By: cmp.Or(r.AffinityBy, AffinityByTarget), Worker: target.Worker, Rank: target.Rank}
	there := 0
	for i := range v.Len() {
		if target.is(v.At(i)) {
			there++
		}
	}
	if x.Affinity.Decided = there > 0 && there < v.Len(); x.Affinity.Decided && f == affinity {
		x.Affinity.Cheapest = v.cheapest(s, scratch)
	}
}

// SessionAffinity keeps requests of a session on one worker. Names and ranges are Dynamo's.
type SessionAffinity struct {
	// TTLSecs is the time to live of a session after its last request. From 1 to 31,536,000, without a default.
	TTLSecs float64 `json:"ttl_secs" msgpack:"ttl_secs"`

	Mode AffinityMode `json:"mode,omitempty" msgpack:"mode,omitempty"` // default soft

	// ByPrompt: a request without a session id belongs to the session whose last prompt the new prompt continues. Such
	// an affinity is soft in both modes. Default false. Dynamo has no such setting.
	ByPrompt bool `json:"by_prompt,omitempty" msgpack:"by_prompt,omitempty"`
}

// TTL returns the time to live of a session after its last request.
func (a *SessionAffinity) TTL() time.Duration { return time.Duration(a.TTLSecs * float64(time.Second)) }

// validate returns all errors of a, which may be nil.
func (a *SessionAffinity) validate() error {
	if a == nil {
		return nil
	}
	var x complaints
	if !(a.TTLSecs >= 1 && a.TTLSecs <= 31_536_000) {
		x.add("session_affinity.ttl_secs is %v: it must be from 1 to 31536000", a.TTLSecs)
	}
	if a.Mode != "" && a.Mode != SoftAffinity && a.Mode != HardAffinity {
		x.add("session_affinity.mode is %q: it must be %q or %q", a.Mode, SoftAffinity, HardAffinity)
	}
	return errors.Join(x...)
}
