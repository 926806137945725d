package routing

import (
	"errors"
	"math/rand/v2"
	"testing"
)

// TestAllBusy compares random calls with and without thresholds of a queue. The test counts busy ranks itself.
func TestAllBusy(t *testing.T) {
	rng := rand.New(rand.NewPCG(22, 1))
	selector, err := New("dynamo", DefaultConfig())
	if err != nil {
		t.Fatal(err)
	}
	var scratch Scratch
	saw := map[bool]int{}
	for range 5000 {
		q := &Queue{}
		if rng.IntN(3) > 0 {
			v := float64(rng.IntN(100))
			q.ThresholdTokens = &v
		}
		if q.ThresholdTokens == nil || rng.IntN(2) == 0 {
			v := rng.Float64() * 2
			q.ThresholdFrac = &v
		}
		r := &Request{ISL: 40, BlockSize: 4, Blocks: 10, Role: Decode}
		var candidates []Candidate
		free, left, best := 0, 0, uint64(0)
		for range 1 + rng.IntN(4) {
			w := &Worker{ID: "w", Role: []Role{Decode, Decode, Prefill}[rng.IntN(3)], MaxNumBatchedTokens: rng.Uint64N(3) * 40}
			c := Candidate{Worker: w, Device: rng.Uint32N(11), HasLoad: rng.IntN(8) > 0, ActivePrefillTokens: rng.Uint64N(120)}
			candidates = append(candidates, c)
			if w.Role != Decode {
				continue
			}
			left++
			batch := float64(w.MaxNumBatchedTokens)
			if batch == 0 {
				batch = 10_000_000
			}
			has := float64(c.ActivePrefillTokens)
			over := q.ThresholdTokens != nil && has > *q.ThresholdTokens ||
				q.ThresholdFrac != nil && has > *q.ThresholdFrac*batch
			if !c.HasLoad || !over {
				free++
			}
			best = max(best, uint64(c.Device)*4)
		}
		_, without := selector.Choose(r, candidates, rng, &scratch)
		r.Queue = q
		_, err := selector.Choose(r, candidates, rng, &scratch)
		var refusal *Refusal
		busy := errors.As(err, &refusal) && refusal.Code == AllBusy
		if want := left > 0 && free == 0; busy != want || !busy && (err == nil) != (without == nil) ||
			busy && (refusal.Eligible != left || refusal.BestCached != best) {
			t.Fatalf("%v, want busy %v: %d of %d free, %d cached; without a queue %v", err, want, free, left, best, without)
		}
		saw[busy]++
	}
	if saw[true] < 500 || saw[false] < 500 {
		t.Error(saw)
	}
}

// TestQueueClass: the name decides, then the family and the tokens to compute, then the default.
func TestQueueClass(t *testing.T) {
	small, large := 100.0, 1000.0
	q := Queue{Classes: []QueueClass{{Name: "short", UncachedBelow: &small}, {Name: "medium", UncachedBelow: &large},
		{Name: "batch-short", Family: "batch", UncachedBelow: &small}, {Name: "batch-long", Family: "batch"}}}
	for _, c := range []struct {
		name     string
		uncached uint64
		want     int
	}{
		{"", 99, 0}, {"", 100, 1}, {"", 1000, 4}, {"batch", 99, 2}, {"batch", 5000, 3}, {"medium", 5000, 1},
		{"nobody", 1, 4},
	} {
		if got := q.Class(c.name, c.uncached); got != c.want {
			t.Errorf("%q with %d tokens: %d, want %d", c.name, c.uncached, got, c.want)
		}
	}
}
