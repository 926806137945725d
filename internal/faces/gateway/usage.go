package gateway

import "bytes"

// usage finds usage.prompt_tokens_details.cached_tokens in a response as it passes, in JSON or in a stream of events,
// wherever it is cut. Text of the answer cannot be mistaken for it: there, quotation marks are escaped. The zero value
// has read nothing.
type usage struct {
	tail []byte // of what was read: a key or its number may have begun there
}

var cachedKey = []byte(`"cached_tokens"`)

// maxNumber bounds the bytes of a number and of what is before it.
const maxNumber = 18

// read returns the number that ends in these bytes, the last if there are several. some is false if none does.
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
		if i == len(rest) && i < maxNumber { // it may go on
			u.tail = append([]byte(nil), text[at:]...)
			return n, some
		}
		if digits && i < maxNumber {
			n, some = value, true
		}
		text = rest[i:]
	}
}
