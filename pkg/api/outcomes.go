package api

import (
	"context"
	"errors"
)

// Transport is the transport of a request.
type Transport string

// The transports.
const (
	OverNATS  Transport = "nats" // the subjects of all nodes
	OverHTTP  Transport = "http"
	OverGRPC  Transport = "grpc"
	FromNodes Transport = "node" // the subjects of this node, for other nodes' parts of a query
)

// OpOther is the operation of a request that was refused before its operation was read.
const OpOther = "other"

// Outcomes of a request beside the [Code] of its error.
const (
	OutcomeOK       = "ok"
	OutcomeCanceled = "canceled" // the caller ended the request before its answer; neither a problem nor a failure
	OutcomeExpired  = "expired"  // the caller's deadline passed before the answer
	OutcomeUnsent   = "unsent"   // the answer could not be sent
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

// Outcome returns the outcome of a request with this failure; nil is [OutcomeOK].
func Outcome(failure *Error) string {
	if failure == nil {
		return OutcomeOK
	}
	return string(failure.Code)
}
