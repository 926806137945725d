package tokenize

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Tokens are what a text consists of for a model. They are shared: nobody changes them.
type Tokens struct {
	IDs api.Tokens

	// Known is how many leading tokens stand for text, or for Media. Hashes of blocks behind have in them what is not
	// known.
	Known int

	Media []events.MediaItem // in order; none overlap
}

// Tokenizer makes tokens of texts of one model. Any number of goroutines may use it. An error that is no [*Error] is
// the context's.
type Tokenizer interface {
	Tokenize(ctx context.Context, t *api.Text) (Tokens, error)
}

// Outcome is what came of a text.
type Outcome string

// The outcomes.
const (
	OK          Outcome = "ok"
	Cached      Outcome = "cached"      // known from before
	Busy        Outcome = "busy"        // too many texts were under way
	TimedOut    Outcome = "timeout"     // there was no answer in time
	Unavailable Outcome = "unavailable" // nobody can be reached, or who was is in trouble
	Refused     Outcome = "refused"     // the source does not take the text: it never will
	Malformed   Outcome = "malformed"   // what came back is not understood
	NoSource    Outcome = "no_source"   // nothing makes tokens for this model
)

// Outcomes lists all, for who counts them.
var Outcomes = []Outcome{OK, Cached, Busy, TimedOut, Unavailable, Refused, Malformed, NoSource}

// Error says why there are no tokens.
type Error struct {
	Outcome Outcome
	Err     error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

func failed(o Outcome, format string, args ...any) *Error {
	return &Error{Outcome: o, Err: fmt.Errorf(format, args...)}
}

// OutcomeOf is what an error of [Service.Tokenize] counts as; nil is OK.
func OutcomeOf(err error) Outcome {
	switch e, is := errors.AsType[*Error](err); {
	case err == nil:
		return OK
	case is:
		return e.Outcome
	}
	return TimedOut
}
