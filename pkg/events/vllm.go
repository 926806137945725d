package events

import (
	"math"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
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
