package api

import (
	"fmt"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// The catalogue of errors is the same over NATS and HTTP; docs/errors.md lists it with what each means and what to do.
// A test holds the two together.

// Code names a class of error for programs. Codes do not change.
type Code string

// The codes, with what a caller does next.
const (
	CodeMalformed         Code = "malformed"           // mend the request
	CodeMissingModel      Code = "missing_model"       // name a model
	CodeUnknownModel      Code = "unknown_model"       // no worker has announced it: check its name, or the workers
	CodeUnknownWorker     Code = "unknown_worker"      // nobody has registered it here
	CodeBlockSizeMismatch Code = "block_size_mismatch" // ask with the model's block size
	CodeRegistered        Code = "already_registered"  // unregister it first
	CodeBadTokens         Code = "bad_tokens"          // tokens are unsigned 32-bit numbers
	CodeConflict          Code = "conflict"            // what stands speaks against it: see to that first
	CodeUnknownRequest    Code = "unknown_request"     // it has ended, expired, or was never booked
	CodeNoWorkers         Code = "no_workers"          // none may be chosen: see why, and ask again when there are some
	CodeOverloaded        Code = "overloaded"          // all that may be chosen are: ask again a little later
	CodeTooLarge          Code = "too_large"           // ask for less
	CodeBusy              Code = "busy"                // ask again a little later, or another node
	CodeNotReady          Code = "not_ready"           // the node is restoring or catching up
	CodeBehind            Code = "behind"              // min_seq was not reached before the deadline
	CodeUnknownOperation  Code = "unknown_operation"   // no such subject or path
	CodeUnavailable       Code = "unavailable"         // NATS or its storage does not answer
	CodeUnauthorized      Code = "unauthorized"        // bring the token
	CodeForbidden         Code = "forbidden"           // not for a web page of another site
	CodeWrongMethod       Code = "wrong_method"        // use the method that Allow names
	CodeRequestTimeout    Code = "request_timeout"     // the body did not arrive in time: send it whole
	CodeWrongContentType  Code = "wrong_content_type"  // say application/json or application/msgpack
	CodeInternal          Code = "internal"            // our mistake
)

var httpStatus = map[Code]int{
	CodeMalformed: 400, CodeMissingModel: 400, CodeBadTokens: 400, CodeUnauthorized: 401, CodeForbidden: 403,
	CodeUnknownModel: 404, CodeUnknownWorker: 404, CodeUnknownRequest: 404,
	CodeUnknownOperation: 404,
	CodeWrongMethod:      405, CodeRequestTimeout: 408, CodeBlockSizeMismatch: 409, CodeRegistered: 409,
	CodeConflict: 409,
	CodeTooLarge: 413, CodeWrongContentType: 415, CodeBusy: 429, CodeOverloaded: 429,
	CodeInternal: 500, CodeNotReady: 503, CodeUnavailable: 503, CodeNoWorkers: 503, CodeBehind: 504,
}

// HTTPStatus is the number that goes with the code in HTTP and in NATS service errors.
func (c Code) HTTPStatus() int {
	if s, ok := httpStatus[c]; ok {
		return s
	}
	return 500
}

// Error is what a client gets in place of an answer.
type Error struct {
	Code    Code   `json:"code" msgpack:"code"`
	Message string `json:"message" msgpack:"message"`

	// Missing are partitions that could not be looked at: with unknown_model and block_size_mismatch those of the query
	// that the verdict is not about, with not_ready those where the model's workers may be.
	Missing []events.Partition `json:"missing,omitempty" msgpack:"missing,omitempty"`

	// Explanation, with no_workers and overloaded, says which rule dropped which worker, if the request asks for it.
	Explanation *routing.Explanation `json:"explanation,omitempty" msgpack:"explanation,omitempty"`

	// Queue, with overloaded, says why a request may not wait, or waits no more.
	Queue *QueueRefusal `json:"queue,omitempty" msgpack:"queue,omitempty"`
}

func (e *Error) Error() string { return string(e.Code) + ": " + e.Message }

// Errorf makes an error for a client.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// ErrorBody is how an error travels.
type ErrorBody struct {
	Error *Error `json:"error" msgpack:"error"`
}

// Body is an error as it travels in a content type.
func (e *Error) Body(contentType string) []byte {
	body, _ := Marshal(contentType, ErrorBody{Error: e}) // which has nothing that cannot be encoded
	return body
}

// Refusal is the error that goes with a NATS service error's number, for those who got, or would send, nothing else.
func Refusal(code int, why string) *Error {
	switch code {
	case 400:
		return Errorf(CodeMalformed, "%s", why)
	case 413:
		return Errorf(CodeTooLarge,
			"%s, the limit over NATS; ask with hashes instead of tokens, or over HTTP, which takes %d (8 MiB)", why, MaxBody)
	case 429:
		return Errorf(CodeBusy, "%s; ask again a little later", why)
	case 503:
		return Errorf(CodeNotReady, "%s; ask again a little later", why)
	case 500: // an answer that does not fit into a message
		return Errorf(CodeTooLarge, "%s, the limit over NATS; ask for less (fewer workers, a limit), or over HTTP", why)
	}
	return Errorf(CodeInternal, "%s (%d)", why, code)
}
