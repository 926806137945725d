package sole

import (
	"math/rand/v2"
	"testing"
)

// TestSample checks the size of a sample of many blocks, and the equality of the samples of all sets.
func TestSample(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 9))
	var s Blocks
	for range 10_000 {
		s.Add(rng.Uint64(), "w")
	}
	list, zeroBits := s.Sample(1_000)
	if n := len(list["w"]); zeroBits != 4 || n < 450 || n > 800 {
		t.Errorf("%d blocks with %d bits", n, zeroBits)
	}
	for _, b := range list["w"] {
		if !Sampled(b, zeroBits) || !Sampled(b, zeroBits-1) {
			t.Errorf("%x is not in the sample", b)
		}
	}
	if list, zeroBits := s.Sample(10_000); len(list["w"]) != 10_000 || zeroBits != 0 {
		t.Errorf("%d blocks of all, %d bits", len(list["w"]), zeroBits)
	}
}
