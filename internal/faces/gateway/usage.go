package gateway

import (
	"bytes"
	"regexp"
)

// usage finds the reused tokens in a response that arrives in pieces, as JSON or as a stream of events: the field
// usage.prompt_tokens_details.cached_tokens of OpenAI's APIs, or usage.cache_read_input_tokens of Anthropic's. Text in
// the answer cannot match: its quotation marks are escaped. The zero value is ready for use.
type usage struct {
	tail []byte // the last bytes read: a key or its number may begin there
}

// usageKeys are the names of the fields.
var usageKeys = [][]byte{[]byte(`"cached_tokens"`), []byte(`"cache_read_input_tokens"`)}

// longestKey is the length of the longest name.
const longestKey = len(`"cache_read_input_tokens"`)

// nextKey returns the place of the first name in a text, and its length. The place is negative without a name.
func nextKey(text []byte) (at, length int) {
	at = -1
	for _, key := range usageKeys {
		if i := bytes.Index(text, key); i >= 0 && (at < 0 || i < at) {
			at, length = i, len(key)
		}
	}
	return at, length
}

// maxNumber bounds the bytes of a number and of the text before it.
const maxNumber = 18

// read returns the number that ends in these bytes, the last of several. some is false without a number.
func (u *usage) read(b []byte) (n uint64, some bool) {
	text := append(u.tail, b...)
	for {
		at, length := nextKey(text)
		if at < 0 {
			u.tail = append([]byte(nil), text[max(0, len(text)-longestKey+1):]...)
			return n, some
		}
		rest := text[at+length:]
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
			u.tail = append([]byte(nil), text[at:]...)
			return n, some
		}
		if digits && i < maxNumber {
			n, some = value, true
		}
		text = rest[i:]
	}
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
