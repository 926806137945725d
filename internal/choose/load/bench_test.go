package load

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// busy returns a table of 256 ranks with 10,000 requests of 512 blocks, and the prompts of the first 1,000 requests.
// Half of the prompts begin with a prefix of 64 blocks. There are eight prefixes.
func busy(tb testing.TB) (*Table, [][]events.SeqHash) {
	r := rand.New(rand.NewPCG(1, 2))
	table := NewTable(1, Limits{})
	var queries [][]events.SeqHash
	for i := range 10_000 {
		seq := make([]events.SeqHash, 512)
		for k := range seq {
			seq[k] = events.SeqHash(r.Uint64())
			if i%2 == 0 && k < 64 {
				seq[k] = events.SeqHash(i/2%8*64 + k)
			}
		}
		if i < 1000 {
			queries = append(queries, seq)
		}
		if err := table.Book(0, Booking{ID: fmt.Sprint(i), Rank: rankKey(i % 256), Hashes: seq,
			PrefillTokens: 4096}); err != nil {
			tb.Fatal(err)
		}
	}
	return table, queries
}

func BenchmarkLoads(b *testing.B) {
	table, queries := busy(b)
	var dst []int32
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		dst = table.Depths(dst, queries[i%len(queries)])
		i++
	}
}

// BenchmarkLoadsOfLadder books prefixes of a single prompt, with a different length for each of 256 ranks. The query is
// the most expensive possible query.
func BenchmarkLoadsOfLadder(b *testing.B) {
	table := NewTable(1, Limits{})
	seq := make([]events.SeqHash, 512)
	for i := range seq {
		seq[i] = events.SeqHash(i)
	}
	for i := range 256 {
		if err := table.Book(0, Booking{ID: fmt.Sprint(i), Rank: rankKey(i), Hashes: seq[:2*i+2]}); err != nil {
			b.Fatal(err)
		}
	}
	var dst []int32
	b.ReportAllocs()
	for b.Loop() {
		dst = table.Depths(dst, seq)
	}
}

func BenchmarkBookAndFree(b *testing.B) {
	table, queries := busy(b)
	ids := make([]string, 1000)
	for i := range ids {
		ids[i] = fmt.Sprint("b", i)
	}
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		id := ids[i%len(ids)]
		if err := table.Book(0, Booking{ID: id, Rank: rankKey(i % 256), Hashes: queries[i%len(queries)],
			PrefillTokens: 100}); err != nil {
			b.Fatal(err)
		}
		if err := table.Free(0, id); err != nil {
			b.Fatal(err)
		}
		i++
	}
}

func BenchmarkOutputBlock(b *testing.B) {
	table, _ := busy(b)
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		if err := table.OutputBlock(0, fmt.Sprint(i%10_000), 0.5); err != nil {
			b.Fatal(err)
		}
		i++
	}
}

// BenchmarkLock compares locks around a table. All goroutines read the table. Every eighth iteration also books and
// frees a request.
func BenchmarkLock(b *testing.B) {
	var rw sync.RWMutex
	var mu sync.Mutex
	for name, l := range map[string][4]func(){
		"mutex":   {mu.Lock, mu.Unlock, mu.Lock, mu.Unlock},
		"rwmutex": {rw.Lock, rw.Unlock, rw.RLock, rw.RUnlock},
	} {
		b.Run(name, func(b *testing.B) {
			table, queries := busy(b)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				var dst []int32
				r := rand.New(rand.NewPCG(3, 4))
				for i := 0; pb.Next(); i++ {
					seq := queries[i%len(queries)]
					if i%8 == 0 {
						id := fmt.Sprint("x", r.Uint64())
						l[0]()
						_ = table.Book(0, Booking{ID: id, Rank: rankKey(i % 256), Hashes: seq})
						_ = table.Free(0, id)
						l[1]()
					}
					l[2]()
					dst = table.Depths(dst, seq)
					l[3]()
				}
			})
		})
	}
}

// pair returns two connected replicas.
func pair(tb testing.TB) (a, b *Replica) {
	a, b = NewReplica(0, ReplicaConfig{Origin: 1}), NewReplica(0, ReplicaConfig{Origin: 2})
	a.Alone()
	b.Alone()
	give(a.Step(0), b)
	give(b.Step(0), a)
	return a, b
}

// give delivers messages to a replica and returns the number of bytes.
func give(list []shared.Message, to *Replica) (bytes int) {
	for _, m := range list {
		bytes += len(m.Data)
		to.Receive(to.now, m.Data)
	}
	return bytes
}

// BenchmarkReplicate books and frees requests on a node and sends the changes to a second node. The time is per
// request, for both nodes together.
func BenchmarkReplicate(b *testing.B) {
	_, queries := busy(b)
	from, to := pair(b)
	model := Model{Name: "m"}
	for i, seq := range queries {
		if err := from.Book(0, model, Booking{ID: fmt.Sprint(i), Rank: rankKey(i % 256), Hashes: seq}); err != nil {
			b.Fatal(err)
		}
	}
	give(from.Step(0), to)
	b.ReportAllocs()
	i, bytes := 0, 0
	for b.Loop() {
		id := fmt.Sprint("x", i)
		if err := from.Book(0, model, Booking{ID: id, Rank: rankKey(i % 256), Hashes: queries[i%len(queries)]}); err != nil {
			b.Fatal(err)
		}
		if err := from.Free(0, model, id); err != nil {
			b.Fatal(err)
		}
		if i++; i%128 == 0 {
			bytes += give(from.Step(0), to)
		}
	}
	b.ReportMetric(float64(bytes)/float64(i), "wire-B/op")
}

// BenchmarkService books, changes and frees a request on a service without peers.
func BenchmarkService(b *testing.B) {
	_, queries := busy(b)
	s, ctx, model := New(Config{}), context.Background(), Model{Name: "m"}
	s.Alone()
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		id := fmt.Sprint("x", i)
		err := s.Book(ctx, model, Booking{ID: id, Rank: rankKey(i % 256), Hashes: queries[i%len(queries)]})
		if err == nil {
			err = s.PrefillComplete(ctx, model, id)
		}
		if err == nil {
			err = s.OutputBlock(ctx, model, id, 0.5)
		}
		if err == nil {
			err = s.Free(ctx, model, id)
		}
		if err != nil {
			b.Fatal(err)
		}
		if i++; i%128 == 0 {
			s.Machine.Step(s.Now())
		}
	}
}
