package api

import (
	"encoding/binary"
	"fmt"

	"github.com/vmihailenco/msgpack/v5"
	"github.com/vmihailenco/msgpack/v5/msgpcode"
)

// The methods for reflection on queries, the twin of the code by hand.

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
	out, err := decodeNumbers((*t)[:0], d, CodeBadTokens, "tokens", 4,
		func(b []byte) uint32 { return binary.LittleEndian.Uint32(b) },
		func(v uint64, negative bool) (uint32, bool) {
			return uint32(v), !negative &&
				v <= 1<<32-1
		}, "an unsigned 32-bit number")
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
	out, err := decodeNumbers((*h)[:0], d, CodeMalformed, "hashes", 8,
		func(b []byte) uint64 { return binary.LittleEndian.Uint64(b) },
		func(v uint64, _ bool) (uint64, bool) { return v, true }, "a 64-bit whole number")
	*h = out
	return err
}

func decodeNumbers[T any](out []T, d *msgpack.Decoder, code Code, field string, size int, load func([]byte) T,
	narrow func(uint64, bool) (T, bool), want string) ([]T, error) {
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
		case c == msgpcode.Int8 || c == msgpcode.Int16 || c == msgpcode.Int32 || c == msgpcode.Int64 ||
			c >= msgpcode.NegFixedNumLow:
			var s int64
			s, err = d.DecodeInt64()
			v, negative = uint64(s), s < 0
		case msgpcode.IsFixedNum(c) || c == msgpcode.Uint8 || c == msgpcode.Uint16 || c == msgpcode.Uint32 ||
			c == msgpcode.Uint64:
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
