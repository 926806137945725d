//go:build judges

package routing

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"os/exec"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

var (
	steps    = flag.Int("steps", 10_000, "random calls of TestDynamosSelector")
	seedFlag = flag.Uint64("seed", 1, "of the random tests; 0 selects a random seed")
)

// call is the input of judge/src/main.rs.
type call struct {
	Config     map[string]any    `json:"config"`
	WorkerType string            `json:"worker_type"`
	BlockSize  uint32            `json:"block_size"`
	ISL        uint64            `json:"isl"`
	TokenSeq   *uint64           `json:"token_seq"`
	Overrides  routing.Overrides `json:"overrides"`
	Workers    []worker          `json:"workers"`
	Rows       []row             `json:"rows"`
	Untiered   bool              `json:"untiered"`
	Shared     [][2]uint32       `json:"shared"`
	Pinned     *[2]int           `json:"pinned"`
	Allowed    []int             `json:"allowed"`
	Overloaded []int             `json:"overloaded"`
	Taints     struct {
		Required  []string           `json:"required_taints"`
		Preferred map[string]float32 `json:"preferred_taints"`
	} `json:"constraints"`
	Eligible int    `json:"eligible"`
	Draws    int    `json:"draws"`
	Seed     uint64 `json:"seed"`
}

type worker struct {
	ID     int      `json:"id"`
	Ranks  int      `json:"ranks"`
	Taints []string `json:"taints"`
}

type row struct {
	Worker   int     `json:"worker"`
	Rank     int     `json:"rank"`
	Device   uint32  `json:"device"`
	Host     uint32  `json:"host"`
	Disk     uint32  `json:"disk"`
	External uint32  `json:"external"`
	Overlap  float64 `json:"overlap"`
	Load     *load   `json:"load"`
}

type load struct {
	Prefill  uint64 `json:"prefill"`
	Blocks   uint64 `json:"blocks"`
	Requests uint64 `json:"requests"`
	New      uint64 `json:"new"`
}

type verdict struct {
	Error      string `json:"error"`
	Candidates []struct {
		Worker                int     `json:"worker"`
		Rank                  int     `json:"rank"`
		Cost                  float64 `json:"cost"`
		Rounded               bool    `json:"rounded"`
		RequiredBlocks        uint64  `json:"required_blocks"`
		EffectiveOverlap      float64 `json:"effective_overlap"`
		CachedTokens          uint64  `json:"cached_tokens"`
		PotentialDecodeBlocks uint64  `json:"potential_decode_blocks"`
		Picked                int     `json:"picked"`
	} `json:"candidates"`
}

// judge is the running program.
type judge struct {
	t   *testing.T
	in  *json.Encoder
	out *bufio.Reader
}

func startJudge(t *testing.T) *judge {
	t.Helper()
	cmd := exec.Command(pyenv.Program(t, "integration/judges/routing/judge"))
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		if err := cmd.Wait(); err != nil && !t.Failed() {
			t.Errorf("the judge: %v", err)
		}
	})
	return &judge{t, json.NewEncoder(in), bufio.NewReader(out)}
}

func (j *judge) ask(c *call) (v verdict) {
	j.t.Helper()
	if err := j.in.Encode(c); err != nil {
		j.t.Fatal(err)
	}
	line, err := j.out.ReadBytes('\n')
	if err != nil {
		j.t.Fatalf("no reply from the judge: %v", err)
	}
	if err := json.Unmarshal(line, &v); err != nil {
		j.t.Fatalf("%s: %v", line, err)
	}
	return v
}

func ptr[T any](v T) *T { return &v }

func oneOf[T any](rng *rand.Rand, values ...T) T { return values[rng.IntN(len(values))] }

func name(worker int) events.WorkerID { return events.WorkerID(fmt.Sprintf("w%d", worker)) }

// random returns a random call in both forms, of every kind that the crate supports.
func random(rng *rand.Rand) (*call, routing.Config, *routing.Request, []routing.Candidate) {
	config := routing.DefaultConfig()
	config.SharedCacheMode = routing.SharedDynamo
	some := func(to *float64, values ...float64) {
		if rng.IntN(2) == 0 {
			*to = oneOf(rng, append(values, rng.Float64())...)
		}
	}
	some(&config.OverlapScoreCredit, 0, 0.5, 1.5)
	some(&config.OverlapScoreCreditDecay, 1, 4)
	some(&config.PrefillLoadScale, 0, 2)
	some(&config.DecodeActiveRequestWeight, 3)
	some(&config.HostCacheHitWeight, 0, 1)
	some(&config.DiskCacheHitWeight, 0, 1)
	config.RouterTrackPrefillTokens = rng.IntN(3) > 0
	c := &call{WorkerType: "decode", Draws: 8, Seed: rng.Uint64() >> 1}
	c.Config = map[string]any{
		"overlap_score_credit": config.OverlapScoreCredit, "prefill_load_scale": config.PrefillLoadScale,
		"overlap_score_credit_decay":   config.OverlapScoreCreditDecay,
		"decode_active_request_weight": config.DecodeActiveRequestWeight,
		"host_cache_hit_weight":        config.HostCacheHitWeight, "disk_cache_hit_weight": config.DiskCacheHitWeight,
		"router_track_prefill_tokens": config.RouterTrackPrefillTokens,
	}
	switch rng.IntN(4) {
	case 0: // no store
	case 1: // a store with the default multiplier
		c.Config["shared_cache_type"] = "hicache"
	default:
		some(&config.SharedCacheMultiplier, 0, 1)
		c.Config["shared_cache_type"] = "hicache"
		c.Config["shared_cache_multiplier"] = config.SharedCacheMultiplier
	}
	r := &routing.Request{ISL: rng.Uint64N(3000), BlockSize: oneOf[uint32](rng, 1, 16, 17, 64), Explain: true}
	r.Blocks = r.ISL / uint64(r.BlockSize)
	c.TokenSeq = &r.Blocks
	switch rng.IntN(8) {
	case 0, 1: // blocks of requests are not tracked
		c.TokenSeq, r.Blocks = nil, 0
	case 2: // more than the prompt has
		r.Blocks += 3
	}
	if rng.IntN(4) == 0 {
		c.WorkerType, r.Role = "prefill", routing.Prefill
	}
	if c.Config["shared_cache_type"] != nil && rng.IntN(4) > 0 {
		for at := uint32(rng.IntN(10)); rng.IntN(3) > 0; at += uint32(rng.IntN(10)) {
			end := at + 1 + uint32(rng.IntN(10))
			r.Shared = append(r.Shared, [2]uint32{at, end})
			at = end
		}
		c.Shared = r.Shared
	}
	for _, o := range []**float64{&r.Overrides.OverlapScoreCredit, &r.Overrides.PrefillLoadScale,
		&r.Overrides.OverlapScoreWeight, &r.Overrides.RouterTemperature, &r.Overrides.SharedCacheMultiplier} {
		if rng.IntN(6) == 0 {
			*o = ptr(oneOf(rng, 0, 1, rng.Float64()))
		}
	}
	if rng.IntN(6) == 0 {
		r.Overrides.TrackPrefillTokens = ptr(rng.IntN(2) == 0)
	}
	c.BlockSize, c.ISL, c.Overrides = r.BlockSize, r.ISL, r.Overrides

	taints := func(n int) []string {
		has := []string{}
		for i := range n {
			if rng.IntN(2) == 0 {
				has = append(has, fmt.Sprintf("taint%d", i))
			}
		}
		return has
	}
	c.Taints.Required, c.Taints.Preferred = []string{}, map[string]float32{}
	if rng.IntN(5) == 0 {
		c.Taints.Required = taints(2)
	}
	if rng.IntN(3) == 0 {
		for _, taint := range taints(4) {
			weight := rng.Float32()*4 - 2
			c.Taints.Preferred[taint] = weight
			r.PreferredTaints = append(r.PreferredTaints, routing.TaintWeight{Taint: taint, Weight: weight})
		}
	}
	r.RequiredTaints = c.Taints.Required

	workers := 1 + rng.IntN(5)
	c.Untiered = rng.IntN(6) == 0
	loads := rng.IntN(3)
	var candidates []routing.Candidate
	for id := range workers {
		w := worker{ID: id, Ranks: 1 + rng.IntN(2), Taints: taints(4)}
		c.Workers = append(c.Workers, w)
		ours := &routing.Worker{ID: name(id), Taints: w.Taints, State: routing.Schedulable, Role: r.Role}
		if rng.IntN(6) == 0 {
			c.Overloaded = append(c.Overloaded, id)
			ours.TotalKVBlocks = 100 // all used, below
		}
		for rank := range w.Ranks {
			theirs := row{Worker: id, Rank: rank}
			if c.Untiered {
				theirs.Overlap = rng.Float64() * 40
			} else {
				theirs.Device, theirs.Host = uint32(rng.IntN(60)), uint32(rng.IntN(20))
				theirs.Disk, theirs.External = uint32(rng.IntN(20)), uint32(rng.IntN(20))
			}
			candidate := routing.Candidate{Worker: ours, Rank: events.Rank(rank), Overlap: theirs.Overlap,
				Device: theirs.Device, Host: theirs.Host, Disk: theirs.Disk + theirs.External}
			if loads > 0 || rng.IntN(2) == 0 {
				theirs.Load = &load{Prefill: rng.Uint64N(4000), Blocks: rng.Uint64N(60), Requests: rng.Uint64N(9),
					New: rng.Uint64N(r.Blocks + 1)}
				if loads == 1 { // equal costs are likely
					*theirs.Load = load{Blocks: rng.Uint64N(2)}
				}
				candidate.HasLoad, candidate.ActivePrefillTokens = true, theirs.Load.Prefill
				candidate.ActiveBlocks, candidate.ActiveRequests = theirs.Load.Blocks, theirs.Load.Requests
				candidate.NewBlocks = theirs.Load.New
			}
			if ours.TotalKVBlocks > 0 {
				candidate.HasUsed, candidate.UsedBlocks = true, 100
			}
			c.Rows, candidates = append(c.Rows, theirs), append(candidates, candidate)
		}
	}
	config.ActiveDecodeBlocksThreshold = ptr(0.99)
	if rng.IntN(6) == 0 {
		pin := [2]int{rng.IntN(workers + 1), rng.IntN(2)}
		c.Pinned, r.Pin = &pin, &routing.Target{Worker: name(pin[0]), Rank: ptr(events.Rank(pin[1]))}
	}
	if rng.IntN(5) == 0 {
		c.Allowed, r.Allowed = []int{}, []events.WorkerID{}
		for id := range workers {
			if rng.IntN(3) > 0 {
				c.Allowed, r.Allowed = append(c.Allowed, id), append(r.Allowed, name(id))
			}
		}
	}
	return c, config, r, candidates
}

// refusals are Dynamo's names of ours.
var refusals = map[routing.Code][]string{
	routing.NoWorkers:     {"NoEndpoints"},
	routing.Overloaded:    {"AllEligibleWorkersOverloaded", "PinnedWorkerOverloaded"},
	routing.PinNotAllowed: {"PinnedWorkerNotAllowed"},
}

// TestDynamosSelector sends the same random calls to Dynamo's selector and to pkg/routing, and compares the refusals,
// the cost, overlap and blocks of every candidate, and the choice.
func TestDynamosSelector(t *testing.T) {
	seed := *seedFlag
	if seed == 0 {
		seed = rand.Uint64()
	}
	t.Logf("-seed=%d", seed)
	rng := rand.New(rand.NewPCG(seed, 161))
	j := startJudge(t)
	scratch := new(routing.Scratch)
	count := map[string]int{}
	for step := range *steps {
		c, config, r, candidates := random(rng)
		ours, err := routing.New("dynamo", config)
		if err != nil {
			t.Fatal(err)
		}
		choice, err := ours.Choose(r, candidates, rng, scratch)
		if err == nil {
			c.Eligible = len(choice.Explanation.Candidates)
		}
		theirs := j.ask(c)
		fail := func(format string, args ...any) {
			t.Helper()
			text, _ := json.Marshal(c)
			t.Fatalf("step %d: %s\nthe call: %s\ntheirs: %+v\nours: %+v, %v", step, fmt.Sprintf(format, args...), text,
				theirs, choice, err)
		}
		if err != nil {
			var refusal *routing.Refusal
			if !errors.As(err, &refusal) {
				fail("no refusal")
			}
			kind, _, _ := cut(theirs.Error)
			if !slices.Contains(refusals[refusal.Code], kind) {
				fail("the refusals differ")
			}
			count[kind]++
			continue
		}
		if theirs.Error != "" || len(theirs.Candidates) != c.Eligible {
			fail("the candidates differ")
		}
		least, cheapest := math.Inf(1), 0
		for i, x := range choice.Explanation.Candidates {
			y := theirs.Candidates[i] // both lists are in order
			if name(y.Worker) != x.Worker || events.Rank(y.Rank) != x.Rank {
				fail("the candidates differ")
			}
			if bound := 1e-12 * max(1, math.Abs(y.Cost)); y.Rounded {
				if math.Abs(x.Cost-y.Cost) > 0.000501 {
					fail("the pinned worker's cost is %v, and theirs %v", x.Cost, y.Cost)
				}
			} else if !(math.Abs(x.Cost-y.Cost) <= bound) {
				fail("the cost of %s/%d is %v, and theirs %v", x.Worker, x.Rank, x.Cost, y.Cost)
			}
			if e := x.Estimate; math.Abs(e.EffectiveOverlap-y.EffectiveOverlap) > 1e-12*max(1, y.EffectiveOverlap) ||
				e.CachedTokens != y.CachedTokens || e.PotentialDecodeBlocks != y.PotentialDecodeBlocks ||
				choice.RequiredBlocks != y.RequiredBlocks {
				fail("for %s/%d pkg/routing has %+v", x.Worker, x.Rank, e)
			}
			least = min(least, x.Cost)
			tally(count, x.Terms)
		}
		temperature := choice.Explanation.Config.RouterTemperature
		for i, x := range choice.Explanation.Candidates {
			dear := x.Cost > least+1e-12*max(1, math.Abs(least))
			if !dear {
				cheapest++
			}
			if temperature == 0 && dear && (x.Chosen || theirs.Candidates[i].Picked > 0) {
				fail("%s/%d is chosen and is not the cheapest", x.Worker, x.Rank)
			}
		}
		switch {
		case r.Pin != nil:
			count["pinned"]++
		case temperature > 0:
			count["temperature"]++
		case cheapest > 1:
			count["ties"]++
		default:
			count["one cheapest"]++
		}
	}
	t.Logf("%v", count)
	for _, kind := range []string{"NoEndpoints", "AllEligibleWorkersOverloaded", "PinnedWorkerOverloaded",
		"PinnedWorkerNotAllowed", "pinned", "temperature", "ties", "one cheapest", "decode form", "decay", "shared",
		"taint factor"} {
		if count[kind] < *steps/200 {
			t.Errorf("%q came up only %d times", kind, count[kind])
		}
	}
}

// cut returns the name of a Rust error without the fields.
func cut(text string) (kind, fields string, ok bool) {
	for i, b := range []byte(text) {
		if b == ' ' || b == '{' || b == '(' {
			return text[:i], text[i:], true
		}
	}
	return text, "", false
}

func tally(count map[string]int, terms *routing.Terms) {
	if terms.DecodeForm {
		count["decode form"]++
	}
	if terms.Decay < 1 {
		count["decay"]++
	}
	if terms.SharedCredit > 0 {
		count["shared"]++
	}
	if terms.TaintFactor != 1 {
		count["taint factor"]++
	}
}

// TestDynamosProbabilities draws from Dynamo's selector, and compares the frequency of every candidate with the
// probability of pkg/routing, at several temperatures and among equal costs.
func TestDynamosProbabilities(t *testing.T) {
	const draws = 20_000
	rng := rand.New(rand.NewPCG(2, 161))
	j := startJudge(t)
	scratch := new(routing.Scratch)
	for _, temperature := range []float64{0, 0.05, 0.1, 0.5, 1, 3} {
		for tested := 0; tested < 4; {
			c, config, r, candidates := random(rng)
			r.Overrides.RouterTemperature = &temperature
			c.Overrides.RouterTemperature = &temperature
			ours, err := routing.New("dynamo", config)
			if err != nil {
				t.Fatal(err)
			}
			choice, err := ours.Choose(r, candidates, rng, scratch)
			if err != nil || len(choice.Explanation.Candidates) < 3 || temperature == 0 && choice.Probability == 1 {
				continue
			}
			tested++
			c.Eligible, c.Draws = len(choice.Explanation.Candidates), draws
			theirs := j.ask(c)
			if theirs.Error != "" || len(theirs.Candidates) != c.Eligible {
				t.Fatalf("%+v", theirs)
			}
			for i, x := range choice.Explanation.Candidates {
				share, p := float64(theirs.Candidates[i].Picked)/draws, x.Probability
				if math.Abs(share-p) > 5*math.Sqrt(p*(1-p)/draws)+5./draws || p == 0 && share > 0 {
					t.Errorf("temperature %v: Dynamo chose %s/%d with a share of %v, want %v", temperature, x.Worker,
						x.Rank, share, p)
				}
			}
		}
	}
}
