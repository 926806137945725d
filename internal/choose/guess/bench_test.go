package guess

import (
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// BenchmarkDepths measures a query of 512 blocks over 256 ranks with 20 prompts each. In the usual case the prompts
// have 64 common blocks, and a few ranks have more. In the worst case each rank has a different depth.
func BenchmarkDepths(b *testing.B) {
	const ranks, blocks = 256, 512
	for name, depth := range map[string]func(i int) int{
		"common=64": func(i int) int {
			if i%100 == 0 {
				return blocks - i%7
			}
			return 64
		},
		"all=512":   func(int) int { return blocks },
		"different": func(i int) int { return 64 + i%448 },
	} {
		b.Run(name, func(b *testing.B) {
			t := NewTable(1<<24, 0.8, time.Minute)
			rules, list := map[events.RankKey]Rule{}, map[events.RankKey]int32{}
			keys := make([]events.RankKey, ranks)
			for i := range keys {
				keys[i] = events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i))}
				rules[keys[i]], list[keys[i]] = Rule{TTL: time.Hour}, int32(i)
			}
			t.SetRules(0, rules)
			seq := func(k, common int) []events.SeqHash {
				list := make([]events.SeqHash, blocks)
				for i := range list {
					if list[i] = events.SeqHash(i + 1); i >= common {
						list[i] += events.SeqHash(k+1) << 32
					}
				}
				return list
			}
			for i := range ranks * 20 {
				common := 64
				if i < ranks {
					common = depth(i)
				}
				t.Observe(time.Duration(i), &load.Request{Key: load.Key{Owner: 1, Seq: uint64(i + 1)}, New: true,
					Rank: keys[i%ranks], Hashes: seq(i, common)})
			}
			if err := t.Check(); err != nil {
				b.Fatal(err)
			}
			asked, depths := seq(-1, blocks), make([]uint32, ranks)
			place, _ := t.Places(list)
			b.ReportAllocs()
			for b.Loop() {
				t.Depths(asked, place, depths)
			}
			for i, d := range depths {
				if d != uint32(depth(i)) {
					b.Fatalf("rank %d has %d, want %d", i, d, depth(i))
				}
			}
		})
	}
}

// BenchmarkBook books and ends prompts of 512 blocks on 256 ranks. The first 64 blocks are common.
func BenchmarkBook(b *testing.B) {
	t := NewTable(1<<20, 0.8, time.Minute)
	rules, keys := map[events.RankKey]Rule{}, make([]events.RankKey, 256)
	for i := range keys {
		keys[i] = events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i))}
		rules[keys[i]] = Rule{Capacity: 4096}
	}
	t.SetRules(0, rules)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		seq := make([]events.SeqHash, 512)
		for j := range seq {
			if seq[j] = events.SeqHash(j + 1); j >= 64 {
				seq[j] += events.SeqHash(i+1) << 32
			}
		}
		r := load.Request{Key: load.Key{Owner: 1, Seq: uint64(i + 1)}, New: true, Rank: keys[i%256], Hashes: seq}
		t.Observe(time.Duration(2*i), &r)
		r.New, r.Ended = false, true
		t.Observe(time.Duration(2*i+1), &r)
	}
}
