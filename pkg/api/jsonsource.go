package api

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/bits"
	"strconv"
	"unicode/utf16"
	"unicode/utf8"
)

// jsonSource reads strict JSON (RFC 8259): no number with leading zeros, no extra comma. It is a large part of the cost
// of a query in JSON.
type jsonSource struct {
	data []byte
	at   int
}

func (s *jsonSource) space() {
	for s.at < len(s.data) {
		switch s.data[s.at] {
		case ' ', '\t', '\n', '\r':
			s.at++
		default:
			return
		}
	}
}

// next returns the next byte after white space; 0 at the end.
func (s *jsonSource) next() byte {
	if s.space(); s.at < len(s.data) {
		return s.data[s.at]
	}
	return 0
}

// unexpected returns the error for input in place of want.
func (s *jsonSource) unexpected(want string) error {
	switch s.space(); {
	case s.at < len(s.data):
		r, n := utf8.DecodeRune(s.data[s.at:])
		if r == utf8.RuneError && n == 1 {
			return fmt.Errorf("byte %d is %#x, where %s should be", s.at, s.data[s.at], want)
		}
		return fmt.Errorf("byte %d is %q, where %s should be", s.at, r, want)
	case len(bytes.TrimSpace(s.data)) == 0:
		return io.EOF
	}
	return io.ErrUnexpectedEOF
}

func (s *jsonSource) kind() kind {
	switch c := s.next(); {
	case c == '{':
		return kindObject
	case c == '[':
		return kindList
	case c == '"':
		return kindText
	case c == '-' || '0' <= c && c <= '9':
		return kindNumber
	case s.at >= len(s.data):
		return kindNone
	case bytes.HasPrefix(s.data[s.at:], []byte("null")):
		return kindNull
	case bytes.HasPrefix(s.data[s.at:], []byte("true")), bytes.HasPrefix(s.data[s.at:], []byte("false")):
		return kindTruth
	}
	return kindNone
}

func (s *jsonSource) null() { s.at += len("null") }

func (s *jsonSource) truth() bool {
	if s.data[s.at] == 't' {
		s.at += len("true")
		return true
	}
	s.at += len("false")
	return false
}

// quoted skips a text and returns the bytes between the quotation marks. escaped: the bytes contain escapes.
func (s *jsonSource) quoted() (raw []byte, escaped bool, err error) {
	start := s.at + 1
	for i := start; i < len(s.data); i++ {
		switch c := s.data[i]; {
		case c == '"':
			s.at = i + 1
			return s.data[start:i], escaped, nil
		case c == '\\':
			escaped = true
			i++
		case c < ' ':
			s.at = i
			return nil, false, fmt.Errorf("byte %d is %#x, which text has as an escape only", i, c)
		}
	}
	return nil, false, io.ErrUnexpectedEOF
}

func (s *jsonSource) text() (string, bool, error) {
	raw, valid, err := s.plain()
	return string(raw), valid, err
}

// plain returns a text without escapes. The result is part of the data if there were no escapes.
func (s *jsonSource) plain() (text []byte, valid bool, err error) {
	start := s.at
	raw, escaped, err := s.quoted()
	if err != nil || !escaped {
		return raw, utf8.Valid(raw), err
	}
	valid = utf8.Valid(raw)
	for i := 0; i < len(raw); i++ {
		if raw[i] != '\\' {
			text = append(text, raw[i])
			continue
		}
		i++ // never the last byte: the text would not have ended
		switch c := raw[i]; c {
		case '"', '\\', '/':
			text = append(text, c)
		case 'b', 'f', 'n', 'r', 't':
			text = append(text, map[byte]byte{'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}[c])
		case 'u':
			r, ok := hex4(raw[i+1:])
			if !ok {
				return nil, false, fmt.Errorf("byte %d begins an escape that is none", start+i)
			}
			i += 4
			if utf16.IsSurrogate(r) {
				low, ok := rune(0), false
				if bytes.HasPrefix(raw[i+1:], []byte(`\u`)) {
					low, ok = hex4(raw[i+3:])
				}
				if r = utf16.DecodeRune(r, low); ok && r != utf8.RuneError {
					i += 6
				} else {
					valid = false
				}
			}
			text = utf8.AppendRune(text, r)
		default:
			return nil, false, fmt.Errorf("byte %d begins an escape that is none", start+i)
		}
	}
	return text, valid, nil
}

// hex4 reads four hexadecimal digits.
func hex4(b []byte) (rune, bool) {
	if len(b) < 4 {
		return 0, false
	}
	v, err := strconv.ParseUint(string(b[:4]), 16, 16)
	return rune(v), err == nil
}

// digits skips at least one digit.
func (s *jsonSource) digits() error {
	start := s.at
	for s.at < len(s.data) && '0' <= s.data[s.at] && s.data[s.at] <= '9' {
		s.at++
	}
	if s.at == start {
		return s.unexpected("a digit")
	}
	return nil
}

// word skips a number and returns its bytes.
func (s *jsonSource) word() ([]byte, error) {
	start := s.at
	has := func(any string) bool {
		if s.at < len(s.data) && bytes.IndexByte([]byte(any), s.data[s.at]) >= 0 {
			s.at++
			return true
		}
		return false
	}
	has("-")
	if !has("0") {
		if err := s.digits(); err != nil {
			return nil, err
		}
	}
	if has(".") {
		if err := s.digits(); err != nil {
			return nil, err
		}
	}
	if has("eE") {
		has("+-")
		if err := s.digits(); err != nil {
			return nil, err
		}
	}
	return s.data[start:s.at], nil
}

func (s *jsonSource) whole() (uint64, whole, error) {
	word, err := s.word()
	if err != nil {
		return 0, notWhole, err
	}
	v, is := parseWhole(word)
	return v, is, nil
}

func (s *jsonSource) number() (float64, error) {
	word, err := s.word()
	if err != nil {
		return 0, err
	}
	v, _ := strconv.ParseFloat(string(word), 64) // infinite if too large
	return v, nil
}

// parseWhole reads a whole number in decimal digits.
func parseWhole(word []byte) (uint64, whole) {
	digits, below := bytes.CutPrefix(word, []byte{'-'})
	if len(digits) == 0 || digits[0] < '0' || digits[0] > '9' || digits[0] == '0' && len(digits) > 1 {
		return 0, notWhole
	}
	if below {
		v, err := strconv.ParseInt(string(word), 10, 64)
		if err != nil {
			return 0, notWhole
		}
		return uint64(v), negative
	}
	v, err := strconv.ParseUint(string(word), 10, 64)
	if err != nil {
		return 0, notWhole
	}
	return v, positive
}

// follows reads the comma after an element, or the end after the last element.
func (s *jsonSource) follows(end byte) (more bool, err error) {
	switch c := s.next(); c {
	case ',':
		s.at++
		return true, nil
	case end:
		s.at++
		return false, nil
	}
	return false, s.unexpected(fmt.Sprintf(`"," or %q`, string(end)))
}

func (s *jsonSource) object(each func(key []byte) error) error {
	s.at++
	if s.next() == '}' {
		s.at++
		return nil
	}
	for {
		if s.next() != '"' {
			return s.unexpected("a name in quotation marks")
		}
		key, valid, err := s.plain()
		if err != nil {
			return err
		}
		if !valid {
			return Errorf(CodeMalformed, "the name %s is not UTF-8", shorten(key))
		}
		if s.next() != ':' {
			return s.unexpected(`":"`)
		}
		s.at++
		if s.kind() == kindNone {
			return s.unexpected("a value")
		}
		if err := each(key); err != nil {
			return err
		}
		if more, err := s.follows('}'); !more {
			return err
		}
	}
}

func (s *jsonSource) list(each func(i int) error) error {
	s.at++
	if s.next() == ']' {
		s.at++
		return nil
	}
	for i := 0; ; i++ {
		if s.kind() == kindNone {
			return s.unexpected("a value")
		}
		if err := each(i); err != nil {
			return err
		}
		if more, err := s.follows(']'); !more {
			return err
		}
	}
}

func (s *jsonSource) skip() error { return s.pass(maxNesting) }

// pass is skip with a limit on the nesting of values.
func (s *jsonSource) pass(depth int) (err error) {
	if depth == 0 {
		return errNested
	}
	switch s.kind() {
	case kindObject:
		return s.object(func([]byte) error { return s.pass(depth - 1) })
	case kindList:
		return s.list(func(int) error { return s.pass(depth - 1) })
	case kindText:
		at, valid := s.at, false
		if _, valid, err = s.plain(); err == nil && !valid {
			err = fmt.Errorf("byte %d begins text that is not UTF-8", at)
		}
	case kindNumber:
		_, err = s.word()
	case kindTruth:
		s.truth()
	case kindNull:
		s.null()
	default:
		err = s.unexpected("a value")
	}
	return err
}

// Members calls each for every member of a JSON object, in order, with the name and the JSON of the value. It returns
// an [Error] if data is no JSON object, and otherwise the first error of each.
func Members(data []byte, each func(name string, value []byte) error) error {
	s := &jsonSource{data: data}
	var theirs error
	err := error(Errorf(CodeMalformed, "the request is %s, not an object", s.shown()))
	switch s.kind() {
	case kindObject:
		err = s.object(func(key []byte) error {
			name := string(key)
			value, err := s.raw()
			if err == nil {
				theirs = each(name, value)
				err = theirs
			}
			return err
		})
		if err == nil {
			err = s.checkEnd()
		}
	case kindNone:
		err = s.unexpected("a value")
	}
	if theirs != nil {
		return theirs
	}
	return notForm(JSON, err)
}

// raw skips a value and returns its bytes.
func (s *jsonSource) raw() ([]byte, error) {
	s.space()
	start := s.at
	err := s.skip()
	return s.data[start:s.at], err
}

func (s *jsonSource) shown() string {
	ahead := jsonSource{data: s.data, at: s.at}
	value, err := ahead.raw()
	if err != nil {
		value = s.data[s.at:]
	}
	return shorten(value)
}

func (s *jsonSource) checkEnd() error {
	if s.space(); s.at < len(s.data) {
		return errors.New("something follows the JSON value")
	}
	return nil
}

func (s *jsonSource) tokens(field string) (Tokens, error) {
	return jsonNumbers(s, field, CodeBadTokens, wantToken, shortNumbers, func(word []byte) (uint32, bool) {
		v, is := parseWhole(word)
		return uint32(v), is == positive && v <= 1<<32-1
	})
}

func (s *jsonSource) hashes(field string) (Hashes, error) {
	return jsonNumbers(s, field, CodeMalformed, wantHash, nil, func(word []byte) (uint64, bool) {
		if len(word) > 2 && word[0] == '"' {
			word = word[1 : len(word)-1]
		}
		v, is := parseWhole(word)
		return v, is != notWhole
	})
}

// pauseOfMany is the number of elements to read one by one before the next attempt to read many at once.
const pauseOfMany = 16

// jsonNumbers reads a list of numbers, of 64 bits with or without a sign. many appends the numbers at the front of data
// that it supports and returns their length with the separators; nil disables it. other reads an element in another
// form.
func jsonNumbers[T uint32 | uint64](s *jsonSource, field string, code Code, want string,
	many func(dst []T, data []byte) ([]T, int), other func(word []byte) (T, bool),
) ([]T, error) {
	most := uint64(^T(0))
	signed := int(most >> 63)
	s.at++
	data, i := s.data, s.at
	upTo := bytes.IndexByte(data[i:], ']') // no number contains it
	if upTo < 0 {
		upTo = len(data) - i
	}
	n := bytes.Count(data[i:i+upTo], []byte{','}) + 1
	if n > MaxTokens {
		return nil, Errorf(CodeTooLarge, "%s has more than %d elements", field, MaxTokens)
	}
	out := make([]T, 0, n)
	if s.next() == ']' {
		s.at++
		return out, nil
	}
	for next := 0; ; {
		if many != nil && len(out) >= next {
			out, i = many(out, data[s.at:])
			if s.at += i; i == 0 { // an attempt costs more than an element
				next = len(out) + pauseOfMany
			}
		}
		s.space()
		i = s.at
		minus := 0
		if i < len(data) && data[i] == '-' {
			minus = 1
		}
		minus &= signed
		i += minus
		if v, n := digitsOf(data[i:], most > math.MaxUint32); n > 0 && v <= most>>minus+uint64(minus) &&
			(n == 1 || data[i] != '0') && (data[i+n] == ',' || data[i+n] == ']') {
			out = append(out, T(v^-uint64(minus))+T(minus)) // -v is ^v+1
			if s.at = i + n + 1; data[i+n] == ']' {
				return out, nil
			}
			continue
		}
		word, err := s.raw()
		if err != nil {
			return nil, err
		}
		x, ok := other(word)
		if !ok {
			return nil, Errorf(code, "%s[%d] is %s, not %s%s",
				field, len(out), shorten(word), want, rounded(word, want))
		}
		out = append(out, x)
		if more, err := s.follows(']'); err != nil || !more {
			return out, err
		}
	}
}

// wordNumbers is shortNumbers for any processor, with eight bytes at a time.
func wordNumbers(dst []uint32, data []byte) ([]uint32, int) {
	free, count, i := dst[len(dst):cap(dst)], 0, 0
	for i+10 <= len(data) && count < len(free) {
		w := (*[10]byte)(data[i:])
		v, n := leadingDigits(binary.LittleEndian.Uint64(w[:]))
		if n == 0 || n == 8 || w[n] != ',' || w[0] == '0' && n > 1 {
			break
		}
		free[count] = uint32(v)
		count++
		if i += n + 1; w[n+1] == ' ' {
			i++
		}
	}
	return dst[:len(dst)+count], i
}

// digitsOf reads the n decimal digits at the front of data, eight at a time without a branch for each digit. Another
// byte must follow the digits. If long is false, digitsOf reads at most eight digits. n is 0 if there is no digit, or
// if the number exceeds 64 bits.
func digitsOf(data []byte, long bool) (v uint64, n int) {
	if len(data) <= 24 { // only for the end of a list
		var padded [32]byte
		copy(padded[:], data)
		if v, n = digitsOf(padded[:], long); n >= len(data) {
			n = 0
		}
		return v, n
	}
	v, n = leadingDigits(binary.LittleEndian.Uint64(data))
	if n < 8 || !long {
		return v, n
	}
	next, k := leadingDigits(binary.LittleEndian.Uint64(data[8:]))
	v, n = v*powers[k]+next, n+k
	if k < 8 {
		return v, n
	}
	next, k = leadingDigits(binary.LittleEndian.Uint64(data[16:]))
	over, v := bits.Mul64(v, powers[k])
	v, carry := bits.Add64(v, next, 0)
	if over|carry != 0 {
		return 0, 0
	}
	return v, n + k
}

var powers = [9]uint64{1, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8}

// leadingDigits returns the value and the number of the decimal digits at the front of eight bytes. The lowest byte is
// the first. The digits are combined in pairs, then fours, then all.
func leadingDigits(b uint64) (v uint64, n int) {
	const ones = 0x0101010101010101
	b ^= '0' * ones
	others := (b&(0x7f*ones) + (0x7f-9)*ones | b) & (0x80 * ones)
	n = 8
	if others != 0 {
		upTo := uint(bits.TrailingZeros64(others)) &^ 7
		b = b << 8 << (56 - upTo) // leading zeros
		n = int(upTo / 8)
	}
	b = b*10 + b>>8
	return ((b&0x000000ff000000ff)*(100+1e6<<32) + (b>>16&0x000000ff000000ff)*(1+1e4<<32)) >> 32, n
}

// rounded returns the advice for a hash that the client has rounded.
func rounded(word []byte, want string) string {
	if want == wantHash && len(word) > 0 && word[0] != '"' && bytes.IndexAny(word, "eE.") > 0 {
		return "; where numbers are rounded, send it as text in decimal digits"
	}
	return ""
}
