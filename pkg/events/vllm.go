package events

import (
	"bytes"
	"encoding/binary"
	"math"
	"slices"
	"strconv"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/zeebo/xxh3"
)

// vLLM's events (vllm-project/vllm › vllm/distributed/kv_events.py), in every version from 0.9 on. Up to 0.23 an event
// is an array with the type as first element. From 0.24 on an event is a map with the key "type". The first byte
// distinguishes the two. SGLang's events have the same form; sglang.go has the differences.

type eventType uint8

const (
	typeNone eventType = iota
	typeUnknown
	typeStored
	typeRemoved
	typeCleared
	typeTierCleared // proposed in vllm-project/vllm#57296
)

// field is a field that the decoder reads.
type field uint8

const (
	fieldOther field = iota
	fieldType
	fieldBlockHashes
	fieldParent
	fieldTokens
	fieldBlockSize
	fieldLoRAID
	fieldMedium
	fieldLoRAName
	fieldExtraKeys
	fieldGroup
	fieldAttention
	fieldWindow
	fieldLocality
	fieldSalt
	fieldLookahead // from 0.33
	fieldOrigin    // proposed in vllm-project/vllm#51699
	fieldMediaKeys // of TensorRT-LLM
	fieldSession   // from 0.30
)

// The fields of events in array form, by position. New versions append fields, so the length of an array shows the
// version of its writer.
var (
	storedPositions = [...]field{
		fieldType,
		fieldBlockHashes,
		fieldParent,
		fieldTokens,
		fieldBlockSize,
		fieldLoRAID,
		fieldMedium,    // from 0.11
		fieldLoRAName,  // from 0.14
		fieldExtraKeys, // from 0.17
		fieldGroup,     // from about 0.19, like the fields after it
		fieldAttention,
		fieldWindow,
	}
	removedPositions = [...]field{fieldType, fieldBlockHashes, fieldMedium, fieldGroup}
	clearedPositions = [...]field{fieldType, fieldMedium}
)

// fieldOf returns the field with this name in events in map form.
func fieldOf(key []byte) field {
	switch string(key) {
	case "type":
		return fieldType
	case "block_hashes":
		return fieldBlockHashes
	case "parent_block_hash":
		return fieldParent
	case "token_ids":
		return fieldTokens
	case "block_size":
		return fieldBlockSize
	case "lora_id":
		return fieldLoRAID
	case "medium":
		return fieldMedium
	case "lora_name":
		return fieldLoRAName
	case "extra_keys":
		return fieldExtraKeys
	case "group_idx":
		return fieldGroup
	case "kv_cache_spec_kind":
		return fieldAttention
	case "kv_cache_spec_sliding_window":
		return fieldWindow
	case "locality":
		return fieldLocality
	case "cache_salt":
		return fieldSalt
	case "lookahead_token_ids":
		return fieldLookahead
	case "origin":
		return fieldOrigin
	case "mm_keys":
		return fieldMediaKeys
	case "session_id":
		return fieldSession
	}
	return fieldOther
}

// rawEvent has the uninterpreted fields of an event. The blocks and tokens lie in the decoder's buffers.
// References into the payload are valid only during the event.
type rawEvent struct {
	kind       eventType
	skip       Skip // the reason to skip an event of any type
	skipStored Skip // the reason to skip a stored event
	data       []byte

	blocks     int // the beginning of the names, and of the local hashes
	locals     int
	badNames   bool // some names are unreadable
	longNames  int  // the number of names above maxEventTokens, which are unread and begin at namesAt
	namesAt    int
	parent     BlockHash
	hasParent  bool
	tokenCount int // in units of the block size: the number of tokens, or of pairs
	blockSize  uint32
	lora       []byte // the adapter's name
	loraID     []byte // the adapter's number as text, used without a name
	badLoRAID  bool
	salt       []byte
	session    SessionHash
	saltField  bool // the event has the field cache_salt, so salts of earlier events do not count
	tier       Tier // 0: not announced
	inStore    bool // the medium has the form of vLLM's MooncakeStoreConnector
	group      GroupIndex
	grouped    bool // the event has a group
	attention  Attention
	window     uint32 // tokens
	drops      bool
	extraKeys  [2]int // the beginning and end of the values of these three
	lookahead  [2]int
	mediaKeys  [2]int
	ahead      uint32 // the number of tokens beyond a block in its hash, the same for all blocks
	isMap      bool
	bareMedia  bool // the version writes multimodal identifiers as bare strings in extra_keys
}

// Of several reasons, the first one in the list of constants counts, in any order of fields.
func (e *rawEvent) pass(reason Skip)       { e.skip = min(e.skip, reason) }
func (e *rawEvent) passStored(reason Skip) { e.skipStored = min(e.skipStored, reason) }

func (e *rawEvent) tierOrDevice() Tier {
	if e.tier == 0 {
		return Device
	}
	return e.tier
}

func (d *Decoder) readEvent(r *msgp.Reader) {
	if n, ok := r.Array(); ok {
		if n == 0 {
			return
		}
		d.field(r, fieldType)
		var positions []field
		switch d.raw.kind {
		case typeStored:
			positions = storedPositions[:]
			d.raw.bareMedia = n <= 9
		case typeRemoved:
			positions = removedPositions[:]
		case typeTierCleared:
			positions = clearedPositions[:]
		}
		for i := 1; i < n && !r.Broken; i++ {
			f := fieldOther
			if i < len(positions) {
				f = positions[i]
			}
			d.field(r, f)
		}
	} else if n, ok := r.Map(); ok {
		d.raw.isMap = true
		for ; n > 0 && !r.Broken; n-- {
			key, ok := r.Str()
			if !ok {
				r.Skip()
			}
			d.field(r, fieldOf(key))
		}
	} else {
		r.Skip()
	}
}

func (d *Decoder) field(r *msgp.Reader, f field) {
	e := &d.raw
	switch f {
	case fieldOther:
		r.Skip()
	case fieldType:
		d.readType(r)
	case fieldBlockHashes:
		d.readBlocks(r)
	case fieldParent:
		d.readParent(r)
	case fieldTokens:
		d.readTokens(r)
	case fieldBlockSize:
		if v, ok := r.Uint(math.MaxUint32); ok {
			e.blockSize = uint32(v)
		} else if !r.Null() {
			e.passStored(skipMalformed)
			r.Skip()
		}
	case fieldLoRAID:
		d.readLoRAID(r)
	case fieldMedium:
		d.readMedium(r)
	case fieldLoRAName:
		if r.Next() == msgp.Map {
			d.readSGLangExtras(r)
		} else {
			e.lora = d.readSpaceName(r)
		}
	case fieldSalt:
		e.salt, e.saltField = d.readSpaceName(r), true
	case fieldExtraKeys:
		e.extraKeys = skipSpan(r)
	case fieldLookahead:
		e.lookahead = skipSpan(r)
	case fieldMediaKeys:
		e.mediaKeys = skipSpan(r)
	case fieldOrigin:
		if origin, ok := r.Str(); !ok {
			d.ignore(r)
		} else if string(origin) == "REUSED" {
			e.passStored(skipReused)
		}
	case fieldSession:
		e.session = d.readSession(r)
	case fieldGroup:
		if v, ok := r.Uint(math.MaxUint32); ok {
			e.group, e.grouped = GroupIndex(v), true
		} else {
			d.ignore(r)
		}
	case fieldAttention:
		if kind, ok := r.Str(); !ok {
			d.ignore(r)
		} else if e.attention, ok = attentionNames[string(kind)]; !ok {
			e.attention = AttentionOther
		}
	case fieldWindow:
		if v, ok := r.Uint(math.MaxUint32); ok {
			e.window = uint32(v)
		} else {
			d.ignore(r)
		}
	case fieldLocality:
		d.readLocality(r)
	}
}

func (d *Decoder) readParent(r *msgp.Reader) {
	e := &d.raw
	if e.hasParent = !r.Null(); e.hasParent {
		var ok bool
		if e.parent, ok = d.readHash(r); !ok {
			e.passStored(skipHash)
			r.Skip()
		}
	}
}

// readLocality passes an event about blocks outside the engine's host.
func (d *Decoder) readLocality(r *msgp.Reader) {
	if r.Null() {
		return
	}
	where, ok := r.Str()
	if !ok {
		r.Skip()
	}
	if !bytes.EqualFold(where, local) {
		d.raw.pass(skipRemote)
	}
}

var local = []byte("LOCAL")

// skipSpan skips a value and returns its beginning and end.
func skipSpan(r *msgp.Reader) [2]int {
	begin := r.At
	r.Skip()
	return [2]int{begin, r.At}
}

func (d *Decoder) readType(r *msgp.Reader) {
	name, ok := r.Str()
	if !ok {
		d.raw.kind = typeNone
		r.Skip()
		return
	}
	switch string(name) {
	case "BlockStored":
		d.raw.kind = typeStored
	case "BlockRemoved":
		d.raw.kind = typeRemoved
	case "AllBlocksCleared":
		d.raw.kind = typeCleared
	case "TierBlocksCleared":
		d.raw.kind = typeTierCleared
	default:
		d.raw.kind = typeUnknown
	}
}

func (d *Decoder) readBlocks(r *msgp.Reader) {
	e := &d.raw
	d.blocks, e.longNames = d.blocks[:e.blocks], 0
	n, ok := r.Array()
	if !ok {
		if !r.Null() {
			e.pass(skipMalformed)
			r.Skip()
		}
		return
	}
	if n > maxEventTokens {
		e.longNames, e.namesAt = n, r.At
		r.SkipN(n)
		return
	}
	for ; n > 0; n-- {
		if b := r.Data[r.At:]; len(b) >= 9 && b[0] == msgp.CodeUint64 { // nearly all names
			d.blocks = append(d.blocks, BlockHash(binary.BigEndian.Uint64(b[1:])))
			r.At += 9
			continue
		}
		if h, ok := d.readHash(r); ok {
			d.blocks = append(d.blocks, h)
		} else if e.badNames = true; !r.Skip() {
			return
		}
	}
}

// readHash reads a block's name: an integer of either sign, the bytes of a digest, or either as digits.
func (d *Decoder) readHash(r *msgp.Reader) (BlockHash, bool) {
	before := r.At
	switch r.Next() {
	case msgp.Int:
		if v, _, ok := r.Int(); ok {
			return BlockHash(v), true
		}
	case msgp.Bin:
		if digest, ok := r.Bin(); ok && len(digest) > 0 {
			if len(digest) > 8 {
				digest = d.engine.digestPart(digest, 8)
			}
			var v uint64
			for _, c := range digest {
				v = v<<8 | uint64(c)
			}
			return BlockHash(v), true
		}
	case msgp.Str:
		if digits, ok := r.Str(); ok {
			if v, ok := d.engine.hashOfDigits(digits); ok {
				return v, true
			}
		}
	}
	if !r.Broken {
		r.At = before
	}
	return 0, false
}

// digestPart returns the n bytes of a digest that the engine itself uses as a name: vLLM the last bytes, SGLang the
// first.
func (e Engine) digestPart(digest []byte, n int) []byte {
	if e == SGLang {
		return digest[:n]
	}
	return digest[len(digest)-n:]
}

// maxDigits bounds a block's name in digits. Parsing a number copies its text.
const maxDigits = 256

func (e Engine) hashOfDigits(digits []byte) (BlockHash, bool) {
	if len(digits) > maxDigits {
		return 0, false
	}
	if v, err := strconv.ParseUint(string(digits), 10, 64); err == nil {
		return BlockHash(v), true
	}
	if v, err := strconv.ParseInt(string(digits), 10, 64); err == nil {
		return BlockHash(v), true
	}
	digits = bytes.TrimPrefix(digits, []byte("0x"))
	if len(digits) > 16 {
		for _, c := range digits {
			if hexDigit(c) < 0 {
				return 0, false
			}
		}
		digits = e.digestPart(digits, 16)
	}
	v, err := strconv.ParseUint(string(digits), 16, 64)
	return BlockHash(v), err == nil
}

func (d *Decoder) readTokens(r *msgp.Reader) {
	e := &d.raw
	d.tokens, d.digests, e.tokenCount = d.tokens[:0], d.digests[:0], 0
	n, ok := r.Array()
	if !ok {
		if !r.Null() {
			e.passStored(skipMalformed)
			r.Skip()
		}
		return
	}
	if n > maxEventTokens {
		e.passStored(skipTooLarge)
		r.SkipN(n)
		return
	}
	e.tokenCount = n
	if n > 0 && r.Next() == msgp.Array {
		d.readTokenPairs(r, n)
	} else if d.tokens, ok = r.Uint32s(d.tokens, n); !ok {
		d.readDigests(r, n)
	}
}

func (d *Decoder) readMedium(r *msgp.Reader) {
	medium, ok := r.Str()
	if !ok {
		if !r.Null() {
			d.raw.pass(skipMedium)
			r.Skip()
		}
		return
	}
	switch string(medium) {
	case "GPU":
		d.raw.tier = Device
	case "CPU", "CPU_PINNED":
		d.raw.tier = Host
	case "cpu":
		d.raw.tier, d.raw.inStore = Host, true
	default:
		if d.raw.tier, ok = tierOfMedium(string(medium[:min(len(medium), maxMedium+1)])); !ok {
			d.raw.pass(skipMedium)
		}
	}
}

// readSpaceName reads a field of the blocks' space. An event with an unreadable field is skipped, so the blocks of a
// tenant never count as another tenant's.
func (d *Decoder) readSpaceName(r *msgp.Reader) []byte {
	name, ok := r.Str()
	if !ok && !r.Null() {
		d.raw.passStored(skipSpace)
		r.Skip()
	}
	return name
}

// readSession reads the session of the request that stored the blocks. The field only describes, so an unreadable id or
// an id of more than maxSession bytes counts as absent.
func (d *Decoder) readSession(r *msgp.Reader) SessionHash {
	id, ok := r.Str()
	switch {
	case !ok:
		d.ignore(r)
	case len(id) > maxSession:
		d.counts[skipField]++
	case len(id) > 0:
		return hashSession(id)
	}
	return 0
}

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
