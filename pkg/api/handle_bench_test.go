package api

import (
	"context"
	"math/rand/v2"
	"testing"
)

// BenchmarkHandle answers a query of 767 hashes, as a prompt of 12,272 tokens has in blocks of 16, from an indexer that
// knows the answer.
func BenchmarkHandle(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 15))
	q := &Query{Model: "m"}
	for range 767 {
		q.Hashes = append(q.Hashes, rng.Uint64())
	}
	for _, contentType := range []string{JSON, MsgPack} {
		body, err := Marshal(contentType, q)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(contentType[len("application/"):], func(b *testing.B) {
			b.ReportAllocs()
			h := Handler{Indexer: &echo{}}
			for b.Loop() {
				if _, failure := h.Handle(context.Background(), OpFind, contentType, body); failure != nil {
					b.Fatal(failure)
				}
			}
		})
	}
}
