package api

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
)

// source reads the body of a request value by value, in any form. kind returns the kind of the next value. Each reading
// method must be called only for a value of its kind. An error of a method that is no [Error] means a broken body.
type source interface {
	kind() kind

	null()
	truth() bool
	text() (s string, valid bool, err error) // valid: UTF-8
	whole() (v uint64, is whole, err error)
	number() (float64, error)
	object(each func(key []byte) error) error
	list(each func(i int) error) error

	tokens(field string) (Tokens, error)
	hashes(field string) (Hashes, error)
	value() (Value, error)

	skip() error
	shown() string   // the next value, for people
	checkEnd() error // an error if further data follows
}

// kind is the kind of a value.
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

// whole classifies a number.
type whole int

const (
	notWhole whole = iota
	positive
	negative // as its two's complement
)

// The texts for expected values.
const (
	wantToken = "an unsigned 32-bit number"
	wantHash  = "a 64-bit whole number"
	wantSeq   = "an unsigned 64-bit number"
)

var errEmpty = errors.New("the body is empty")

// openSource returns a source for a body.
func openSource(contentType string, body []byte) (source, error) {
	if contentType != MsgPack {
		return &jsonSource{data: body}, nil
	}
	if err := validate(body); err != nil {
		return nil, err
	}
	return &packSource{unpacker{msgp.Reader{Data: body}}}, nil
}

// notForm converts an error of a body to an [Error]; nil stays nil.
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

// shorten returns text in UTF-8, short enough for a message.
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
