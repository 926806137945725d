package routing

import "github.com/kvatlas/kvatlas/pkg/events"

// Explanation has the reasons of a choice or a refusal.
type Explanation struct {
	Policy string `json:"policy" msgpack:"policy"`
	Config Config `json:"config" msgpack:"config"` // with the overrides of the request

	// Affinity is the effect of the request's affinity to a worker; nil without an affinity.
	Affinity *AffinityEffect `json:"affinity,omitempty" msgpack:"affinity,omitempty"`

	Candidates []Considered `json:"candidates,omitempty" msgpack:"candidates,omitempty"` // of the policy
	Dropped    []Dropped    `json:"dropped,omitempty" msgpack:"dropped,omitempty"`       // in the order of the filters
}

// Considered is a candidate among which the policy chose.
type Considered struct {
	Worker      events.WorkerID `json:"worker" msgpack:"worker"`
	Rank        events.Rank     `json:"rank" msgpack:"rank"`
	Chosen      bool            `json:"chosen,omitempty" msgpack:"chosen,omitempty"`
	Cost        float64         `json:"cost" msgpack:"cost"`
	Probability float64         `json:"probability" msgpack:"probability"`
	Estimate    Estimate        `json:"estimate" msgpack:"estimate"`

	// Terms are the parts of the cost, if the policy has the scorer [DynamoCost].
	Terms *Terms `json:"terms,omitempty" msgpack:"terms,omitempty"`

	// Reported is the engine's report of used memory and requests; nil without a report.
	Reported *Reported `json:"reported,omitempty" msgpack:"reported,omitempty"`

	// Memory has the inputs of the eviction cost; nil if the rank has evicted no block. Only the policy kvatlas has an
	// eviction cost.
	Memory *Memory `json:"memory,omitempty" msgpack:"memory,omitempty"`

	// Scores are the costs by scorer of the policy.
	Scores []Score `json:"scores,omitempty" msgpack:"scores,omitempty"`
}

// Reported is an engine's report of its memory and its requests.
type Reported struct {
	UsedBlocks    uint64 `json:"used_blocks" msgpack:"used_blocks"`
	Capacity      uint64 `json:"capacity,omitempty" msgpack:"capacity,omitempty"` // in blocks; 0: not known
	PrefillTokens uint64 `json:"prefill_tokens,omitempty" msgpack:"prefill_tokens,omitempty"`

	Requests *EngineRequests `json:"requests,omitempty" msgpack:"requests,omitempty"` // nil: not reported
	Source   string          `json:"source,omitempty" msgpack:"source,omitempty"`     // such as vllm
	AgeS     float64         `json:"age_s" msgpack:"age_s"`                           // seconds since the latest number
}

// Score is a scorer's part of a cost.
type Score struct {
	Scorer string  `json:"scorer" msgpack:"scorer"`
	Cost   float64 `json:"cost" msgpack:"cost"`
}

// Dropped is a candidate that a filter dropped.
type Dropped struct {
	Worker events.WorkerID `json:"worker" msgpack:"worker"`
	Rank   events.Rank     `json:"rank" msgpack:"rank"`
	Filter string          `json:"filter" msgpack:"filter"`
	Reason string          `json:"reason" msgpack:"reason"` // a clause about the candidate: "is draining"
}

// score adds the costs of a scorer.
func (x *Explanation) score(scorer string, score []float64) {
	for i := range x.Candidates {
		x.Candidates[i].Scores = append(x.Candidates[i].Scores, Score{Scorer: scorer, Cost: score[i]})
	}
}

// fill sets the fields of the candidates after the choice.
func (x *Explanation) fill(v *View, s *Scratch, picked int) {
	for i := range x.Candidates {
		c := v.At(i)
		to := &x.Candidates[i]
		to.Worker, to.Rank, to.Chosen = c.Worker.ID, c.Rank, i == picked
		to.Cost, to.Probability, to.Estimate = s.cost[i], s.probability[i], v.Estimate(c)
		to.Memory = c.Memory
		if v.terms != nil {
			to.Terms = &v.terms[i]
		}
		if c.HasUsed || c.UsedPrefillTokens > 0 || c.Engine != nil {
			to.Reported = &Reported{UsedBlocks: c.UsedBlocks, Capacity: c.capacity(), PrefillTokens: c.UsedPrefillTokens}
			if r := c.Engine; r != nil {
				to.Reported.Requests, to.Reported.Source, to.Reported.AgeS = r.Requests, r.Source, r.AgeS
			}
		}
	}
}
