package api

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// source is the body of a request, read one value after another, in whichever form it came. kind says what the next
// value is, and each method that reads is called only where the next value is of its kind. A method's error says that
// the body is broken, unless it is an [Error].
type source interface {
	kind() kind

	null()
	truth() bool
	text() (s string, valid bool, err error) // valid: it is UTF-8
	whole() (v uint64, is whole, err error)
	number() (float64, error)
	object(each func(key []byte) error) error
	list(each func(i int) error) error

	tokens(field string) (Tokens, error)
	hashes(field string) (Hashes, error)
	value() (Value, error)

	skip() error
	shown() string // the next value, as people may see it
	end() error    // that something follows the value that was read
}

// kind is what a value is.
type kind string

const (
	kindNone   kind = "nothing" // the body is broken, or at its end
	kindNull   kind = "null"
	kindTruth  kind = "true or false"
	kindNumber kind = "a number"
	kindText   kind = "text"
	kindBytes  kind = "bytes"
	kindList   kind = "a list"
	kindObject kind = "an object"
	kindOther  kind = "an extension type"
)

// whole says which whole number a number is.
type whole int

const (
	notWhole whole = iota
	positive
	negative // as its two's complement
)

// The words for what a field wants.
const (
	wantToken = "an unsigned 32-bit number"
	wantHash  = "a 64-bit whole number"
	wantSeq   = "an unsigned 64-bit number"
)

var errEmpty = errors.New("the body is empty")

// openSource returns a body to read from.
func openSource(contentType string, body []byte) (source, error) {
	if contentType != MsgPack {
		return &jsonSource{data: body}, nil
	}
	if err := validate(body); err != nil {
		return nil, err
	}
	return &packSource{unpacker{msgp.Reader{Data: body}}}, nil
}

// notForm is the error of a body that is not of its content type; nil if err is.
func notForm(contentType string, err error) error {
	form := "JSON"
	if contentType == MsgPack {
		form = "MessagePack"
	}
	switch refused, is := errors.AsType[*Error](err); {
	case err == nil:
		return nil
	case is:
		return refused
	case errors.Is(err, io.EOF):
		err = errEmpty
	case errors.Is(err, io.ErrUnexpectedEOF):
		err = errors.New("it ends too early")
	}
	return Errorf(CodeMalformed, "the body is not the %s that it should be: %v", form, err)
}

// shorten makes text short enough for a message, and UTF-8.
func shorten[T string | []byte](text T) string {
	const most = 40
	s := string(text[:min(len(text), most+utf8.UTFMax)])
	if len(s) > most {
		s = s[:most] + "…"
	}
	if !utf8.ValidString(s) {
		return fmt.Sprintf("%+q", s)
	}
	return s
}
