package tokenize

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// Tokens are the tokens of a text for a model. They are shared and must not be modified.
type Tokens struct {
	IDs api.Tokens

	// Known is the number of leading tokens of text or Media. Hashes of later blocks contain unknown values.
	Known int

	Media []events.MediaItem // sorted, without overlaps

	// Took is the time of the tokenizer, without the wait for other texts. Tokens from the cache keep the first time.
	// [Service] sets it.
	Took time.Duration
}

// Tokenizer tokenizes texts of one model. It must be safe for concurrent use. An error other than [*Error] is the
// context's.
type Tokenizer interface {
	Tokenize(ctx context.Context, t *api.Text) (Tokens, error)
}

// Outcome is the result of tokenizing a text.
type Outcome string

// The outcomes.
const (
	OK          Outcome = "ok"
	Cached      Outcome = "cached"      // found in the cache
	Busy        Outcome = "busy"        // too many texts in progress
	TimedOut    Outcome = "timeout"     // no answer in time
	Unavailable Outcome = "unavailable" // no server is reachable, or the servers fail
	Refused     Outcome = "refused"     // the source refuses the text, permanently
	Malformed   Outcome = "malformed"   // the answer is invalid
	NoSource    Outcome = "no_source"   // the model has no tokenizer
)

// Outcomes lists all outcomes, for counters.
var Outcomes = []Outcome{OK, Cached, Busy, TimedOut, Unavailable, Refused, Malformed, NoSource}

// Error is the reason for missing tokens.
type Error struct {
	Outcome Outcome
	Fields  []string // the fields of the request that the source does not support
	Err     error
}

func (e *Error) Error() string { return e.Err.Error() }
func (e *Error) Unwrap() error { return e.Err }

func failed(o Outcome, format string, args ...any) *Error {
	return &Error{Outcome: o, Err: fmt.Errorf(format, args...)}
}

// OutcomeOf returns the outcome of an error of [Service.Tokenize]; nil is OK.
func OutcomeOf(err error) Outcome {
	switch e, is := errors.AsType[*Error](err); {
	case err == nil:
		return OK
	case is:
		return e.Outcome
	}
	return TimedOut
}
