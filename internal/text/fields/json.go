package fields

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"slices"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/strictjson"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// toUTF8 returns a body in UTF-8, without a byte order mark, as Python's json.detect_encoding reads it.
func toUTF8(b []byte) []byte {
	at := func(i int) bool { return i < len(b) && b[i] != 0 }
	switch {
	case bytes.HasPrefix(b, []byte{0xff, 0xfe, 0, 0}):
		return fromUTF32(b[4:], binary.LittleEndian)
	case bytes.HasPrefix(b, []byte{0, 0, 0xfe, 0xff}):
		return fromUTF32(b[4:], binary.BigEndian)
	case bytes.HasPrefix(b, []byte{0xff, 0xfe}):
		return fromUTF16(b[2:], binary.LittleEndian)
	case bytes.HasPrefix(b, []byte{0xfe, 0xff}):
		return fromUTF16(b[2:], binary.BigEndian)
	case bytes.HasPrefix(b, []byte{0xef, 0xbb, 0xbf}):
		return b[3:]
	case len(b) >= 4 && !at(0) && at(1):
		return fromUTF16(b, binary.BigEndian)
	case len(b) >= 4 && !at(0):
		return fromUTF32(b, binary.BigEndian)
	case len(b) >= 4 && !at(1) && (at(2) || at(3)):
		return fromUTF16(b, binary.LittleEndian)
	case len(b) >= 4 && !at(1):
		return fromUTF32(b, binary.LittleEndian)
	case len(b) == 2 && !at(0):
		return fromUTF16(b, binary.BigEndian)
	case len(b) == 2 && !at(1):
		return fromUTF16(b, binary.LittleEndian)
	}
	return b
}

func fromUTF16(b []byte, order binary.ByteOrder) []byte {
	units := make([]uint16, len(b)/2)
	for i := range units {
		units[i] = order.Uint16(b[2*i:])
	}
	return []byte(string(utf16.Decode(units)))
}

func fromUTF32(b []byte, order binary.ByteOrder) (text []byte) {
	for ; len(b) >= 4; b = b[4:] {
		text = utf8.AppendRune(text, rune(min(order.Uint32(b), utf8.MaxRune+1)))
	}
	return text
}

// numbers are the numbers of Python's json module that are not JSON, in the order of the search.
var numbers = [][]byte{[]byte("-Infinity"), []byte("Infinity"), []byte("NaN")}

// finite returns a text with other numbers in place of NaN, Infinity and -Infinity, at the same positions.
func finite(text []byte) []byte {
	var out []byte
	for i := 0; i < len(text); i++ {
		if text[i] == '"' {
			i = endOfString(text, i) - 1
			continue
		}
		for _, n := range numbers {
			if bytes.HasPrefix(text[i:], n) && (i == 0 || strings.IndexByte(":,[ \t\r\n", text[i-1]) >= 0) {
				if out == nil {
					out = bytes.Clone(text)
				}
				copy(out[i:], bytes.Repeat([]byte{' '}, len(n)))
				out[i] = '0'
				i += len(n) - 1
				break
			}
		}
	}
	if out == nil {
		return text
	}
	return out
}

// endOfString returns the index after a string that begins at an index.
func endOfString(text []byte, at int) int {
	for at++; at < len(text); at++ {
		switch text[at] {
		case '\\':
			at++
		case '"':
			return at + 1
		}
	}
	return len(text)
}

// endOfValue returns the index after a value of valid JSON that begins at an index.
func endOfValue(text []byte, at int) int {
	depth := 0
	for at < len(text) {
		switch text[at] {
		case '"':
			at = endOfString(text, at)
		case '{', '[':
			depth++
			at++
		case '}', ']':
			depth--
			at++
		default:
			at++
			for depth == 0 && at < len(text) && strings.IndexByte(",]} \t\r\n", text[at]) < 0 {
				at++
			}
		}
		if depth == 0 {
			return at
		}
	}
	return at
}

// blank returns the index of the next byte that is no white space.
func blank(text []byte, at int) int {
	for at < len(text) && (text[at] == ' ' || text[at] == '\t' || text[at] == '\r' || text[at] == '\n') {
		at++
	}
	return at
}

// eachItem calls f with the position of each element of a list, or with the name and the position of each member of an
// object, in valid JSON. For a list, the name is nil.
func eachItem(text []byte, f func(name []byte, from, to int)) {
	at := blank(text, 0)
	if at == len(text) || text[at] != '{' && text[at] != '[' {
		return
	}
	object := text[at] == '{'
	for at = blank(text, at+1); at < len(text) && text[at] != '}' && text[at] != ']'; {
		var name []byte
		if object {
			end := endOfString(text, at)
			name = text[at:end]
			at = blank(text, blank(text, end)+1)
		}
		end := endOfValue(text, at)
		f(name, at, end)
		if at = blank(text, end); at < len(text) && text[at] == ',' {
			at = blank(text, at+1)
		}
	}
}

// field is a field of a body.
type field struct {
	name   string
	value  []byte
	finite bool // the value contains no NaN or Infinity
}

// readObject returns the fields of a body, in their order.
func readObject(body []byte) (list []field, err error) {
	text := toUTF8(body)
	valid := text
	if !json.Valid(text) {
		valid = finite(text)
	}
	var any json.RawMessage
	if err := strictjson.Unmarshal(valid, &any); err != nil {
		return nil, api.Errorf(api.CodeMalformed, "the body is not the JSON of a request: %v", err)
	}
	if valid[blank(valid, 0)] != '{' {
		return nil, api.Errorf(api.CodeMalformed, "the body is JSON, but not an object")
	}
	seen := map[string]bool{}
	eachItem(valid, func(quoted []byte, from, to int) {
		var name string
		_ = strictjson.Unmarshal(quoted, &name) // a valid string
		if seen[name] {
			err = api.Errorf(api.CodeMalformed, "the field %.40q is given twice", name)
		}
		seen[name] = true
		list = append(list, field{name, text[from:to], bytes.Equal(text[from:to], valid[from:to])})
	})
	return list, err
}

// Each calls f with the name and the value of each field of an object in valid JSON.
func Each(object []byte, f func(name string, value []byte)) {
	eachItem(object, func(quoted []byte, from, to int) {
		var name string
		_ = strictjson.Unmarshal(quoted, &name) // a valid string
		f(name, object[from:to])
	})
}

// Member is a member of an object, with its value as JSON. An empty value removes the member.
type Member struct{ Name, Value string }

// Replace returns a body that Read accepts, in UTF-8, with members in place of its members of the same names.
func Replace(body []byte, members []Member) []byte {
	text := toUTF8(body)
	out := append(make([]byte, 0, len(text)+256), '{')
	add := func(name, value []byte) {
		if len(out) > 1 {
			out = append(out, ',')
		}
		out = append(append(append(out, name...), ':'), value...)
	}
	eachItem(text, func(quoted []byte, from, to int) {
		var name string
		_ = strictjson.Unmarshal(quoted, &name) // a valid string
		if !slices.ContainsFunc(members, func(m Member) bool { return m.Name == name }) {
			add(quoted, text[from:to])
		}
	})
	for _, m := range members {
		if m.Value != "" {
			add(strconv.AppendQuote(nil, m.Name), []byte(m.Value))
		}
	}
	return append(out, '}')
}
