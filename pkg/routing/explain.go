package routing

import "github.com/kvatlas/kvatlas/pkg/events"

// Explanation is how a choice, or a refusal, came about.
type Explanation struct {
	Policy string `json:"policy" msgpack:"policy"`
	Config Config `json:"config" msgpack:"config"` // as the request overrode it

	// Affinity is what the affinity of the request to a worker did; nil if it has none.
	Affinity *AffinityEffect `json:"affinity,omitempty" msgpack:"affinity,omitempty"`

	Candidates []Considered `json:"candidates,omitempty" msgpack:"candidates,omitempty"` // among which the policy chose
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

	// Reported is how full its engine has said that it is, if it has. It enters no cost.
	Reported *Reported `json:"reported,omitempty" msgpack:"reported,omitempty"`

	// Memory is what the eviction cost rests on, if the rank has evicted blocks. Only the policy kvatlas has that cost.
	Memory *Memory `json:"memory,omitempty" msgpack:"memory,omitempty"`

	// Scores are what each scorer of the policy gave.
	Scores []Score `json:"scores,omitempty" msgpack:"scores,omitempty"`
}

// Reported is how full an engine is, as it says.
type Reported struct {
	UsedBlocks    uint64 `json:"used_blocks" msgpack:"used_blocks"`
	Capacity      uint64 `json:"capacity,omitempty" msgpack:"capacity,omitempty"` // in blocks; 0: not known
	PrefillTokens uint64 `json:"prefill_tokens,omitempty" msgpack:"prefill_tokens,omitempty"`
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

// score adds what a scorer gave.
func (x *Explanation) score(scorer string, score []float64) {
	for i := range x.Candidates {
		x.Candidates[i].Scores = append(x.Candidates[i].Scores, Score{Scorer: scorer, Cost: score[i]})
	}
}

// fill fills in what is known of the candidates once one of them is picked.
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
		if c.HasUsed || c.UsedPrefillTokens > 0 {
			to.Reported = &Reported{c.UsedBlocks, c.capacity(), c.UsedPrefillTokens}
		}
	}
}
