package events

import (
	"errors"
	"fmt"
)

// The errors of decoding. A caller counts and skips a malformed message. A message of a later version requires a newer
// program.
var (
	ErrMalformed = errors.New("malformed")
	ErrVersion   = errors.New("format version not supported")
)

// malformed returns an error that wraps ErrMalformed and states the position and the fault.
func malformed(at int, format string, args ...any) error {
	return fmt.Errorf("events: %w: byte %d: %s", ErrMalformed, at, fmt.Sprintf(format, args...))
}
