package zmtp

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	"github.com/kvatlas/kvatlas/internal/base/hooks"
)

// Config bounds a socket. The zero value is a good one: zero fields take their defaults.
type Config struct {
	// ConnectTimeout bounds one attempt to connect; default 5 s.
	ConnectTimeout time.Duration

	// HandshakeTimeout bounds greeting and READY of a new connection; default 5 s.
	HandshakeTimeout time.Duration

	// MaxMessage bounds the bytes of a received message, all frames together, and with it those of a frame; default 64
	// MiB. A greater one ends the connection with [ErrTooLarge].
	MaxMessage int

	// MaxFrames bounds the frames of a received message; default 64.
	MaxFrames int

	// RecvQueue and RecvBytes bound what was received and not yet taken by Recv; defaults 65,536 messages and 64 MiB.
	// One message always fits into an empty queue.
	RecvQueue int
	RecvBytes int

	// SendQueue and SendBytes bound what waits to be sent to one peer (the high-water mark); defaults 1,000 messages,
	// as in libzmq, and 256 MiB.
	SendQueue int
	SendBytes int

	// Heartbeat is the time between our PINGs; default 5 s; negative: none. A publisher that pings a libzmq subscriber
	// whose queue is full gets no answer, so that a slow one looks dead: engines do not ping.
	Heartbeat time.Duration

	// HeartbeatTimeout is how long a peer that we ping may be silent; default three times Heartbeat.
	HeartbeatTimeout time.Duration

	// BackoffMin and BackoffMax bound the pause before dialling again; defaults 100 ms and 10 s. The pause doubles
	// after each attempt, and between half and all of it is waited. A connection that lasted BackoffMax ends the
	// doubling, and so does [Sub.DialNow].
	BackoffMin time.Duration
	BackoffMax time.Duration

	// BackoffReachable bounds that pause while the peer's host can be reached: it refused the last attempt, or the last
	// connection was made and came to nothing. Such a host answers at once and is asked often at little cost, so that a
	// peer which starts again is found soon. Default 1 s, or BackoffMax if that is less.
	BackoffReachable time.Duration

	// MaxConns bounds the connections that a listening socket has at a time; default 1,024. Further ones are
	// closed at once.
	MaxConns int

	// Identity is what a Dealer calls itself; at most 255 bytes, not beginning with a zero. Default: the router
	// makes up a name.
	Identity []byte

	// Rule, if not nil, judges each address that is dialled, for endpoints that somebody else than the operator named.
	// Unix sockets are refused then.
	Rule *dial.Rule

	// Hooks are told what happens.
	Hooks Hooks
}

// Hooks tell what happens to a socket's connections. Each may be nil.
type Hooks struct {
	Connected func(Peer) // called after a handshake.

	// Disconnected is called once for each Connected, with the reason. It is [ErrStopped] if we ended the connection,
	// io.EOF if the peer closed it, [ErrProtocol], [ErrTooLarge] or [ErrSilent] if it was given up, or what the
	// transport says.
	Disconnected func(Peer, error)

	// Failed is called when no connection came about: nobody there, a time-out, or, with [ErrRefused], a peer with
	// whom we cannot talk. The Peer has what was learned of it.
	Failed func(Peer, error)
}

// Peer is the other side of a connection.
type Peer struct {
	Conn       uint64 // number of the connection within the socket, from 1; 0 before the handshake
	Endpoint   string // what was dialled or listened on
	Remote     string // the peer's address, where the transport has one
	SocketType string // as the peer's READY says
	Minor      byte   // ZMTP 3.Minor
	Identity   string // a dealer's, as its READY says
}

func (p Peer) String() string {
	s := p.Endpoint
	if p.Remote != "" && p.Remote != p.Endpoint {
		s += " (" + p.Remote + ")"
	}
	return s
}

// Errors, by what the caller does next.
var (
	// ErrStopped is returned after Stop, and by Recv after the end of the context that a socket was made with.
	ErrStopped = errors.New("zmtp: socket is stopped")

	// ErrRefused: the peer demands a mechanism that we lack, speaks another protocol or version, or is the wrong kind
	// of socket. Trying again will not help until someone changes a configuration. The error is a [*RefusedError].
	ErrRefused = errors.New("zmtp: peer refused")

	// ErrProtocol: the peer broke the protocol; its connection is closed.
	ErrProtocol = errors.New("zmtp: protocol broken")

	// ErrTooLarge: the peer sent more than MaxMessage or MaxFrames allow. It is an ErrProtocol too.
	ErrTooLarge = fmt.Errorf("%w: too large", ErrProtocol)

	// ErrSilent: the peer said nothing for too long, in the handshake or after.
	ErrSilent = errors.New("zmtp: peer is silent")

	// ErrFull: the peer's send queue is at its high-water mark. Returned by [Conn.TrySend].
	ErrFull = errors.New("zmtp: send queue is full")
)

// RefusedError says why a peer cannot be talked to.
type RefusedError struct {
	Mechanism string // the mechanism that the peer demands, if that is the reason; "unknown" if its name is not known
	Protocol  string // the protocol that the peer speaks, HTTP, NATS or TLS, if that is the reason
	Reason    string // in words
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
	hooks.Fill(&c.Hooks)

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
		"Identity begins with a zero, which is kept for names that routers make up")
	return c, errors.Join(errs...)
}

func isTimeout(err error) bool {
	var ne net.Error
	return errors.As(err, &ne) && ne.Timeout()
}
