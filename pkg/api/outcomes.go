package api

import (
	"context"
	"errors"
)

// Transport is the way by which a request came.
type Transport string

// The ways.
const (
	OverNATS  Transport = "nats" // the subjects that any node may answer on
	OverHTTP  Transport = "http"
	OverGRPC  Transport = "grpc"
	FromNodes Transport = "node" // this node's own subjects: other nodes ask there for their shares of a query
)

// OpOther stands for the operation of a request that was refused before it was known what it asks.
const OpOther = "other"

// Outcomes of a request beside the [Code] of its error.
const (
	OutcomeOK       = "ok"
	OutcomeCanceled = "canceled" // the caller ended the request before its answer; this is neither a problem nor a failure
	OutcomeExpired  = "expired"  // the caller's deadline passed before the answer
	OutcomeUnsent   = "unsent"   // there was an answer, and it could not be sent
)

// OutcomeOf returns the outcome of a request that ended with err; nil is [OutcomeOK].
func OutcomeOf(err error) string {
	switch {
	case err == nil:
		return OutcomeOK
	case errors.Is(err, context.Canceled):
		return OutcomeCanceled
	}
	return string(AsError(err).Code)
}

// Outcome is what a request is counted as that was answered, or refused.
func Outcome(failure *Error) string {
	if failure == nil {
		return OutcomeOK
	}
	return string(failure.Code)
}
