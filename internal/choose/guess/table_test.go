package guess

import (
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seedFlag = flag.Uint64("seed", 1, "seed of the random tests")

// TestTableIsItsTwin runs random histories on a table and its twin: timely and late bookings, unknown ranks, ends,
// outputs, refutations, new, changed and ended registrations; with and without room.
func TestTableIsItsTwin(t *testing.T) {
	histories, steps := 40, 300
	if testing.Short() {
		histories = 20
	}
	for h := range testkit.Rounds(histories) {
		seed := *seedFlag*1000 + uint64(h)
		if err := history(rand.New(rand.NewPCG(seed, 7)), steps); err != nil {
			t.Fatalf("seed %d, history %d: %v", *seedFlag, h, err)
		}
	}
}

func history(rng *rand.Rand, steps int) error {
	blocks := []int{40, 150, 1 << 20}[rng.IntN(3)]
	ratio := []float64{0.5, 0.8, 1}[rng.IntN(3)]
	table, twin := NewTable(blocks, ratio, 3*time.Second), newTwin(blocks, ratio, 3*time.Second)
	ranks := make([]events.RankKey, []int{5, 5, 60}[rng.IntN(3)])
	for i := range ranks {
		ranks[i] = events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i/2)), Rank: events.Rank(i % 2)}
	}
	now, key := time.Second*100, uint64(0)
	var running, over []*load.Request
	prompt := func() []events.SeqHash {
		seq := make([]events.SeqHash, rng.IntN(14))
		for i := range seq {
			if seq[i] = events.SeqHash(100 * i); rng.IntN(8) == 0 {
				seq[i] += events.SeqHash(rng.IntN(3))
			}
		}
		return seq
	}
	for range steps {
		now += time.Duration(1 + rng.Int64N(int64(400*time.Millisecond))) // all times differ
		observe := func(r load.Request) {
			table.Observe(now, &r)
			twin.observe(now, &r)
		}
		what := ""
		switch op := rng.IntN(20); {
		case op < 7:
			key++
			r := &load.Request{Key: load.Key{Owner: 1, Seq: key}, Rank: ranks[rng.IntN(len(ranks))], Hashes: prompt()}
			if rng.IntN(4) == 0 {
				r.Age = time.Duration(rng.Int64N(int64(6 * time.Second)))
			}
			if rng.IntN(8) == 0 {
				r.Private, r.Hashes = len(r.Hashes), nil
			}
			r.PrefillDone = rng.IntN(8) == 0
			what = fmt.Sprintf("book %+v", r)
			news := *r
			news.New = true
			observe(news)
			running = append(running, r)
		case op < 12 && len(running) > 0:
			i := rng.IntN(len(running))
			r := running[i]
			what = fmt.Sprintf("change of %+v", r)
			switch rng.IntN(3) {
			case 0:
				r.Outputs += 1 + rng.IntN(3)
			case 1:
				r.PrefillDone = true
			default:
				r.Ended = true
				running = slices.Delete(running, i, i+1)
				over = append(over, r)
			}
			observe(*r)
		case op == 12 && len(over) > 0: // a repeated end
			r := *over[rng.IntN(len(over))]
			if r.Ended {
				observe(r)
			}
		case op == 13:
			rules := map[events.RankKey]Rule{}
			for _, k := range ranks {
				switch rng.IntN(8) {
				case 0: // unregistered
				case 1:
					rules[k] = Rule{}
				case 2, 3:
					rules[k] = Rule{TTL: time.Duration(1+rng.IntN(4)) * time.Second}
				default:
					rules[k] = Rule{Capacity: 1 + rng.IntN(40)}
				}
			}
			what = fmt.Sprintf("rules %v", rules)
			table.SetRules(now, rules)
			twin.setRules(now, maps.Clone(rules))
		case op < 16:
			what = "expire"
			table.Expire(now)
			twin.expire(now)
		default:
			k, seq := ranks[rng.IntN(len(ranks))], prompt()
			if len(running) > 0 && rng.IntN(2) == 0 {
				r := running[rng.IntN(len(running))]
				k, seq = r.Rank, r.Hashes
			}
			confirmed, passed := rng.IntN(4), now-time.Duration(rng.Int64N(int64(2*time.Second)))
			what = fmt.Sprintf("refute %v %v from %d", k, seq, confirmed)
			if got, want := table.Refute(k, seq, confirmed, passed), twin.refute(k, seq, confirmed, passed); got != want {
				return fmt.Errorf("%s: %v, want %v", what, got, want)
			}
		}
		if err := same(table, twin, ranks, prompt); err != nil {
			return fmt.Errorf("after %s: %w", what, err)
		}
	}
	return nil
}

func same(table *Table, twin *twin, ranks []events.RankKey, prompt func() []events.SeqHash) error {
	if err := table.Check(); err != nil {
		return err
	}
	if table.Size() != twin.total() || table.Dropped != twin.dropped {
		return fmt.Errorf("size %d, want %d; dropped %v, want %v", table.Size(), twin.total(), table.Dropped, twin.dropped)
	}
	if table.Size() > table.blocks { // only leased blocks may exceed the maximum
		for _, k := range table.ranks {
			if k != nil && len(k.queue) > 0 {
				return fmt.Errorf("%d blocks, more than %d, and %v has some to drop", table.Size(), table.blocks, k.key)
			}
		}
	}
	list := map[events.RankKey]int32{}
	for i, k := range ranks {
		list[k] = int32(i)
	}
	place, _ := table.Places(list)
	for range 4 {
		seq, got := prompt(), make([]uint32, len(ranks))
		some := table.Depths(seq, place, got)
		for i, k := range ranks {
			if want := twin.depth(k, seq); int(got[i]) != want || want > 0 && !some {
				return fmt.Errorf("%v has %d of %v, want %d", k, got[i], seq, want)
			}
		}
	}
	return nil
}

// TestPast transfers a table's guesses to an empty table, which then has the same guesses and size, and to a table with
// guesses.
func TestPast(t *testing.T) {
	for h := range uint64(60) {
		rng := rand.New(rand.NewPCG(*seedFlag*1000+h, 8))
		rules, ranks := map[events.RankKey]Rule{}, make([]events.RankKey, 6)
		list := map[events.RankKey]int32{}
		for i := range ranks {
			ranks[i] = events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i))}
			list[ranks[i]] = int32(i)
			if rules[ranks[i]] = (Rule{TTL: 3 * time.Second}); i%2 == 0 {
				rules[ranks[i]] = Rule{Capacity: 20 + 10*i}
			}
		}
		prompt := func() []events.SeqHash {
			seq := make([]events.SeqHash, 1+rng.IntN(14))
			for i := range seq {
				if seq[i] = events.SeqHash(100 * i); rng.IntN(8) == 0 {
					seq[i] += events.SeqHash(rng.IntN(3))
				}
			}
			return seq
		}
		now, key := 100*time.Second, uint64(0)
		filled := func(n int) *Table {
			table := NewTable(1<<20, 1, time.Second)
			table.SetRules(now, rules)
			for range n {
				now += time.Duration(1 + rng.Int64N(int64(200*time.Millisecond)))
				key++
				r := load.Request{Key: load.Key{Owner: 1, Seq: key}, Rank: ranks[rng.IntN(6)], Hashes: prompt(), New: true,
					Private: rng.IntN(3)}
				table.Observe(now, &r)
				if r.New, r.Ended = false, true; rules[r.Rank].Capacity > 0 || rng.IntN(4) > 0 {
					table.Observe(now, &r)
				}
			}
			table.Expire(now)
			return table
		}
		other, from, to := filled(int(h)%30), filled(40), filled(0)
		depths := func(of *Table, seq []events.SeqHash) []uint32 {
			place, _ := of.Places(list)
			got := make([]uint32, len(ranks))
			of.Depths(seq, place, got)
			return got
		}
		other.Expire(now)
		own := map[string][]uint32{}
		for range 50 {
			seq := prompt()
			own[path(seq)] = depths(other, seq)
		}
		for _, to := range []*Table{to, other} {
			n, last := 0, time.Duration(0)
			from.Past(now, func(r *load.Request) bool {
				if n++; r.Age < last {
					t.Fatalf("history %d: age %v after %v", h, r.Age, last)
				}
				last = r.Age
				to.Recall(now, r)
				return true
			})
			if err := to.Check(); err != nil || n > 80 {
				t.Fatalf("history %d: %d requests, %v", h, n, err)
			}
		}
		if to.Size() != from.Size() {
			t.Fatalf("history %d: %d blocks, want %d", h, to.Size(), from.Size())
		}
		for range 50 {
			seq := prompt()
			if got, want := depths(to, seq), depths(from, seq); !slices.Equal(got, want) {
				t.Fatalf("history %d: %v of %v, want %v", h, got, seq, want)
			}
			for i, had := range own[path(seq)] {
				if got := depths(other, seq); got[i] < had && rules[ranks[i]].Capacity == 0 {
					t.Fatalf("history %d: %v of %v, had %v", h, got, seq, had)
				}
			}
		}
	}
}
