package routing

import (
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

var seedFlag = flag.Uint64("seed", 1, "seed of the random tests; 0: a new seed")

func seeded(t *testing.T) *rand.Rand {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed=%d", seed)
	return rand.New(rand.NewPCG(seed, 15))
}

func ptr[T any](v T) *T { return &v }

// near reports whether two costs are equal up to rounding.
func near(a, b float64) bool {
	return math.Abs(a-b) <= 1e-12*max(1, math.Abs(a), math.Abs(b))
}

// oneOf returns a random value of values.
func oneOf[T any](rng *rand.Rand, values ...T) T { return values[rng.IntN(len(values))] }

// randomConfig returns a valid configuration, often the default in most fields.
func randomConfig(rng *rand.Rand) Config {
	c := DefaultConfig()
	some := func(to *float64, values ...float64) {
		if rng.IntN(2) == 0 {
			*to = oneOf(rng, append(values, rng.Float64())...)
		}
	}
	some(&c.OverlapScoreCredit, 0, 0.5, 1.5)
	some(&c.OverlapScoreCreditDecay, 0, 1, 4)
	some(&c.PrefillLoadScale, 0, 2)
	some(&c.DecodeActiveRequestWeight, 0, 3)
	some(&c.HostCacheHitWeight, 0, 1)
	some(&c.DiskCacheHitWeight, 0, 1)
	some(&c.SharedCacheMultiplier, 0, 1)
	c.SharedCacheMode = oneOf(rng, SharedWouldLoad, SharedDynamo)
	c.RouterTrackPrefillTokens = rng.IntN(3) > 0
	if rng.IntN(3) == 0 {
		c.ActiveDecodeBlocksThreshold = ptr(oneOf(rng, 0, 0.5, 0.9, 1))
	}
	if rng.IntN(4) == 0 {
		c.ActivePrefillTokensThreshold = ptr(float64(rng.IntN(2000)))
	}
	if rng.IntN(4) == 0 {
		c.ActivePrefillTokensThresholdFrac = ptr(rng.Float64())
	}
	return c
}

// randomCall returns a request and its candidates. Few workers, adapters and taints make collisions frequent.
func randomCall(rng *rand.Rand) (*Request, []Candidate) {
	names := func(of string, n int) (some []string) {
		for i := range n {
			if rng.IntN(2) == 0 {
				some = append(some, fmt.Sprintf("%s%d", of, i))
			}
		}
		return some
	}
	r := &Request{
		ISL: uint64(rng.IntN(2000)), BlockSize: oneOf[uint32](rng, 1, 16, 17, 64),
		Explain: true,
	}
	r.Blocks = r.ISL / uint64(r.BlockSize)
	if rng.IntN(6) == 0 {
		r.Blocks = rng.Uint64N(2) * (r.Blocks + 3)
	}
	if rng.IntN(4) == 0 {
		r.Role = oneOf(rng, Aggregated, Prefill, Decode)
	}
	if rng.IntN(4) == 0 {
		r.LoRA = "lora0"
	}
	if rng.IntN(4) == 0 {
		r.RequiredTaints = names("taint", 2)
	}
	if rng.IntN(4) == 0 {
		r.Near = names("taint", 4)
	}
	if rng.IntN(3) == 0 {
		for _, taint := range names("taint", 4) {
			r.PreferredTaints = append(r.PreferredTaints, TaintWeight{taint, rng.Float32()*4 - 2})
		}
	}
	workers := 1 + rng.IntN(6)
	target := func() *Target {
		t := &Target{Worker: events.WorkerID(fmt.Sprintf("w%d", rng.IntN(workers+1)))}
		if rng.IntN(2) == 0 {
			t.Rank = ptr(events.Rank(rng.IntN(2)))
		}
		return t
	}
	if rng.IntN(6) == 0 {
		r.Pin = target()
	}
	if rng.IntN(4) == 0 {
		r.Affinity = target()
	}
	if rng.IntN(4) == 0 {
		r.Allowed = []events.WorkerID{}
		for _, w := range names("w", workers) {
			r.Allowed = append(r.Allowed, events.WorkerID(w))
		}
	}
	if rng.IntN(4) == 0 {
		r.Excluded = []events.WorkerID{events.WorkerID(fmt.Sprintf("w%d", rng.IntN(workers)))}
	}
	if rng.IntN(4) == 0 {
		r.Endpoints = names("e", 4)
	}
	for at := uint32(rng.IntN(10)); rng.IntN(3) > 0; at += uint32(rng.IntN(10)) {
		end := at + 1 + uint32(rng.IntN(10))
		r.Shared = append(r.Shared, [2]uint32{at, end})
		at = end
	}
	o := &r.Overrides
	for _, f := range []**float64{&o.OverlapScoreCredit, &o.PrefillLoadScale, &o.OverlapScoreWeight,
		&o.SharedCacheMultiplier} {
		if rng.IntN(8) == 0 {
			*f = ptr(oneOf(rng, 0, 1, rng.Float64()))
		}
	}
	if rng.IntN(6) == 0 {
		o.TrackPrefillTokens = ptr(rng.IntN(2) == 0)
	}

	tiered := rng.IntN(6) > 0
	loaded := rng.IntN(3) > 0
	var candidates []Candidate
	for i := range workers {
		w := &Worker{ID: events.WorkerID(fmt.Sprintf("w%d", i)), Taints: names("taint", 4), LoRAs: names("lora", 3)}
		if rng.IntN(4) == 0 {
			w.LoRAs = oneOf(rng, nil, []string{}, []string{AnyLoRA}, []string{AnyLoRA, "lora1"})
		}
		if r.Role != "" || rng.IntN(4) == 0 {
			w.Role = oneOf(rng, "", Aggregated, Prefill, Decode, Encode, r.Role)
		}
		if rng.IntN(4) == 0 {
			w.State = oneOf(rng, Schedulable, Draining, Unschedulable, Incomplete)
		}
		if rng.IntN(4) > 0 {
			w.Endpoint = fmt.Sprintf("e%d", rng.IntN(4))
		}
		if rng.IntN(3) > 0 {
			w.TotalKVBlocks = uint64(rng.IntN(200))
		}
		if rng.IntN(3) > 0 {
			w.MaxNumBatchedTokens = uint64(rng.IntN(5000))
		}
		var penalty *Penalty
		if rng.IntN(4) == 0 {
			penalty = &Penalty{Failures: 1, Reason: "timeout", LeftS: 0.5}
		}
		for rank := range 1 + rng.IntN(2) {
			c := Candidate{Worker: w, Rank: events.Rank(rank), Penalty: penalty}
			if tiered {
				c.Device, c.Host, c.Disk = uint32(rng.IntN(20)), uint32(rng.IntN(10)), uint32(rng.IntN(10))
			}
			c.Overlap, c.WouldLoad = rng.Float64()*20, uint32(rng.IntN(10))
			if loaded || rng.IntN(2) == 0 {
				c.HasLoad, c.ActiveRequests = true, uint64(rng.IntN(5))
				c.ActivePrefillTokens, c.ActiveBlocks = uint64(rng.IntN(3000)), uint64(rng.IntN(150))
			}
			c.NewBlocks = rng.Uint64N(r.Blocks + 1)
			if rng.IntN(2) == 0 {
				c.HasUsed, c.UsedBlocks = true, uint64(rng.IntN(200))
				c.UsedOf = oneOf(rng, 0, uint64(rng.IntN(200)))
			}
			c.UsedPrefillTokens = oneOf(rng, 0, uint64(rng.IntN(3000)))
			candidates = append(candidates, c)
		}
	}
	return r, candidates
}

// TestDynamoIsItsTwin compares the policy dynamo with the formula of the package comment: the filter of each dropped
// candidate, every cost, and the choice of a cheapest candidate.
func TestDynamoIsItsTwin(t *testing.T) {
	rng := seeded(t)
	var scratch Scratch
	codes := map[Code]int{}
	forms := map[string]int{}
	for step := range 30_000 {
		config := randomConfig(rng)
		r, candidates := randomCall(rng)
		s, err := New("dynamo", config)
		if err != nil {
			t.Fatal(err)
		}
		tw := &twin{config, r, candidates}
		dropped := tw.eligible()
		choice, err := s.Choose(r, candidates, rng, &scratch)
		var refusal *Refusal
		x := choice.Explanation
		switch {
		case err == nil:
			codes["chosen"]++
		case !errors.As(err, &refusal):
			t.Fatalf("step %d: %v is no refusal", step, err)
		default:
			codes[refusal.Code]++
			x = refusal.Explanation
			if refusal.Code == PinNotAllowed {
				if r.Pin == nil || r.Allowed == nil || slices.Contains(r.Allowed, r.Pin.Worker) {
					t.Fatalf("step %d: %v", step, err)
				}
				continue
			}
		}
		least, left := math.Inf(1), 0
		costs := map[rankKey]float64{}
		for i := range candidates {
			if key := keyOf(&candidates[i]); dropped[key] == "" {
				left++
				costs[key] = tw.cost(key)
				least = min(least, costs[key])
			}
		}
		if len(x.Candidates) != left || len(x.Dropped) != len(candidates)-left {
			t.Fatalf("step %d: %d are left and %d dropped of %d, and the twin leaves %d", step, len(x.Candidates),
				len(x.Dropped), len(candidates), left)
		}
		for _, d := range x.Dropped {
			if why := dropped[rankKey{Instance: d.Worker, Rank: d.Rank}]; why != d.Filter || d.Reason == "" {
				t.Fatalf("step %d: %s/%d was dropped by %s, reason %q; the twin's filter is %q", step, d.Worker, d.Rank,
					d.Filter, d.Reason, why)
			}
			forms[d.Filter]++
		}
		if (err == nil) != (left > 0) {
			t.Fatalf("step %d: %v, and the twin leaves %d", step, err, left)
		}
		if err != nil {
			wantCode := NoWorkers
			if last := x.Dropped[len(x.Dropped)-1]; last.Filter == "overload" {
				wantCode = Overloaded
			}
			if refusal.Code != wantCode {
				t.Fatalf("step %d: the code is %s, not %s", step, refusal.Code, wantCode)
			}
			continue
		}
		sum := 0.0
		for _, c := range x.Candidates {
			want := costs[rankKey{Instance: c.Worker, Rank: c.Rank}]
			if !near(c.Cost, want) {
				t.Fatalf("step %d: the cost of %s/%d is %v, the twin's %v", step, c.Worker, c.Rank, c.Cost, want)
			}
			sum += c.Probability
			if c.Chosen && (c.Worker != choice.Worker || c.Probability != choice.Probability || c.Cost != choice.Cost) {
				t.Fatalf("step %d: the choice is %+v, its explanation %+v", step, choice, c)
			}
			switch terms := c.Terms; {
			case terms.DecodeForm:
				forms["decode form"]++
			case terms.Prefill > 0 && terms.Decay < 1:
				forms["decay"]++
			}
			if c.Terms.TaintFactor != 1 {
				forms["taint factor"]++
			}
			if c.Terms.SharedCredit > 0 {
				forms["shared"]++
			}
		}
		switch a := x.Affinity; {
		case (a != nil) != (r.Affinity != nil):
			t.Fatalf("step %d: the affinity is %+v, and explained as %+v", step, r.Affinity, a)
		case a != nil && (a.Worker != r.Affinity.Worker || a.By != AffinityByTarget || a.Decided != (a.Cheapest != nil) ||
			a.Decided != slices.ContainsFunc(x.Dropped, func(d Dropped) bool { return d.Filter == "affinity_target" })):
			t.Fatalf("step %d: %+v, and dropped are %+v", step, a, x.Dropped)
		case a != nil && a.Decided:
			free := *r
			free.Affinity = nil
			choice, err := s.Choose(&free, candidates, rng, new(Scratch))
			if err != nil || choice.Cost != a.Cheapest.Cost {
				t.Fatalf("step %d: without the affinity the choice is %+v, %v; the cheapest is %+v", step, choice, err, a.Cheapest)
			}
		}
		if math.Abs(sum-1) > 1e-9 {
			t.Fatalf("step %d: the probabilities add up to %v", step, sum)
		}
		if c := &candidates[choice.Index]; c.Worker.ID != choice.Worker || c.Rank != choice.Rank ||
			!near(choice.Cost, least) {
			t.Fatalf("step %d: %+v was chosen at index %d, which is %s/%d; the least cost is %v", step, choice,
				choice.Index, c.Worker.ID, c.Rank, least)
		}
		checkEstimate(t, config.With(&r.Overrides), r, candidates, &choice)
	}
	t.Logf("%v, %v", codes, forms)
	for _, code := range []Code{"chosen", NoWorkers, Overloaded, PinNotAllowed} {
		if codes[code] < 300 {
			t.Errorf("%q came up only %d times", code, codes[code])
		}
	}
	for _, form := range []string{"decode form", "decay", "taint factor", "shared", "pinned_worker", "role", "state",
		"lora", "allowed_worker_ids", "endpoints", "required_taints", "near", "overload", "affinity_target"} {
		if forms[form] < 300 {
			t.Errorf("%q came up only %d times", form, forms[form])
		}
	}
}

// checkEstimate compares the estimate in a choice with the figures of the chosen candidate.
func checkEstimate(t *testing.T, config Config, r *Request, candidates []Candidate, choice *Choice) {
	t.Helper()
	c := &candidates[choice.Index]
	effective := float64(c.Device) + config.HostCacheHitWeight*float64(c.Host) + config.DiskCacheHitWeight*float64(c.Disk)
	if !slices.ContainsFunc(candidates, func(c Candidate) bool { return c.Device+c.Host+c.Disk > 0 }) {
		effective = c.Overlap
	}
	cached := math.Round(effective * float64(r.BlockSize))
	required := math.Ceil(float64(r.ISL) / float64(r.BlockSize))
	decode := max(required-float64(r.Blocks), 0)
	if c.HasLoad {
		decode += float64(c.ActiveBlocks + c.NewBlocks)
	}
	if choice.EffectiveOverlap != effective || float64(choice.CachedTokens) != cached ||
		float64(choice.EffectivePrefillTokens) != max(float64(r.ISL)-cached, 0) ||
		float64(choice.RequiredBlocks) != required || float64(choice.PotentialDecodeBlocks) != decode ||
		choice.TrackPrefillTokens != config.RouterTrackPrefillTokens {
		t.Fatalf("%+v: overlap %v, cached %v, required %v, decode %v", choice, effective, cached, required, decode)
	}
}
