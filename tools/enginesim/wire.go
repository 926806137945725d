package enginesim

import (
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Release is the first vLLM release with a given form of events (vllm-project/vllm, vllm/distributed/kv_events.py).
type Release int

// The releases with different forms.
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
	medium     = "GPU"
	hostMedium = "CPU"
	kind       = "full_attention"
)

// mediumOf returns the medium of an event.
func mediumOf(e *Announced) string {
	if e.Tier == events.Host {
		return hostMedium
	}
	return medium
}

// appendEvent encodes an event. Maps omit nil fields with a default of nil. Arrays have all fields.
func (r Release) appendEvent(b []byte, e Announced, blockSize int) []byte {
	if r == VLLM023 {
		return appendArrayEvent(b, e, blockSize)
	}
	switch {
	case e.Kind == events.Stored && e.Tier == events.Host:
		return appendHostStored(b, e)
	case e.Kind == events.Stored:
		if e.Session == "" {
			b = msgp.AppendMapHead(b, 11)
		} else {
			b = msgp.AppendMapHead(b, 12)
			b = msgp.AppendStr(msgp.AppendStr(b, "session_id"), e.Session)
		}
		b = msgp.AppendStr(msgp.AppendStr(b, "type"), "BlockStored")
		b = appendHashes(msgp.AppendStr(b, "block_hashes"), e.Blocks)
		b = appendParent(msgp.AppendStr(b, "parent_block_hash"), e)
		b = appendTokens(msgp.AppendStr(b, "token_ids"), e.Tokens)
		b = msgp.AppendUint(msgp.AppendStr(b, "block_size"), uint64(blockSize))
		b = msgp.AppendNil(msgp.AppendStr(b, "lora_id"))
		b = msgp.AppendStr(msgp.AppendStr(b, "medium"), medium)
		b = msgp.AppendNil(msgp.AppendStr(b, "lora_name"))
		b = appendNils(msgp.AppendStr(b, "extra_keys"), len(e.Blocks))
		b = msgp.AppendUint(msgp.AppendStr(b, "group_idx"), 0)
		return msgp.AppendStr(msgp.AppendStr(b, "kv_cache_spec_kind"), kind)
	case e.Kind == events.Removed:
		b = msgp.AppendMapHead(b, 4)
		b = msgp.AppendStr(msgp.AppendStr(b, "type"), "BlockRemoved")
		b = appendHashes(msgp.AppendStr(b, "block_hashes"), e.Blocks)
		b = msgp.AppendStr(msgp.AppendStr(b, "medium"), mediumOf(&e))
		return msgp.AppendUint(msgp.AppendStr(b, "group_idx"), 0)
	}
	b = msgp.AppendMapHead(b, 1)
	return msgp.AppendStr(msgp.AppendStr(b, "type"), "AllBlocksCleared")
}

// appendHostStored encodes a copy in host memory as the offloading connector does: names alone, with block_size 0 and
// without the kind of attention.
func appendHostStored(b []byte, e Announced) []byte {
	b = msgp.AppendMapHead(b, 9)
	b = msgp.AppendStr(msgp.AppendStr(b, "type"), "BlockStored")
	b = appendHashes(msgp.AppendStr(b, "block_hashes"), e.Blocks)
	b = msgp.AppendNil(msgp.AppendStr(b, "parent_block_hash"))
	b = appendTokens(msgp.AppendStr(b, "token_ids"), nil)
	b = msgp.AppendUint(msgp.AppendStr(b, "block_size"), 0)
	b = msgp.AppendNil(msgp.AppendStr(b, "lora_id"))
	b = msgp.AppendStr(msgp.AppendStr(b, "medium"), hostMedium)
	b = msgp.AppendNil(msgp.AppendStr(b, "lora_name"))
	return msgp.AppendUint(msgp.AppendStr(b, "group_idx"), 0)
}

func appendArrayEvent(b []byte, e Announced, blockSize int) []byte {
	switch {
	case e.Kind == events.Stored && e.Tier == events.Host:
		b = msgp.AppendStr(msgp.AppendArrayHead(b, 12), "BlockStored")
		b = msgp.AppendNil(appendHashes(b, e.Blocks))
		b = msgp.AppendUint(appendTokens(b, nil), 0)
		b = msgp.AppendStr(msgp.AppendNil(b), hostMedium)
		b = appendNilValues(b, 2)    // lora_name, extra_keys
		b = msgp.AppendUint(b, 0)    // group_idx
		return appendNilValues(b, 2) // kind, window
	case e.Kind == events.Stored:
		b = msgp.AppendStr(msgp.AppendArrayHead(b, 12), "BlockStored")
		b = appendHashes(b, e.Blocks)
		b = appendParent(b, e)
		b = appendTokens(b, e.Tokens)
		b = msgp.AppendUint(b, uint64(blockSize))
		b = msgp.AppendNil(b) // lora_id
		b = msgp.AppendStr(b, medium)
		b = msgp.AppendNil(b)            // lora_name
		b = appendNils(b, len(e.Blocks)) // extra_keys
		b = msgp.AppendUint(b, 0)        // group_idx
		b = msgp.AppendStr(b, kind)
		return msgp.AppendNil(b) // kv_cache_spec_sliding_window
	case e.Kind == events.Removed:
		b = msgp.AppendStr(msgp.AppendArrayHead(b, 4), "BlockRemoved")
		b = appendHashes(b, e.Blocks)
		b = msgp.AppendStr(b, mediumOf(&e))
		return msgp.AppendUint(b, 0) // group_idx
	}
	return msgp.AppendStr(msgp.AppendArrayHead(b, 1), "AllBlocksCleared")
}

// appendBatch writes a whole message's payload: [timestamp in seconds, events, rank].
func (r Release) appendBatch(b []byte, seconds float64, batch []Announced, blockSize int, rank events.Rank) []byte {
	b = msgp.AppendArrayHead(b, 3)
	b = msgp.AppendFloat(b, seconds)
	b = msgp.AppendArrayHead(b, len(batch))
	for _, e := range batch {
		b = r.appendEvent(b, e, blockSize)
	}
	return msgp.AppendUint(b, uint64(rank))
}

func appendParent(b []byte, e Announced) []byte {
	if !e.HasParent {
		return msgp.AppendNil(b)
	}
	return msgp.AppendUint(b, uint64(e.Parent))
}

func appendHashes(b []byte, hashes []events.BlockHash) []byte {
	b = msgp.AppendArrayHead(b, len(hashes))
	for _, h := range hashes {
		b = msgp.AppendUint(b, uint64(h))
	}
	return b
}

func appendTokens(b []byte, tokens []uint32) []byte {
	b = msgp.AppendArrayHead(b, len(tokens))
	for _, t := range tokens {
		b = msgp.AppendUint(b, uint64(t))
	}
	return b
}

func appendNils(b []byte, n int) []byte { return appendNilValues(msgp.AppendArrayHead(b, n), n) }

func appendNilValues(b []byte, n int) []byte {
	for range n {
		b = msgp.AppendNil(b)
	}
	return b
}
