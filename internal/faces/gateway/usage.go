package gateway

import (
	"bytes"
	"regexp"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// usage reads the numbers of tokens in a response that arrives in pieces, as JSON or as a stream of events. The numbers
// are fields of the object usage. A later number replaces an earlier one: streams may repeat the object. Text in the
// answer cannot match: its quotation marks are escaped. The zero value is ready for use.
type usage struct {
	tail []byte            // the last bytes read: a name or its number may begin there
	last map[string]uint64 // the last number of each name
}

// usageNames has the names of the fields. A field with true has the number of reused tokens.
var usageNames = map[string]bool{
	"cached_tokens": true, "prompt_tokens": false, "completion_tokens": false, // of OpenAI's APIs
	"input_tokens": false, "output_tokens": false, // of OpenAI Responses and Anthropic Messages
	"cache_read_input_tokens": true, "cache_creation_input_tokens": false, // of Anthropic Messages
}

// nameEnd is the end of every name.
var nameEnd = []byte(`tokens"`)

const (
	longestName = len(`"cache_creation_input_tokens"`)

	// maxNumber bounds the bytes of a number and of the text before it.
	maxNumber = 18
)

// read reads a piece, and returns the number of reused tokens that ends there. reported is false without the number.
func (u *usage) read(b []byte) (reused uint64, reported bool) {
	text := append(u.tail, b...)
	for {
		end := bytes.Index(text, nameEnd)
		if end < 0 {
			u.tail = append([]byte(nil), text[max(0, len(text)-longestName+1):]...)
			return reused, reported
		}
		end += len(nameEnd)
		before, rest := text[max(0, end-longestName):end], text[end:]
		name := before[bytes.LastIndexByte(before[:len(before)-1], '"')+1 : len(before)-1]
		reuse, known := usageNames[string(name)]
		if !known {
			text = rest
			continue
		}
		value, digits := uint64(0), false
		i := 0
		for ; i < min(len(rest), maxNumber); i++ {
			if c := rest[i]; c >= '0' && c <= '9' {
				value, digits = value*10+uint64(c-'0'), true
			} else if digits || c != ':' && c != ' ' {
				break
			}
		}
		if i == len(rest) && i < maxNumber { // the number may continue
			u.tail = append([]byte(nil), before...)
			u.tail = append(u.tail, rest...)
			return reused, reported
		}
		if digits && i < maxNumber && bytes.IndexByte([]byte(",}] \t\r\n"), rest[i]) >= 0 && value <= api.MaxISL {
			if u.last == nil {
				u.last = map[string]uint64{}
			}
			if u.last[string(name)] = value; reuse {
				reused, reported = value, true
			}
		}
		text = rest[i:]
	}
}

// prompt returns the number of the prompts' tokens, with the reused tokens; 0: unknown. input_tokens of Anthropic
// Messages lacks the tokens that the engine has read from its cache or written to it (vllm-project/vllm ›
// vllm/entrypoints/anthropic/serving.py, _build_anthropic_usage). Only that API has separate fields for them.
func (u *usage) prompt() uint64 {
	if n, some := u.last["prompt_tokens"]; some {
		return n
	}
	return u.last["input_tokens"] + u.last["cache_read_input_tokens"] + u.last["cache_creation_input_tokens"]
}

// completion returns the number of the answers' tokens; 0: unknown, or none.
func (u *usage) completion() uint64 {
	return max(u.last["completion_tokens"], u.last["output_tokens"])
}

// responseID finds the id of a response of the Responses API at the beginning of an answer, as JSON or as a stream of
// events. The zero value is ready for use.
type responseID struct {
	head []byte
	done bool
}

// idPattern matches the id, which engines write before any text of the request or of the answer.
var idPattern = regexp.MustCompile(`"id"\s*:\s*"(resp_[\w-]{1,200})"`)

// maxHead bounds the bytes before the end of an id.
const maxHead = 4 << 10

// read returns the id that ends in these bytes; empty without an id.
func (r *responseID) read(b []byte) string {
	if r.done {
		return ""
	}
	r.head = append(r.head, b[:min(len(b), maxHead-len(r.head))]...)
	match := idPattern.FindSubmatch(r.head)
	if r.done = match != nil || len(r.head) == maxHead; !r.done {
		return ""
	}
	r.head = nil
	if match == nil {
		return ""
	}
	return string(match[1])
}
