package hicache

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"strings"
	"unicode/utf8"
	"unsafe"
)

// readBatchReply has a chunk hear what /batch_query_keys answers: which keys were answered for, and whether their
// objects exist.
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

// scanBatchReply reads a reply in the form that masters write: {"success":true,"data":{KEY:{"ok":BOOL,...},...}}, with
// no escape in text. Of another form, or if it is no JSON, it is for decodeBatchReply, which reads the same in it; what
// hear was told is worth nothing then. Keys are parts of text.
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

// plainText reports whether text is of ASCII, without control characters and backslashes.
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

// replyScanner reads JSON of the plainest form. Its methods report whether they have read what they are for; if not,
// nothing else is to be read.
type replyScanner struct {
	text  string
	at    int
	plain bool // text passes plainText
}

// entry reads what is said of one key.
func (s *replyScanner) entry() (ok, said bool) {
	read := s.object(func(name string) bool {
		switch {
		case name == "ok":
			ok, said = s.word("true"), true
			return ok || s.word("false")
		case strings.EqualFold(name, "ok"): // which encoding/json takes for the same
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

// byte passes over space and a byte.
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

// quoted reads text without escapes.
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

// value passes over a value, in which others may lie so deep.
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

// whole passes over a whole number without a sign.
func (s *replyScanner) whole() bool {
	first := s.at
	for s.at < len(s.text) && s.text[s.at]-'0' <= 9 {
		s.at++
	}
	return s.at == first+1 || s.at > first && s.text[first] != '0'
}

// decodeBatchReply is readBatchReply for every form of JSON, by reflection.
func decodeBatchReply(body []byte, hint int) (map[string]bool, error) {
	type entry struct {
		OK *bool `json:"ok"`
	}
	reply := struct {
		Success *bool             `json:"success"`
		Data    map[string]*entry `json:"data"`
	}{Data: make(map[string]*entry, hint)}
	if err := json.Unmarshal(body, &reply); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrReply, err)
	}
	if reply.Success == nil || !*reply.Success {
		return nil, fmt.Errorf("%w: it does not say success: %.200q", ErrReply, body)
	}
	out := make(map[string]bool, len(reply.Data))
	for key, e := range reply.Data {
		if e != nil && e.OK != nil { // else nothing is said of the key
			out[key] = *e.OK
		}
	}
	return out, nil
}
