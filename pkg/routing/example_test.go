package routing_test

import (
	"fmt"
	"math/rand/v2"

	"github.com/kvatlas/kvatlas/pkg/routing"
)

func Example() {
	s, err := routing.New("dynamo", routing.DefaultConfig())
	if err != nil {
		panic(err)
	}
	busy := &routing.Worker{ID: "busy"}
	idle := &routing.Worker{ID: "idle"}
	gone := &routing.Worker{ID: "gone", State: routing.Draining}
	request := &routing.Request{ISL: 1000, BlockSize: 16, Blocks: 62, Explain: true}
	candidates := []routing.Candidate{
		{Worker: busy, Device: 40, HasLoad: true, ActivePrefillTokens: 1600, ActiveBlocks: 30, NewBlocks: 22},
		{Worker: idle, Device: 10, HasLoad: true, NewBlocks: 62},
		{Worker: gone, Device: 60, HasLoad: true, NewBlocks: 2},
	}
	rng, scratch := rand.New(rand.NewPCG(1, 2)), new(routing.Scratch)
	choice, err := s.Choose(request, candidates, rng, scratch)
	if err != nil {
		panic(err)
	}
	fmt.Printf("%s, which has %d of %d tokens\n", choice.Worker, choice.CachedTokens, request.ISL)
	for _, c := range choice.Explanation.Candidates {
		t := c.Terms
		fmt.Printf("%s: max(%v − %v, 0) + %v = %v\n", c.Worker, t.RawPrefill, t.DeviceCredit, t.Decode, c.Cost)
	}
	for _, d := range choice.Explanation.Dropped {
		fmt.Printf("%s %s\n", d.Worker, d.Reason)
	}
	// Output:
	// idle, which has 160 of 1000 tokens
	// busy: max(162.5 − 40, 0) + 52 = 174.5
	// idle: max(62.5 − 10, 0) + 62 = 114.5
	// gone is draining
}
