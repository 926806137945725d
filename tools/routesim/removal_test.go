package routesim

import (
	"errors"
	"math"
	"math/bits"
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

// The tests remove three of eight workers.
const removalWorkers, removedWorkers = 8, 3

// removalRun returns a run with sessions of 18 turns.
func removalRun(seed uint64, rate float64) Config {
	w := sessions{name: "agents", prefixes: 4, prefixTokens: 3072, turns: 18, first: 2500, added: 900, output: 120,
		pause: 0.04}.workload(seed+1, 300, Defaults()).AtRate(rate)
	w.Workers = removalWorkers
	return config(w, ArmExactShared, 1)
}

// lostBlocks returns a function with the loss by the removal of a set of workers now: the blocks that only these
// workers hold, and that a later request repeats from the start of its prompt. A bit of the set stands for a worker.
func lostBlocks(s *sim) func(gone uint) int {
	holders := map[block]uint{}
	for _, a := range s.Workload.Stages[0].Arrivals {
		if after(a.At) < s.now {
			continue
		}
		for w, e := range s.engines {
			for _, b := range a.Prompt.blocks[:prefix(a.Prompt.blocks, e.pool.held)] {
				holders[b] |= 1 << w
			}
		}
	}
	blocks := map[uint]int{} // by the set of holders
	for _, set := range holders {
		blocks[set]++
	}
	return func(gone uint) (lost int) {
		for set, n := range blocks {
			if set&^gone == 0 {
				lost += n
			}
		}
		return lost
	}
}

// errMeasured ends a run.
var errMeasured = errors.New("measured")

// TestRemovalOrder removes three workers in the middle of a run, in the order of package removal, at three request
// rates. The order loses at most half of the blocks that a random order loses. Later choices of the router have no
// effect on the comparison: they make the reuse of the rest of a run chaotic.
func TestRemovalOrder(t *testing.T) {
	for _, rate := range []float64{1, 2, 4} {
		inOrder, random, least := 0, 0.0, 0
		for seed := range uint64(testkit.Rounds(16)) {
			s, err := newSim(removalRun(seed, rate))
			if err != nil {
				t.Fatal(err)
			}
			s.queue.push(after(s.Workload.Duration()/2), func() error {
				lost, set := lostBlocks(s), uint(0)
				for _, w := range removalOrder(s)[:removedWorkers] {
					set |= 1 << w
				}
				inOrder += lost(set)
				sum, sets, best := 0, 0, math.MaxInt
				for set := range uint(1) << removalWorkers {
					if bits.OnesCount(set) == removedWorkers {
						sum, sets, best = sum+lost(set), sets+1, min(best, lost(set))
					}
				}
				random, least = random+float64(sum)/float64(sets), least+best
				return errMeasured
			})
			if err := s.loop(t.Context(), s.Workload.requests()); !errors.Is(err, errMeasured) {
				t.Fatal(err)
			}
		}
		t.Logf("rate %v: of a random order's %.0f blocks, the order loses %.1f %%, the best sets lose %.1f %%", rate, random,
			100*float64(inOrder)/random, 100*float64(least)/random)
		if random <= 0 || float64(inOrder) > random/2 {
			t.Errorf("rate %v: the order loses %d blocks, a random order %.0f", rate, inOrder, random)
		}
	}
}

// TestReuseAfterRemoval compares the reuse of the rest of a run: without a removal, with a removal in the order of
// package removal, and at random. The order loses at most half of the reuse that a random order loses.
func TestReuseAfterRemoval(t *testing.T) {
	const orders = 4
	inOrder, random := 0.0, 0.0
	for seed := range uint64(testkit.Rounds(4)) {
		c := removalRun(seed, 1)
		at := c.Workload.Duration() / 2
		all := hitsAfter(t, c, at, func(*sim) []int { return nil })
		lost := all - hitsAfter(t, c, at, func(s *sim) []int { return removalOrder(s)[:removedWorkers] })
		rng, mean := rand.New(rand.NewPCG(seed, 7)), 0.0
		for range orders {
			mean += (all - hitsAfter(t, c, at, func(*sim) []int { return rng.Perm(removalWorkers)[:removedWorkers] })) /
				orders
		}
		t.Logf("seed %d: of %.0f reused tokens, the order loses %.0f and a random order %.0f", seed, all, lost, mean)
		inOrder, random = inOrder+lost, random+mean
	}
	t.Logf("the order loses %.1f %% of a random order", 100*inOrder/random)
	if random <= 0 || inOrder > random/2 {
		t.Errorf("the order loses %.0f tokens, a random order %.0f", inOrder, random)
	}
}
