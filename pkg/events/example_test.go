package events_test

import (
	"encoding/hex"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// A message of vLLM 0.23 stores two blocks of four tokens.
func ExampleDecoder() {
	payload, _ := hex.DecodeString("93cb3ff8000000000000919cab426c6f636b53746f72656492cfdab89baa7b5857c002c0" +
		"98010203040506070804c0a3475055c092c0c000ae66756c6c5f617474656e74696f6ec000")
	d, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
	if err != nil {
		panic(err)
	}
	m, err := d.Decode(payload)
	if err != nil {
		panic(err)
	}
	for _, e := range m.Events {
		fmt.Println("stored in", e.Tier)
		for i, name := range e.Blocks {
			fmt.Printf("%016x is local %016x\n", name, e.Locals[i])
		}
	}
	// Output:
	// stored in device
	// dab89baa7b5857c0 is local cb38e4d7fb2dca5c
	// 0000000000000002 is local e8d3ec39b907b74c
}

func ExampleHasher() {
	h, err := events.NewHasher(4, events.Space{})
	if err != nil {
		panic(err)
	}
	locals := h.Hash(nil, []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9}) // the last token fills no block
	for i, seq := range events.SeqHashes(nil, locals) {
		fmt.Printf("%016x %016x\n", locals[i], seq)
	}
	// Output:
	// cb38e4d7fb2dca5c cb38e4d7fb2dca5c
	// e8d3ec39b907b74c 44a2b2379d6d3c3d
}

func ExampleAppendBatch() {
	data, err := events.AppendBatch(nil, &events.Batch{
		Incarnation: 1, FirstID: 7, Model: "llama", BlockSize: 16,
		Cursor: events.Cursor{Known: true, Seq: 6, Digest: 0xd1},
		Events: []events.Event{{Kind: events.Removed, Tier: events.Host, Blocks: []events.BlockHash{2}}},
	})
	if err != nil {
		panic(err)
	}
	fmt.Printf("%x\n", data)
	var b events.Batch
	if err := events.DecodeBatch(data, &b); err != nil {
		panic(err)
	}
	fmt.Println(b.Model, b.LastID(), b.Events[0].Tier, b.Events[0].Blocks)
	// Output:
	// 98010107a56c6c616d611094c306ccd100c291980202000000c0c4080200000000000000c0
	// llama 7 host [2]
}
