package routesim

import (
	"math/rand/v2"
	"strconv"
	"testing"

	"github.com/kvatlas/kvatlas/internal/choose/removal"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// hitsAfter runs a workload in which the picked workers leave at a moment, and returns the prompt tokens that later
// requests reused.
func hitsAfter(t *testing.T, c Config, at float64, pick func(*sim) []int) (tokens float64) {
	t.Helper()
	s, err := newSim(c)
	if err != nil {
		t.Fatal(err)
	}
	s.queue.push(after(at), func() error {
		for _, w := range pick(s) {
			if err := s.change(&Change{Worker: w}); err != nil {
				return err
			}
		}
		return nil
	})
	if err := s.loop(t.Context(), c.Workload.requests()); err != nil {
		t.Fatal(err)
	}
	for _, r := range s.all {
		if r.sent >= after(at) {
			tokens += float64(r.reused + r.loaded)
		}
	}
	return tokens
}

// removalOrder ranks the workers by the newest requests, as an indexer does by recorded requests.
func removalOrder(s *sim) (order []int) {
	const newest = 32 // as in package funnel
	var workers []events.WorkerID
	for w := range s.engines {
		workers = append(workers, events.WorkerID(strconv.Itoa(w)))
	}
	var sample [][]removal.Depth
	for _, r := range s.all[max(len(s.all)-newest, 0):] {
		var depths []removal.Depth
		for w, e := range s.engines {
			if n := prefix(r.prompt.blocks, e.pool.held); n > 0 {
				depths = append(depths, removal.Depth{Worker: workers[w], Blocks: uint32(n)})
			}
		}
		sample = append(sample, depths)
	}
	for _, c := range removal.Rank(workers, nil, sample) {
		w, _ := strconv.Atoi(string(c.Worker))
		order = append(order, w)
	}
	return order
}

// TestRemovalOrder removes three of eight workers in the middle of a run: none, in the order of package removal, and at
// random. The order loses at most half of the reuse that a random order loses.
func TestRemovalOrder(t *testing.T) {
	const workers, gone, orders = 8, 3, 4
	inOrder, random := 0.0, 0.0
	for seed := range uint64(testkit.Rounds(8)) {
		e := Defaults()
		w := sessions{name: "agents", prefixes: 4, prefixTokens: 3072, turns: 18, first: 2500, added: 900, output: 120,
			pause: 0.04}.workload(seed+1, 300, e).AtRate(1)
		w.Workers = workers
		c := config(w, ArmExactShared, 1)
		at := w.Duration() / 2
		all := hitsAfter(t, c, at, func(*sim) []int { return nil })
		lost := all - hitsAfter(t, c, at, func(s *sim) []int { return removalOrder(s)[:gone] })
		rng, mean := rand.New(rand.NewPCG(seed, 7)), 0.0
		for range orders {
			mean += (all - hitsAfter(t, c, at, func(*sim) []int { return rng.Perm(workers)[:gone] })) / orders
		}
		t.Logf("seed %d: of %.0f reused tokens, the order loses %.0f and a random order %.0f", seed, all, lost, mean)
		inOrder, random = inOrder+lost, random+mean
	}
	t.Logf("the order loses %.1f %% of a random order", 100*inOrder/random)
	if random <= 0 || inOrder > random/2 {
		t.Errorf("the order loses %.0f tokens, a random order %.0f", inOrder, random)
	}
}
