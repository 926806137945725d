package gateway

import "bytes"

// usage finds usage.prompt_tokens_details.cached_tokens in a response that arrives in pieces, as JSON or as a stream of
// events. Text in the answer cannot match: its quotation marks are escaped. The zero value is ready for use.
type usage struct {
	tail []byte // the last bytes read: a key or its number may begin there
}

var cachedKey = []byte(`"cached_tokens"`)

// maxNumber bounds the bytes of a number and of the text before it.
const maxNumber = 18

// read returns the number that ends in these bytes, the last of several. some is false without a number.
func (u *usage) read(b []byte) (n uint64, some bool) {
	text := append(u.tail, b...)
	for {
		at := bytes.Index(text, cachedKey)
		if at < 0 {
			u.tail = append([]byte(nil), text[max(0, len(text)-len(cachedKey)+1):]...)
			return n, some
		}
		rest := text[at+len(cachedKey):]
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
