package api

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

// What becomes of a request, other than that it is answered ([OutcomeOK]) or refused (its error's [Code]).
const (
	OutcomeOK      = "ok"
	OutcomeExpired = "expired" // nobody waited for the answer any more
	OutcomeUnsent  = "unsent"  // there was an answer, and it could not be sent
)

// Outcome is what a request is counted as that was answered, or refused.
func Outcome(failure *Error) string {
	if failure == nil {
		return OutcomeOK
	}
	return string(failure.Code)
}
