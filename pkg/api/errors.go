package api

import (
	"context"
	"errors"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// The catalogue of errors is the same over NATS and HTTP. docs/errors.md lists the meaning and the remedy of each code.
// A test compares the catalogue with the page.

// Code is a class of errors for programs. Codes do not change.
type Code string

// The codes, each with the remedy.
const (
	CodeMalformed         Code = "malformed"           // correct the request
	CodeMissingModel      Code = "missing_model"       // add a model
	CodeUnknownModel      Code = "unknown_model"       // no worker has announced the model: check the name
	CodeUnknownWorker     Code = "unknown_worker"      // the worker is not registered
	CodeBlockSizeMismatch Code = "block_size_mismatch" // use the model's block size
	CodeRegistered        Code = "already_registered"  // remove the registration first
	CodeBadTokens         Code = "bad_tokens"          // tokens are unsigned 32-bit numbers
	CodeConflict          Code = "conflict"            // the present state contradicts the request: resolve that first
	CodeUnknownRequest    Code = "unknown_request"     // the request has ended, expired, or was never booked
	CodeNoWorkers         Code = "no_workers"          // no worker is eligible: read the reasons
	CodeOverloaded        Code = "overloaded"          // all eligible workers are overloaded: retry later
	CodeQuota             Code = "quota_exceeded"      // the tenant has used its quota: retry after quota.retry_after_ms
	CodeTooLarge          Code = "too_large"           // request less
	CodeBusy              Code = "busy"                // retry later, or use another node
	CodeNotReady          Code = "not_ready"           // the node is restoring or catching up
	CodeBehind            Code = "behind"              // the deadline passed, such as before min_seq was reached
	CodeUnknownOperation  Code = "unknown_operation"   // no such subject or path
	CodeUnavailable       Code = "unavailable"         // NATS or the storage of NATS does not answer
	CodeUnauthorized      Code = "unauthorized"        // add the token
	CodeForbidden         Code = "forbidden"           // token or user without the role; request from another site
	CodeWrongMethod       Code = "wrong_method"        // use a method of the header Allow
	CodeRequestTimeout    Code = "request_timeout"     // the body did not arrive in time: send the whole body at once
	CodeWrongContentType  Code = "wrong_content_type"  // use application/json or application/msgpack
	CodeInternal          Code = "internal"            // a bug of kvatlas; of a client also: the server is not an indexer
)

var httpStatus = map[Code]int{
	CodeMalformed: 400, CodeMissingModel: 400, CodeBadTokens: 400, CodeUnauthorized: 401, CodeForbidden: 403,
	CodeUnknownModel: 404, CodeUnknownWorker: 404, CodeUnknownRequest: 404,
	CodeUnknownOperation: 404,
	CodeWrongMethod:      405, CodeRequestTimeout: 408, CodeBlockSizeMismatch: 409, CodeRegistered: 409,
	CodeConflict: 409,
	CodeTooLarge: 413, CodeWrongContentType: 415, CodeBusy: 429, CodeOverloaded: 429, CodeQuota: 429,
	CodeInternal: 500, CodeNotReady: 503, CodeUnavailable: 503, CodeNoWorkers: 503, CodeBehind: 504,
}

// HTTPStatus returns the status of the code in HTTP and in NATS service errors.
func (c Code) HTTPStatus() int {
	if s, ok := httpStatus[c]; ok {
		return s
	}
	return 500
}

// Error is the reply in place of an answer.
type Error struct {
	Code    Code   `json:"code" msgpack:"code"`
	Message string `json:"message" msgpack:"message"`

	// Missing lists partitions that could not be searched. With unknown_model and block_size_mismatch, the verdict does
	// not cover these partitions of the query. With not_ready, the model's workers may be in these partitions.
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Explanation, with no_workers and overloaded, has the rule that dropped each worker, if the request has Explain.
	Explanation *routing.Explanation `json:"explanation,omitempty" msgpack:"explanation,omitempty"`

	// Queue, with overloaded, is the reason that a request may not wait, or waits no longer.
	Queue *QueueRefusal `json:"queue,omitempty" msgpack:"queue,omitempty"`

	// Quota, with quota_exceeded, is the quota of the tenant.
	Quota *QuotaState `json:"quota,omitempty" msgpack:"quota,omitempty"`
}

// RetryAfter returns the seconds of the header Retry-After; 0: no header.
func (e *Error) RetryAfter() uint64 {
	if e == nil || e.Quota == nil {
		return 0
	}
	return max(1, (e.Quota.RetryAfterMS+999)/1000)
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Errorf returns an error for a client.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// ErrorBody is the encoded form of an error.
type ErrorBody struct {
	Error *Error `json:"error" msgpack:"error"`
}

// Body encodes an error in a content type.
func (e *Error) Body(contentType string) []byte {
	body, _ := Marshal(contentType, ErrorBody{Error: e}) // cannot fail: all fields can be encoded
	return body
}

// Outcome returns the outcome of a request with this failure; nil is [ops.OK].
func (e *Error) Outcome() string {
	if e == nil {
		return ops.OK
	}
	return string(e.Code)
}

// OutcomeOf returns the outcome of a request that ended with err; nil is [ops.OK].
func OutcomeOf(err error) string {
	switch {
	case err == nil:
		return ops.OK
	case errors.Is(err, context.Canceled):
		return ops.Canceled
	}
	return AsError(err).Outcome()
}

// Refusal converts the number of a NATS service error to an Error, for messages that have, or can have, no other
// content.
func Refusal(code int, why string) *Error {
	switch code {
	case 400:
		return Errorf(CodeMalformed, "%s", why)
	case 413:
		return Errorf(CodeTooLarge,
			"%s, the limit over NATS; send hashes instead of tokens, or use HTTP, with a limit of %d (8 MiB)", why, MaxBody)
	case 429:
		return Errorf(CodeBusy, "%s; retry later", why)
	case 503:
		return Errorf(CodeNotReady, "%s; retry later", why)
	case 500: // the answer does not fit into a message
		return Errorf(CodeTooLarge, "%s, the limit over NATS; request less (fewer workers, a limit), or use HTTP", why)
	}
	return Errorf(CodeInternal, "%s (%d)", why, code)
}
