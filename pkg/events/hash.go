package events

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"slices"

	"github.com/zeebo/xxh3"

	"github.com/kvatlas/kvatlas/internal/base/littleendian"
)

// The hashes of tokens are those of NVIDIA Dynamo (ai-dynamo/dynamo › lib/kv-router and lib/llm,
// compute_block_hash_for_seq). A router can send the same numbers to Dynamo and to kvatlas.
const (
	baseSeed    = 1337 // for every block
	loraSeed    = 0    // for a LoRA's name
	saltSeed    = 1    // for a cache salt
	sessionSeed = 2    // for a session id
)

// Space is the part of a block's identity beside the tokens: a block serves only prompts of the same space. The zero
// Space is the base model without salt.
type Space struct {
	LoRA string // the adapter's name; "" is the base model
	Salt string // the cache salt, which separates tenants; "" is none
}

// seed returns the seed for hashing the blocks of this space.
func (s Space) seed() uint64 { return baseSeed + s.addend() }

// addend returns the space's addend to the seed.
func (s Space) addend() uint64 {
	var sum uint64
	if s.LoRA != "" {
		sum += xxh3.HashStringSeed(s.LoRA, loraSeed)
	}
	if s.Salt != "" {
		sum += xxh3.HashStringSeed(s.Salt, saltSeed)
	}
	return sum
}

// Hasher computes the local hashes of blocks. A hasher is immutable, so any number of goroutines may use it.
type Hasher struct {
	seed   uint64
	block  int // tokens from one block's beginning to the next
	window int // hashed tokens: those of the block, and the lookahead
}

// NewHasher returns a hasher for blocks of blockSize tokens.
func NewHasher(blockSize uint32, space Space) (*Hasher, error) {
	if blockSize == 0 || blockSize > MaxBlockSize {
		return nil, fmt.Errorf("events: a block of %d tokens: want 1 to %d", blockSize, MaxBlockSize)
	}
	return &Hasher{seed: space.seed(), block: int(blockSize), window: int(blockSize)}, nil
}

// NewLookaheadHasher returns a hasher for engines whose draft models read ahead. The drafter's cache depends on
// lookahead tokens after a block, so the block's hash covers them too; n tokens have (n-lookahead)/blockSize blocks.
// EAGLE reads one token ahead. [Event].Lookahead is the lookahead of an engine.
func NewLookaheadHasher(blockSize, lookahead uint32, space Space) (*Hasher, error) {
	h, err := NewHasher(blockSize, space)
	if err != nil {
		return nil, err
	}
	if lookahead > MaxBlockSize {
		return nil, fmt.Errorf("events: a lookahead of %d tokens: at most %d", lookahead, MaxBlockSize)
	}
	h.window += int(lookahead)
	return h, nil
}

// blocks returns the number of full blocks of n tokens.
func (h *Hasher) blocks(n int) int { return max(0, n-(h.window-h.block)) / h.block }

// Hash appends to dst the local hashes of the full blocks of tokens.
func (h *Hasher) Hash(dst []LocalHash, tokens []uint32) []LocalHash {
	return h.HashMedia(dst, tokens, nil)
}

// HashMedia is Hash for prompts with multimodal items such as images. media[i] has the items within the hashed
// tokens of block i, in the order of their tokens. media may be shorter than the number of blocks. HashMedia does not
// change it.
//
// The input of a block's hash is the tokens; then, per item, the hash as little-endian u64 and the offset as i64; then
// the byte 1. Thus blocks are equal only if engines hash both equally, and blocks without items have inputs of
// different lengths. A block with a single item without offset has Dynamo's hash: the input is the tokens and the
// item's hash. Blocks with offsets never have this hash.
func (h *Hasher) HashMedia(dst []LocalHash, tokens []uint32, media [][]BlockMedia) []LocalHash {
	var scratch blockScratch
	n := h.blocks(len(tokens))
	dst = slices.Grow(dst, n)
	if h.block == 16 && h.window == 16 && len(media) == 0 {
		return hashSixteens(dst, tokens[:16*n], h.seed)
	}
	for i := range n {
		block := tokens[i*h.block : i*h.block+h.window]
		if i < len(media) && len(media[i]) > 0 {
			dst = append(dst, scratch.hash(block, media[i], h.seed))
		} else {
			dst = append(dst, hashTokens(block, h.seed))
		}
	}
	return dst
}

// maxSession bounds the bytes of a session's id.
const maxSession = 256

// HashSession returns the hash by which events refer to a session: the log contains no id of a client. An empty id has
// the hash 0.
func HashSession(id string) SessionHash {
	if id == "" {
		return 0
	}
	return max(SessionHash(xxh3.HashStringSeed(id, sessionSeed)), 1)
}

// hashSession is HashSession for bytes that are not empty.
func hashSession(id []byte) SessionHash { return max(SessionHash(xxh3.HashSeed(id, sessionSeed)), 1) }

// BlockMedia is a multimodal item with at least one token in a block.
type BlockMedia struct {
	Hash uint64 // the MediaHash of its identifier; Dynamo's mm_hash if the item has no offset

	// Offset is the position of the item's first token, counted from the block's first token. It is negative if the item
	// begins in an earlier block, and NoOffset if the event has none: vLLM announces offsets from 0.23 on, Dynamo never.
	Offset int64
}

// NoOffset is the offset of an item at an unknown position.
const NoOffset = math.MinInt64

// MediaItem is a multimodal item of a prompt, such as an image.
type MediaItem struct {
	// Hash is the MediaHash of the engine's identifier. A request may contain the identifier itself, as text.
	Hash uint64 `json:"hash" msgpack:"hash"`

	// The placeholder tokens of the item: the position of the first token, from 0, and the number.
	Offset uint32 `json:"offset" msgpack:"offset"`
	Length uint32 `json:"length" msgpack:"length"`
}

// HashItems is HashMedia for the items of a whole prompt, in the order of their offsets and without overlap, as engines
// list them (vllm-project/vllm › vllm/v1/core/kv_cache_utils.py, _gen_mm_extra_hash_keys).
func (h *Hasher) HashItems(dst []LocalHash, tokens []uint32, items []MediaItem) []LocalHash {
	if len(items) == 0 {
		return h.Hash(dst, tokens)
	}
	media := make([][]BlockMedia, h.blocks(len(tokens)))
	for _, item := range items {
		first := max(0, int(item.Offset)-h.window+h.block) / h.block
		for i := first; i < len(media) && i*h.block < int(item.Offset)+int(item.Length); i++ {
			media[i] = append(media[i], BlockMedia{item.Hash, int64(item.Offset) - int64(i*h.block)})
		}
	}
	return h.HashMedia(dst, tokens, media)
}

// MediaHash returns the XXH3-64 of a multimodal item's identifier, an input of the blocks' hashes. Dynamo's
// mm_hash is different: its input is only the first 16 digits of an identifier of 64 hexadecimal digits.
func MediaHash(identifier string) uint64 { return xxh3.HashString(identifier) }

// dynamoMediaHash returns Dynamo's mm_hash of an identifier: the first 16 of 64 hexadecimal digits, or the XXH3-64 of
// any other text.
func dynamoMediaHash(identifier []byte) (v uint64) {
	if !isDigest(identifier) {
		return xxh3.Hash(identifier)
	}
	for i := range 16 {
		v = v<<4 | uint64(hexDigit(identifier[i]))
	}
	return v
}

// SeqHashes appends to dst the sequence hashes of a prompt. locals are its local hashes, from the first block on. The
// first sequence hash is the local hash itself. A later hash is the XXH3-64 with seed 1337 of the previous sequence
// hash and the local hash, both as little-endian u64.
func SeqHashes(dst []SeqHash, locals []LocalHash) []SeqHash {
	if len(locals) == 0 {
		return dst
	}
	dst = slices.Grow(dst, len(locals))
	seq := SeqHash(locals[0])
	dst = append(dst, seq)
	for _, local := range locals[1:] {
		seq = nextSeqHash(seq, local)
		dst = append(dst, seq)
	}
	return dst
}

// nextSeqHash returns the sequence hash of the block with this local hash after seq. The function computes XXH3-64 of
// 16 bytes like xxh3.HashSeed, but in registers. The constants are bytes 24 to 55 of the secret, and the multiplier of
// the avalanche.
func nextSeqHash(seq SeqHash, local LocalHash) SeqHash {
	lo := uint64(seq) ^ (0x1f67b3b7a4a44072 ^ 0x78e5c0cc4ee679cb + baseSeed)
	hi := uint64(local) ^ (0x2172ffcc7dd05a82 ^ 0x8e2443f7744608b8 - baseSeed)
	high, low := bits.Mul64(lo, hi)
	x := 16 + bits.ReverseBytes64(lo) + hi + (high ^ low)
	x ^= x >> 37
	x *= 0x165667919e3779f9
	return SeqHash(x ^ x>>32)
}

// hashSixteens appends to dst the hashes of blocks of 16 tokens, the most common size. It computes XXH3-64 of 64 bytes
// like xxh3.HashSeed, without a branch on the length. The constants are the secret's first eight words, the length
// times a prime, and the multiplier of the avalanche.
func hashSixteens(dst []LocalHash, tokens []uint32, seed uint64) []LocalHash {
	k0, k1 := 0xbe4ba423396cfeb8+seed, 0x1cad21f72c81017c-seed
	k2, k3 := 0xdb979083e96dd4de+seed, 0x1f67b3b7a4a44072-seed
	k4, k5 := 0x78e5c0cc4ee679cb+seed, 0x2172ffcc7dd05a82-seed
	k6, k7 := 0x8e2443f7744608b8+seed, 0x4c263a81e69035e0-seed
	mix := func(a, b, c, d uint32, lo, hi uint64) uint64 {
		high, low := bits.Mul64(lo^(uint64(a)|uint64(b)<<32), hi^(uint64(c)|uint64(d)<<32))
		return high ^ low
	}
	const length = 64 * 0x9e3779b185ebca87 & (1<<64 - 1)
	for ; len(tokens) >= 16; tokens = tokens[16:] {
		t := (*[16]uint32)(tokens)
		x := length + mix(t[0], t[1], t[2], t[3], k0, k1) + mix(t[4], t[5], t[6], t[7], k4, k5) +
			mix(t[8], t[9], t[10], t[11], k6, k7) + mix(t[12], t[13], t[14], t[15], k2, k3)
		x ^= x >> 37
		x *= 0x165667919e3779f9
		dst = append(dst, LocalHash(x^x>>32))
	}
	return dst
}

// PayloadDigest returns the digest of an engine's message, as in [Cursor].
func PayloadDigest(payload []byte) uint64 { return xxh3.Hash(payload) }

// hashTokens hashes tokens as little-endian u32. On little-endian machines it does so in place.
func hashTokens(tokens []uint32, seed uint64) LocalHash {
	if bytes, ok := littleendian.InPlace(tokens); ok {
		return LocalHash(xxh3.HashSeed(bytes, seed))
	}
	var scratch blockScratch
	return scratch.hash(tokens, nil, seed)
}

// blockScratch is a buffer for assembling inputs before hashing.
type blockScratch struct{ bytes []byte }

// hash hashes the tokens and the multimodal items after them; see [Hasher.HashMedia].
func (s *blockScratch) hash(tokens []uint32, media []BlockMedia, seed uint64) LocalHash {
	s.bytes = s.bytes[:0]
	s.bytes = littleendian.Append(s.bytes, tokens)
	if len(media) == 1 && media[0].Offset == NoOffset {
		s.bytes = binary.LittleEndian.AppendUint64(s.bytes, media[0].Hash)
	} else if len(media) > 0 {
		for _, m := range media {
			s.bytes = binary.LittleEndian.AppendUint64(s.bytes, m.Hash)
			s.bytes = binary.LittleEndian.AppendUint64(s.bytes, uint64(m.Offset))
		}
		s.bytes = append(s.bytes, 1)
	}
	return LocalHash(xxh3.HashSeed(s.bytes, seed))
}

// isDigest reports whether s is 64 hexadecimal digits.
func isDigest(s []byte) bool {
	if len(s) != 64 {
		return false
	}
	for i := range len(s) {
		if hexDigit(s[i]) < 0 {
			return false
		}
	}
	return true
}

// hexDigit returns the value of a hexadecimal digit, or -1.
func hexDigit(c byte) int {
	switch {
	case '0' <= c && c <= '9':
		return int(c - '0')
	case 'a' <= c && c <= 'f':
		return int(c-'a') + 10
	case 'A' <= c && c <= 'F':
		return int(c-'A') + 10
	}
	return -1
}

// MaxBlockSize is the maximum size of a block in tokens, far above the sizes that engines use.
const MaxBlockSize = math.MaxUint16
