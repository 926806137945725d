package routing

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

func newSelector(t testing.TB, policy string, change func(*Config)) *Selector {
	t.Helper()
	config := DefaultConfig()
	if change != nil {
		change(&config)
	}
	s, err := New(policy, config)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// idle returns candidates w0, w1, … of a single rank each, with these numbers of blocks on the device.
func idle(device ...uint32) (candidates []Candidate) {
	for i, d := range device {
		candidates = append(candidates, Candidate{
			Worker: &Worker{ID: events.WorkerID(fmt.Sprintf("w%d", i))}, Device: d, HasLoad: true,
		})
	}
	return candidates
}

// shares draws n times and returns each candidate's share of the draws, and the reported probability.
func shares(t *testing.T, s *Selector, r *Request, candidates []Candidate, n int) (drawn, said []float64) {
	t.Helper()
	rng := seeded(t)
	var scratch Scratch
	drawn = make([]float64, len(candidates))
	for range n {
		c, err := s.Choose(r, candidates, rng, &scratch)
		if err != nil {
			t.Fatal(err)
		}
		drawn[c.Index] += 1 / float64(n)
	}
	explained := *r
	explained.Explain = true
	choice, err := s.Choose(&explained, candidates, rng, &scratch)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range choice.Explanation.Candidates {
		said = append(said, c.Probability)
	}
	return drawn, said
}

// within reports whether a share of n draws is within five standard deviations of a probability, or within five draws
// of a small probability.
func within(share, p float64, n int) bool {
	if p == 0 || p == 1 {
		return math.Abs(share-p) < 1e-9
	}
	return math.Abs(share-p) <= 5*math.Sqrt(p*(1-p)/float64(n))+5/float64(n)
}

// TestTies: candidates of equal cost have equal shares, and more expensive candidates are never chosen.
func TestTies(t *testing.T) {
	const n = 40_000
	r := &Request{ISL: 160, BlockSize: 16}
	drawn, said := shares(t, newSelector(t, "dynamo", nil), r, idle(4, 7, 3, 7, 7, 0), n)
	for i, p := range []float64{0, 1. / 3, 0, 1. / 3, 1. / 3, 0} {
		if !within(drawn[i], p, n) || said[i] != p {
			t.Errorf("candidate %d: a share of %v, a probability of %v, want %v", i, drawn[i], said[i], p)
		}
	}
}

// TestTemperature draws at several temperatures and compares the shares with the formula.
func TestTemperature(t *testing.T) {
	const n = 40_000
	device := []uint32{4, 7, 3, 7, 0}
	for _, temperature := range []float64{0.1, 0.5, 1, 10} {
		weights, sum := make([]float64, len(device)), 0.0
		for i, d := range device {
			weights[i] = math.Exp(-(float64(10-d) - 3) / ((10 - 3) * temperature))
			sum += weights[i]
		}
		r := &Request{ISL: 160, BlockSize: 16, Overrides: Overrides{RouterTemperature: &temperature}}
		drawn, said := shares(t, newSelector(t, "dynamo", nil), r, idle(device...), n)
		for i := range device {
			if p := weights[i] / sum; !within(drawn[i], p, n) || math.Abs(said[i]-p) > 1e-12 {
				t.Errorf("temperature %v, candidate %d: a share of %v, a probability of %v, want %v", temperature, i,
					drawn[i], said[i], p)
			}
		}
	}
	r := &Request{ISL: 160, BlockSize: 16}
	hot := newSelector(t, "dynamo", func(c *Config) { c.RouterTemperature = 1 })
	if drawn, _ := shares(t, hot, r, idle(5, 5), n); !within(drawn[0], 0.5, n) {
		t.Errorf("equal costs at a temperature: a share of %v", drawn[0])
	}
}

// TestExtremes: extreme costs and temperatures give valid probabilities.
func TestExtremes(t *testing.T) {
	for _, cost := range [][]float64{
		{0, 1}, {-1, 1}, {1e300, -1e300, 0}, {math.MaxFloat64, -math.MaxFloat64, 0}, {1, 1 + 1e-16, 1 + 4e-16},
		{0, 5e-324}, {3, 3, 3},
	} {
		for _, temperature := range []float64{0, 5e-324, 1e-300, 0.1, 1, 1e300, math.MaxFloat64} {
			s := &Selector{config: Config{RouterTemperature: temperature}, policy: Policy{
				Scorers: []Scorer{scorerFunc{"given", func(_ *View, c *Candidate) float64 { return cost[c.Device] }}},
				Picker:  Lowest(),
			}}
			var candidates []Candidate
			for i := range cost {
				candidates = append(candidates, idle(uint32(i))...)
			}
			r := &Request{ISL: 1, BlockSize: 1, Explain: true}
			choice, err := s.Choose(r, candidates, rand.New(rand.NewPCG(1, 2)), new(Scratch))
			if err != nil {
				t.Errorf("costs %v, temperature %v: %v", cost, temperature, err)
				continue
			}
			sum, least := 0.0, slices.Min(cost)
			for i, c := range choice.Explanation.Candidates {
				if !(c.Probability >= 0 && c.Probability <= 1) || temperature == 0 && c.Probability > 0 && cost[i] != least {
					t.Errorf("costs %v, temperature %v: candidate %d has %v", cost, temperature, i, c.Probability)
				}
				sum += c.Probability
			}
			if math.Abs(sum-1) > 1e-9 || choice.Probability == 0 {
				t.Errorf("costs %v, temperature %v: %+v; the sum is %v", cost, temperature, choice, sum)
			}
		}
	}
}

// TestPenalties: penalised workers are dropped, with a reason, while another candidate is left. Overloaded candidates
// are not left.
func TestPenalties(t *testing.T) {
	penalty := &Penalty{Failures: 3, Reason: "timeout", LeftS: 0.25}
	full := &Worker{ID: "full", TotalKVBlocks: 10}
	for _, test := range []struct {
		candidates []Candidate
		want       string
		dropped    []string
	}{
		{[]Candidate{{Worker: &Worker{ID: "a"}, Device: 6, Penalty: penalty}, {Worker: &Worker{ID: "b"}}}, "b",
			[]string{"a penalty is penalised for another 0.2 s: 3 failed requests since its last success, the last one: timeout"}},
		{[]Candidate{{Worker: &Worker{ID: "a"}, Device: 6, Penalty: penalty}, {Worker: &Worker{ID: "b"}, Penalty: penalty}},
			"a", nil},
		{[]Candidate{{Worker: &Worker{ID: "a"}, Penalty: penalty}, {Worker: full, HasLoad: true, ActiveBlocks: 10}}, "a",
			[]string{"full overload is overloaded: used blocks is 10, above 9"}},
	} {
		s := newSelector(t, "dynamo", func(c *Config) { c.ActiveDecodeBlocksThreshold = ptr(0.9) })
		r := &Request{ISL: 100, BlockSize: 16, Explain: true}
		choice, err := s.Choose(r, test.candidates, rand.New(rand.NewPCG(1, 2)), new(Scratch))
		if err != nil {
			t.Fatal(err)
		}
		var dropped []string
		for _, d := range choice.Explanation.Dropped {
			dropped = append(dropped, fmt.Sprintf("%s %s %s", d.Worker, d.Filter, d.Reason))
		}
		if string(choice.Worker) != test.want || !slices.Equal(dropped, test.dropped) {
			t.Errorf("%s, dropped %q; want %s, %q", choice.Worker, dropped, test.want, test.dropped)
		}
	}
}

// TestRefusals: every refusal has a code, the counts of dropped candidates by filter, and an explanation with reasons.
func TestRefusals(t *testing.T) {
	draining := &Worker{ID: "d", State: Draining}
	incomplete := &Worker{ID: "i", State: Incomplete, Reasons: []string{"block_size mismatch", "no endpoint"}}
	full := &Worker{ID: "f", TotalKVBlocks: 100, Role: Decode, Taints: []string{"zone=a"}}
	unknown := &Worker{ID: "f", Role: Decode, Taints: full.Taints} // the engine reports the capacity
	candidates := []Candidate{{Worker: draining}, {Worker: incomplete}, {Worker: full, HasUsed: true, UsedBlocks: 95},
		{Worker: full, Rank: 1, HasLoad: true, ActiveBlocks: 91},
		{Worker: unknown, Rank: 2, HasUsed: true, UsedBlocks: 50, UsedOf: 50},
		{Worker: full, Rank: 3, HasLoad: true, ActivePrefillTokens: 4001, HasUsed: true, UsedBlocks: 90, UsedOf: 50}}
	config := func(c *Config) {
		c.ActiveDecodeBlocksThreshold, c.ActivePrefillTokensThreshold = ptr(0.9), ptr(4000.)
	}
	for _, test := range []struct {
		name    string
		change  func(*Request)
		want    string
		reasons []string // of f's ranks, or of d and i
	}{
		{"overloaded", func(r *Request) {}, `overloaded: all eligible workers are overloaded (of 6 candidates dropped by ` +
			`state 2, overload 4)`, []string{"d/0 state: is draining",
			"i/0 state: is incomplete: block_size mismatch; no endpoint",
			"f/0 overload: is overloaded: used blocks, as it reports, is 95, above 90",
			"f/1 overload: is overloaded: used blocks is 91, above 90",
			"f/2 overload: is overloaded: used blocks, as it reports, is 50, above 45",
			"f/3 overload: is overloaded: active_prefill_tokens is 4001, above 4000"}},
		{"pinned and overloaded", func(r *Request) { r.Pin = &Target{Worker: "f"} },
			`overloaded: worker "f" is pinned and overloaded (of 6 candidates dropped by pinned_worker 2, overload 4)`, nil},
		{"pinned and draining", func(r *Request) { r.Pin = &Target{Worker: "d"} },
			`no_workers: no worker may serve the request (of 6 candidates dropped by pinned_worker 5, state 1)`, nil},
		{"pinned and unknown", func(r *Request) { r.Pin = &Target{Worker: "x"} },
			`no_workers: worker "x" is pinned and is not a candidate (of 6 candidates dropped by pinned_worker 6)`, nil},
		{"pinned rank", func(r *Request) { r.Pin = &Target{Worker: "f", Rank: ptr(events.Rank(9))} },
			`no_workers: worker "f" rank 9 is pinned and is not a candidate (of 6 candidates dropped by pinned_worker 6)`,
			nil},
		{"pinned and not allowed", func(r *Request) {
			r.Pin, r.Allowed = &Target{Worker: "f"}, []events.WorkerID{"d"}
		}, `pin_not_allowed: worker "f" is pinned and is not in allowed_worker_ids`, nil},
		{"excluded", func(r *Request) { r.Excluded = []events.WorkerID{"f", "i"} },
			`no_workers: no worker may serve the request (of 6 candidates dropped by excluded_workers 5, state 1)`,
			[]string{"f/0 excluded_workers: is excluded by the request"}},
		{"none allowed", func(r *Request) { r.Allowed = []events.WorkerID{} },
			`no_workers: no worker may serve the request (of 6 candidates dropped by allowed_worker_ids 6)`, nil},
		{"role", func(r *Request) { r.Role = Aggregated }, `no_workers: no worker may serve the request (of 6 ` +
			`candidates dropped by role 4, state 2)`, []string{"f/0 role: is in another pool, decode"}},
		{"taints", func(r *Request) { r.RequiredTaints = []string{"zone=a", "zone=b"} }, `no_workers: no worker may ` +
			`serve the request (of 6 candidates dropped by state 2, required_taints 4)`,
			[]string{`f/0 required_taints: lacks the required taint "zone=b"`}},
	} {
		for _, explain := range []bool{false, true} {
			r := &Request{ISL: 100, BlockSize: 16, Explain: explain}
			test.change(r)
			_, err := newSelector(t, "dynamo", config).Choose(r, candidates, rand.New(rand.NewPCG(1, 2)), new(Scratch))
			if fmt.Sprint(err) != test.want {
				t.Errorf("%s: %v\nwant %s", test.name, err, test.want)
				continue
			}
			var refusal *Refusal
			errors.As(err, &refusal)
			if !explain || refusal.Explanation == nil {
				if refusal.Explanation != nil || explain && refusal.Code != PinNotAllowed {
					t.Errorf("%s: the explanation is %+v", test.name, refusal.Explanation)
				}
				continue
			}
			var got []string
			for _, d := range refusal.Explanation.Dropped {
				got = append(got, fmt.Sprintf("%s/%d %s: %s", d.Worker, d.Rank, d.Filter, d.Reason))
			}
			for _, want := range test.reasons {
				if !slices.Contains(got, want) {
					t.Errorf("%s: reason %q is missing; got\n%s", test.name, want, strings.Join(got, "\n"))
				}
			}
		}
	}
	s := newSelector(t, "dynamo", nil)
	if _, err := s.Choose(&Request{BlockSize: 1}, nil, nil, new(Scratch)); fmt.Sprint(err) !=
		"no_workers: there are no candidates" {
		t.Error(err)
	}
	if _, err := s.Choose(&Request{BlockSize: 1}, make([]Candidate, 2), nil, new(Scratch)); fmt.Sprint(err) !=
		"bad_request: candidate 0 has no worker" {
		t.Error(err)
	}
}

// TestBadInput: one error lists all faults, by the names on the wire.
func TestBadInput(t *testing.T) {
	nan, minus, inf := math.NaN(), -0.5, math.Inf(1)
	bad := Config{OverlapScoreCredit: nan, OverlapScoreCreditDecay: minus, PrefillLoadScale: inf,
		DecodeActiveRequestWeight: minus, HostCacheHitWeight: 1.1, DiskCacheHitWeight: nan, RouterTemperature: minus,
		SharedCacheMultiplier: 2, SharedCacheMode: "both", ActiveDecodeBlocksThreshold: ptr(1.5),
		ActivePrefillTokensThreshold: &nan, ActivePrefillTokensThresholdFrac: &inf}
	_, err := New("dynamo", bad)
	want := `overlap_score_credit is NaN: it must be finite and at least 0
overlap_score_credit_decay is -0.5: it must be finite and at least 0
prefill_load_scale is +Inf: it must be finite and at least 0
decode_active_request_weight is -0.5: it must be finite and at least 0
host_cache_hit_weight is 1.1: it must be from 0 to 1
disk_cache_hit_weight is NaN: it must be from 0 to 1
router_temperature is -0.5: it must be finite and at least 0
shared_cache_multiplier is 2: it must be from 0 to 1
shared_cache_mode is "both": it must be "would_load" or "dynamo"
active_decode_blocks_threshold is 1.5: it must be from 0 to 1
active_prefill_tokens_threshold is NaN: it must be finite and at least 0
active_prefill_tokens_threshold_frac is +Inf: it must be finite and at least 0`
	if fmt.Sprint(err) != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	r := &Request{Role: "both", Pin: &Target{}, Affinity: &Target{},
		PreferredTaints: []TaintWeight{{"a", float32(inf)}}, Shared: [][2]uint32{{0, 4}, {3, 5}},
		Overrides: Overrides{OverlapScoreCredit: &nan, PrefillLoadScale: &minus, OverlapScoreWeight: &inf,
			RouterTemperature: &minus, SharedCacheMultiplier: &minus}}
	_, err = newSelector(t, "dynamo", nil).Choose(r, idle(1), nil, new(Scratch))
	want = `bad_request: block_size is 0; role is "both": it must be "aggregated", "prefill" or "decode"; ` +
		`pinned_worker has no worker; affinity_target has no worker; ` +
		`preferred_taints: the weight of "a" is +Inf: it must be finite; ` +
		`shared: range 1, [3, 5), is empty or not after the one before; ` +
		`overlap_score_credit is NaN: it must be finite and at least 0; ` +
		`prefill_load_scale is -0.5: it must be finite and at least 0; ` +
		`overlap_score_weight is +Inf: it must be finite and at least 0; ` +
		`router_temperature is -0.5: it must be finite and at least 0; ` +
		`shared_cache_multiplier is -0.5: it must be from 0 to 1`
	if fmt.Sprint(err) != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	if _, err := New("best", DefaultConfig()); fmt.Sprint(err) !=
		`no policy is named "best"; there are `+strings.Join(Policies(), ", ") {
		t.Error(err)
	}
	config := DefaultConfig()
	if err := config.Validate(); err != nil {
		t.Errorf("the defaults: %v", err)
	}
	if err := new(Config).Validate(); err != nil {
		t.Errorf("the zero value: %v", err)
	}
}

// TestOtherPolicies: each policy reads its own inputs and ignores the rest.
func TestOtherPolicies(t *testing.T) {
	const n = 20_000
	r := &Request{ISL: 160, BlockSize: 16}
	candidates := idle(9, 2, 2, 0)
	candidates[0].ActivePrefillTokens, candidates[0].ActiveBlocks = 160, 5 // 15 blocks
	candidates[1].ActiveBlocks = 4
	candidates[2].ActivePrefillTokens = 64 // 4 blocks
	candidates[3].ActiveBlocks = 5
	candidates[3].WouldLoad = 18 // worth 9 blocks
	for policy, want := range map[string][]float64{
		"least_load":  {0, 0.5, 0.5, 0},
		"prefix_only": {0.5, 0, 0, 0.5},
		"random":      {0.25, 0.25, 0.25, 0.25},
		"round_robin": {0.25, 0.25, 0.25, 0.25},
	} {
		drawn, _ := shares(t, newSelector(t, policy, nil), r, candidates, n)
		for i, p := range want {
			if !within(drawn[i], p, n) {
				t.Errorf("%s: candidate %d has a share of %v, want %v", policy, i, drawn[i], p)
			}
		}
	}
	s, scratch := newSelector(t, "round_robin", nil), new(Scratch)
	for i := range 10 {
		choice, err := s.Choose(r, candidates, nil, scratch)
		if err != nil || choice.Index != i%4 || choice.Probability != 1 {
			t.Errorf("round robin: choice %d is %+v, %v", i, choice, err)
		}
	}
	candidates[1].Worker.State = Draining
	for _, policy := range []string{"dynamo", "kvatlas", "least_load", "prefix_only", "random", "round_robin"} {
		s := newSelector(t, policy, nil)
		for _, worker := range []events.WorkerID{"w0", "w2", "w3"} {
			choice, err := s.Choose(&Request{ISL: 160, BlockSize: 16, Affinity: &Target{Worker: worker}}, candidates,
				rand.New(rand.NewPCG(1, 2)), scratch)
			if err != nil || choice.Worker != worker || choice.Probability != 1 {
				t.Errorf("%s: with affinity to %s: %+v, %v", policy, worker, choice, err)
			}
		}
		choice, err := s.Choose(&Request{ISL: 160, BlockSize: 16, Affinity: &Target{Worker: "w1"}}, candidates,
			rand.New(rand.NewPCG(1, 2)), scratch)
		if err != nil || choice.Worker == "w1" {
			t.Errorf("%s: with affinity to a draining worker: %+v, %v", policy, choice, err)
		}
	}
}

// even drops candidates of odd device depth.
type even struct{}

func (even) Name() string { return "even" }
func (even) Filter(v *View) {
	for i := range v.Len() {
		if v.At(i).Device%2 == 1 {
			v.Drop(i, "is odd")
		}
	}
}

type pick int

func (p pick) Pick(_ *View, _, probability []float64, _ *rand.Rand) int { return int(p) }

func constant(name string, cost float64) Scorer {
	return scorerFunc{name, func(*View, *Candidate) float64 { return cost }}
}

// TestPoliciesOfOthers: filters, scorers and a picker make a policy, and faults of each are reported by name.
func TestPoliciesOfOthers(t *testing.T) {
	deepest := scorerFunc{"deepest", func(_ *View, c *Candidate) float64 { return -2 * float64(c.Device) }}
	policies := map[string]Policy{
		"test-even":  {Filters: []Filter{even{}}, Scorers: []Scorer{constant("one", 1), deepest}, Picker: Lowest()},
		"test-nan":   {Scorers: []Scorer{constant("one", 1), constant("nan", math.NaN())}, Picker: Lowest()},
		"test-inf":   {Scorers: []Scorer{constant("big", 1e308), constant("too big", 1e308)}, Picker: Lowest()},
		"test-below": {Picker: pick(-1)},
		"test-above": {Picker: pick(3)},
		"test-none":  {},
	}
	for name, p := range policies {
		Register(name, func(Config) (Policy, error) { return p, nil })
	}
	Register("test-fails", func(c Config) (Policy, error) { return Policy{}, errors.New("no model") })
	defer maps.DeleteFunc(registry, func(name string, _ Factory) bool { return strings.HasPrefix(name, "test-") })
	r := &Request{ISL: 160, BlockSize: 16, Explain: true}
	s := newSelector(t, "test-even", nil)
	choice, err := s.Choose(r, idle(1, 2, 6, 9), rand.New(rand.NewPCG(1, 2)), new(Scratch))
	if err != nil || choice.Worker != "w2" || choice.Cost != -11 || s.Policy() != "test-even" {
		t.Errorf("%+v, %v", choice, err)
	} else if x := choice.Explanation; len(x.Dropped) != 2 ||
		x.Dropped[1] != (Dropped{Worker: "w3", Filter: "even", Reason: "is odd"}) ||
		!slices.Equal(x.Candidates[1].Scores, []Score{{"one", 1}, {"deepest", -12}}) || x.Candidates[1].Terms != nil {
		t.Errorf("%+v", x)
	}
	for policy, want := range map[string]string{
		"test-even":  "filtered: the policy test-even leaves no eligible candidate (of 3 candidates dropped by even 3)",
		"test-nan":   `policy_failed: the cost of worker "w0" rank 0 is NaN after scorer nan`,
		"test-inf":   `policy_failed: the cost of worker "w0" rank 0 is +Inf after scorer too big`,
		"test-below": "policy_failed: the picker chose candidate -1 of 3",
		"test-above": "policy_failed: the picker chose candidate 3 of 3",
	} {
		_, err := newSelector(t, policy, nil).Choose(r, idle(1, 3, 5), rand.New(rand.NewPCG(1, 2)), new(Scratch))
		if fmt.Sprint(err) != want {
			t.Errorf("%s: %v\nwant %s", policy, err, want)
		}
	}
	for policy, want := range map[string]string{
		"test-fails": "policy test-fails: no model", "test-none": "policy test-none has no picker",
	} {
		if _, err := New(policy, DefaultConfig()); fmt.Sprint(err) != want {
			t.Errorf("%v, want %s", err, want)
		}
	}
	for _, register := range []func(){
		func() { Register("dynamo", func(Config) (Policy, error) { return Policy{}, nil }) },
		func() { Register("", func(Config) (Policy, error) { return Policy{}, nil }) },
		func() { Register("test-nil", nil) },
	} {
		func() {
			defer func() {
				if recover() == nil {
					t.Error("no panic")
				}
			}()
			register()
		}()
	}
	got := slices.DeleteFunc(Policies(), func(name string) bool { return strings.HasPrefix(name, "test-") })
	if !slices.Equal(got, []string{"dynamo", "kvatlas", "least_load", "prefix_only", "random", "round_robin"}) {
		t.Errorf("there are %q", got)
	}
}

// TestOneSelectorForAll: goroutines with separate scratches share a selector. The results equal the results of a single
// goroutine.
func TestOneSelectorForAll(t *testing.T) {
	s := newSelector(t, "dynamo", nil)
	rng := seeded(t)
	var requests []*Request
	var calls [][]Candidate
	for range 200 {
		r, candidates := randomCall(rng)
		r.Explain = len(requests)%2 == 0
		requests, calls = append(requests, r), append(calls, candidates)
	}
	run := func() (all []string) {
		rng, scratch := rand.New(rand.NewPCG(7, 7)), new(Scratch)
		for i, r := range requests {
			choice, err := s.Choose(r, calls[i], rng, scratch)
			choice.Explanation = nil
			all = append(all, fmt.Sprintf("%+v %v", choice, err))
		}
		return all
	}
	want := run()
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if got := run(); !slices.Equal(got, want) {
				t.Error("another goroutine's choices differ")
			}
		})
	}
	wg.Wait()
}

// fleet returns n candidates, half of them with a prefix of 64 blocks, and a request of 512.
func fleet(n int) (*Request, []Candidate) {
	rng := rand.New(rand.NewPCG(3, 4))
	var candidates []Candidate
	for i := range n {
		c := Candidate{
			Worker:  &Worker{ID: events.WorkerID(fmt.Sprintf("worker-%03d", i)), State: Schedulable, TotalKVBlocks: 20_000},
			HasLoad: true, ActivePrefillTokens: rng.Uint64N(20_000), ActiveBlocks: rng.Uint64N(10_000),
			ActiveRequests: rng.Uint64N(50), NewBlocks: 512, HasUsed: true, UsedBlocks: rng.Uint64N(15_000),
		}
		if i%2 == 0 {
			c.Device, c.Host, c.WouldLoad, c.NewBlocks = 64, 20, 10, 448
		}
		candidates = append(candidates, c)
	}
	return &Request{ISL: 8192, BlockSize: 16, Blocks: 512, Shared: [][2]uint32{{0, 80}, {90, 100}, {120, 300}}}, candidates
}

// variants are calls of all kinds with the same use of memory.
func variants() map[string]func(*Config, *Request) {
	return map[string]func(*Config, *Request){
		"default":     func(*Config, *Request) {},
		"temperature": func(c *Config, _ *Request) { c.RouterTemperature = 0.5 },
		"everything": func(c *Config, r *Request) {
			c.OverlapScoreCreditDecay, c.DecodeActiveRequestWeight, c.SharedCacheMode = 1, 2, SharedDynamo
			c.ActiveDecodeBlocksThreshold, c.ActivePrefillTokensThresholdFrac = ptr(0.7), ptr(2.)
			r.LoRA, r.PreferredTaints = "a", []TaintWeight{{"x", 1}}
			for i := range 250 {
				r.Allowed = append(r.Allowed, events.WorkerID(fmt.Sprintf("worker-%03d", i)))
			}
		},
	}
}

// TestNoAllocations: without an explanation, a choice allocates nothing outside the scratch.
func TestNoAllocations(t *testing.T) {
	for name, change := range variants() {
		for _, policy := range []string{"dynamo", "kvatlas", "least_load", "prefix_only", "random", "round_robin"} {
			r, candidates := fleet(256)
			s := newSelector(t, policy, func(c *Config) { change(c, r) })
			rng, scratch := rand.New(rand.NewPCG(1, 2)), new(Scratch)
			choose := func() {
				if _, err := s.Choose(r, candidates, rng, scratch); err != nil {
					t.Fatal(err)
				}
			}
			choose()
			if n := testing.AllocsPerRun(100, choose); n != 0 {
				t.Errorf("%s, %s: %v allocations", policy, name, n)
			}
		}
	}
}

func BenchmarkChoose(b *testing.B) {
	for _, name := range []string{"default", "temperature", "everything", "kvatlas"} {
		b.Run(name, func(b *testing.B) {
			r, candidates := fleet(256)
			policy := "dynamo"
			change := variants()[name]
			if name == "kvatlas" {
				policy, change = name, variants()["default"]
				for i := range candidates {
					c := &candidates[i]
					c.PrefillRate, c.Busy, c.WorkingMS, c.LifeMS = 8+float64(i%5), 0.5, float64(i%50), 900
					c.PrefillRequests = min(c.ActiveRequests, uint64(i%3))
				}
			}
			s := newSelector(b, policy, func(c *Config) { change(c, r) })
			rng, scratch := rand.New(rand.NewPCG(1, 2)), new(Scratch)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := s.Choose(r, candidates, rng, scratch); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestPools: a request without a pool never goes to a worker that only computes parts for other workers.
func TestPools(t *testing.T) {
	roles := []Role{"", Aggregated, Decode, Prefill, Encode}
	var candidates []Candidate
	for i, role := range roles {
		candidates = append(candidates, Candidate{Worker: &Worker{ID: events.WorkerID(fmt.Sprint(i)), Role: role}})
	}
	for pool, want := range map[Role][]Role{"": {"", Aggregated, Decode}, Aggregated: {"", Aggregated},
		Decode: {Decode}, Prefill: {Prefill}} {
		r := &Request{ISL: 100, BlockSize: 16, Role: pool, Explain: true}
		choice, err := newSelector(t, "dynamo", func(*Config) {}).Choose(r, candidates, rand.New(rand.NewPCG(1, 2)),
			new(Scratch))
		if err != nil {
			t.Fatal(err)
		}
		var got []Role
		for _, c := range choice.Explanation.Candidates {
			got = append(got, candidates[c.Worker[0]-'0'].Worker.Role)
		}
		if !slices.Equal(got, want) {
			t.Errorf("pool %q: workers with the roles %q are candidates, want %q", pool, got, want)
		}
	}
}
