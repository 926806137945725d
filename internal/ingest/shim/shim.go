package shim

import (
	"context"
	"errors"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/tracing"
	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// The errors of a Log, by the reaction.
var (
	// ErrFenced reports another publisher for the same (instance, rank). Run returns it. Find the other shim.
	ErrFenced = errors.New("another shim publishes for this worker and rank")

	// ErrUnusable reports a log, or a content, that this shim cannot use. Run returns it. An operator must act.
	ErrUnusable = errors.New("the log cannot be used")

	// ErrLogLost reports that acknowledged messages are gone. Run begins a new incarnation with the engine's repeatable
	// events.
	ErrLogLost = errors.New("the log has lost acknowledged messages")
)

// Log is the log of a rank. Run uses it from a single goroutine at a time.
type Log interface {
	// Last returns the state of this rank in the log, from any shim.
	Last(ctx context.Context) (Published, error)

	// Publish appends messages in order, and returns the position of the last after all are in the log. It retries until
	// then, and determines the result of attempts without a reply. The error wraps ErrFenced or ErrLogLost, or is ctx's;
	// any other error ends Run.
	Publish(ctx context.Context, msgs [][]byte) (events.StreamSeq, error)
}

// Receiver is a source of the messages of a ZeroMQ socket: a [zmtp.Sub] or a [zmtp.Inbox].
type Receiver interface {
	// Ready has an element when TryRecv may return a message, or the error of the end.
	Ready() <-chan struct{}

	// TryRecv returns the next message. ok is false if none waits.
	TryRecv() (m zmtp.Message, ok bool, err error)
}

// Config configures a shim.
type Config struct {
	Engine string // the engine's PUB endpoint, tcp:// or ipc://
	Listen bool   // Engine is where to listen: the engine dials in
	Replay string // the engine's replay endpoint; empty without replays
	Topics []string

	// Messages, if not nil, replaces the shim's own socket. It has the messages of one engine, from a socket at which
	// several engines publish. Engine then only names the socket. Run returns nil after the error of TryRecv, when all
	// received events are in the log.
	Messages Receiver

	// Feed, if not nil, has the engine's messages. The five fields above are then unused, and so is Decoder for frames
	// that are already decoded. Run returns nil after the close of Feed, when all received events are in the log.
	Feed <-chan Frame

	// Source, if not nil, supplies missed messages of a feed.
	Source Source

	Identity Identity
	Limits   Limits
	Decoder  Decoder

	// ClearUnreadable makes undecodable messages count as missing: the rank is cleared. Otherwise an undecodable message
	// is skipped. With a Source, the shim requests a snapshot after a pause of the engine.
	ClearUnreadable bool

	Log     Log
	Control *ControlServer // answers requests of other processes; nil without requests

	// Keep, if not nil, holds the rank's lease until ctx ends, and calls lost when the lease may have expired: Run then
	// reads the log. An error ends Run.
	Keep func(ctx context.Context, lost func()) error

	// ReplayTimeout is the longest wait for a message of the replay socket before the replay counts as failed. Default 2
	// s: engines reply within a tenth of a second.
	ReplayTimeout time.Duration

	// IdleCheck is the silence after which the shim checks the replay socket for missed messages: an engine that drops its
	// last message and then publishes nothing shows no gap. Default 30 s. After a new connection, the shim checks twice:
	// at once, and after a second, when the engine certainly has the subscription.
	IdleCheck time.Duration

	// RetryMin and RetryMax limit the pause after a failure of the log or the replay socket. The pause doubles in between,
	// with jitter. Defaults 100 ms and 5 s. While the engine's host refuses connections, and so is reachable,
	// RetryReachable replaces RetryMax: default 500 ms.
	RetryMin, RetryMax, RetryReachable time.Duration

	// OnRefused is the reaction to refusing ports after the end of the engine's connection: the ports of Engine (without
	// Listen) and Replay.
	OnRefused OnRefused

	// SilentAfter is the time without a sign of life after which the engine counts as silent: without replies to
	// heartbeats, for ZMTP 3.1, and without a connection. Default 10 s. Silence proves nothing about the engine's blocks.
	SilentAfter time.Duration

	// GoneAfter is the further time after which a silent engine counts as gone, and its memory is cleared. Default 0:
	// never.
	GoneAfter time.Duration

	// QuietAfter is the time without a first message since the first connection after which the engine counts as quiet. An
	// engine with earlier messages in the log never counts as quiet. Default 30 s.
	QuietAfter time.Duration

	// Stop, if not nil, is closed to request a graceful stop. Run continues, and returns nil when the engine is gone and
	// the log has all of its events. The caller ends ctx to stop waiting for the engine.
	Stop <-chan struct{}

	// Serving is the engine's address for requests, HOST:PORT. Run connects twice a second to detect refusals. Empty
	// disables the check.
	Serving string

	// Sleep, if not nil, delivers reports of the engine's sleep. A sleeping engine's rank is cleared.
	Sleep <-chan SleepReport

	Tracer *tracing.Tracer // traces published events; nil disables traces

	Sockets  zmtp.Config // bounds of the engine's sockets; Run sets Failed
	Observer Observer    // nil: [Unobserved]
}
