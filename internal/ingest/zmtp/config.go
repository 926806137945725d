package zmtp

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
)

// Config configures a socket. The zero value is usable: zero fields get their defaults.
type Config struct {
	// ConnectTimeout bounds a single attempt to connect. The default is 5 s.
	ConnectTimeout time.Duration

	// HandshakeTimeout bounds the greeting and READY of a new connection. The default is 5 s.
	HandshakeTimeout time.Duration

	// MaxMessage bounds the bytes of a received message, all frames together, and so the size of a frame. The default
	// is 64 MiB. A larger message ends the connection with [ErrTooLarge].
	MaxMessage int

	// MaxFrames bounds the frames of a received message. The default is 64.
	MaxFrames int

	// RecvQueue and RecvBytes bound the messages that wait for Recv. The defaults are 65,536 messages and 64 MiB. An
	// empty queue accepts a message of any size.
	RecvQueue int
	RecvBytes int

	// SendQueue and SendBytes bound the messages that wait to be sent to a peer (the high-water mark). The defaults are
	// 1,000 messages, as in libzmq, and 256 MiB.
	SendQueue int
	SendBytes int

	// Heartbeat is the interval of our PINGs. The default is 5 s; a negative value disables PINGs. A libzmq subscriber
	// with a full queue does not answer PINGs and would look dead, so engines do not ping.
	Heartbeat time.Duration

	// HeartbeatTimeout is the longest silence of a pinged peer. The default is three times Heartbeat.
	HeartbeatTimeout time.Duration

	// BackoffMin and BackoffMax bound the pause before a reconnect. The defaults are 100 ms and 10 s. The pause doubles
	// after each attempt, and the socket waits between half of the pause and the whole pause. A connection that lasted
	// BackoffMax resets the pause, and so does [Sub.DialNow].
	BackoffMin time.Duration
	BackoffMax time.Duration

	// BackoffReachable bounds the pause while the peer's host is reachable: the host refused the last attempt, or the
	// last attempt made a connection that ended soon. Such a host answers at once, so frequent attempts are cheap and
	// find a restarted peer soon. The default is 1 s, or BackoffMax if smaller.
	BackoffReachable time.Duration

	// MaxConns bounds the concurrent connections of a listening socket. The default is 1,024. Further connections are
	// closed at once.
	MaxConns int

	// Identity is the name of a Dealer: at most 255 bytes, without a leading zero byte. By default the router chooses a
	// name.
	Identity []byte

	// Rule restricts the dialled addresses, for endpoints that the operator did not name. Unix sockets are refused
	// then. nil permits every address.
	Rule *dial.Rule

	// Disconnected, if not nil, is called at the end of a connection with the reason: [ErrStopped] if this side ended the
	// connection, io.EOF if the peer closed the connection, [ErrProtocol], [ErrTooLarge] or [ErrSilent] if this side gave
	// the peer up, or the error of the transport. Several goroutines call it.
	Disconnected func(Peer, error)

	// Failed, if not nil, is called when a connection attempt failed: no listener, a timeout, or [ErrRefused] for an
	// incompatible peer. Peer contains the properties received before the failure. Several goroutines call it.
	Failed func(Peer, error)
}

// Peer describes the other side of a connection.
type Peer struct {
	Conn       uint64 // number of the connection within the socket, from 1; 0 before the handshake
	Endpoint   string // the endpoint that was dialled or listened on
	Remote     string // the peer's address, if the transport has addresses
	SocketType string // from the peer's READY
	Minor      byte   // ZMTP 3.Minor
	Identity   string // of a dealer, from its READY
}

func (p Peer) String() string {
	s := p.Endpoint
	if p.Remote != "" && p.Remote != p.Endpoint {
		s += " (" + p.Remote + ")"
	}
	return s
}

// Errors, by the caller's reaction.
var (
	// ErrStopped is returned after Stop, and by Recv after the end of the socket's context.
	ErrStopped = errors.New("zmtp: socket is stopped")

	// ErrRefused: the peer demands an unsupported mechanism, speaks another protocol or version, or is the wrong kind
	// of socket. A retry does not help until a configuration changes. The error is a [*RefusedError].
	ErrRefused = errors.New("zmtp: peer refused")

	// ErrProtocol: the peer broke the protocol; its connection is closed.
	ErrProtocol = errors.New("zmtp: protocol broken")

	// ErrTooLarge: the peer exceeded MaxMessage or MaxFrames. ErrTooLarge wraps ErrProtocol.
	ErrTooLarge = fmt.Errorf("%w: too large", ErrProtocol)

	// ErrSilent: the peer sent nothing for too long, in the handshake or later.
	ErrSilent = errors.New("zmtp: peer is silent")

	// ErrFull: the peer's send queue is at its high-water mark. [Conn.TrySend] returns ErrFull.
	ErrFull = errors.New("zmtp: send queue is full")
)

// RefusedError contains the reason why a peer is incompatible.
type RefusedError struct {
	Mechanism string // the mechanism that the peer demands, if that is the reason; "unknown" for an unlisted name
	Protocol  string // the peer's protocol (HTTP, NATS or TLS), if that is the reason
	Reason    string // the reason in words
}

func (e *RefusedError) Error() string { return "zmtp: peer refused: " + e.Reason }

func (e *RefusedError) Is(target error) bool { return target == ErrRefused }

func (c Config) filled() (Config, error) {
	c.ConnectTimeout = cmp.Or(c.ConnectTimeout, 5*time.Second)
	c.HandshakeTimeout = cmp.Or(c.HandshakeTimeout, 5*time.Second)
	c.Heartbeat = cmp.Or(c.Heartbeat, 5*time.Second)
	c.HeartbeatTimeout = cmp.Or(c.HeartbeatTimeout, 3*max(c.Heartbeat, 0))
	c.BackoffMin = cmp.Or(c.BackoffMin, 100*time.Millisecond)
	c.BackoffMax = cmp.Or(c.BackoffMax, max(10*time.Second, c.BackoffMin))
	c.BackoffReachable = cmp.Or(c.BackoffReachable, min(max(time.Second, c.BackoffMin), c.BackoffMax))
	c.MaxMessage = cmp.Or(c.MaxMessage, 64<<20)
	c.MaxFrames = cmp.Or(c.MaxFrames, 64)
	c.RecvQueue = cmp.Or(c.RecvQueue, 1<<16)
	c.RecvBytes = cmp.Or(c.RecvBytes, 64<<20)
	c.SendQueue = cmp.Or(c.SendQueue, 1000)
	c.SendBytes = cmp.Or(c.SendBytes, 256<<20)
	c.MaxConns = cmp.Or(c.MaxConns, 1024)
	for _, f := range []*func(Peer, error){&c.Disconnected, &c.Failed} {
		if *f == nil {
			*f = func(Peer, error) {}
		}
	}

	var errs []error
	bad := func(cond bool, format string, args ...any) {
		if cond {
			errs = append(errs, fmt.Errorf("zmtp: "+format, args...))
		}
	}
	bad(c.ConnectTimeout < 0, "ConnectTimeout is negative: %v", c.ConnectTimeout)
	bad(c.HandshakeTimeout < 0, "HandshakeTimeout is negative: %v", c.HandshakeTimeout)
	bad(c.Heartbeat > 0 && c.HeartbeatTimeout < c.Heartbeat, "HeartbeatTimeout %v is shorter than Heartbeat %v",
		c.HeartbeatTimeout, c.Heartbeat)
	bad(c.BackoffMin < 0 || c.BackoffMax < c.BackoffMin, "BackoffMin %v and BackoffMax %v are out of order",
		c.BackoffMin, c.BackoffMax)
	bad(c.BackoffReachable < c.BackoffMin || c.BackoffReachable > c.BackoffMax,
		"BackoffReachable %v is not from BackoffMin %v to BackoffMax %v", c.BackoffReachable, c.BackoffMin,
		c.BackoffMax)
	for _, f := range []struct {
		name string
		n    int
	}{{"MaxMessage", c.MaxMessage}, {"MaxFrames", c.MaxFrames}, {"RecvQueue", c.RecvQueue}, {"RecvBytes", c.RecvBytes},
		{"SendQueue", c.SendQueue}, {"SendBytes", c.SendBytes}, {"MaxConns", c.MaxConns}} {
		bad(f.n < 0, "%s is negative: %d", f.name, f.n)
	}
	bad(len(c.Identity) > 255, "Identity has %d bytes, more than 255", len(c.Identity))
	bad(len(c.Identity) > 0 && c.Identity[0] == 0,
		"Identity begins with a zero, which is reserved for names that routers choose")
	return c, errors.Join(errs...)
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
