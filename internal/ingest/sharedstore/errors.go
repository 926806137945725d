package sharedstore

import "errors"

// Errors of stores. The caller's reaction is the same for all: answer without the store and report the reason.
var (
	// ErrKey is the error for a key that a request cannot have. Such a key is never sent.
	ErrKey = errors.New("invalid key for the store")

	// ErrReply is the error for a reply that violates the protocol.
	ErrReply = errors.New("invalid reply")

	// ErrStandby is the error of a reachable store that does not serve.
	ErrStandby = errors.New("the store does not serve")
)
