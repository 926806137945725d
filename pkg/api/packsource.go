package api

import (
	"errors"
	"strconv"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// packSource reads MessagePack in any valid form: numbers of any width, lists of numbers as lists or as bytes, text as
// bytes. Its data is validated: all lengths fit.
type packSource struct{ unpacker }

var kindOfForm = [...]kind{
	msgp.None: kindNone, msgp.Nil: kindNull, msgp.Bool: kindTruth, msgp.Int: kindNumber, msgp.Float: kindNumber,
	msgp.Str: kindText, msgp.Bin: kindBytes, msgp.Array: kindList, msgp.Map: kindObject, msgp.Ext: kindOther,
}

func (s *packSource) kind() kind { return kindOfForm[s.Next()] }

func (s *packSource) null() { s.Null() }

func (s *packSource) text() (string, bool, error) {
	b, ok := s.Str()
	if !ok {
		b, _ = s.Bin()
	}
	return string(b), utf8.Valid(b), nil
}

func (s *packSource) whole() (uint64, whole, error) {
	v, below, ok := s.Int()
	switch {
	case !ok:
		return 0, notWhole, s.skip()
	case below:
		return v, negative, nil
	}
	return v, positive, nil
}

func (s *packSource) number() (float64, error) {
	v, ok := s.Float()
	if !ok {
		return 0, s.skip()
	}
	return v, nil
}

func (s *packSource) object(each func(key []byte) error) error {
	n, _ := s.Map()
	for range n {
		if k := s.kind(); k != kindText {
			return Errorf(CodeMalformed, "a name is %s, not text", k)
		}
		key, _ := s.Str()
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

func (s *packSource) skip() error { return skipValue(&s.Reader, maxNesting) }

func (s *packSource) shown() string {
	ahead := *s
	switch k := ahead.kind(); k {
	case kindText:
		return shorten(strconv.Quote(ahead.unpacker.text()))
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

func (s *packSource) checkEnd() error {
	if s.Left() > 0 {
		return errors.New("something follows the MessagePack value")
	}
	return nil
}

func (s *packSource) tokens(field string) (Tokens, error) {
	accept := func(v uint64, is whole) (uint32, bool) { return uint32(v), is == positive && v <= 1<<32-1 }
	return packNumbers(s, field, CodeBadTokens, wantToken, 4, readTokens, accept)
}

func (s *packSource) hashes(field string) (Hashes, error) {
	accept := func(v uint64, is whole) (uint64, bool) { return v, is != notWhole }
	return packNumbers(s, field, CodeMalformed, wantHash, 8, readHashes, accept)
}

// packNumbers reads a list of numbers, or their bytes, with size bytes for each number.
func packNumbers[T uint32 | uint64, L ~[]T](
	s *packSource, field string, code Code, want string,
	size int, read func([]byte) L, accept func(uint64, whole) (T, bool),
) (L, error) {
	if s.kind() == kindBytes {
		b, _ := s.Bin()
		switch {
		case len(b)%size != 0:
			return nil, Errorf(code, "%s is %d bytes, not a multiple of %d", field, len(b), size)
		case len(b) > size*MaxTokens:
			return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
		}
		return read(b), nil
	}
	n := s.array()
	if n > MaxTokens {
		return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
	}
	out := make([]T, 0, n) // each number has at least one byte
	for i := range n {
		at := *s
		v, is := uint64(0), notWhole
		switch s.kind() {
		case kindNumber:
			v, is, _ = s.whole()
		case kindText:
			if word, _ := s.Str(); want == wantHash {
				v, is = parseWhole(word)
			}
		}
		x, ok := accept(v, is)
		if !ok {
			return nil, Errorf(code, "%s[%d] is %s, not %s", field, i, at.shown(), want)
		}
		out = append(out, x)
	}
	return out, nil
}
