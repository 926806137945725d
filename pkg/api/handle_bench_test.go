package api

import (
	"context"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"math/rand/v2"
	"testing"
)

// BenchmarkHandle answers a query of 767 hashes, the blocks of 16 of a prompt of 12,272 tokens, or of these tokens,
// from an indexer with a fixed answer.
func BenchmarkHandle(b *testing.B) {
	rng := rand.New(rand.NewPCG(1, 15))
	q := &Query{Model: "m"}
	for range 767 {
		q.Hashes = append(q.Hashes, rng.Uint64())
	}
	signed := make([]int64, len(q.Hashes))
	for i, h := range q.Hashes {
		signed[i] = int64(h)
	}
	tokens := &Query{Model: "m"}
	for range 767 * 16 {
		tokens.Tokens = append(tokens.Tokens, rng.Uint32N(150_000))
	}
	for _, c := range []struct {
		name, contentType string
		query             any
	}{
		{"json", JSON, q}, {"json/signed", JSON, map[string]any{"model": "m", "hashes": signed}}, {"msgpack", MsgPack, q},
		{"json/tokens", JSON, tokens}, {"msgpack/tokens", MsgPack, tokens},
	} {
		contentType := c.contentType
		body, err := Marshal(contentType, c.query)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(c.name, func(b *testing.B) {
			b.ReportAllocs()
			h := Handler{Indexer: &echo{}}
			for b.Loop() {
				if _, failure := h.Handle(context.Background(), ops.Find, contentType, body); failure != nil {
					b.Fatal(failure)
				}
			}
		})
	}
}
