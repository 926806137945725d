package jetstream

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
)

// The classes of errors, named after the reaction of the caller. Every error of this package from a server or a
// connection wraps one of them, with the action and the server's text.
var (
	// ErrUnavailable: no answer for now (no connection, no leader, no stream, a deadline passed). Back off and retry.
	// The message may or may not have been stored.
	ErrUnavailable = errors.New("not available")

	// ErrConflict: another writer was first. Read again, then decide. Errors of [Publisher.Publish] and [Bucket.Commit]
	// that wrap it are of type *[conflictError].
	ErrConflict = errors.New("written by another client")

	// ErrTooLarge: a message or value is above the limit in the error. Split it; a retry is useless.
	ErrTooLarge = errors.New("too large")

	// ErrFull: the server has no room or could not write. Back off; an operator must make room.
	ErrFull = errors.New("no room")

	// ErrDenied: the server refuses the subject for this user. An operator must grant it.
	ErrDenied = errors.New("permission denied")

	// ErrNoJetStream: this NATS server, or this account on it, has no JetStream.
	ErrNoJetStream = errors.New("JetStream is not enabled")

	// ErrNoLeader: a NATS server answers, but JetStream has no meta leader. Requests between clients work. Streams and
	// buckets can be neither read nor written. It comes with [ErrUnavailable]: back off, and start the missing NATS
	// servers.
	ErrNoLeader = errors.New(
		"JetStream does not answer: it has no meta leader (more than half of its NATS servers must be up), or is just starting")

	// ErrNoNamespace: no indexer has created the namespace yet. [OpenNamespace] returns it.
	ErrNoNamespace = errors.New("namespace does not exist")

	// ErrMismatch: the stored value contradicts the requested one (partitions of a namespace, block size of a model,
	// the settings of a stream). The error has both. A person must choose.
	ErrMismatch = errors.New("mismatch")

	// ErrNotFound: the stream, key or message does not exist.
	ErrNotFound = errors.New("not found")

	// ErrBadName: a name that cannot be part of a subject, or a token that does not come from a name.
	ErrBadName = errors.New("bad name")

	// ErrNoResponder: no service listens on the subject of a request. [Conn.Request] returns it at once.
	ErrNoResponder = rpc.ErrNoResponder

	// ErrTimeout: the deadline of a request passed without an answer. [Conn.Request] returns it.
	ErrTimeout = errors.New("no answer in time")
)

// conflictError describes the conflict of a conditional write. It wraps [ErrConflict].
type conflictError struct {
	Subject  string // subject of the write
	Expected uint64 // expected sequence of the last message on the subject; 0 for none
	Found    uint64 // actual sequence, if the server reported it; else 0
	Writer   string // id of the [Publisher] that wrote that message; empty: unknown
	Server   string // the server's text
}

func (e *conflictError) Error() string {
	by := ""
	if e.Writer != "" {
		by = " by writer " + e.Writer
	}
	return fmt.Sprintf("%s: %v: expected sequence %d as the last one, found %d%s (%s)", e.Subject, ErrConflict,
		e.Expected, e.Found, by, e.Server)
}

func (e *conflictError) Unwrap() error { return ErrConflict }

// Causes of the early end of an attempt.
var (
	errDisconnected = errors.New("the connection was lost while waiting")
	errAttemptOver  = errors.New("the server did not answer")
	errNoConnection = errors.New("there is no connection to a NATS server")
)

// Error codes of the JetStream API without a name in nats.go (nats-server server/errors.json).
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
	codeNotClustered       = 10074
	codeMaxStreams         = 10026
	codeMemoryResources    = 10028
	codeServerNotAvailable = 503
)

// remedies are the remedies for errors of the JetStream API that an operator must correct.
var remedies = map[int]string{
	codeNotClustered: "the NATS server is in no cluster, so it keeps one copy: use 1 replica (--nats-replicas 1), or " +
		"give the addresses of a cluster with as many servers as replicas",
	codeNoPeers: "start more NATS servers of the cluster, or use fewer replicas (--nats-replicas)",
	codeStorageResources: "make room on the disk of the NATS servers, or raise max_file_store of their jetstream block " +
		"or the account's limit",
	codeInsufficient: "make room on the NATS servers, or raise max_file_store of their jetstream block or the account's " +
		"limit",
	codeMemoryResources:  "raise max_memory_store of the NATS servers' jetstream block or the account's limit",
	codeAccountResources: "raise the JetStream limits of the NATS account",
	codeMaxStreams:       "raise the number of streams of the NATS account, or delete unused streams",
	codeNotEnabled:       "start nats-server with JetStream (-js, or a jetstream block in its configuration)",
	codeNotEnabledAccount: "enable JetStream for this NATS account: `jetstream: enabled` in the account of the servers' " +
		"configuration",
}

// apiError is the error of a JetStream API answer or of a publish acknowledgement.
type apiError struct {
	Code        int    `json:"code"`
	ErrCode     int    `json:"err_code"`
	Description string `json:"description"`
}

// Error returns the server's text, the code with its name, and the remedy if there is one.
func (e *apiError) Error() string {
	text := fmt.Sprintf("%s (JetStream error %d)", cmp.Or(e.Description, "no description"), e.ErrCode)
	if remedy := remedies[e.ErrCode]; remedy != "" {
		text += "; what to do: " + remedy
	}
	return text
}

// legibleError is an error with the text of an [apiError] in place of the text of nats.go.
type legibleError struct {
	error
	text string
}

func (e *legibleError) Error() string { return e.text }

func (e *legibleError) Unwrap() error { return e.error }

// legible replaces the text of nats.go's error of the JetStream API, which is a list of codes.
func legible(err error) error {
	theirs, is := errors.AsType[*jetstream.APIError](err)
	if !is {
		return err
	}
	own := apiError{theirs.Code, int(theirs.ErrorCode), theirs.Description}
	return &legibleError{err, strings.ReplaceAll(err.Error(), theirs.Error(), own.Error())}
}

// codeOf returns the code of a JetStream API answer, or 0 for other errors.
func codeOf(err error) int {
	if own, is := errors.AsType[*apiError](err); is {
		return own.ErrCode
	}
	return 0
}

// classOf returns the class of an error; nil if it has none, as after a bug of ours or an unexpected text of a server.
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

// classes has the classes of errors that are no answers of the JetStream API.
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
		errBehind, io.EOF, io.ErrClosedPipe, net.ErrClosed}}, // net.ErrClosed: a write while a connection is lost
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

// sent replaces nats.go's error for a send without a connection, which names a limit of a buffer, by our own.
func sent(err error) error {
	if errors.Is(err, nats.ErrReconnectBufExceeded) {
		return errNoConnection
	}
	return err
}

// failed wraps an error with its class and the action, unless it has them already.
func failed(action string, err error) error {
	if err == nil {
		return nil
	}
	err = legible(sent(err))
	class := classOf(err)
	if codeOf(err) == codeNoLeader && !errors.Is(err, ErrNoLeader) {
		return fmt.Errorf("%s: %w: %w: %w", action, class, ErrNoLeader, err)
	}
	if class == nil || errors.Is(err, class) {
		return fmt.Errorf("%s: %w", action, err)
	}
	return fmt.Errorf("%s: %w: %w", action, class, err)
}
