package regions

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// naive is the twin of a filter.
type naive map[events.SeqHash]bool

func randomHashes(rng *rand.Rand, n int) (list []events.SeqHash, set naive) {
	set = naive{}
	for range n {
		h := events.SeqHash(rng.Uint64())
		if len(list) > 0 && rng.IntN(10) == 0 {
			h = list[rng.IntN(len(list))] + events.SeqHash(rng.IntN(2)) // a duplicate, or a neighbour
		}
		list, set[h] = append(list, h), true
	}
	return list, set
}

// TestFilterAgainstSet: a filter has every hash of its set, and others at the stated rate.
func TestFilterAgainstSet(t *testing.T) {
	others, wrong := 0, 0
	for seed := range uint64(testkit.Rounds(300)) {
		rng := rand.New(rand.NewPCG(seed, 1))
		n := rng.IntN(1 << rng.IntN(14))
		list, set := randomHashes(rng, n)
		f := NewFilter(list)
		if !f.valid() || f.Len() != len(set) {
			t.Fatalf("seed %d: %d of %d hashes, valid %v", seed, f.Len(), len(set), f.valid())
		}
		for h := range set {
			if !f.Has(h) {
				t.Fatalf("seed %d: the filter lacks %x", seed, h)
			}
		}
		for range 2000 {
			if h := events.SeqHash(rng.Uint64()); !set[h] {
				if n > 0 {
					others++
				}
				if f.Has(h) {
					wrong++
					if n == 0 {
						t.Fatal("the empty filter has a hash")
					}
				}
			}
		}
	}
	within(t, "false positives", others, wrong, FalsePositives)
}

// within fails unless a number of results is within five standard deviations of the expectation.
func within(t *testing.T, what string, tries, results int, p float64) {
	t.Helper()
	want := float64(tries) * p
	if off := math.Abs(float64(results) - want); off > 5*math.Sqrt(want*(1-p)) {
		t.Errorf("%s: %d of %d, want %.0f", what, results, tries, want)
	}
	t.Logf("%s: %d of %d (%.3f %%)", what, results, tries, 100*float64(results)/float64(tries))
}

// TestPrefixOfFilter: a prompt that leaves the set after a number of blocks has further blocks at the rates of the
// formula.
func TestPrefixOfFilter(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	list, set := randomHashes(rng, 50_000)
	f := NewFilter(list)
	prompts := testkit.Rounds(200_000)
	over := [3]int{}
	for range prompts {
		in, prompt := rng.IntN(4), []events.SeqHash(nil)
		for len(prompt) < in {
			prompt = append(prompt, list[rng.IntN(f.Len())])
		}
		for len(prompt) < in+8 {
			if h := events.SeqHash(rng.Uint64()); !set[h] {
				prompt = append(prompt, h)
			}
		}
		got := f.Prefix(prompt)
		if got < in {
			t.Fatalf("%d of %d blocks", got, in)
		}
		for i := range over {
			if got > in+i {
				over[i]++
			}
		}
	}
	within(t, "prefixes with a block too many", prompts, over[0], FalsePositives)
	if most := 10 + 10*float64(prompts)*FalsePositives*FalsePositives; float64(over[1]) > most {
		t.Errorf("%d prefixes have two blocks too many", over[1])
	}
}

// TestFilterSize: a filter of the capacity of a number of bytes has at most these bytes, and large filters need about 9
// bits a hash.
func TestFilterSize(t *testing.T) {
	for bytes := 1; bytes < MaxDigestBytes; bytes += 1 + bytes/3 {
		if n := Capacity(bytes); n < 0 || filterBytes(n) > bytes {
			t.Fatalf("%d hashes for %d bytes need %d", n, bytes, filterBytes(n))
		}
	}
	for _, bytes := range []int{1 << 16, 1 << 20, MaxDigestBytes} {
		if n := Capacity(bytes); float64(n) < 0.8*float64(bytes) {
			t.Errorf("only %d hashes for %d bytes", n, bytes)
		}
	}
	n := Capacity(1 << 20)
	rng := rand.New(rand.NewPCG(3, 4))
	list := make([]events.SeqHash, n)
	for i := range list {
		list[i] = events.SeqHash(rng.Uint64())
	}
	f := NewFilter(list)
	if len(f.prints) > 1<<20 || float64(len(f.prints)) > 1.15*float64(n) {
		t.Errorf("%d hashes need %d bytes", n, len(f.prints))
	}
}

func BenchmarkFilter(b *testing.B) {
	rng := rand.New(rand.NewPCG(3, 4))
	list := make([]events.SeqHash, 1<<20)
	for i := range list {
		list[i] = events.SeqHash(rng.Uint64())
	}
	b.Run("make", func(b *testing.B) {
		b.ReportAllocs()
		for range b.N {
			NewFilter(list)
		}
		b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(len(list)), "ns/hash")
	})
	f := NewFilter(list)
	b.Run("has", func(b *testing.B) {
		b.ReportAllocs()
		for i := range b.N {
			if !f.Has(list[i&(1<<20-1)]) {
				b.Fatal("missing")
			}
		}
	})
}

func ExampleFilter() {
	prompt := events.SeqHashes(nil, []events.LocalHash{1, 2, 3, 4})
	f := NewFilter(events.SeqHashes(nil, []events.LocalHash{1, 2, 3, 5}))
	fmt.Println(f.Len(), f.Prefix(prompt))
	// Output: 4 3
}
