package events

import (
	"errors"
	"fmt"
)

// What decoding can end with. A caller counts and passes over a malformed message; one of a version from the future
// means that this program must be replaced before it can go on.
var (
	ErrMalformed = errors.New("malformed")
	ErrVersion   = errors.New("format version not supported")
)

// malformed is ErrMalformed with what was looked for and where.
func malformed(at int, format string, args ...any) error {
	return fmt.Errorf("events: %w: byte %d: %s", ErrMalformed, at, fmt.Sprintf(format, args...))
}
