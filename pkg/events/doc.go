// Package events answers one question: what did an engine say, in our words? It is the vocabulary of all other packages
// (identities, events, batches, images) and what turns bytes into it: the decoders of engines' messages, the hashes by
// which blocks are known, and the wire format of the log.
//
// # Use, in the order in which data flows
//
// A shim makes one [Decoder] for each rank and gives it every message of the engine:
//
//	d, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 16})
//	m, err := d.Decode(payload)       // m.Events, good until the next call
//	m, more, err := d.Begin(payload)  // the first part of a large message; d.Continue returns the next
//
// It numbers the events, cuts them into batches, writes each with [AppendBatch] and publishes it. A
// shim that starts again reads the cursor of the last one with [DecodeBatchHeader]. An indexer node reads batches with
// [DecodeBatch], again and again into the same [Batch]. Whoever asks makes a [Hasher] and turns a prompt's tokens into
// local hashes; those of equal prompts are equal on whatever engine, which is all that a match needs.
//
// # What it promises
//
//  1. No input makes it panic, loop, or take more memory than a small multiple of the input's length.
//  2. No event makes an engine's message fail. What cannot be taken is passed over and counted under its own name
//     ([Skip]). A message that is no MessagePack, or no message, is [ErrMalformed] and leaves the decoder as good as
//     before.
//  3. The same engine message makes the same number of events, cut at the same places, in every life of a shim.
//  4. A block is never named so that a prompt finds it which it does not serve. Where LoRA, salt, multimodal items or
//     lookahead tokens cannot be read, the event is passed over; where a copy's are left out, its tokens are; where a
//     salt was forgotten, the block is found by no one.
//  5. What takes away is taken as far as it can be read: unreadable names do not keep a removal's other names, and
//     nothing keeps a clear.
//  6. The format of batches has a version. Later ones of the same version may have more elements than we know, which
//     are passed over; a later version is [ErrVersion], never misread. Every batch ever written is kept in testdata.
//  7. Decoding, hashing and encoding allocate nothing once their memory has grown.
//
// A [Hasher] may be used by any number of goroutines. A [Decoder] and a [Batch] that is decoded into belong to one. All
// other functions keep nothing.
//
// # Hashes
//
//	seed      = 1337 + xxh3_64(LoRA name, seed 0) + xxh3_64(cache salt, seed 1), the latter two only if not empty
//	local     = xxh3_64(tokens of the block as u32 ‖ hashes of its multimodal items as u64, ascending; seed)
//
// All numbers are little-endian and wrap around. With EAGLE a block's tokens are one more than its size: the next
// block's first; other drafters read further ahead ([Event].Lookahead). These are NVIDIA Dynamo's (ai-dynamo/dynamo ›
// lib/llm, compute_block_hash_for_seq), and the tests hold them to what its library computes.
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
//	      + - - - - - + - - - - - - - - + - - - - - - - - - + - - -                |
//	      | lookahead | window | drops  | chunk  | content  | more  <--------------+
//	      + - - - - - + - - - - - - - - + - - - - - - - - - + - - -
//	          uint       uint     bool    uint      bin or
//	                                                 nil
//
// The first element is the format version. Integers are unsigned and as short as they can be. kind, tier, attention and
// reason are the numbers in this package, marked as wire constants. parent is nil if there is none. blocks and locals
// are nil if empty, and else one binary of little-endian u64, so that reading them is one copy and no visit: at most
// [MaxBlocksPerEvent] numbers. lookahead is left out if it is 0 and nothing follows it, and so are window and drops,
// together, and chunk and content, together. content is the local hashes of an event with a name of the connector's own
// ([Event].Own), whose locals are nil. Nothing follows the batch. What a later writer needs beyond this it appends to
// an array; what would make an old reader wrong takes a new version, and so does a new kind or tier.
//
// # Engine messages
//
// vllm.go and sglang.go say what engines write. One reader takes both, choosing by what is there and never by version.
// The fields that matter to what a block is (names, tokens, LoRA, salt, extra keys, lookahead, medium, locality) spoil
// an event if they have a wrong type; the others (group, kind of attention, timestamp, rank) are then taken as absent
// and counted. DESIGN.md says why, and what was decided where engines contradict each other.
//
// # What it leaves to others
//
// Reference counts, parents that are not known, what group serves what: all that needs memory of events belongs to the
// index. Sequence numbers, gaps, replay and sockets belong to the shim. Hashes of pages in a shared store belong to
// pkg/hicache.
package events
