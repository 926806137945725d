package api

import (
	"maps"
	"slices"
)

// Transport is the way by which a request came.
type Transport string

// The ways.
const (
	OverNATS  Transport = "nats" // the subjects that any node may answer on
	OverHTTP  Transport = "http"
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

// overload says what to do where requests end so, which is this node's trouble and not that of who asks.
var overload = map[string]string{
	string(CodeBusy): "all query workers were busy and their queue was full: " +
		"raise --query-workers or --query-queue, or add nodes",
	OutcomeExpired: "their callers' deadlines passed while they waited: " +
		"raise --query-workers, add nodes, or let clients wait longer",
	OutcomeUnsent: "there were answers, and the connection did not take them: see the log for what became of it",
}

// Overloaded reports whether an outcome is a sign that a node has more to do than it can, and what helps.
func Overloaded(outcome string) (whatToDo string, is bool) {
	whatToDo, is = overload[outcome]
	return whatToDo, is
}

// Overloads lists the outcomes that [Overloaded] is about.
func Overloads() []string { return slices.Sorted(maps.Keys(overload)) }
