package enginesim

import (
	"encoding/binary"
	"fmt"
	"math"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// Release is a release of vLLM from which on events look as they do (vllm-project/vllm, vllm/distributed/kv_events.py).
type Release int

// The releases that made a difference.
const (
	VLLM026 Release = iota // events are maps, replies to a replay carry the topic (in fact since 0.25.1)
	VLLM024                // events are maps, replies do not carry the topic
	VLLM023                // events are arrays, replies do not carry the topic
)

func (r Release) String() string {
	switch r {
	case VLLM026:
		return "vllm-0.26"
	case VLLM024:
		return "vllm-0.24"
	case VLLM023:
		return "vllm-0.23"
	}
	return fmt.Sprintf("release(%d)", int(r))
}

func (r Release) replayHasTopic() bool { return r == VLLM026 }

const (
	medium = "GPU"
	kind   = "full_attention"
)

// appendEvent writes one event. Maps leave out what is nil and has that for its default; arrays have every place.
func (r Release) appendEvent(b []byte, e Announced, blockSize int) []byte {
	if r == VLLM023 {
		return appendArrayEvent(b, e, blockSize)
	}
	switch e.Kind {
	case events.Stored:
		b = appendMapHead(b, 11)
		b = appendText(appendText(b, "type"), "BlockStored")
		b = appendHashes(appendText(b, "block_hashes"), e.Blocks)
		b = appendParent(appendText(b, "parent_block_hash"), e)
		b = appendTokens(appendText(b, "token_ids"), e.Tokens)
		b = appendUint(appendText(b, "block_size"), uint64(blockSize))
		b = appendNil(appendText(b, "lora_id"))
		b = appendText(appendText(b, "medium"), medium)
		b = appendNil(appendText(b, "lora_name"))
		b = appendNils(appendText(b, "extra_keys"), len(e.Blocks))
		b = appendUint(appendText(b, "group_idx"), 0)
		return appendText(appendText(b, "kv_cache_spec_kind"), kind)
	case events.Removed:
		b = appendMapHead(b, 4)
		b = appendText(appendText(b, "type"), "BlockRemoved")
		b = appendHashes(appendText(b, "block_hashes"), e.Blocks)
		b = appendText(appendText(b, "medium"), medium)
		return appendUint(appendText(b, "group_idx"), 0)
	}
	b = appendMapHead(b, 1)
	return appendText(appendText(b, "type"), "AllBlocksCleared")
}

func appendArrayEvent(b []byte, e Announced, blockSize int) []byte {
	switch e.Kind {
	case events.Stored:
		b = appendText(appendArrayHead(b, 12), "BlockStored")
		b = appendHashes(b, e.Blocks)
		b = appendParent(b, e)
		b = appendTokens(b, e.Tokens)
		b = appendUint(b, uint64(blockSize))
		b = appendNil(b) // lora_id
		b = appendText(b, medium)
		b = appendNil(b)                 // lora_name
		b = appendNils(b, len(e.Blocks)) // extra_keys
		b = appendUint(b, 0)             // group_idx
		b = appendText(b, kind)
		return appendNil(b) // kv_cache_spec_sliding_window
	case events.Removed:
		b = appendText(appendArrayHead(b, 4), "BlockRemoved")
		b = appendHashes(b, e.Blocks)
		b = appendText(b, medium)
		return appendUint(b, 0) // group_idx
	}
	return appendText(appendArrayHead(b, 1), "AllBlocksCleared")
}

// appendBatch writes a whole message's payload: [timestamp in seconds, events, rank].
func (r Release) appendBatch(b []byte, seconds float64, batch []Announced, blockSize int, rank events.Rank) []byte {
	b = appendArrayHead(b, 3)
	b = append(b, 0xcb)
	b = binary.BigEndian.AppendUint64(b, math.Float64bits(seconds))
	b = appendArrayHead(b, len(batch))
	for _, e := range batch {
		b = r.appendEvent(b, e, blockSize)
	}
	return appendUint(b, uint64(rank))
}

func appendParent(b []byte, e Announced) []byte {
	if !e.HasParent {
		return appendNil(b)
	}
	return appendUint(b, uint64(e.Parent))
}

func appendHashes(b []byte, hashes []events.BlockHash) []byte {
	b = appendArrayHead(b, len(hashes))
	for _, h := range hashes {
		b = appendUint(b, uint64(h))
	}
	return b
}

func appendTokens(b []byte, tokens []uint32) []byte {
	b = appendArrayHead(b, len(tokens))
	for _, t := range tokens {
		b = appendUint(b, uint64(t))
	}
	return b
}

func appendNils(b []byte, n int) []byte {
	b = appendArrayHead(b, n)
	for range n {
		b = appendNil(b)
	}
	return b
}

// What follows is as much MessagePack (https://github.com/msgpack/msgpack, spec.md) as events need, each value in its
// shortest form, as msgspec writes it.

func appendNil(b []byte) []byte { return append(b, 0xc0) }

func appendUint(b []byte, v uint64) []byte {
	switch {
	case v < 1<<7:
		return append(b, byte(v))
	case v < 1<<8:
		return append(b, 0xcc, byte(v))
	case v < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xcd), uint16(v))
	case v < 1<<32:
		return binary.BigEndian.AppendUint32(append(b, 0xce), uint32(v))
	}
	return binary.BigEndian.AppendUint64(append(b, 0xcf), v)
}

// appendText writes a text of less than 32 bytes.
func appendText(b []byte, s string) []byte {
	return append(append(b, 0xa0|byte(len(s))), s...)
}

// appendMapHead begins a map of less than 16 entries.
func appendMapHead(b []byte, n int) []byte { return append(b, 0x80|byte(n)) }

func appendArrayHead(b []byte, n int) []byte {
	switch {
	case n < 1<<4:
		return append(b, 0x90|byte(n))
	case n < 1<<16:
		return binary.BigEndian.AppendUint16(append(b, 0xdc), uint16(n))
	}
	return binary.BigEndian.AppendUint32(append(b, 0xdd), uint32(n))
}
