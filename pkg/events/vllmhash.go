package events

import (
	"bytes"
	"slices"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/zeebo/xxh3"
)

// This file computes the local hashes of an event's blocks from tokens, extra keys and media.

// hash appends the local hashes of the event's blocks, up to the first block with a token that is not a number.
func (d *Decoder) hash(e *rawEvent, blocks []BlockHash) Skip {
	if !d.readExtraKeys(e, len(blocks)) || !d.readMediaKeys(e, len(blocks)) {
		return skipSpace
	}
	if !d.readLookahead(e, len(blocks)) {
		return skipLookahead
	}
	if e.skipStored != notSkipped {
		return e.skipStored
	}
	readable := d.placeStandIns(len(blocks))
	if readable == 0 {
		return skipToken
	}
	seed := uint64(baseSeed)
	switch {
	case len(e.lora) > 0:
		seed += xxh3.HashSeed(e.lora, loraSeed)
	case e.badLoRAID:
		return skipSpace
	case len(e.loraID) > 0:
		d.scratch.bytes = append(append(d.scratch.bytes[:0], loraByID...), e.loraID...)
		seed += xxh3.HashSeed(d.scratch.bytes, loraSeed)
	}
	var salt uint64
	salted := len(e.salt) > 0
	if salted {
		salt = xxh3.HashSeed(e.salt, saltSeed)
	} else if e.hasParent && !e.saltField { // the prompt began in an earlier event
		salt, salted = d.salts.lookup(e.parent)
	}
	if salted {
		seed += salt
		if !e.saltField {
			d.salts.remember(blocks, salt)
		}
	}
	size := int(d.block)
	window := size
	if len(d.tokens) > e.tokenCount { // n pairs have n+1 tokens
		window++
	}
	e.ahead = uint32(window - size + len(d.beyond.block(0)))
	plain := len(d.media.ends) == 0 && len(d.beyond.ends) == 0
	for i := range readable {
		tokens := d.tokens[i*size : i*size+window]
		if plain {
			d.locals = append(d.locals, hashTokens(tokens, seed))
			continue
		}
		if beyond := d.beyond.block(i); len(beyond) > 0 {
			d.window = append(append(d.window[:0], tokens...), beyond...)
			tokens = d.window
		}
		if media := d.media.block(i); len(media) > 0 {
			d.locals = append(d.locals, d.scratch.hash(tokens, media, seed))
		} else {
			d.locals = append(d.locals, hashTokens(tokens, seed))
		}
	}
	return notSkipped
}

// dynamoSalt is the prefix of a salt from Dynamo's frontend. Queries contain the salt without this prefix.
const dynamoSalt = "dynamo-cache-salt:"

// readExtraKeys reads the inputs of the engine's own hashes beside the tokens. For each of n blocks, the field has nil
// or an array of these, in order: the LoRA's name; multimodal items as [identifier, offset], before 0.23 as identifiers
// alone; in a prompt's first block the cache salt; and the digest of prompt embeddings.
//
// The position determines the meaning of a bare string:
//
//   - The first string of a block is the LoRA's name if equal to lora_name. In the event's first block this is also
//     true if the event has only the id of the LoRA.
//   - The last string of a prompt's first block is the salt, unless the version writes bare identifiers and the string
//     looks like an identifier.
//   - All other strings are identifiers.
//
// If a salt is read as an identifier, or an identifier as a salt, no query finds the block; a wrong query never does.
func (d *Decoder) readExtraKeys(e *rawEvent, n int) bool {
	d.media.reset()
	r, some, ok := e.blockValues(e.extraKeys, n)
	for i := 0; some && i < n; i++ {
		if !r.Null() {
			keys, ok := r.Array()
			if !ok || !d.blockKeys(&r, e, keys, i) {
				return false
			}
		}
		d.media.end()
	}
	return ok
}

// blockValues opens a field with a value for each of n blocks: an array of values, or nil. some is false if all
// values are nil. ok is false if the field has another form.
func (e *rawEvent) blockValues(span [2]int, n int) (r msgp.Reader, some, ok bool) {
	r = msgp.Reader{Data: e.data[:span[1]], At: span[0]}
	if r.Left() == 0 || r.Null() {
		return r, false, true
	}
	count, ok := r.Array()
	if ok && r.Left() == count && bytes.Count(r.Data[r.At:], []byte{msgp.CodeNil}) == count {
		return r, false, true
	}
	ok = ok && count == n
	return r, ok, ok
}

func (d *Decoder) blockKeys(r *msgp.Reader, e *rawEvent, keys, i int) bool {
	if len(d.media.values)+keys > maxEventTokens {
		e.passStored(skipTooLarge)
		return r.SkipN(keys)
	}
	first := i == 0 && !e.hasParent
	var bare []byte // the last bare string, if it may be the salt
	before := 0     // the number of items before it
	for k := range keys {
		switch r.Next() {
		case msgp.Str:
			s, ok := r.Str()
			if !ok {
				return false
			}
			switch {
			case k == 0 && len(e.lora) > 0 && bytes.Equal(s, e.lora):
			case i == 0 && k == 0 && len(e.lora) == 0 && len(e.loraID) > 0 && len(s) > 0:
				e.lora = s
			case bytes.HasPrefix(s, []byte(dynamoSalt)):
				e.salt = s[len(dynamoSalt):]
			case first:
				if bare != nil {
					d.insertMedia(before, bare)
				}
				bare, before = s, len(d.media.values)
			default:
				d.media.add(BlockMedia{dynamoMediaHash(s), NoOffset})
			}
		case msgp.Array:
			parts, ok := r.Array()
			if !ok || parts == 0 {
				return false
			}
			if bare != nil {
				d.insertMedia(before, bare)
				bare = nil
			}
			hash, dynamo, ok := readIdentifier(r)
			if !ok {
				return false
			}
			item := BlockMedia{dynamo, NoOffset}
			if parts > 1 {
				if at, _, ok := r.Int(); ok { // negative for an item that begins in an earlier block
					item = BlockMedia{hash, int64(at)}
				} else {
					r.Skip()
				}
				r.SkipN(parts - 2)
			}
			d.media.add(item)
		case msgp.Bin:
			hash, _, ok := readIdentifier(r)
			if !ok {
				return false
			}
			d.media.add(BlockMedia{hash, NoOffset})
		default:
			return false
		}
	}
	switch {
	case bare == nil:
	case !(e.bareMedia && isDigest(bare)) && len(e.salt) == 0:
		e.salt = bare
	case e.bareMedia && isDigest(bare) || !bytes.Equal(bare, e.salt):
		d.insertMedia(before, bare)
	}
	return true
}

// insertMedia inserts an item before other items of the current block.
func (d *Decoder) insertMedia(at int, identifier []byte) {
	d.media.values = slices.Insert(d.media.values, at, BlockMedia{dynamoMediaHash(identifier), NoOffset})
}

// readIdentifier reads the identifier of a multimodal item or of prompt embeddings. It returns the MediaHash and
// Dynamo's mm_hash of it.
func readIdentifier(r *msgp.Reader) (hash, dynamo uint64, ok bool) {
	if v, _, ok := r.Int(); ok {
		return v, v, true
	}
	if s, ok := r.Str(); ok {
		return xxh3.Hash(s), dynamoMediaHash(s), true
	}
	b, ok := r.Bin()
	return xxh3.Hash(b), xxh3.Hash(b), ok
}

// readLookahead reads, for each of n blocks, the tokens beyond the block in the engine's hash: nil, one token, or an
// array of tokens. An engine reads equally far ahead of each block (vllm-project/vllm › vllm/config/vllm.py,
// num_hash_lookahead_tokens). Otherwise no query could find the blocks.
func (d *Decoder) readLookahead(e *rawEvent, n int) bool {
	d.beyond.reset()
	r, some, ok := e.blockValues(e.lookahead, n)
	for i := 0; some && i < n; i++ {
		if !r.Null() {
			tokens, many := r.Array()
			if !many {
				tokens = 1
			}
			switch {
			case tokens >= MaxBlockSize:
				return false
			case len(d.beyond.values)+tokens > maxEventTokens:
				e.passStored(skipTooLarge)
				return true
			}
			if d.beyond.values, ok = r.Uint32s(d.beyond.values, tokens); !ok {
				return false
			}
		}
		d.beyond.end()
		if len(d.beyond.block(i)) != len(d.beyond.block(0)) {
			return false
		}
	}
	return ok && len(d.beyond.block(0)) < MaxBlockSize
}
