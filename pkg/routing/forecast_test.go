package routing

import (
	"math"
	"math/rand/v2"
	"slices"
	"testing"
)

// TestForecasts compares the forecasts with the terms in explanations of the policy kvatlas, for random candidates.
func TestForecasts(t *testing.T) {
	s, err := New("kvatlas", DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var scratch Scratch
	for round := range 300 {
		blocks := 1 + rng.IntN(400)
		r := &Request{ISL: uint64(blocks*16 + rng.IntN(16)), BlockSize: 16, Blocks: uint64(blocks), Explain: true}
		list := make([]Candidate, 1+rng.IntN(6))
		for i := range list {
			device := rng.IntN(blocks + 1)
			list[i] = Candidate{Worker: &Worker{ID: "w", State: Schedulable, TotalKVBlocks: uint64(500 + rng.IntN(500))},
				Rank: 0, Device: uint32(device), Host: uint32(rng.IntN(blocks - device + 1)), HasLoad: true,
				ActivePrefillTokens: uint64(rng.IntN(20_000)), PrefillRequests: uint64(rng.IntN(3)),
				ActiveBlocks: uint64(rng.IntN(900)), ActiveRequests: uint64(3 + rng.IntN(9)), NewBlocks: uint64(blocks),
				PrefillRate: 1 + 20*rng.Float64(), Busy: rng.Float64(), WorkingMS: 100 * rng.Float64(), LifeMS: 4000,
				Memory: &Memory{Free: uint64(rng.IntN(200)), Unique: rng.Float64(), Again: rng.Float64()}}
		}
		choice, err := s.Choose(r, list, rng, &scratch)
		if err != nil {
			t.Fatal(err)
		}
		compareGuesses(t, rng, r, list)
		costs := ComputeCosts(nil, r, list)
		for i, c := range choice.Explanation.Candidates {
			near := func(what string, got float64, terms ...string) {
				want := 0.0
				for _, name := range terms {
					at := slices.IndexFunc(c.Scores, func(s Score) bool { return s.Scorer == name })
					if at < 0 {
						t.Fatalf("there is no term %q in %v", name, c.Scores)
					}
					want += c.Scores[at].Cost
				}
				if math.Abs(got-want) > 1e-9*max(1, math.Abs(want)) {
					t.Fatalf("round %d, candidate %d: %s is %v, the terms are %v", round, i, what, got, want)
				}
			}
			near("FirstToken", FirstToken(r, &list[i]), "queue", "room", "prefill", "load")
			near("Waiting", Waiting(&list[i]), "queue", "room")
			near("ComputeCosts", costs[i], "prefill", "decode", "later", "evict")
		}
	}
}

// compareGuesses compares a Forecast with FirstToken for random depths. The results are equal to the last bit.
func compareGuesses(t *testing.T, rng *rand.Rand, r *Request, list []Candidate) {
	t.Helper()
	var f Forecast
	for i := range list {
		f.Set(r, &list[i])
		for range 4 {
			depth := list[i].Device + 1 + uint32(rng.IntN(int(r.Blocks)))
			trial := list[i]
			trial.Guess(depth)
			if got, want := f.Guess(depth), FirstToken(r, &trial); got != want {
				t.Fatalf("depth %d of %+v: %v, want %v", depth, list[i], got, want)
			}
		}
	}
}
