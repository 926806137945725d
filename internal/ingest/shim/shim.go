package shim

import (
	"context"
	"errors"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// The errors that a Log tells apart, by what is done next.
var (
	// ErrFenced: somebody else publishes for the same (instance, rank). Run returns it; find the other shim.
	ErrFenced = errors.New("another shim publishes for this worker and rank")

	// ErrUnusable: the log, or what is in it, is not for this shim. Run returns it; a person must act.
	ErrUnusable = errors.New("the log cannot be used")

	// ErrLogLost: what the log had acknowledged is gone. Run begins a new incarnation with what the engine can say
	// again.
	ErrLogLost = errors.New("the log has lost what it had acknowledged")
)

// Log is where one rank's batches go. Run uses it from one goroutine at a time.
type Log interface {
	// Last returns what the log holds of this rank, from whichever shim.
	Last(ctx context.Context) (Published, error)

	// Publish appends messages, in order, and returns the place of the last when all are in the log. It tries until
	// then, and clears up by itself what became of an attempt that nobody answered. The error wraps ErrFenced or
	// ErrLogLost, or is ctx's; another one ends Run.
	Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error)
}

// Receiver is a source of the messages of a ZeroMQ socket: a [zmtp.Sub] or a [zmtp.Inbox].
type Receiver interface {
	// Ready has an element when TryRecv may return a message, or the error of the end.
	Ready() <-chan struct{}

	// TryRecv returns the next message. ok is false if none waits.
	TryRecv() (m zmtp.Message, ok bool, err error)
}

// Config is one shim's.
type Config struct {
	Engine string // the engine's PUB endpoint, tcp:// or ipc://
	Listen bool   // Engine is where to listen: the engine dials in
	Replay string // the engine's replay endpoint; empty if it has none
	Topics []string

	// Messages, if not nil, is where the engine's messages come from in place of a socket of its own: they are one
	// engine's part of a socket at which several engines publish. Engine then only names the socket. After TryRecv's
	// error, when all that came is in the log, Run returns nil.
	Messages Receiver

	// Feed, if not nil, is where the engine's messages come from instead: the five fields above are not used, nor is
	// Decoder for those that were read already. When it is closed and all of it is in the log, Run returns nil.
	Feed <-chan Frame

	// Source, if not nil, is asked for what a feed has missed.
	Source Source

	Identity Identity
	Limits   Limits
	Decoder  Decoder

	// ClearUnreadable has a message that Decoder refuses count as one that is missing: what the rank was known to hold
	// is cleared. Else it costs itself alone. An engine that gives snapshots is asked for one when it says nothing for
	// a while.
	ClearUnreadable bool

	Log     Log
	Control *ControlServer // answers what others ask; nil if nobody can

	// Keep, if not nil, holds the rank's lease until ctx ends, and calls lost when the lease may have expired: then the
	// log is looked into. An error ends Run.
	Keep func(ctx context.Context, lost func()) error

	// ReplayTimeout is how long the replay socket may say nothing before the replay counts as failed. Default 2 s:
	// engines answer within a tenth of one.
	ReplayTimeout time.Duration

	// IdleCheck is after how long a silence the replay socket is asked whether anything was missed: an engine that
	// drops its last message and then says nothing shows no gap. Default 30 s. After a new connection it is asked
	// twice: at once, and a second later, when the engine is sure to have our subscription.
	IdleCheck time.Duration

	// RetryMin and RetryMax bound the pause after the log or the replay socket failed; it doubles in between, with
	// jitter. Defaults 100 ms and 5 s. While the engine's host refuses, and so can be reached, RetryReachable takes
	// RetryMax's place: default 500 ms.
	RetryMin, RetryMax, RetryReachable time.Duration

	// OnRefused is what follows when the engine's connection has ended and its own ports refuse, Engine's (without
	// Listen) and Replay's.
	OnRefused OnRefused

	// SilentAfter is after how long without a sign of life the engine counts as silent: heartbeats that are not
	// answered, for who speaks ZMTP 3.1, and no connection. Default 10 s. It proves nothing of what the engine holds.
	SilentAfter time.Duration

	// GoneAfter is after how much longer a silent engine counts as gone, and what it had in memory is cleared. Default
	// 0: never.
	GoneAfter time.Duration

	// QuietAfter is after how long without a first message, since the first connection, the engine counts as quiet. An
	// engine whose earlier messages are in the log has published before. Default 30 s.
	QuietAfter time.Duration

	// Stop, if not nil, is closed when the shim is to stop in good order. Run goes on, and returns nil when the engine is
	// gone and the log has all of it. The caller ends ctx when it waits no longer for the engine.
	Stop <-chan struct{}

	// Serving is where the engine takes requests, HOST:PORT. Run connects to it twice a second to see whether it still
	// accepts. Empty: it is not watched.
	Serving string

	// Sleep, if not nil, is where reports come from whether the engine sleeps. What a sleeping engine held is cleared.
	Sleep <-chan SleepReport

	Tracer *tracing.Tracer // of what is published; nil: that is not traced

	Sockets  zmtp.Config // bounds of the engine's sockets; Run sets Failed
	Observer Observer    // nil: [Unobserved]
}
