// Package usage holds the errors of invalid input: of a command line, a setting, or the file of a flag. The exit status
// of a program with an error of invalid input is 2, and a retry is useless.
package usage

import (
	"errors"
	"fmt"
)

// Error is an error of invalid input.
type Error struct{ err error }

func (e *Error) Error() string { return e.err.Error() }

func (e *Error) Unwrap() error { return e.err }

// Errorf returns an error of invalid input.
func Errorf(format string, args ...any) error { return &Error{fmt.Errorf(format, args...)} }

// Complaints are the errors in the settings of a command. A program reports all errors together.
type Complaints []error

// When adds an error if wrong is true.
func (c *Complaints) When(wrong bool, format string, args ...any) {
	if wrong {
		*c = append(*c, fmt.Errorf(format, args...))
	}
}

// About adds the error of a flag, unless err is nil.
func (c *Complaints) About(flag string, err error) { c.When(err != nil, "%s: %w", flag, err) }

// Usage returns an error of invalid input with all complaints; nil without complaints.
func (c *Complaints) Usage() error {
	if err := errors.Join(*c...); err != nil {
		return &Error{err}
	}
	return nil
}
