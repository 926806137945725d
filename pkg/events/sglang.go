package events

import (
	"math"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// SGLang's events differ from vLLM's as follows (sgl-project/sglang › python/sglang/srt/mem_cache/events.py, in older
// versions disaggregation/kv_events.py):
//
//   - Names are signed.
//   - Every event has a field for the salt. In arrays, the field is in a map at the position of vLLM's
//     lora_name (0.5.18 and 0.5.19).
//   - With EAGLE, a token is a pair.

// readSGLangExtras reads the map {"cache_salt": …, "session_id": …}.
func (d *Decoder) readSGLangExtras(r *msgp.Reader) {
	n, _ := r.Map()
	for ; n > 0 && !r.Broken; n-- {
		key, ok := r.Str()
		if !ok {
			r.Skip()
		}
		switch string(key) {
		case "cache_salt":
			d.raw.salt, d.raw.saltField = d.readSpaceName(r), true
		case "lora_name":
			d.raw.lora = d.readSpaceName(r)
		case "session_id":
			d.raw.session = d.readSession(r)
		default:
			r.Skip()
		}
	}
}

// readTokenPairs reads n pairs [t, u] as n+1 tokens. Each pair begins with the last token of the pair before.
func (d *Decoder) readTokenPairs(r *msgp.Reader, n int) {
	for ; n > 0; n-- {
		before := r.At
		two, ok := r.Array()
		if !ok || two != 2 {
			r.At = before
			break
		}
		t, ok1 := r.Uint(math.MaxUint32)
		u, ok2 := r.Uint(math.MaxUint32)
		last := len(d.tokens) - 1
		if !ok1 || !ok2 || last >= 0 && d.tokens[last] != uint32(t) {
			r.At = before
			break
		}
		if last < 0 {
			d.tokens = append(d.tokens, uint32(t))
		}
		d.tokens = append(d.tokens, uint32(u))
	}
	if n > 0 && !r.Broken {
		d.raw.passStored(skipToken)
		r.SkipN(n)
	}
}
