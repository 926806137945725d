package jetstream

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/pkg/rpc"
)

// The classes of errors, named by what the caller does next. Every error of this package that comes from a
// server or a connection wraps one of them, with the action and what the server said.
var (
	// ErrUnavailable: nobody answered, or nobody could for now (no connection, no leader, no stream, a deadline
	// passed). Back off and try again. Whatever was sent may have been taken or not.
	ErrUnavailable = errors.New("not available")

	// ErrConflict: somebody else wrote first. Read again, then decide. Errors of [Publisher.Publish] and of
	// [Bucket.Commit] that wrap it are of type *[ConflictError].
	ErrConflict = errors.New("written by somebody else")

	// ErrTooLarge: a message or value is above a limit that the error names. Split it; sending it again is useless.
	ErrTooLarge = errors.New("too large")

	// ErrFull: the server has no room or could not write. Back off; an operator must make room.
	ErrFull = errors.New("no room")

	// ErrDenied: the server refuses this user this subject. An operator must grant it.
	ErrDenied = errors.New("permission denied")

	// ErrNoJetStream: this NATS server, or this account on it, has no JetStream.
	ErrNoJetStream = errors.New("JetStream is not enabled")

	// ErrNoLeader: a NATS server answers and JetStream does not: it has no meta leader. Requests between clients work,
	// nothing can be read from or written to a stream or bucket. It comes with [ErrUnavailable]: back off, and start
	// the NATS servers that are away.
	ErrNoLeader = errors.New(
		"JetStream does not answer: it has no meta leader (more than half of its NATS servers must be up), or is just starting")

	// ErrNoNamespace: no indexer has created the namespace yet. Returned by [OpenNamespace].
	ErrNoNamespace = errors.New("namespace does not exist")

	// ErrMismatch: what is stored and what was asked for cannot both be right (partitions of a namespace, block
	// size of a model, the shape of a stream). The error names both. A person must choose.
	ErrMismatch = errors.New("mismatch")

	// ErrNotFound: there is no such stream, key or message.
	ErrNotFound = errors.New("not found")

	// ErrBadName: a name that cannot become part of a subject, or a token that no name has become.
	ErrBadName = errors.New("bad name")

	// ErrNoResponder: nobody serves the subject of a request at this moment. Returned by [Conn.Request], at once.
	ErrNoResponder = rpc.ErrNoResponder

	// ErrTimeout: the deadline of a request passed without an answer. Returned by [Conn.Request].
	ErrTimeout = errors.New("no answer in time")
)

// ConflictError says what a conditional write met. It wraps [ErrConflict].
type ConflictError struct {
	Subject  string // what was to be written
	Expected uint64 // the sequence that the last message on the subject should have had; 0 for none
	Found    uint64 // the one that it had, if the server said; else 0
	Writer   string // who wrote that message, if it was written by a [Publisher]
	Server   string // what the server said
}

func (e *ConflictError) Error() string {
	by := ""
	if e.Writer != "" {
		by = " by writer " + e.Writer
	}
	return fmt.Sprintf("%s: %v: expected sequence %d as the last one, found %d%s (%s)", e.Subject, ErrConflict,
		e.Expected, e.Found, by, e.Server)
}

func (e *ConflictError) Unwrap() error { return ErrConflict }

// Causes with which an attempt is ended before its time, or before it has begun.
var (
	errDisconnected = errors.New("the connection was lost while waiting")
	errAttemptOver  = errors.New("the server did not answer")
	errNoConnection = errors.New("there is no connection to a NATS server")
)

// Error codes of the JetStream API that nats.go has no name for (nats-server server/errors.json).
const (
	codeAccountResources   = 10002
	codeInsufficient       = 10023
	codeMaxPayload         = 10054
	codeStorageResources   = 10047
	codeStoreFailed        = 10077
	codeMaxStreamBytes     = 10122
	codeAtomicDisabled     = 10174
	codeAtomicIncomplete   = 10176
	codeAtomicTooLarge     = 10199
	codeAtomicTooMany      = 10210
	codeStreamGeneral      = 10051
	codeStreamNotFound     = 10059
	codeNoMessage          = 10037
	codeStreamNameInUse    = 10058
	codeWrongLast          = 10071
	codeWrongLastConstant  = 10164
	codeNotEnabled         = 10076
	codeNotEnabledAccount  = 10039
	codeNoLeader           = 10008
	codeNoPeers            = 10005
	codeServerNotAvailable = 503
)

// apiError is the error of a JetStream API answer or of a publish acknowledgement.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

func (e *apiError) Error() string { return fmt.Sprintf("%s (%d)", e.Description, e.ErrCode) }

// codeOf is the code of a JetStream API answer, 0 of another error.
func codeOf(err error) int {
	if own, is := errors.AsType[*apiError](err); is {
		return own.ErrCode
	}
	return 0
}

// classOf finds the class of an error. It is nil for an error that has none: a bug of ours, or a server that speaks
// otherwise.
func classOf(err error) error {
	if own, is := errors.AsType[*apiError](err); is {
		return classOfCode(own.Code, own.ErrCode)
	}
	if theirs, is := errors.AsType[*jetstream.APIError](err); is {
		return classOfCode(theirs.Code, int(theirs.ErrorCode))
	}
	for _, c := range classes {
		if slices.ContainsFunc(c.errs, func(e error) bool { return errors.Is(err, e) }) {
			return c.class
		}
	}
	if _, is := errors.AsType[net.Error](err); is {
		return ErrUnavailable
	}
	return nil
}

// classes are those of errors that are no answer of the JetStream API.
var classes = []struct {
	class error
	errs  []error
}{
	{ErrDenied, []error{nats.ErrPermissionViolation, nats.ErrAuthorization, nats.ErrAuthExpired, nats.ErrAuthRevoked,
		nats.ErrAccountAuthExpired}},
	{ErrTooLarge, []error{nats.ErrMaxPayload}},
	{ErrNoJetStream, []error{jetstream.ErrJetStreamNotEnabled, jetstream.ErrJetStreamNotEnabledForAccount}},
	{ErrUnavailable, []error{nats.ErrNoResponders, jetstream.ErrNoStreamResponse, nats.ErrTimeout,
		context.DeadlineExceeded, context.Canceled, nats.ErrConnectionClosed, nats.ErrConnectionDraining,
		nats.ErrConnectionReconnecting, nats.ErrDisconnected, nats.ErrNoServers, nats.ErrStaleConnection,
		jetstream.ErrConnectionClosed, jetstream.ErrServerShutdown, errDisconnected, errNoConnection, errAttemptOver,
		errBehind, io.EOF, io.ErrClosedPipe, net.ErrClosed}}, // the last: a write into a connection that is being lost
}

func classOfCode(code, errCode int) error {
	switch errCode {
	case codeWrongLast, codeWrongLastConstant:
		return ErrConflict
	case codeMaxPayload:
		return ErrTooLarge
	case codeStoreFailed, codeAccountResources, codeInsufficient, codeStorageResources, codeMaxStreamBytes:
		return ErrFull
	case codeNotEnabled, codeNotEnabledAccount:
		return ErrNoJetStream
	case codeStreamNotFound, codeNoMessage:
		return ErrNotFound
	case codeAtomicIncomplete, codeAtomicTooMany:
		return ErrUnavailable
	}
	switch code {
	case codeServerNotAvailable, 429:
		return ErrUnavailable
	case 404:
		return ErrNotFound
	}
	return nil
}

// sent is an error of sending, in words that one understands: nothing is kept back while there is no connection, and
// nats.go calls that a buffer's limit.
func sent(err error) error {
	if errors.Is(err, nats.ErrReconnectBufExceeded) {
		return errNoConnection
	}
	return err
}

// failed wraps an error with the action that failed and its class, unless it has them.
func failed(action string, err error) error {
	if err == nil {
		return nil
	}
	err = sent(err)
	class := classOf(err)
	if codeOf(err) == codeNoLeader && !errors.Is(err, ErrNoLeader) {
		return fmt.Errorf("%s: %w: %w: %w", action, class, ErrNoLeader, err)
	}
	if class == nil || errors.Is(err, class) {
		return fmt.Errorf("%s: %w", action, err)
	}
	return fmt.Errorf("%s: %w: %w", action, class, err)
}
