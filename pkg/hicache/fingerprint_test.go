package hicache

import (
	"math/rand/v2"
	"slices"
	"testing"
)

// runs returns the number of runs of some pages.
func runs(pages int) (n int) {
	for first := 0; first < pages; first += runLength(first) {
		if runOf(first) != n || runOf(min(pages, first+runLength(first))-1) != n {
			panic("runs are not numbered in order")
		}
		n++
	}
	return n
}

// TestFingerprintsAgainstNames: two prompts have the same fingerprint of a run if and only if the
// pages have the same names.
func TestFingerprintsAgainstNames(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	salts := []string{"", "x"}
	for range 1000 {
		s := &SGLang{Backend: "mooncake", PageSize: 1 + rng.IntN(4), TPSize: 1, PPSize: 1, IsEagle: rng.IntN(2) == 0}
		a := make([]uint32, rng.IntN([]int{60, 60, 60, 1300}[rng.IntN(4)]*s.PageSize))
		for i := range a {
			a[i] = rng.Uint32N(3)
		}
		b := slices.Clone(a)
		if len(b) > 0 && rng.IntN(4) > 0 {
			b = b[:1+rng.IntN(len(b))]
			b[rng.IntN(len(b))] = rng.Uint32N(3)
		}
		lane := func(tokens []uint32) (Lane, []PageHash) {
			var space Space
			if rng.IntN(4) == 0 {
				space.CacheSalt = &salts[rng.IntN(2)]
			}
			return onlyLane(s, tokens, space), s.PageHashes(nil, tokens, space)
		}
		x, names := lane(a)
		y, others := lane(b)
		if x.Pages != len(names) || len(x.fingerprints) != runs(len(names)) {
			t.Fatalf("%d pages, %d fingerprints, %d names", x.Pages, len(x.fingerprints), len(names))
		}
		for r := range min(len(x.fingerprints), len(y.fingerprints)) {
			end := min(r+1, 64)*16 + max(r-63, 0)*64
			p, q := min(x.Pages, end), min(y.Pages, end)
			if same := p == q && names[p-1] == others[q-1]; (x.fingerprints[r] == y.fingerprints[r]) != same {
				t.Fatalf("run %d: equal names: %v, equal fingerprints: %v\n%+v\n%v\n%v", r, same, !same, s, a, b)
			}
		}
		for from := range x.Pages {
			if rng.IntN(x.Pages) > 2 {
				continue
			}
			to := from + 1 + rng.IntN(x.Pages-from)
			if got, want := x.Names(from, to).Keys, s.Keys(names[from:to]).Keys; !slices.Equal(got, want) {
				t.Fatalf("pages %d to %d: %v, want %v", from, to, got, want)
			}
		}
	}
}

func BenchmarkMarks4096Pages(b *testing.B) {
	tokens := prompt(4096, 16)
	m := fingerprinter{pageSize: 16}
	var fingerprints []fingerprint
	b.ReportAllocs()
	for b.Loop() {
		fingerprints = m.append(fingerprints[:0], tokens, 4096)
	}
}
