package shim

import (
	"slices"
	"testing"

	"github.com/vmihailenco/msgpack/v5"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Engines announce a prompt's salt with its first block alone. A shim that starts again must hash the blocks after it with the
// salt that a shim before it was told.
func TestAShimThatStartsAgainKnowsSalts(t *testing.T) {
	frame := func(seq events.EngineSeq, name int, parent any, extra []any) Frame {
		payload, err := msgpack.Marshal([]any{1.5, []any{map[string]any{
			"type": "BlockStored", "block_hashes": []int{name}, "parent_block_hash": parent, "token_ids": []int{1, 2}, "block_size": 2, "lora_id": nil,
			"medium": "GPU", "lora_name": nil, "extra_keys": []any{extra}, "group_idx": 0, "kv_cache_spec_kind": "full_attention",
		}}, 0})
		if err != nil {
			t.Fatal(err)
		}
		return Frame{Seq: seq, Payload: payload}
	}
	engine := []Frame{frame(0, 11, nil, []any{"tenant"}), frame(1, 12, 11, nil), frame(2, 13, 12, nil)}

	// run has a shim, started from what the log has, hear all that the engine has said up to a message.
	var last Published
	run := func(heard int) (stored []events.LocalHash) {
		decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 2})
		if err != nil {
			t.Fatal(err)
		}
		m := NewMachine(Identity{Model: "m", BlockSize: 2}, Limits{}, true, decoder)
		m.Recovered(last, 100)
		m.Connected()
		from, ok := m.WantsReplay()
		if !ok {
			t.Fatal("no replay is due")
		}
		for _, f := range engine[from:heard] {
			m.Replayed(f, 100)
		}
		m.ReplayEnded(100)
		flight, err := m.NextFlight()
		if err != nil {
			t.Fatal(err)
		}
		for _, data := range flight {
			var b events.Batch
			if err := events.DecodeBatch(data, &b); err != nil {
				t.Fatal(err)
			}
			last = Published{Found: true, Incarnation: b.Incarnation, LastID: b.LastID(), Cursor: b.Cursor}
			for _, e := range b.Events {
				stored = append(stored, e.Locals...)
			}
		}
		m.Flushed()
		if c := m.Counts(); c.Duplicates != 0 || c.Gaps != 0 {
			t.Errorf("counts are %+v", c)
		}
		return stored
	}
	whole := run(3)
	last = Published{}
	if pieces := slices.Concat(run(1), run(2), run(3)); !slices.Equal(pieces, whole) {
		t.Errorf("in three lives of the shim the blocks are hashed %v, in one %v", pieces, whole)
	}
}
