package routing

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// expectedTwin is the cost of the policy kvatlas by the formula of the package comment, with all terms in one place.
func expectedTwin(r *Request, all []Candidate, i int) (cost, tokens float64) {
	w, size := &all[i], float64(r.BlockSize)
	rate := w.PrefillRate
	if rate == 0 {
		rate = 10
	}
	busy, mean := 0.0, 0.0
	for k := range all {
		busy += all[k].Busy / float64(len(all))
		if all[k].PrefillRate == 0 {
			mean += 10 / float64(len(all))
		}
		mean += all[k].PrefillRate / float64(len(all))
	}
	congestion := 3.0
	if busy < 1 {
		congestion = math.Min(3, 1/math.Pow(1-busy, 2))
	}
	of := func(blocks uint32) float64 { return float64(blocks) * size }
	device := of(w.Device)
	if under := float64(r.Blocks-min(w.NewBlocks, r.Blocks)) * size; w.HasLoad {
		device = math.Max(device, under)
	}
	device = math.Min(device, float64(r.ISL))
	all3 := of(w.Device) + of(w.Host) + of(w.Disk) + of(w.WouldLoad)
	held := math.Min(math.Max(all3, device), float64(r.ISL))
	left := float64(r.ISL) - held
	// ends of the tiers in the prompt: blocks of requests under way are not loaded
	load, transfer, end := 0.0, 0.0, held
	for _, tier := range []struct {
		blocks uint32
		share  float64
	}{{w.WouldLoad, 0.2}, {w.Disk, 0.5}, {w.Host, 0.1}} {
		n := math.Min(of(tier.blocks), end-device)
		load, end = load+n*tier.share, end-n
	}
	prefill := left / rate * (1 + (float64(r.ISL)-left/2)/32768)
	if r.Role == Decode {
		transfer, prefill = left*0.2, 0
	}
	cost = (load+transfer)/rate + prefill + (congestion-1)*prefill*rate/mean
	if w.HasLoad {
		queue := float64(w.ActivePrefillTokens) / rate
		if w.PrefillRequests > 0 {
			queue -= math.Min(w.WorkingMS, queue/float64(w.PrefillRequests))
		}
		decoding := math.Max(0, float64(w.ActiveRequests)-float64(w.PrefillRequests))
		cost += queue + 0.1*float64(w.ActiveBlocks)*size/rate + 0.05*decoding*prefill
	}
	room := float64(w.Worker.TotalKVBlocks)
	if need := float64(w.ActiveBlocks + w.NewBlocks); w.HasLoad && room > 0 && need > room {
		cost += w.LifeMS * math.Min((need-room)/math.Max(float64(w.ActiveBlocks), 1), 1)
	}
	if w.Memory != nil {
		evicted := math.Max(0, math.Ceil((float64(r.ISL)-device)/size)-float64(w.Memory.Free))
		share := 1.0
		if r.Role == Decode {
			share = 0.2
		}
		if w.Memory.Tiered {
			share *= 0.1
		}
		cost += evicted * size / mean * w.Memory.Unique * w.Memory.Again * share * congestion
	}
	return cost, left + load
}

// TestExpectedLikeItsTwin compares costs and choices of random requests with the twin.
func TestExpectedLikeItsTwin(t *testing.T) {
	t.Parallel()
	var scratch Scratch
	for seed := range uint64(testkit.Rounds(3000)) {
		rng := rand.New(rand.NewPCG(seed, 36))
		config := DefaultConfig()
		config.HostCacheHitWeight, config.DiskCacheHitWeight = rng.Float64(), rng.Float64()
		config.SharedCacheMultiplier = rng.Float64()
		s, err := New("kvatlas", config)
		if err != nil {
			t.Fatal(err)
		}
		r := &Request{ISL: 1 + rng.Uint64N(20_000), BlockSize: 1 + rng.Uint32N(64), Explain: true,
			Role: []Role{"", Prefill, Decode}[rng.IntN(3)]}
		r.Blocks = r.ISL / uint64(r.BlockSize)
		all := make([]Candidate, 1+rng.IntN(8))
		for i := range all {
			c := &all[i]
			c.Worker = &Worker{ID: events.WorkerID(fmt.Sprint(i)), Role: r.Role, TotalKVBlocks: uint64(rng.IntN(2) * 1000)}
			deep := func() uint32 { return rng.Uint32N(uint32(r.RequestBlocks()) + 1) }
			c.Device, c.Host, c.Disk, c.WouldLoad = 1+deep(), deep()/2, deep()/4, deep()/4
			if c.HasLoad = rng.IntN(4) > 0; c.HasLoad {
				c.PrefillRequests = rng.Uint64N(4)
				c.ActivePrefillTokens, c.ActiveRequests = c.PrefillRequests*rng.Uint64N(9000), rng.Uint64N(30)
				c.Busy, c.WorkingMS = rng.Float64(), 200*rng.Float64()
				c.ActiveBlocks, c.NewBlocks, c.LifeMS = rng.Uint64N(1500), rng.Uint64N(200), 5000*rng.Float64()
				c.PrefillRate = float64(rng.IntN(2)) * 20 * rng.Float64()
			}
			if rng.IntN(2) == 0 {
				c.Memory = &Memory{rng.Uint64N(300) * rng.Uint64N(2), rng.Float64(), rng.Float64(), rng.IntN(2) == 0}
			}
		}
		choice, err := s.Choose(r, all, rng, &scratch)
		if err != nil {
			t.Fatal(err)
		}
		var want []float64
		for i := range all {
			cost, tokens := expectedTwin(r, all, i)
			want = append(want, cost)
			if got := choice.Explanation.Candidates[i].Estimate.EffectivePrefillTokens; got != uint64(math.Round(tokens)) {
				t.Fatalf("seed %d: candidate %d counts %d tokens of prefill, want %v", seed, i, got, tokens)
			}
		}
		least := slices.Min(want)
		for i, x := range choice.Explanation.Candidates {
			sum := 0.0
			for _, score := range x.Scores {
				sum += score.Cost
			}
			near := func(a, b float64) bool { return math.Abs(a-b) <= 1e-9*math.Max(1, math.Abs(a)) }
			if !near(x.Cost, want[i]) || !near(sum, want[i]) || len(x.Scores) != 8 {
				t.Fatalf("seed %d: candidate %d costs %v (%+v), want %v", seed, i, x.Cost, x.Scores, want[i])
			}
			if want[i] > least*1.021+1.001 && (x.Chosen || x.Probability > 0) {
				t.Fatalf("seed %d: candidate %d of cost %v may be chosen; the least is %v", seed, i, x.Cost, least)
			}
			if want[i] < least*1.019+0.999 && x.Probability == 0 {
				t.Fatalf("seed %d: candidate %d of cost %v may not be chosen; the least is %v", seed, i, x.Cost, least)
			}
		}
	}
}

// TestEvictionDecidesWhereACopyGoes: a hot prefix is on a worker with a long queue, and two idle workers lack the
// prefix. The copy goes to the worker with free memory. Without free memory, it goes to the worker with evictable
// blocks that have other copies or no further requests.
func TestEvictionDecidesWhereACopyGoes(t *testing.T) {
	t.Parallel()
	s, err := New("kvatlas", DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	full := func(unique, again float64) *Memory { return &Memory{Unique: unique, Again: again} }
	for name, other := range map[string]*Memory{
		"free memory": {Free: 600, Unique: 0.9, Again: 0.5}, "never evicted": nil,
		"blocks that others hold": full(0.1, 0.5), "blocks that no request needs": full(0.9, 0.01),
		"blocks in a lower tier": {Unique: 0.9, Again: 0.5, Tiered: true},
	} {
		list := make([]Candidate, 3)
		for i := range list {
			list[i] = Candidate{Worker: &Worker{ID: events.WorkerID(fmt.Sprint(i))}, HasLoad: true, NewBlocks: 512,
				PrefillRate: 10, Busy: 0.5, Memory: full(0.9, 0.5)}
		}
		list[0].Device, list[0].NewBlocks, list[0].ActivePrefillTokens = 500, 12, 200_000
		list[2].Memory = other
		var scratch Scratch
		r := &Request{ISL: 8192, BlockSize: 16, Blocks: 512, Explain: true}
		choice, err := s.Choose(r, list, rand.New(rand.NewPCG(1, 1)), &scratch)
		if err != nil || choice.Index != 2 || choice.Probability != 1 {
			t.Errorf("%s: %+v, %v", name, choice, err)
			continue
		}
		got := choice.Explanation.Candidates
		if got[1].Memory != list[1].Memory || got[2].Memory != other {
			t.Errorf("%s: the explanation has %+v and %+v", name, got[1].Memory, got[2].Memory)
		}
	}
}
