package events

import (
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// vLLM's connectors announce copies below the device (vllm-project/vllm › vllm/distributed/kv_transfer/
// kv_connector/v1). The forms of the connectors:
//
//	OffloadingConnector        a chunk, named by its last block, with block_size 0. Up to 0.23 an event has many names;
//	                           before 0.12 block_size is the chunk's. With self_describing_kv_events, an event has the
//	                           names and tokens of all blocks of one chunk. The connector loads only whole chunks.
//	SimpleCPUOffloadConnector,
//	UMBPConnector              one block, with its tokens
//	LMCacheConnector           one chunk under LMCache's own name, with the tokens of all blocks and without a group
//	MooncakeStoreConnector     one block with medium "cpu" and a group; never a removal
//
// No connector announces the extra_keys of all blocks, and some omit the LoRA as well. The tokens alone would turn the
// block of a tenant or an adapter into a block of the base model. Therefore the tokens of such a copy never determine
// its place alone: the index also requires the device's event of the same block.

// isBareCopy reports whether the event announces a copy below the device without the extra keys of its blocks' names.
func (d *Decoder) isBareCopy(e *rawEvent) bool {
	hasKeys := e.extraKeys[0] < e.extraKeys[1] && e.data[e.extraKeys[0]] != msgp.CodeNil
	return d.engine == VLLM && e.tierOrDevice() != Device && !hasKeys
}

// isStoreCopy reports whether the event announces a copy in a Mooncake store that several workers share. The connector
// announces no removal (mooncake/store/worker.py), so such a copy would count for ever. Queries ask the store instead.
func (d *Decoder) isStoreCopy(e *rawEvent) bool {
	return d.engine == VLLM && e.inStore && (e.grouped && e.attention == AttentionUnknown || d.store)
}

// chunkOf returns the number of blocks per name of a bare copy, in the form of [Event.Chunk], or 0 if the event's sizes
// do not fit the decoder's blocks.
func (d *Decoder) chunkOf(e *rawEvent, names int) uint32 {
	switch {
	case e.blockSize%d.block != 0:
		return 0
	case e.tokenCount == 0 && e.blockSize == 0:
		return ChunkSizeUnknown
	case e.tokenCount == 0:
		return e.blockSize / d.block
	case uint64(names)*uint64(e.blockSize) != uint64(e.tokenCount):
		return 0
	case names == 1 || e.blockSize > d.block:
		return e.blockSize / d.block
	case e.grouped && e.attention.Main() && e.attention != AttentionUnknown:
		return uint32(names) // the blocks of one chunk of the offloading connector
	}
	return 0
}

// mayOwnName reports whether the name of a bare copy may be LMCache's own. LMCache's events have neither group nor kind
// of attention, and a single chunk (LMCache/LMCache › lmcache/integration/vllm/lmcache_mp_connector.py; in process
// vllm_v1_adapter.py and vLLM's lmcache_connector.py).
func (e *rawEvent) mayOwnName(names int) bool {
	return names == 1 && e.tier == Host && !e.grouped && e.attention == AttentionUnknown && len(e.lora) == 0 &&
		len(e.loraID) == 0 && !e.badLoRAID && len(e.salt) == 0 && e.lookahead == [2]int{} && e.mediaKeys == [2]int{}
}

// hashContent appends the plain local hashes of the blocks of a chunk.
func (d *Decoder) hashContent(blocks uint32) {
	for i := range int(blocks) {
		d.locals = append(d.locals, hashTokens(d.tokens[i*int(d.block):(i+1)*int(d.block)], baseSeed))
	}
}

// bareCopy appends a copy of blocks of a main group by name, and by content if a name may be the
// connector's own.
func (d *Decoder) bareCopy(e *rawEvent, blocks []BlockHash) Skip {
	chunk := d.chunkOf(e, len(blocks))
	if e.tokenCount > 0 {
		switch {
		case e.blockSize == 0 || e.blockSize%d.block != 0: // LMCache may store the end of a prompt as a partial chunk
			return d.sizes.reject(e, blocks, d.block)
		case uint64(len(blocks))*uint64(e.blockSize) != uint64(e.tokenCount):
			return skipLength
		}
		d.counts[skipCopyTokens]++
	}
	d.zero = d.zero || slices.Contains(blocks, 0)
	s := Event{Kind: Stored, Tier: e.tier, Group: e.group, Attention: e.attention, Window: e.window, Drops: e.drops,
		Chunk: chunk}
	if e.tokenCount > 0 && chunk <= MaxBlocksPerEvent && e.mayOwnName(len(blocks)) {
		d.hashContent(chunk)
		s.Own, s.Locals = true, d.locals[e.locals:len(d.locals):len(d.locals)]
		s.HasParent, s.Parent = e.hasParent, e.parent
	}
	for len(blocks) > 0 {
		n := min(len(blocks), MaxBlocksPerEvent)
		s.Blocks, blocks = blocks[:n:n], blocks[n:]
		d.events = append(d.events, s)
	}
	return notSkipped
}
