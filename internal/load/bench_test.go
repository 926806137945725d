package load

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// busy is a table of 256 ranks with 10,000 requests of 512 blocks; half of them begin with one of eight prefixes of 64
// blocks.
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
	var dst []Load
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		dst = table.Loads(dst, queries[i%len(queries)])
		i++
	}
}

// BenchmarkLoadsOfLadder has each of 256 ranks end at another block of one prompt: the most that a query can cost.
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
	var dst []Load
	b.ReportAllocs()
	for b.Loop() {
		dst = table.Loads(dst, seq)
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

// BenchmarkLock compares locks around a table of which all read, and each eighth books and frees too.
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
				var dst []Load
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
					dst = table.Loads(dst, seq)
					l[3]()
				}
			})
		})
	}
}
