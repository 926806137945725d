package events

import (
	"bytes"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// signs distinguish the engines. The formats of vLLM and SGLang are nearly equal; a message without any of these signs
// has the same meaning in both. The first sign of a message in the order of the list decides, since the projects may
// adopt the later fields from each other (sgl-project/sglang RFC #39991).
var signs = [...]struct {
	is   Engine
	what string
}{
	signNegative:   {SGLang, "block hashes are signed"},
	signUnsigned:   {VLLM, "block hashes are unsigned"},
	signDigest:     {VLLM, "block hashes are digests"},
	signPairs:      {SGLang, "tokens come in pairs"},
	signSalt:       {SGLang, "cache_salt is a field"},
	signFields:     {VLLM, "events have vLLM's fields"},
	signRankName:   {SGLang, "the rank is attn_dp_rank"},
	signVLLMMedium: {VLLM, "media are called as in vLLM"},
	signMedium:     {SGLang, "media are called as in SGLang"},
}

type sign uint8

const (
	signNegative sign = iota // sgl-project/sglang › srt/mem_cache/utils.py, hash_str_to_int64
	signUnsigned             // vllm-project/vllm › vllm/v1/core/kv_cache_utils.py, maybe_convert_block_hash
	signDigest
	signPairs
	signSalt
	signFields
	signRankName
	signVLLMMedium
	signMedium
	numSigns
)

// Engine returns the engine of the messages: AnyEngine until a message identifies the engine. why is the identifying
// sign, or empty if the configuration names the engine.
func (d *Decoder) Engine() (e Engine, why string) { return d.engine, d.why }

// detectEngine sets the engine if the message has a sign of one.
func (d *Decoder) detectEngine(payload []byte) {
	l := look{r: msgp.Reader{Data: payload}}
	l.message()
	if l.r.Broken {
		return // a truncated message is no evidence
	}
	if l.has[signNegative] && l.has[signUnsigned] { // of equal weight
		l.has[signNegative], l.has[signUnsigned] = false, false
	}
	for s, has := range l.has {
		if has {
			d.engine, d.why = signs[s].is, signs[s].what
			return
		}
	}
}

// look searches a message for signs.
type look struct {
	r   msgp.Reader
	has [numSigns]bool
}

func (l *look) message() {
	r := &l.r
	if n, ok := r.Array(); ok && n > 1 {
		r.Skip()
		l.events()
		r.SkipN(n - 2)
		return
	}
	n, _ := r.Map()
	for ; n > 0 && !r.Broken; n-- {
		switch key, ok := r.Str(); {
		case !ok:
			r.SkipN(2)
		case string(key) == "events":
			l.events()
		default:
			l.has[signRankName] = l.has[signRankName] || string(key) == "attn_dp_rank"
			r.Skip()
		}
	}
}

func (l *look) events() {
	for n := l.array(); n > 0 && !l.r.Broken; n-- {
		l.event()
	}
}

// array returns the number of elements of an array. It skips a value of another type, and returns 0.
func (l *look) array() int {
	n, ok := l.r.Array()
	if !ok {
		l.r.Skip()
	}
	return n
}

func (l *look) event() {
	r := &l.r
	if n, ok := r.Array(); ok {
		if n > 0 {
			l.positions(n)
		}
		return
	}
	n, ok := r.Map()
	if !ok {
		r.Skip()
		return
	}
	for ; n > 0 && !r.Broken; n-- {
		key, ok := r.Str()
		if !ok {
			r.SkipN(2)
			continue
		}
		switch f := fieldOf(key); f {
		case fieldExtraKeys, fieldGroup, fieldAttention, fieldLocality, fieldLookahead, fieldOrigin:
			l.has[signFields] = true
			r.Skip()
		case fieldSalt:
			l.has[signSalt] = true
			r.Skip()
		default:
			l.field(f)
		}
	}
}

func (l *look) positions(n int) {
	r := &l.r
	name, ok := r.Str()
	if !ok {
		r.SkipN(n)
		return
	}
	var positions []field
	switch string(name) {
	case "BlockStored":
		positions = storedPositions[:]
	case "BlockRemoved":
		positions = removedPositions[:]
	}
	for i := 1; i < n && !r.Broken; i++ {
		switch f := at(positions, i); {
		case f == fieldLoRAName && r.Next() == msgp.Map:
			l.has[signSalt] = true
			r.Skip()
		case f == fieldLoRAName || f == fieldExtraKeys || f == fieldGroup || f == fieldAttention:
			l.has[signFields] = true
			r.Skip()
		default:
			l.field(f)
		}
	}
}

func at(positions []field, i int) field {
	if i < len(positions) {
		return positions[i]
	}
	return fieldOther
}

func (l *look) field(f field) {
	r := &l.r
	switch f {
	case fieldBlockHashes:
		for n := l.array(); n > 0 && !r.Broken; n-- {
			l.hash()
		}
	case fieldParent:
		l.hash()
	case fieldTokens:
		n := l.array()
		l.has[signPairs] = l.has[signPairs] || n > 0 && r.Next() == msgp.Array
		r.SkipN(n)
	case fieldMedium:
		name, ok := r.Str()
		if !ok {
			r.Skip()
			return
		}
		switch tier, known := tierOfMedium(string(name[:min(len(name), maxMedium+1)])); {
		case !known || tier == Device:
		case ofSGLang(name):
			l.has[signMedium] = true
		default:
			l.has[signVLLMMedium] = true
		}
	default:
		r.Skip()
	}
}

func (l *look) hash() {
	r := &l.r
	switch r.Next() {
	case msgp.Int:
		bits, negative, _ := r.Int()
		l.has[signNegative] = l.has[signNegative] || negative
		l.has[signUnsigned] = l.has[signUnsigned] || !negative && bits > 1<<63-1
	case msgp.Bin:
		l.has[signDigest] = true
		r.Skip()
	case msgp.Str:
		digits, _ := r.Str()
		v, _ := VLLM.hashOfDigits(digits)
		s, _ := SGLang.hashOfDigits(digits)
		l.has[signDigest] = l.has[signDigest] || v != s
	default:
		r.Skip()
	}
}

// ofSGLang reports whether only SGLang uses this name of a medium (sgl-project/sglang › srt/mem_cache/events.py).
func ofSGLang(medium []byte) bool {
	for _, name := range [...]string{"CPU_PINNED", "CPU_TIER1", "CPU_TIER2", "DISK", "EXTERNAL"} {
		if bytes.EqualFold(medium, []byte(name)) {
			return true
		}
	}
	return false
}
