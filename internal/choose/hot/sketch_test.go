package hot

import (
	"flag"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var seed = flag.Uint64("seed", 1, "of random tests")

// exact is the naive twin of a sketch: it keeps all additions.
type exact struct {
	halfLife  time.Duration
	additions map[events.SeqHash][]addition
}

type addition struct {
	at time.Duration
	ms float64
}

func (x *exact) weight(now time.Duration, hash events.SeqHash) (sum float64) {
	for _, a := range x.additions[hash] {
		sum += a.ms * math.Exp2(-float64(now-a.at)/float64(x.halfLife))
	}
	return sum
}

// TestSketch compares a sketch with sums of all additions: every weight is at least the sum and exceeds it by at most
// the excess, the excess is at most the total over the size, and no prefix without an entry has a larger sum than the
// smallest weight. After an entry was forgotten, only the bound with the excess holds. Half-lives are short, so units
// are converted many times.
func TestSketch(t *testing.T) {
	for round := range uint64(testkit.Rounds(200)) {
		rng := rand.New(rand.NewPCG(*seed, round))
		size := 1 + rng.IntN(12)
		twin := &exact{halfLife: time.Duration(1+rng.IntN(1000)) * time.Millisecond,
			additions: map[events.SeqHash][]addition{}}
		s := newSketch(size, twin.halfLife)
		now, forgot := time.Duration(0), false
		for step := range 300 {
			now += time.Duration(rng.ExpFloat64() * float64(200*time.Millisecond))
			s.tick(now)
			hash := events.SeqHash(rng.ExpFloat64()*10) + 1
			ms := rng.Float64() * 10
			if e := s.byHash[hash]; round%2 == 0 && e != nil && rng.IntN(40) == 0 {
				s.forget(now, e)
				delete(twin.additions, hash)
				forgot = true
			}
			s.add(now, hash, 0, 1, ms)
			twin.additions[hash] = append(twin.additions[hash], addition{now, ms})
			total := 0.0
			for h := range twin.additions {
				total += twin.weight(now, h)
			}
			least := math.Inf(1)
			for i, e := range s.heap {
				least = min(least, e.weight/s.unit)
				if e.at != i || s.byHash[e.hash] != e || i > 0 && s.heap[(i-1)/2].weight > e.weight {
					t.Fatalf("round %d, step %d: the heap is invalid at %d", round, step, i)
				}
				want, slack := twin.weight(now, e.hash), 1e-9*(1+total)
				if w := e.weight / s.unit; !forgot && w < want-slack || w-e.excess/s.unit > want+slack {
					t.Fatalf("round %d, step %d: prefix %d has %v with an excess of %v, the sum is %v", round, step, e.hash, w,
						e.excess/s.unit, want)
				}
			}
			if len(s.heap) > size || len(s.byHash) != len(s.heap) {
				t.Fatalf("round %d: %d entries and %d hashes, the size is %d", round, len(s.heap), len(s.byHash), size)
			}
			for h := range twin.additions {
				if !forgot && s.byHash[h] == nil && twin.weight(now, h) > least+1e-9*(1+total) {
					t.Fatalf("round %d, step %d: prefix %d has %v and no entry; the smallest weight is %v", round, step, h,
						twin.weight(now, h), least)
				}
			}
		}
	}
}

// TestRate compares the rate of an entry with the rate of its additions.
func TestRate(t *testing.T) {
	s := newSketch(4, time.Minute)
	now := time.Duration(0)
	for range 100 * 60 { // 10 additions of 3 ms a second
		now += 100 * time.Millisecond
		s.tick(now)
		s.count(s.add(now, 7, 0, 1, 3), sums{requests: 1})
		if e := s.byHash[7]; now > 20*time.Second {
			ms, n := s.rate(now, e, e.weight), s.rate(now, e, e.sums.requests)
			if math.Abs(ms-30) > 0.3 || math.Abs(n-10) > 0.1 {
				t.Fatalf("after %v: %v ms and %v requests per second", now, ms, n)
			}
		}
	}
}
