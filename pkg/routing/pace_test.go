package routing

import (
	"math"
	"math/rand/v2"
	"testing"
	"time"
)

// TestPaceOfAQueue simulates ranks that prefill requests one by one, at a given rate and with given pauses.
func TestPaceOfAQueue(t *testing.T) {
	t.Parallel()
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 36))
		rate, load := 1+30*rng.Float64(), 0.1+0.7*rng.Float64()
		var p Pace
		now, free := time.Second, time.Duration(0)
		const mean = 2000.0 // tokens
		for range 3000 {
			now += time.Duration(rng.ExpFloat64() * mean / rate / load * float64(time.Millisecond))
			tokens := 1 + rng.Int64N(2*mean)
			free = max(free, now) + time.Duration(float64(tokens)/rate*float64(time.Millisecond))
			p.Prefilled(free, now, tokens)
		}
		p.Tick(now)
		if got := p.Rate(0); math.Abs(got-rate) > 0.04*(rate+10) {
			t.Errorf("seed %d: rate %.2f, measured %.2f", seed, rate, got)
		}
		if got := p.Busy(); math.Abs(got-load) > 0.25 {
			t.Errorf("seed %d: busy %.2f, measured %.2f", seed, load, got)
		}
		if p.Tick(now + time.Hour); p.Busy() > 0.01+PriorBusy*priorTime/window {
			t.Errorf("seed %d: busy %.2f after an hour without requests", seed, p.Busy())
		}
	}
}

// TestPaceIsBounded: rates and shares stay within their bounds for all inputs.
func TestPaceIsBounded(t *testing.T) {
	t.Parallel()
	rng := rand.New(rand.NewPCG(1, 36))
	for range 200 {
		var p, fleet Pace
		for range 100 {
			now, sent := time.Duration(rng.Int64()>>rng.IntN(63)), time.Duration(rng.Int64()>>rng.IntN(63))
			p.Prefilled(now, sent, rng.Int64()>>rng.IntN(63)-5)
			p.Tick(time.Duration(rng.Int64() >> rng.IntN(63)))
			fleet.Add(&p)
			for _, rate := range []float64{p.Rate(0), p.Rate(fleet.Rate(0)), fleet.Rate(0)} {
				if !(rate >= leastRate && rate <= mostRate) {
					t.Fatalf("rate %v of %+v", rate, p)
				}
			}
			if b := p.Busy(); !(b >= 0 && b <= 1) {
				t.Fatalf("busy %v of %+v", b, p)
			}
			p.Ended(now, sent)
			if l := p.Life(); !(l >= 0 && l <= mostLife) {
				t.Fatalf("life %v of %+v", l, p)
			}
			if w := p.Working(now, sent); !(w >= 0) {
				t.Fatalf("working %v", w)
			}
		}
	}
	var p Pace
	if p.Rate(0) != priorPrefillRate || p.Rate(3) != 3 || p.Busy() != PriorBusy {
		t.Errorf("nothing measured: %v, %v, %v", p.Rate(0), p.Rate(3), p.Busy())
	}
}
