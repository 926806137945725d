package selection

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// BenchmarkSelect chooses among 256 workers and books, with a given answer of the index. Half of the workers hold 64
// blocks of the prompt's 512, and 10,000 requests are under way. Half of the requests are in prefill, and every worker
// has ended some, so that workers have measured rates. Workers with a part of the prompt have a full device memory, and
// so eviction costs. With sources, every choice looks for a KV source.
func BenchmarkSelect(b *testing.B) {
	for _, policy := range []string{"kvatlas", "dynamo"} {
		b.Run(policy, func(b *testing.B) { benchmarkSelect(b, policy, Sources{}) })
	}
	b.Run("kvatlas with sources", func(b *testing.B) {
		benchmarkSelect(b, "kvatlas", Sources{MinTokens: 1, Tiers: "host", Mark: func(*api.Answer) {}})
	})
}

func benchmarkSelect(b *testing.B, policy string, sources Sources) {
	const workers, blocks = 256, 512
	f := newFleet(b, workers, 1)
	f.service.cfg.Sources = sources
	answer := &api.Answer{Model: "m", BlockSize: block, Complete: true}
	for w := range workers / 2 {
		answer.Workers = append(answer.Workers,
			api.Overlap{Instance: events.WorkerID(strings.Clone(string(f.pool.Ranks[2*w].Instance))), Device: 64,
				Number: uint32(w + 1), Held: 4000, Full: 4000, Within: []uint32{64 + uint32(w%2)}})
	}
	f.service.cfg.Find = func(context.Context, *api.Query) (*api.Answer, error) { return answer, nil }
	hashes := func(k int) api.Hashes {
		list := make(api.Hashes, blocks)
		for i := range list {
			list[i] = uint64(i + 1)
			if i >= 64 {
				list[i] += uint64(k+1) << 32
			}
		}
		return list
	}
	for i := range 10_000 {
		var seq []events.SeqHash
		for _, h := range hashes(i)[:64+i%200] {
			seq = append(seq, events.SeqHash(h))
		}
		live := load.Booking{ID: fmt.Sprint("live", i), Rank: f.pool.Ranks[i%workers].RankKey, Hashes: seq,
			PrefillTokens: int64(i % 1000)}
		err := f.loads.Book(context.Background(), table("m"), live)
		if err == nil && i%2 == 0 {
			err = f.loads.PrefillComplete(context.Background(), table("m"), live.ID)
		}
		if err == nil && i >= 5000 && i%4 == 0 {
			live.ID = fmt.Sprint("past", i)
			if err = f.loads.Book(context.Background(), table("m"), live); err == nil {
				err = f.loads.Free(context.Background(), table("m"), live.ID)
			}
		}
		if err != nil {
			b.Fatal(err)
		}
	}
	r := &api.SelectRequest{Query: api.Query{Model: "m", Hashes: hashes(0)}, ISLTokens: blocks*block + 1, Book: true,
		Policy: policy}
	ctx := context.Background()
	var took []time.Duration
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		r.RequestID = "r" + fmt.Sprint(i)
		begun := time.Now()
		if _, err := f.service.Select(ctx, r); err != nil {
			b.Fatal(err)
		}
		took = append(took, time.Since(begun))
		b.StopTimer()
		if err := f.service.Free(ctx, &api.RequestRef{Model: "m", RequestID: r.RequestID}); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
	slices.Sort(took)
	for q, name := range map[float64]string{0.5: "p50-ns", 0.99: "p99-ns"} {
		b.ReportMetric(float64(took[int(q*float64(len(took)-1))]), name)
	}
}
