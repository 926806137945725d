package routing

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Choice is the chosen worker with the figures for a booking of the request there.
type Choice struct {
	Worker events.WorkerID
	Rank   events.Rank
	Index  int // of the candidate, in the call

	Eligible int // number of candidates before the policy's own filters

	Cost        float64 // the sum of the policy's scorers
	Probability float64 // with which this candidate was chosen

	RequiredBlocks   uint64  // the prompt in blocks; the last one may be partial
	EffectiveOverlap float64 // cached blocks of the candidate's tiers, weighted
	CachedTokens     uint64  // the same in tokens, rounded

	// EffectivePrefillTokens is the new part of the prompt by the rules of the policy. The tokens count as load if
	// TrackPrefillTokens is set.
	EffectivePrefillTokens uint64
	TrackPrefillTokens     bool

	// PotentialDecodeBlocks is the number of blocks of all requests on the candidate, including the new request.
	PotentialDecodeBlocks uint64

	Explanation *Explanation // if Request.Explain is set
}

// Code is the class of a refusal, for programs.
type Code string

// The codes, each with the remedy.
const (
	BadRequest    Code = "bad_request"     // correct the request: the message has all errors
	NoWorkers     Code = "no_workers"      // no candidate may be chosen: retry when there are workers
	Overloaded    Code = "overloaded"      // all eligible candidates are overloaded: retry later
	AllBusy       Code = "all_busy"        // all eligible candidates are busy: wait for a free candidate
	PinNotAllowed Code = "pin_not_allowed" // the pinned worker is not allowed: correct the request
	Filtered      Code = "filtered"        // the policy's own filters dropped all eligible candidates
	PolicyFailed  Code = "policy_failed"   // a cost is not finite, or the picker chose none: correct the policy
)

// Refusal is the error of a call without a choice.
type Refusal struct {
	Code        Code
	Message     string
	Explanation *Explanation // if Request.Explain is set

	// For AllBusy: the number of eligible ranks, and the most cached tokens of the prompt on any of these ranks.
	Eligible   int
	BestCached uint64
}

func (r *Refusal) Error() string { return string(r.Code) + ": " + r.Message }

func refuse(code Code, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Choose chooses a candidate. The candidates are different ranks. Choose first drops the candidates that the request or
// the operator's configuration excludes, by the filters pinned_worker, allowed_worker_ids, excluded_workers, endpoints,
// role, state, lora, required_taints, near, overload and penalty, in this order. The policy chooses among the rest. The
// error is a [*Refusal].
func (s *Selector) Choose(r *Request, candidates []Candidate, rng *rand.Rand, scratch *Scratch) (Choice, error) {
	if err := r.Validate(); err != nil {
		return Choice{}, refuse(BadRequest, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	}
	v := scratch.begin(r, s.config.With(&r.Overrides), candidates)
	v.prefill = s.policy.Prefill
	defer scratch.end()
	if v.workerless >= 0 {
		return Choice{}, refuse(BadRequest, "candidate %d has no worker", v.workerless)
	}
	if r.Pin != nil && r.Allowed != nil && !slices.Contains(r.Allowed, r.Pin.Worker) {
		return Choice{}, refuse(PinNotAllowed, "worker %q is pinned and is not in allowed_worker_ids", r.Pin.Worker)
	}
	var x *Explanation
	if r.Explain {
		x = &Explanation{Policy: s.name, Config: v.Config}
	}
	eligible := 0
	for i, filters := range [...][]Filter{eligibility, s.policy.Filters} {
		if eligible = v.Len(); i == 1 && r.Queue != nil && eligible > 0 {
			if busy := v.allBusy(r.Queue, x); busy != nil {
				return Choice{}, busy
			}
		}
		for _, f := range filters {
			if x != nil {
				x.affinity(v, f, s, scratch)
			}
			v.run(f, scratch, x)
			if v.Len() == 0 {
				return Choice{}, v.refusal(f, i == 1, s, scratch, x)
			}
		}
	}
	if v.Len() == 0 {
		return Choice{}, &Refusal{Code: NoWorkers, Message: "there are no candidates", Explanation: x}
	}
	n := v.Len()
	if x != nil {
		x.Candidates = make([]Considered, n)
	}
	scratch.cost = grown(scratch.cost, n)
	for _, scorer := range s.scorers(r.Explain) {
		scratch.score = grown(scratch.score, n)
		scorer.Score(v, scratch.score)
		for i, cost := range scratch.score {
			sum := scratch.cost[i] + cost
			if scratch.cost[i] = sum; sum-sum != 0 { // infinite, or no number
				c := v.At(i)
				return Choice{}, &Refusal{Code: PolicyFailed, Message: fmt.Sprintf(
					"the cost of worker %q rank %d is %v after scorer %s", c.Worker.ID, c.Rank, sum, scorer.Name()), Explanation: x}
			}
		}
		if x != nil {
			x.score(scorer.Name(), scratch.score)
		}
	}
	scratch.probability = grown(scratch.probability, n)
	picked := s.policy.Picker.Pick(v, scratch.cost, scratch.probability, rng)
	if picked < 0 || picked >= n {
		return Choice{}, &Refusal{Code: PolicyFailed, Explanation: x,
			Message: fmt.Sprintf("the picker chose candidate %d of %d", picked, n)}
	}
	c := v.At(picked)
	choice := Choice{
		Worker: c.Worker.ID, Rank: c.Rank, Index: v.Index(picked), Eligible: eligible,
		Cost: scratch.cost[picked], Probability: scratch.probability[picked],
		RequiredBlocks: r.RequestBlocks(), TrackPrefillTokens: v.Config.RouterTrackPrefillTokens,
	}
	e := v.Estimate(c)
	choice.EffectiveOverlap, choice.CachedTokens = e.EffectiveOverlap, e.CachedTokens
	choice.EffectivePrefillTokens, choice.PotentialDecodeBlocks = e.EffectivePrefillTokens, e.PotentialDecodeBlocks
	if x != nil {
		x.fill(v, scratch, picked)
		choice.Explanation = x
	}
	return choice, nil
}

// begin sets up the view of a call.
func (s *Scratch) begin(r *Request, config Config, candidates []Candidate) *View {
	s.kept = grown(s.kept, len(candidates))
	s.why = grown(s.why, len(candidates))
	s.dropped = s.dropped[:0]
	s.view = View{Request: r, Config: config, candidates: candidates, kept: s.kept, why: s.why, untiered: true,
		workerless: -1, scratch: s}
	v := &s.view
	depths := uint32(0)
	for i := range candidates {
		c := &candidates[i]
		v.kept[i] = i
		depths |= c.Device | c.Host | c.Disk
		w := c.Worker
		if w == nil {
			if v.workerless < 0 {
				v.workerless = i
			}
			continue
		}
		v.penalised = v.penalised || c.Penalty != nil
		v.unfit = v.unfit || w.unschedulable() || !w.Role.In(r.Role)
	}
	v.untiered = depths == 0
	s.beyond = grown(s.beyond, len(r.Shared))
	sum := uint32(0)
	for i := len(r.Shared) - 1; i >= 0; i-- {
		sum += r.Shared[i][1] - r.Shared[i][0]
		s.beyond[i] = sum
	}
	v.beyond = s.beyond
	return v
}

// end drops the references to the caller's data.
func (s *Scratch) end() {
	s.view = View{}
}

// run runs a filter and removes the dropped candidates.
func (v *View) run(f Filter, s *Scratch, x *Explanation) {
	f.Filter(v)
	s.dropped = append(s.dropped, v.drops)
	if v.drops == 0 {
		return
	}
	n := 0
	for i, k := range v.kept {
		if v.why[i] == "" {
			v.kept[n] = k
			n++
		} else if x != nil {
			c := &v.candidates[k]
			x.Dropped = append(x.Dropped, Dropped{Worker: c.Worker.ID, Rank: c.Rank, Filter: f.Name(), Reason: v.why[i]})
		}
	}
	clear(v.why[:len(v.kept)])
	v.kept, v.drops = v.kept[:n], 0
}

// refusal returns the error of a call in which filter f dropped the last candidate.
func (v *View) refusal(f Filter, ofPolicy bool, s *Selector, scratch *Scratch, x *Explanation) *Refusal {
	refusal := &Refusal{Code: NoWorkers, Explanation: x}
	pin := v.Request.Pin
	switch {
	case len(v.candidates) == 0:
		refusal.Message = "there are no candidates"
		return refusal
	case ofPolicy:
		refusal.Code, refusal.Message = Filtered, "the policy "+s.name+" leaves no eligible candidate"
	case f == eligibility[0]:
		refusal.Message = fmt.Sprintf("worker %q is pinned and is not a candidate", pin.Worker)
		if pin.Rank != nil {
			refusal.Message = fmt.Sprintf("worker %q rank %d is pinned and is not a candidate", pin.Worker, *pin.Rank)
		}
	case f == overload:
		refusal.Code, refusal.Message = Overloaded, "all eligible workers are overloaded"
		if pin != nil {
			refusal.Message = fmt.Sprintf("worker %q is pinned and overloaded", pin.Worker)
		}
	default:
		refusal.Message = "no worker may serve the request"
	}
	var counts []string
	for i, n := range scratch.dropped {
		if n > 0 {
			counts = append(counts, fmt.Sprintf("%s %d", slices.Concat(eligibility, s.policy.Filters)[i].Name(), n))
		}
	}
	refusal.Message += fmt.Sprintf(" (of %d candidates dropped by %s)", len(v.candidates), strings.Join(counts, ", "))
	return refusal
}
