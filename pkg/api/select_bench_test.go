package api

import (
	"context"
	"github.com/kvatlas/kvatlas/internal/base/ops"
	"testing"
)

// choosing is a router that returns the same choice for every request.
type choosing struct {
	Router
	choice *Selection
}

func (c choosing) Select(context.Context, *SelectRequest) (*Selection, error) { return c.choice, nil }

// BenchmarkSelect measures the decoding and encoding of a choice for a prompt of 512 blocks, by form.
func BenchmarkSelect(b *testing.B) {
	q := &SelectRequest{Query: Query{Model: "llama", L3: L3Off}, ISLTokens: 8199, RequestID: "r-1", Book: true}
	for i := range uint64(512) {
		q.Hashes = append(q.Hashes, (i+1)*0x9E3779B97F4A7C15)
	}
	choice := &Selection{Model: "llama", BlockSize: 16, Blocks: 512, ISLTokens: 8199, RequestID: "r-1", Booked: true,
		Worker: "worker-1", Endpoint: "http://10.0.0.1:8000", Device: 64, Policy: "dynamo", Candidates: 256, Cost: 812.5,
		Probability: 1, RequiredBlocks: 513, EffectiveOverlap: 64, CachedTokens: 1024, EffectivePrefillTokens: 7175,
		TrackPrefillTokens: true, PotentialDecodeBlocks: 700, Complete: true}
	h := Handler{Router: choosing{choice: choice}}
	for _, form := range []string{JSON, MsgPack} {
		body, err := Marshal(form, q)
		if err != nil {
			b.Fatal(err)
		}
		reply, err := Marshal(form, choice)
		if err != nil {
			b.Fatal(err)
		}
		b.Run(form+"/request", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, err := Marshal(form, q); err != nil {
					b.Fatal(err)
				}
			}
		})
		b.Run(form+"/handle", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if _, failure := h.Handle(context.Background(), ops.Select, form, body); failure != nil {
					b.Fatal(failure)
				}
			}
		})
		b.Run(form+"/reply", func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				var s Selection
				if err := DecodeReply(form, reply, &s); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
