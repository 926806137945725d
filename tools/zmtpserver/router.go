package zmtpserver

import (
	"context"
	"encoding/binary"
	"errors"
	"sync"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
)

// ErrNoPeer reports a name without a connection to the Router.
var ErrNoPeer = errors.New("zmtpserver: no such peer")

// Router receives requests from dealers and replies by name.
type Router struct {
	*zmtp.Listener
	in chan request

	mu     sync.Mutex
	byName map[string]*zmtp.Conn
}

type request struct {
	from   string
	frames [][]byte
}

// waiting is how many requests a router keeps for Recv.
const waiting = 1000

// ListenRouter opens a Router at endpoint, until the end of ctx or a call of Stop.
func ListenRouter(ctx context.Context, endpoint string, cfg zmtp.Config) (*Router, error) {
	r := &Router{in: make(chan request, waiting), byName: make(map[string]*zmtp.Conn)}
	var err error
	r.Listener, err = zmtp.Listen(ctx, "ROUTER", endpoint, cfg, r.serve)
	return r, err
}

func (r *Router) serve(c *zmtp.Conn) {
	name := c.Peer().Identity
	if name == "" { // a zero and a number, as in libzmq
		name = string(binary.BigEndian.AppendUint32([]byte{0}, uint32(c.Peer().Conn)))
	}
	r.mu.Lock()
	if old := r.byName[name]; old != nil {
		old.End(zmtp.ErrStopped) // the peer reconnected before the end of the old connection was detected
	}
	r.byName[name] = c
	r.mu.Unlock()
	c.Run(func(frames [][]byte) error {
		select {
		case r.in <- request{name, frames}:
			return nil
		case <-c.Done():
			return zmtp.ErrStopped
		}
	}, func(string, []byte) error { return nil })
	r.mu.Lock()
	if r.byName[name] == c {
		delete(r.byName, name)
	}
	r.mu.Unlock()
}

// Recv waits for the next message of any peer and returns the peer's name. The frames exclude the name. The error is
// ctx's, or [zmtp.ErrStopped].
func (r *Router) Recv(ctx context.Context) (from string, frames [][]byte, err error) {
	select {
	case req := <-r.in:
		return req.from, req.frames, nil
	case <-ctx.Done():
		return "", nil, context.Cause(ctx)
	case <-r.Done():
		return "", nil, zmtp.ErrStopped
	}
}

func (r *Router) peer(name string) (*zmtp.Conn, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.byName[name]; c != nil {
		return c, nil
	}
	return nil, ErrNoPeer
}

// Send queues a message for a peer. It does not block: at the high-water mark the message is dropped and the error is
// [zmtp.ErrFull]. Libzmq's routers drop the message without an error. An unknown peer gives [ErrNoPeer].
func (r *Router) Send(to string, frames ...[]byte) error {
	c, err := r.peer(to)
	if err != nil {
		return err
	}
	return c.TrySend(zmtp.Encode(frames))
}

// SendWait is Send, but waits for room in the queue.
func (r *Router) SendWait(ctx context.Context, to string, frames ...[]byte) error {
	c, err := r.peer(to)
	if err != nil {
		return err
	}
	return c.Send(ctx, zmtp.Encode(frames))
}
