package api

import (
	"encoding/binary"
	"errors"
	"strconv"
	"unicode/utf8"
)

// packSource reads MessagePack as anybody may write it: numbers in any form that holds them, lists of numbers as lists
// or as bytes, text as bytes. Its data is sound: all lengths fit.
type packSource struct{ unpacker }

func (*packSource) form() string { return "MessagePack" }

func (s *packSource) kind() kind {
	if len(s.b) == 0 {
		return kindNone
	}
	switch c := s.b[0]; {
	case c < 0x80, c >= 0xe0, c >= 0xca && c <= 0xd3:
		return kindNumber
	case c < 0x90, c == 0xde, c == 0xdf:
		return kindObject
	case c < 0xa0, c == 0xdc, c == 0xdd:
		return kindList
	case c < 0xc0, c >= 0xd9 && c <= 0xdb:
		return kindText
	case c == 0xc0:
		return kindNull
	case c == 0xc2, c == 0xc3:
		return kindTruth
	case c >= 0xc4 && c <= 0xc6:
		return kindBytes
	case c == 0xc1:
		return kindNone
	}
	return kindOther
}

func (s *packSource) null() { s.code() }

func (s *packSource) text() (string, bool, error) {
	b := s.key()
	return string(b), utf8.Valid(b), nil
}

func (s *packSource) whole() (uint64, whole, error) {
	switch c := s.b[0]; {
	case c >= 0xe0:
		s.code()
		return uint64(int8(c)), negative, nil
	case c >= 0xd0 && c <= 0xd3: // signed
		size := 1 << (c - 0xd0)
		s.code()
		v := int64(s.sized(size)) << (64 - 8*size) >> (64 - 8*size)
		if v < 0 {
			return uint64(v), negative, nil
		}
		return uint64(v), positive, nil
	case c == 0xca, c == 0xcb:
		return 0, notWhole, s.skip()
	}
	return s.number(), positive, nil
}

func (s *packSource) object(each func(key []byte) error) error {
	for range s.fields() {
		if k := s.kind(); k != kindText {
			return Errorf(CodeMalformed, "a name is %s, not text", k)
		}
		key := s.key()
		if !utf8.Valid(key) {
			return Errorf(CodeMalformed, "the name %s is not UTF-8", shorten(key))
		}
		if err := each(key); err != nil {
			return err
		}
	}
	return nil
}

func (s *packSource) list(each func(i int) error) error {
	for i := range s.array() {
		if err := each(i); err != nil {
			return err
		}
	}
	return nil
}

func (s *packSource) skip() error { return s.unpacker.skip(maxNesting) }

func (s *packSource) shown() string {
	ahead := packSource{unpacker{b: s.b}}
	switch k := ahead.kind(); k {
	case kindText:
		return shorten(strconv.Quote(string(ahead.key())))
	case kindTruth:
		return strconv.FormatBool(ahead.truth())
	case kindNumber:
		switch v, is, _ := ahead.whole(); is {
		case positive:
			return strconv.FormatUint(v, 10)
		case negative:
			return strconv.FormatInt(int64(v), 10)
		}
		return "a floating-point number"
	default:
		return string(k)
	}
}

func (s *packSource) end() error {
	if len(s.b) > 0 {
		return errors.New("something follows the MessagePack value")
	}
	return nil
}

func (s *packSource) tokens(field string) (Tokens, error) {
	take := func(v uint64, is whole) (uint32, bool) { return uint32(v), is == positive && v <= 1<<32-1 }
	return packNumbers(s, field, CodeBadTokens, wantToken, 4, binary.LittleEndian.Uint32, take)
}

func (s *packSource) hashes(field string) (Hashes, error) {
	take := func(v uint64, is whole) (uint64, bool) { return v, is != notWhole }
	return packNumbers(s, field, CodeMalformed, wantHash, 8, binary.LittleEndian.Uint64, take)
}

// packNumbers reads a list of numbers, or their bytes, each of so many.
func packNumbers[T uint32 | uint64](
	s *packSource, field string, code Code, want string,
	size int, load func([]byte) T, take func(uint64, whole) (T, bool),
) ([]T, error) {
	if s.kind() == kindBytes {
		b := s.bytes()
		switch {
		case len(b)%size != 0:
			return nil, Errorf(code, "%s is %d bytes, not a multiple of %d", field, len(b), size)
		case len(b) > size*MaxTokens:
			return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
		}
		out := make([]T, len(b)/size)
		for i := range out {
			out[i] = load(b[size*i:])
		}
		return out, nil
	}
	n := s.array()
	if n > MaxTokens {
		return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
	}
	out := make([]T, 0, n) // each takes a byte at least
	for i := range n {
		at := packSource{unpacker{b: s.b}}
		v, is := uint64(0), notWhole
		switch s.kind() {
		case kindNumber:
			v, is, _ = s.whole()
		case kindText:
			if word := s.key(); want == wantHash {
				v, is = parseWhole(word)
			}
		}
		x, ok := take(v, is)
		if !ok {
			return nil, Errorf(code, "%s[%d] is %s, not %s", field, i, at.shown(), want)
		}
		out = append(out, x)
	}
	return out, nil
}
