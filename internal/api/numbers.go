package api

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"strconv"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// Tokens are token ids. In JSON an array of numbers; in MessagePack the same, or a bin of little-endian u32.
type Tokens []uint32

// Hashes are local hashes of blocks. In JSON an array of numbers, unsigned, or negative for those who hold them as signed
// 64-bit numbers; in MessagePack the same, or a bin of little-endian u64.
type Hashes []uint64

// IsZero reports whether there are none at all. A list without elements is one: a prompt that has no whole block.
func (t Tokens) IsZero() bool { return t == nil }

// IsZero reports whether there are none at all. A list without elements is one: a prompt that has no whole block.
func (h Hashes) IsZero() bool { return h == nil }

// UnmarshalJSON reads an array and says which element is no token.
func (t *Tokens) UnmarshalJSON(data []byte) error {
	out, err := parseNumbers((*t)[:0], data, CodeBadTokens, "tokens", func(s []byte) (uint32, bool) {
		v, ok := parseUint(s)
		return uint32(v), ok && v <= 1<<32-1
	}, "an unsigned 32-bit number")
	*t = out
	return err
}

// UnmarshalJSON reads an array and says which element is no hash.
func (h *Hashes) UnmarshalJSON(data []byte) error {
	out, err := parseNumbers((*h)[:0], data, CodeMalformed, "hashes", func(s []byte) (uint64, bool) {
		if len(s) > 0 && s[0] == '-' {
			v, err := strconv.ParseInt(string(s), 10, 64)
			return uint64(v), err == nil
		}
		return parseUint(s)
	}, "a 64-bit whole number")
	*h = out
	return err
}

func parseUint(s []byte) (v uint64, ok bool) {
	if len(s) == 0 || len(s) > 20 {
		return 0, false
	}
	for _, c := range s {
		d := uint64(c - '0')
		if d > 9 || v > (1<<64-1-d)/10 {
			return 0, false
		}
		v = v*10 + d
	}
	return v, true
}

// parseNumbers reads a JSON array of whole numbers. data is one valid JSON value, as encoding/json hands it over.
func parseNumbers[T any](out []T, data []byte, code Code, field string, parse func([]byte) (T, bool), want string) ([]T, error) {
	if string(data) == "null" {
		return nil, nil
	}
	if len(data) < 2 || data[0] != '[' {
		return nil, Errorf(code, "%s must be an array, each of it %s", field, want)
	}
	body := bytes.TrimSpace(data[1 : len(data)-1])
	if n := bytes.Count(body, []byte{','}) + 1; n > MaxTokens {
		return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
	} else if cap(out) < n || out == nil {
		out = make([]T, 0, n)
	}
	for len(body) > 0 {
		word := body
		if i := bytes.IndexByte(body, ','); i >= 0 {
			word, body = body[:i], body[i+1:]
		} else {
			body = nil
		}
		word = bytes.TrimSpace(word)
		v, ok := parse(word)
		if !ok {
			return nil, Errorf(code, "%s[%d] is %.40s, not %s", field, len(out), word, want)
		}
		out = append(out, v)
	}
	return out, nil
}

// EncodeMsgpack writes a bin of little-endian u32.
func (t Tokens) EncodeMsgpack(e *msgpack.Encoder) error {
	b := make([]byte, 0, 4*len(t))
	for _, v := range t {
		b = binary.LittleEndian.AppendUint32(b, v)
	}
	return e.EncodeBytes(b)
}

// DecodeMsgpack reads a bin of little-endian u32, or an array.
func (t *Tokens) DecodeMsgpack(d *msgpack.Decoder) error {
	out, err := decodeNumbers((*t)[:0], d, CodeBadTokens, "tokens", 4, func(b []byte) uint32 { return binary.LittleEndian.Uint32(b) },
		func(v uint64, negative bool) (uint32, bool) { return uint32(v), !negative && v <= 1<<32-1 }, "an unsigned 32-bit number")
	*t = out
	return err
}

// EncodeMsgpack writes a bin of little-endian u64.
func (h Hashes) EncodeMsgpack(e *msgpack.Encoder) error {
	b := make([]byte, 0, 8*len(h))
	for _, v := range h {
		b = binary.LittleEndian.AppendUint64(b, v)
	}
	return e.EncodeBytes(b)
}

// DecodeMsgpack reads a bin of little-endian u64, or an array.
func (h *Hashes) DecodeMsgpack(d *msgpack.Decoder) error {
	out, err := decodeNumbers((*h)[:0], d, CodeMalformed, "hashes", 8, func(b []byte) uint64 { return binary.LittleEndian.Uint64(b) },
		func(v uint64, _ bool) (uint64, bool) { return v, true }, "a 64-bit whole number")
	*h = out
	return err
}

func decodeNumbers[T any](out []T, d *msgpack.Decoder, code Code, field string, size int, load func([]byte) T, narrow func(uint64, bool) (T, bool), want string) ([]T, error) {
	c, err := d.PeekCode()
	if err != nil {
		return nil, err
	}
	if msgpcode.IsBin(c) {
		n, err := d.DecodeBytesLen()
		if err != nil {
			return nil, err
		}
		if n%size != 0 {
			return nil, Errorf(code, "%s is %d bytes, not a multiple of %d", field, n, size)
		}
		if n > size*MaxTokens {
			return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
		}
		raw := make([]byte, max(n, 0))
		if err := d.ReadFull(raw); err != nil {
			return nil, err
		}
		out = make([]T, 0, len(raw)/size)
		for ; len(raw) > 0; raw = raw[size:] {
			out = append(out, load(raw))
		}
		return out, nil
	}
	n, err := d.DecodeArrayLen()
	if err != nil {
		return nil, Errorf(code, "%s must be an array, each of it %s", field, want)
	}
	if n > MaxTokens {
		return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
	}
	if n >= 0 && out == nil {
		out = []T{}
	}
	for i := range max(n, 0) {
		c, err := d.PeekCode()
		if err != nil {
			return nil, err
		}
		var v uint64
		negative := false
		switch {
		case c == msgpcode.Int8 || c == msgpcode.Int16 || c == msgpcode.Int32 || c == msgpcode.Int64 || c >= msgpcode.NegFixedNumLow:
			var s int64
			s, err = d.DecodeInt64()
			v, negative = uint64(s), s < 0
		case msgpcode.IsFixedNum(c) || c == msgpcode.Uint8 || c == msgpcode.Uint16 || c == msgpcode.Uint32 || c == msgpcode.Uint64:
			v, err = d.DecodeUint64()
		default:
			err = fmt.Errorf("code %#x", c)
		}
		t, ok := narrow(v, negative)
		if err != nil || !ok {
			return nil, Errorf(code, "%s[%d] is not %s", field, i, want)
		}
		out = append(out, t)
	}
	return out, nil
}
