package routesim

import (
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
)

// warmed runs a workload without and with copies of hot prefixes, and returns the mean TTFTs in milliseconds and the
// number of copies.
func warmed(t *testing.T, w Workload) (without, with float64, copies int) {
	t.Helper()
	c := config(w, "policy:kvatlas", 1)
	without = 1e3 * simulate(t, c).Total.TTFTMean
	c.WarmUp = 20
	s, err := newSim(c)
	if err != nil {
		t.Fatal(err)
	}
	if err := s.loop(t.Context(), c.Workload.requests()); err != nil {
		t.Fatal(err)
	}
	s.run.close(s)
	for _, e := range s.engines {
		if e.requests != 0 || e.live.used != 0 {
			t.Fatalf("a worker has %d requests and %d blocks under way at the end", e.requests, e.live.used)
		}
	}
	return without, 1e3 * s.run.Total.TTFTMean, s.fleet.warm.copies
}

// popular is a workload with eight long system prompts. 60 % of the requests begin with the first prompt.
func popular(seed uint64, requests, workers int) Workload {
	w := sessions{name: "popular", prefixes: 8, prefixTokens: 32_768, hot: 0.6, turns: 1, first: 1200, output: 150}.
		workload(seed, requests, MatrixEngine())
	w.Workers = workers
	return w
}

// TestWarmUpOfPopularPrompt runs a popular system prompt at 0.7 and 0.9 of the saturating rate: with copies of hot
// prefixes, the mean TTFT is at most half.
func TestWarmUpOfPopularPrompt(t *testing.T) {
	testkit.Sequential(t)
	t.Parallel()
	for _, load := range []float64{0.7, 0.9} {
		for seed := range uint64(2) {
			w := popular(seed+1, 1000, 8)
			without, with, copies := warmed(t, w.AtRate(load*w.SaturatingRate(8)))
			t.Logf("load %.1f, seed %d: mean TTFT %.0f ms without and %.0f ms with %d copies", load, seed, without, with,
				copies)
			if copies == 0 || with > without/2 {
				t.Errorf("load %.1f, seed %d: mean TTFT %.0f ms without and %.0f ms with %d copies", load, seed, without, with,
					copies)
			}
		}
	}
}

// TestWarmUpOfTraces runs the generated forms of Mooncake's traces, and a workload with a hot prefix, at 0.7 of the
// saturating rate. Copies of hot prefixes raise the mean TTFT over all seeds by at most 5 %.
func TestWarmUpOfTraces(t *testing.T) {
	t.Parallel()
	for _, m := range MatrixWorkloads(1500, nil) {
		if !slices.Contains([]string{"conversation", "toolagent", "synthetic", "hot-prefix"}, m.Name) {
			continue
		}
		sum := [2]float64{}
		made, seeds := 0, 1
		if testkit.Whole { // .ci/daily
			seeds = 4
		}
		for seed := range uint64(seeds) {
			w := m.make(seed + 1)
			without, with, copies := warmed(t, m.at(seed+1, 0.7*w.SaturatingRate(w.Workers)))
			sum[0], sum[1], made = sum[0]+without, sum[1]+with, made+copies
		}
		t.Logf("%s: mean TTFT %.0f ms without and %.0f ms with %d copies in %d runs", m.Name, sum[0]/float64(seeds),
			sum[1]/float64(seeds), made, seeds)
		if sum[1] > 1.05*sum[0] {
			t.Errorf("%s: mean TTFT %.0f ms without and %.0f ms with copies", m.Name, sum[0]/float64(seeds),
				sum[1]/float64(seeds))
		}
	}
}
