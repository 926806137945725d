package routing

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// reuseTwin keeps every use of a block.
type reuseTwin struct {
	last map[events.SeqHash]time.Duration
	ages []time.Duration // of uses, until the next request; negative: there was none
	use  map[events.SeqHash]int
}

func (w *reuseTwin) requested(now time.Duration, prompt []events.SeqHash) {
	for _, h := range prompt {
		if last, ok := w.last[h]; ok {
			w.ages[w.use[h]] = now - last
		}
		w.last[h], w.use[h] = now, len(w.ages)
		w.ages = append(w.ages, -1)
	}
}

// again counts uses without a request within an age, and the part of them with a request within twice the age.
func (w *reuseTwin) again(age time.Duration) float64 {
	without, some := 0, 0
	for _, a := range w.ages {
		if a < 0 || a >= age {
			without++
			if a >= age && a < 2*age {
				some++
			}
		}
	}
	return float64(some) / float64(max(without, 1))
}

// TestReuseLikeItsTwin compares probabilities with a twin that keeps every block. At ages between two powers of two,
// the sum of a span is divided as if ages were evenly distributed.
func TestReuseLikeItsTwin(t *testing.T) {
	t.Parallel()
	for seed := range uint64(30) {
		rng := rand.New(rand.NewPCG(seed, 36))
		blocks, sampled := uint64(200+rng.IntN(3000)), seed%2 == 1
		if sampled {
			blocks = 20_000
		}
		var r Reuse
		twin := reuseTwin{last: map[events.SeqHash]time.Duration{}, use: map[events.SeqHash]int{}}
		now := time.Second
		for range map[bool]int{false: 300, true: 6000}[sampled] {
			now += time.Duration(rng.ExpFloat64() * float64(100*time.Millisecond))
			prompt := make([]events.SeqHash, 1+rng.IntN(40))
			first := uint64(math.Pow(rng.Float64(), 3) * float64(blocks)) // some blocks are more frequent than others
			for i := range prompt {
				prompt[i] = events.SeqHash(first + uint64(i))
			}
			r.Requested(now, prompt)
			twin.requested(now, prompt)
		}
		if (r.limit < math.MaxUint64) != sampled {
			t.Fatalf("seed %d: the sample has the blocks up to %x", seed, r.limit)
		}
		for k := range 14 {
			age := time.Millisecond << k
			got, want := r.Again(age), twin.again(age)
			off := 1e-9
			if sampled {
				off = 0.03
			}
			if math.Abs(got-want) > off {
				t.Errorf("seed %d: %v of the blocks are needed again after %v, want %v", seed, got, age, want)
			}
			if between := r.Again(age * 3 / 2); between < 0 || between > 1 {
				t.Errorf("seed %d: probability %v", seed, between)
			}
		}
	}
}

// TestReuseIsBounded: the sample and the probabilities stay within their bounds for all inputs.
func TestReuseIsBounded(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(2, 36))
	for range 20 {
		var r Reuse
		if p := r.Again(time.Second); p != 0 {
			t.Fatalf("without a request: %v", p)
		}
		for range 200 {
			prompt := make([]events.SeqHash, rng.IntN(300))
			for i := range prompt {
				prompt[i] = events.SeqHash(rng.Uint64() >> rng.IntN(64))
			}
			r.Requested(time.Duration(rng.Int64()>>rng.IntN(63)), prompt)
			if len(r.last) > reuseBlocks || r.uses > reuseUses+300 {
				t.Fatalf("%d blocks, %v uses", len(r.last), r.uses)
			}
			if p := r.Again(time.Duration(rng.Int64() >> rng.IntN(63))); !(p >= 0 && p <= 1) {
				t.Fatalf("probability %v", p)
			}
		}
	}
}

// TestUnique: the share counts prompts for which the rank alone held the longest part, among all prompts for which the
// rank held a longest part.
func TestUnique(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(3, 36))
	var u, none Unique
	for range 2000 {
		list := []Candidate{{Device: 3 + rng.Uint32N(2)}, {Device: 3}, {Device: rng.Uint32N(3)}}
		Longest(list, func(i int, alone bool) {
			if i == 2 {
				t.Fatal("the candidate holds less than the rest")
			}
			if i == 0 {
				u.Longest(alone)
			}
		})
	}
	if got := u.Share(); math.Abs(got-0.5) > 0.15 {
		t.Errorf("share %v, want about a half", got)
	}
	if none.Share() != 1 {
		t.Errorf("without a prompt: %v", none.Share())
	}
	Longest([]Candidate{{}, {Host: 3}}, func(int, bool) { t.Error("no candidate holds anything in device memory") })
}

// TestEvictionAge: blocks stay for the time in which the rank computes a whole memory of blocks, within a bound.
func TestEvictionAge(t *testing.T) {
	t.Parallel()
	if got := EvictionAge(1000, 16, 10, 0.5); got != 3200*time.Millisecond {
		t.Errorf("16,000 tokens at 5 tokens per millisecond last for %v", got)
	}
	for _, idle := range []time.Duration{EvictionAge(1000, 16, 10, 0), EvictionAge(math.MaxUint64, 16, 0.01, 1e-9)} {
		if idle != mostAge {
			t.Errorf("age %v, want the bound", idle)
		}
	}
}
