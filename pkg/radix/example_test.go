package radix_test

import (
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

func Example() {
	x := radix.New(radix.Config{})
	const space = 0 // a model with a block size
	a, b := x.AddRank(space, 16), x.AddRank(space, 16)

	prompt := []events.LocalHash{11, 12, 13, 14}
	store := func(id radix.RankID, tier events.Tier, parent events.BlockHash, names []events.BlockHash,
		locals []events.LocalHash) {
		x.Apply(id, 0, []events.Event{{
			Kind: events.Stored, Tier: tier, HasParent: parent != 0, Parent: parent, Blocks: names, Locals: locals,
		}})
	}
	store(a, events.Device, 0, []events.BlockHash{901, 902, 903}, prompt[:3])
	store(b, events.Device, 0, []events.BlockHash{1, 2}, prompt[:2]) // other names for the same blocks
	store(b, events.Host, 2, []events.BlockHash{3, 4}, prompt[2:])

	// Rank a loses a block in the middle from its device. The blocks after it do not count until the block is stored
	// again.
	x.Apply(a, 0, []events.Event{{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{902}}})

	var answer radix.Answer
	x.Match(space, prompt, nil, &answer)
	for _, o := range answer.Ranks {
		fmt.Println(map[radix.RankID]string{a: "a", b: "b"}[o.Rank], o.Depth)
	}
	// Unordered output:
	// a [1 0 0 0]
	// b [2 2 0 0]
}

func ExampleIndex_Explain() {
	x := radix.New(radix.Config{})
	id := x.AddRank(0, 16)
	prompt := []events.LocalHash{11, 12, 13, 14}
	x.Apply(id, 0, []events.Event{
		{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1, 2, 3, 4}, Locals: prompt},
		{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{2}},
	})
	for _, p := range x.Explain(0, prompt, nil).Ranks {
		fmt.Printf("%d blocks, then %v; %d held after\n", p.Overlap.Blocks(), p.Stop, p.Behind)
	}
	// Output: 1 blocks, then not_held; 2 held after
}
