package msgp

import (
	"math/rand/v2"
	"testing"
)

// BenchmarkUint32s reads 1,024 tokens of a vocabulary of 151,936.
func BenchmarkUint32s(b *testing.B) {
	const n = 1024
	rng := rand.New(rand.NewPCG(1, 1))
	var data []byte
	for range n {
		data = AppendUint(data, rng.Uint64N(151_936))
	}
	var tokens []uint32
	b.SetBytes(4 * n)
	b.ReportAllocs()
	for b.Loop() {
		r, ok := Reader{Data: data}, false
		if tokens, ok = r.Uint32s(tokens[:0], n); !ok {
			b.Fatal("the tokens are not read")
		}
	}
}
