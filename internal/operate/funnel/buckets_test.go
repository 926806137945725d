package funnel

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestBucketsOfAnHour records requests and reports over hours, some late, on two nodes, and compares with sums by span.
// An hour needs only the buckets of spans for ten minutes, and of minutes.
func TestBucketsOfAnHour(t *testing.T) {
	const model = "m"
	for seed := range uint64(20) {
		rng := rand.New(rand.NewPCG(seed, 3))
		var nodes [2]Buckets
		asked, lostTo := map[int64]uint64{}, map[int64]map[events.WorkerID]uint64{}
		now := time.Unix(1_800_000_000+rng.Int64N(600), 0)
		for range 3000 {
			now = now.Add(time.Duration(rng.ExpFloat64() * float64(6*time.Second)))
			if rng.IntN(500) == 0 {
				now = now.Add(time.Duration(rng.Int64N(int64(80 * time.Minute))))
			}
			at := now
			if rng.IntN(4) == 0 {
				at = at.Add(-time.Duration(rng.Int64N(int64(50 * time.Minute))))
			}
			n, by := uint64(1+rng.IntN(1000)), events.WorkerID(fmt.Sprint(rng.IntN(5)))
			node := &nodes[rng.IntN(2)]
			r := &Request{At: at, Model: model, Routed: true}
			if !node.add(&Request{At: now, Model: model}, &share{}) || !node.add(r, &share{asked: n, lost: []loss{
				{step: api.StepHeld, cause: api.CauseEvicted, tokens: n, worker: by, tier: events.Device}}}) {
				t.Fatalf("seed %d: a request of %s at %s is not counted", seed, at, now)
			}
			in := at.UnixNano() / int64(span)
			if asked[in] += n; lostTo[in] == nil {
				lostTo[in] = map[events.WorkerID]uint64{}
			}
			lostTo[in][by] += n
			if len(node.models[model]) > fine+wide+int(hour)/wide {
				t.Fatalf("seed %d: there are %d buckets", seed, len(node.models[model]))
			}
			if rng.IntN(50) > 0 {
				continue
			}
			since := time.Duration(1+rng.Int64N(60)) * time.Minute
			f := nodes[0].funnel(model, firstSpan(now.Add(-since), now), now)
			Merge(f, nodes[1].funnel(model, firstSpan(now.Add(-since), now), now))
			first, sum, workers := f.From.UnixNano()/int64(span), uint64(0), map[events.WorkerID]uint64{}
			if early := now.Add(-since).Sub(f.From); early >= time.Minute || since <= 10*time.Minute && early >= span {
				t.Fatalf("seed %d: a window of %s begins %s before it", seed, since, early)
			}
			for in, n := range asked {
				if in >= first {
					sum += n
					for w, n := range lostTo[in] {
						workers[w] += n
					}
				}
			}
			if f.Steps[0].Tokens != sum || f.Steps[2].Lost[0].Tokens != sum {
				t.Fatalf("seed %d: since %s %d tokens were asked for, %d lost, want %d", seed, f.From, f.Steps[0].Tokens,
					f.Steps[2].Lost[0].Tokens, sum)
			}
			if f.Decisions[outcomeNoWorker] != f.Routed || f.Requests < f.Routed {
				t.Fatalf("seed %d: %d choices of %d requests by outcome: %v", seed, f.Routed, f.Requests, f.Decisions)
			}
			for _, w := range f.Steps[2].Lost[0].Workers {
				if w.Tokens != workers[w.Worker] {
					t.Fatalf("seed %d: of %s %d tokens were lost, want %d", seed, w.Worker, w.Tokens, workers[w.Worker])
				}
			}
			end := f.From
			for _, b := range f.Buckets {
				want := uint64(0)
				for in := range int64(b.Seconds) / 10 {
					want += asked[b.From.UnixNano()/int64(span)+in]
				}
				if b.Asked != want || b.Lost[api.CauseEvicted] != want || b.From.Before(end) {
					t.Fatalf("seed %d: the bucket %+v, behind %s, should have %d", seed, b, end, want)
				}
				end = b.From.Add(time.Duration(b.Seconds) * time.Second)
			}
		}
	}
}

// TestNothingReported: without a report, the share of the step reused is unknown. A report of another node is enough.
func TestNothingReported(t *testing.T) {
	now := time.Unix(1_000_000, 0)
	parts := [2]Buckets{}
	for i := range parts {
		if !parts[i].add(&Request{At: now, Model: "m", Routed: true}, &share{asked: 100, seen: 80, held: 60, selected: 40}) {
			t.Fatal("not counted")
		}
	}
	f := parts[0].funnel("m", firstSpan(now.Add(-time.Minute), now), now)
	if s := f.Steps[4]; s.Step != api.StepReused || !s.NotReported || s.Share != nil || s.Tokens != 0 {
		t.Errorf("without a report: %+v", s)
	}
	if s := f.Steps[3]; s.NotReported || s.Share == nil || *s.Share != 0.4 {
		t.Errorf("selected: %+v", s)
	}
	parts[1].models["m"][0].reports, parts[1].models["m"][0].reused = 1, 20
	Merge(f, parts[1].funnel("m", firstSpan(now.Add(-time.Minute), now), now))
	if s := f.Steps[4]; s.NotReported || s.Share == nil || *s.Share != 0.1 || f.Buckets[0].Reported != 1 {
		t.Errorf("with a report: %+v, %+v", s, f.Buckets)
	}
}
