// Package events defines the vocabulary of all packages (identities, events, batches, images) and the conversion from
// bytes: decoders of the engines' messages, the hashes of blocks, and the wire format of the log.
//
// # Use, in the order in which data flows
//
// A shim creates a [Decoder] for each rank and passes every message of the engine to the decoder:
//
//	d, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 16})
//	m, err := d.Decode(payload)       // m.Events are valid until the next call
//	m, more, err := d.Begin(payload)  // the first part of a large message; d.Continue returns the next
//
// The shim numbers the events and encodes them into batches with a [BatchWriter] before publication; [AppendBatch]
// encodes a whole [Batch]. A restarted shim decodes the last batch in the log for the cursor. An indexer node decodes
// batches with [DecodeBatch] and reuses a [Batch] for all. A client converts a prompt's tokens to local hashes with a
// [Hasher]. Equal prompts have equal local hashes on every engine; a match needs nothing else.
//
// # Guarantees
//
//  1. No input causes a panic or an endless loop, or takes more memory than a small multiple of the input's length.
//  2. No event invalidates a message. Unusable events are skipped and counted by reason ([Skip]). A
//     message that is not MessagePack, or not a message, returns [ErrMalformed] and leaves the decoder unchanged.
//  3. The same engine message results in the same events with the same cuts, whenever a shim decodes it.
//  4. No prompt finds a block of another prompt. Events with an unreadable LoRA, salt, multimodal item or lookahead
//     token are skipped. If a copy's event lacks these fields, the tokens are ignored. A block with a forgotten salt
//     is not found.
//  5. Removals are applied as far as readable: unreadable names do not suppress the readable names of a removal, and
//     no fault suppresses a clear.
//  6. The format of batches has a version. Batches of the same version may have further elements, which are skipped. A
//     later version returns [ErrVersion]. The folder testdata contains batches of every format ever written.
//  7. Decoding, hashing and encoding allocate nothing once their buffers have grown.
//
// Any number of goroutines may use a [Hasher]. A [Decoder], and the [Batch] of DecodeBatch, belong to one
// goroutine. All other functions keep no state.
//
// # Hashes
//
//	seed      = 1337 + xxh3_64(LoRA name, seed 0) + xxh3_64(cache salt, seed 1), the latter two only if not empty
//	local     = xxh3_64(tokens of the block as u32 ‖ hashes of its multimodal items as u64, ascending; seed)
//
// All numbers are little-endian and wrap around. With EAGLE, the tokens of a block include the first token of the next
// block; some drafters read further ahead ([Event].Lookahead). The hashes are those of NVIDIA Dynamo
// (ai-dynamo/dynamo › lib/llm, compute_block_hash_for_seq); the tests compare both.
//
// # The format of a batch, version 1
//
// MessagePack: an array of eight elements or more.
//
//	+---+-------------+----------+-------+------------+--------+----------+--------+ - - -
//	| 1 | incarnation | first id | model | block size | cursor | shutdown | events | more
//	+---+-------------+----------+-------+------------+--------+----------+--------+ - - -
//	 uint    uint         uint      str       uint     array of    bool    array of
//	                                                       |                   |
//	      +-------+-----+--------+---------+ - - -         |                   |
//	      | known | seq | digest | partial | more <--------+                   |
//	      +-------+-----+--------+---------+ - - -                             |
//	        bool   uint    uint     uint                                       |
//	                                                                           |
//	      +------+------+-------+-----------+--------+--------+--------+--------+ - - -
//	      | kind | tier | group | attention | reason | parent | blocks | locals | more
//	      +------+------+-------+-----------+--------+--------+--------+--------+ - - -
//	        uint   uint   uint      uint       uint   uint or   bin or   bin or    |
//	                                                    nil       nil      nil     |
//	      + - - - - - + - - - - - - - - + - - - - - - - - - + - - - - + - - -      |
//	      | lookahead | window | drops  | chunk  | content  | session | more  <----+
//	      + - - - - - + - - - - - - - - + - - - - - - - - - + - - - - + - - -
//	          uint       uint     bool    uint      bin or     uint
//	                                                 nil
//
// The first element is the format version. Integers are unsigned and have their shortest form. kind, tier, attention
// and reason are the wire constants of the package. parent is nil if there is none. blocks
// and locals are nil if empty. Otherwise the value is a binary of at most [MaxBlocksPerEvent] little-endian u64, and a
// reader copies the binary as a whole. An event ends after locals if all later elements are 0 or empty. window and
// drops are written together, and so are chunk and content. content holds the local hashes of an event with a name of
// the connector's own ([Event].Own), whose locals are nil. session is the hash of a session's id. Nothing follows the
// batch. A later writer appends new elements to an array. A change that an old reader would misread takes a new
// version; so does a new kind or tier.
//
// # Engine messages
//
// vllm.go and sglang.go describe the engines' formats. One reader decodes both, by the fields of a message and not by
// the engine's version. Some fields determine the identity of a block: names, tokens, LoRA, salt, extra
// keys, lookahead, medium, locality. An event with a wrong type in such a field is skipped. Descriptive fields
// (session, group, kind of attention, timestamp, rank) of a wrong type count as absent, and are counted. DESIGN.md has
// the reasons, and the decisions about contradictions between engines.
//
// # Responsibilities of other packages
//
// The index keeps everything that needs memory of earlier events: reference counts, unknown parents, and the kind of
// each group. The shim handles sequence numbers, gaps, replay and sockets. pkg/hicache computes the hashes of pages in
// a shared store.
package events
