package sharedstore

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/bits"
	"strings"
	"unicode/utf8"
	"unsafe"
)

// readBatchReply parses a reply of /batch_query_keys and passes each key, and whether the object exists, to the chunk.
func readBatchReply(body []byte, c *chunk) error {
	if scanBatchReply(unsafe.String(unsafe.SliceData(body), len(body)), c.hear) {
		return nil
	}
	c.forget()
	out, err := decodeBatchReply(body, len(c.at))
	for key, ok := range out {
		c.hear(key, ok)
	}
	return err
}

// scanBatchReply parses a reply in the form that masters write: {"success":true,"data":{KEY:{"ok":BOOL,...},...}},
// without escapes. It returns false for other forms and for invalid JSON; the caller then discards the keys and uses
// decodeBatchReply, which returns the same result for this form. The keys are parts of text.
func scanBatchReply(text string, hear func(key string, ok bool)) bool {
	s := replyScanner{text: text, plain: plainText(text)}
	success, data := false, false
	is := s.object(func(name string) bool {
		switch {
		case name == "success" && !success:
			success = true
			return s.word("true")
		case name == "data" && !data:
			data = true
			return s.object(func(key string) bool {
				ok, said := s.entry()
				if said = said && (s.plain || utf8.ValidString(key)); said {
					hear(key, ok)
				}
				return said
			})
		}
		return false
	})
	s.space()
	return is && success && data && s.at == len(text)
}

// plainText reports whether text is ASCII without control characters and backslashes.
func plainText(text string) bool {
	const ones = 0x0101010101010101
	b := unsafe.Slice(unsafe.StringData(text), len(text))
	bad := uint64(0) // bit 7 of each byte
	for ; len(b) >= 8; b = b[8:] {
		w := binary.LittleEndian.Uint64(b)
		slash := w ^ '\\'*ones
		bad |= w | (w-' '*ones)&^w | (slash-ones)&^slash
	}
	for _, c := range b {
		if c < ' ' || c >= 0x80 || c == '\\' {
			return false
		}
	}
	return bad&(0x80*ones) == 0
}

// replyScanner scans JSON of the plainest form. The methods return false if the text has another form; then the caller
// must stop.
type replyScanner struct {
	text  string
	at    int
	plain bool          // text passes plainText
	read  [2]replyEntry // the last two entries that newEntry parsed
}

// replyEntry is the text of an entry with the parsed result.
type replyEntry struct {
	text     string
	ok, said bool
}

// entry parses the entry of a key. Most entries equal one of the two previous entries, except for addresses.
func (s *replyScanner) entry() (ok, said bool) {
	for i := range s.read {
		if e := &s.read[i]; e.text != "" && s.like(e.text) {
			return e.ok, e.said
		}
	}
	s.space()
	first := s.at
	if ok, said = s.newEntry(); said {
		s.read[1] = s.read[0]
		s.read[0] = replyEntry{s.text[first:s.at], ok, said}
	}
	return ok, said
}

// like skips text that differs from before only in digits, if both have digits there: whole numbers, or a part of a
// quoted text. Such a text has the same form and meaning.
func (s *replyScanner) like(before string) bool {
	text := s.text[s.at:]
	for i, j := 0, 0; ; {
		n := commonPrefix(before[i:], text[j:])
		i, j = i+n, j+n
		if i == len(before) {
			s.at += j
			return true
		}
		equal := 0 // number of digits before this position
		for equal < n && before[i-equal-1]-'0' <= 9 {
			equal++
		}
		was, is := i, j
		for was < len(before) && before[was]-'0' <= 9 {
			was++
		}
		for is < len(text) && text[is]-'0' <= 9 {
			is++
		}
		digits := is - j + equal
		if was == i && is == j || was-i+equal == 0 || digits == 0 || digits > 1 && text[is-digits] == '0' {
			return false
		}
		i, j = was, is
	}
}

// commonPrefix returns the length of the common prefix of two texts.
func commonPrefix(a, b string) (n int) {
	most := min(len(a), len(b))
	x, y := unsafe.Slice(unsafe.StringData(a), most), unsafe.Slice(unsafe.StringData(b), most)
	for ; n+8 <= most; n += 8 {
		if d := binary.LittleEndian.Uint64(x[n:]) ^ binary.LittleEndian.Uint64(y[n:]); d != 0 {
			return n + bits.TrailingZeros64(d)/8
		}
	}
	for n < most && x[n] == y[n] {
		n++
	}
	return n
}

// newEntry parses an entry member by member.
func (s *replyScanner) newEntry() (ok, said bool) {
	read := s.object(func(name string) bool {
		switch {
		case name == "ok":
			ok, said = s.word("true"), true
			return ok || s.word("false")
		case strings.EqualFold(name, "ok"): // equal names in encoding/json
			return false
		}
		return s.value(8)
	})
	return ok, read && said
}

func (s *replyScanner) space() {
	for s.at < len(s.text) && (s.text[s.at] == ' ' || s.text[s.at]-'\t' < 2 || s.text[s.at] == '\r') {
		s.at++
	}
}

// byte skips space and a byte.
func (s *replyScanner) byte(c byte) bool {
	if s.space(); s.at < len(s.text) && s.text[s.at] == c {
		s.at++
		return true
	}
	return false
}

func (s *replyScanner) word(w string) bool {
	s.space()
	is := strings.HasPrefix(s.text[s.at:], w)
	if is {
		s.at += len(w)
	}
	return is
}

// quoted scans a text without escapes.
func (s *replyScanner) quoted() (text string, is bool) {
	if !s.byte('"') {
		return "", false
	}
	if s.plain {
		n := strings.IndexByte(s.text[s.at:], '"')
		if n < 0 {
			return "", false
		}
		text, s.at = s.text[s.at:s.at+n], s.at+n+1
		return text, true
	}
	for i := s.at; i < len(s.text); i++ {
		switch c := s.text[i]; {
		case c == '"':
			text, s.at = s.text[s.at:i], i+1
			return text, true
		case c == '\\' || c < ' ':
			return "", false
		}
	}
	return "", false
}

func (s *replyScanner) object(member func(name string) bool) bool {
	if !s.byte('{') {
		return false
	}
	if s.byte('}') {
		return true
	}
	for {
		name, is := s.quoted()
		if !is || !s.byte(':') || !member(name) {
			return false
		}
		if !s.byte(',') {
			return s.byte('}')
		}
	}
}

// value skips a value of limited depth.
func (s *replyScanner) value(depth int) bool {
	if s.space(); s.at == len(s.text) || depth == 0 {
		return false
	}
	switch c := s.text[s.at]; c {
	case '"':
		_, is := s.quoted()
		return is
	case '{':
		return s.object(func(string) bool { return s.value(depth - 1) })
	case '[':
		if s.at++; s.byte(']') {
			return true
		}
		for s.value(depth - 1) {
			if !s.byte(',') {
				return s.byte(']')
			}
		}
		return false
	case 'n':
		return s.word("null")
	case 't':
		return s.word("true")
	case 'f':
		return s.word("false")
	}
	return s.whole()
}

// whole skips an unsigned whole number.
func (s *replyScanner) whole() bool {
	first := s.at
	for s.at < len(s.text) && s.text[s.at]-'0' <= 9 {
		s.at++
	}
	return s.at == first+1 || s.at > first && s.text[first] != '0'
}

// decodeBatchReply is readBatchReply for every form of JSON, with reflection.
func decodeBatchReply(body []byte, hint int) (map[string]bool, error) {
	type entry struct {
		OK *bool `json:"ok"`
	}
	reply := struct {
		Success *bool             `json:"success"`
		Data    map[string]*entry `json:"data"`
	}{Data: make(map[string]*entry, hint)}
	if err := json.Unmarshal(body, &reply); err != nil {
		return nil, fmt.Errorf("%w: the reply is not JSON", ErrReply) // the text of err has a part of the body
	}
	if reply.Success == nil || !*reply.Success {
		return nil, fmt.Errorf("%w: the reply does not report success", ErrReply)
	}
	out := make(map[string]bool, len(reply.Data))
	for key, e := range reply.Data {
		if e != nil && e.OK != nil { // otherwise the reply has no answer for the key
			out[key] = *e.OK
		}
	}
	return out, nil
}
