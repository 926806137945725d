package events

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/vmihailenco/msgpack/v5"
)

// vllmStore is a message of vLLM with one stored event: a map (from 0.24 on) or an array (0.19 to 0.23).
func vllmStore(t testing.TB, asMap bool, blocks, blockSize int, others ...pair) []byte {
	t.Helper()
	r := rand.New(rand.NewPCG(1, 2))
	hashes := make([]uint64, blocks)
	for i := range hashes {
		hashes[i] = r.Uint64() | 1<<40
	}
	tokens := make([]uint32, blocks*blockSize)
	for i := range tokens {
		tokens[i] = r.Uint32N(151_936)
	}
	var event any = []any{"BlockStored", hashes, r.Uint64(), tokens, blockSize, nil, "GPU", nil, make([]any, blocks), 0,
		"full_attention", nil}
	if asMap {
		event = append(pairs{
			{"type", "BlockStored"}, {"block_hashes", hashes}, {"parent_block_hash", r.Uint64()}, {"token_ids", tokens},
			{"block_size", blockSize}, {"lora_id", nil}, {"medium", "GPU"}, {"lora_name", nil},
			{"extra_keys", make([]any, blocks)}, {"group_idx", 0}, {"kv_cache_spec_kind", "full_attention"},
		}, others...)
	}
	return pack(t, []any{1795254706.123, []any{event}, 0})
}

// pairs is a map in a given order.
type pairs []pair

type pair struct {
	key   string
	value any
}

func (p pairs) EncodeMsgpack(e *msgpack.Encoder) error {
	if err := e.EncodeMapLen(len(p)); err != nil {
		return err
	}
	for _, f := range p {
		if err := e.EncodeString(f.key); err != nil {
			return err
		}
		if err := e.Encode(f.value); err != nil {
			return err
		}
	}
	return nil
}

// pack encodes v with integers in the shortest form, like engines.
func pack(t interface{ Fatal(...any) }, v any) []byte {
	var buf writeBuffer
	e := msgpack.NewEncoder(&buf)
	e.UseCompactInts(true)
	if err := e.Encode(v); err != nil {
		t.Fatal(err)
	}
	return buf
}

type writeBuffer []byte

func (b *writeBuffer) Write(p []byte) (int, error) {
	*b = append(*b, p...)
	return len(p), nil
}

func BenchmarkDecodeVLLM(b *testing.B) {
	for _, c := range []struct {
		asMap             bool
		blocks, blockSize int
	}{{false, 64, 16}, {true, 64, 16}, {true, 1, 16}, {true, 16, 64}, {true, 2048, 16}} {
		b.Run(fmt.Sprintf("map=%v/blocks=%dx%d", c.asMap, c.blocks, c.blockSize), func(b *testing.B) {
			payload := vllmStore(b, c.asMap, c.blocks, c.blockSize)
			d := mustDecoder(b, VLLM, uint32(c.blockSize))
			b.SetBytes(int64(len(payload)))
			b.ReportAllocs()
			for b.Loop() {
				m, err := d.Decode(payload)
				if err != nil || len(m.Events) != 1 {
					b.Fatal(m, err)
				}
			}
			reportBlocks(b, c.blocks)
		})
	}
}

// An engine with one token of lookahead (EAGLE).
func BenchmarkDecodeLookahead(b *testing.B) {
	payload, d := lookaheadStore(b), mustDecoder(b, VLLM, 16)
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		m, err := d.Decode(payload)
		if err != nil || len(m.Events) != 1 || m.Events[0].Lookahead != 1 {
			b.Fatal(m, err)
		}
	}
	reportBlocks(b, 64)
}

func lookaheadStore(t testing.TB) []byte {
	ahead := make([]any, 64)
	for i := range ahead {
		ahead[i] = []any{100_000 + i}
	}
	return vllmStore(t, true, 64, 16, pair{"lookahead_token_ids", ahead})
}

func TestDecodeDoesNotAllocate(t *testing.T) {
	rich := message(t,
		store(names(1, 2), nil, count(0, 32), pair{"block_size", 16}, pair{"lora_id", 7},
			pair{"lora_name", "adapter-a"}, pair{"medium", "CPU"},
			pair{"extra_keys", []any{[]any{"adapter-a", []any{"image-1", 3}, "tenant-a"},
				[]any{"adapter-a", []any{"image-1", -13}}}}),
		store(names(3), 2, count(0, 16), pair{"block_size", 16}, pair{"lora_id", 7}),
		[]any{"BlockRemoved", names(3, []byte("0123456789abcdef")), "CPU_PINNED", 0},
		[]any{"BlockStored", names(4), nil, count(0, 16), 16, nil, "GPU", map[string]any{"cache_salt": "tenant-b"}},
	)
	for name, payload := range map[string][]byte{
		"array": vllmStore(t, false, 64, 16), "map": vllmStore(t, true, 64, 16), "lookahead": lookaheadStore(t),
		"rich": rich, "session": vllmStore(t, true, 64, 16, pair{"session_id", "chat-17"}),
	} {
		d := mustDecoder(t, VLLM, 16)
		if n := testing.AllocsPerRun(100, func() {
			if _, err := d.Decode(payload); err != nil {
				t.Fatal(err)
			}
		}); n != 0 {
			t.Errorf("%s: %v allocations", name, n)
		}
		if d.Counts() != (SkipCounts{}) {
			t.Errorf("%s: passed over %v", name, d.Counts())
		}
	}
}
