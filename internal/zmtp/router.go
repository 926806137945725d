package zmtp

import (
	"context"
	"encoding/binary"
	"sync"
)

// Router hears requests of dealers and answers each by name.
type Router struct {
	socket
	in *queue[request]

	nameMu sync.Mutex
	byName map[string]*conn
}

type request struct {
	from   string
	frames [][]byte
}

// ListenRouter opens a Router at endpoint. It lives until ctx ends or Stop is called.
func ListenRouter(ctx context.Context, endpoint string, cfg Config) (*Router, error) {
	r := &Router{byName: make(map[string]*conn)}
	if err := r.init(ctx, "ROUTER", endpoint, cfg); err != nil {
		return nil, err
	}
	r.in = newQueue[request](r.cfg.RecvQueue, r.cfg.RecvBytes)
	if err := r.listen(r.serve); err != nil {
		return nil, err
	}
	r.wg.Go(func() {
		<-r.ctx.Done()
		r.in.close(stopCause(r.ctx))
	})
	return r, nil
}

func (r *Router) serve(c *conn) {
	name := c.peer.Identity
	if name == "" { // as libzmq makes them: a zero and a number
		name = string(binary.BigEndian.AppendUint32([]byte{0}, uint32(c.peer.Conn)))
		c.peer.Identity = name
	}
	r.nameMu.Lock()
	if old := r.byName[name]; old != nil {
		old.end(ErrStopped) // the peer came back before we saw it go
	}
	r.byName[name] = c
	r.nameMu.Unlock()
	r.cfg.Hooks.connected(c.peer)
	c.run(func(frames [][]byte) error {
		if err := r.in.put(r.ctx, request{name, frames}, size(frames)); err != nil {
			return ErrStopped
		}
		return nil
	}, ignoreCommand)
	r.nameMu.Lock()
	if r.byName[name] == c {
		delete(r.byName, name)
	}
	r.nameMu.Unlock()
}

// Recv waits for the next message of any peer and says whose it is. The frames are what the peer sent, without its
// name. Its errors are ctx's, or [ErrStopped].
func (r *Router) Recv(ctx context.Context) (from string, frames [][]byte, err error) {
	req, err := r.in.get(ctx)
	return req.from, req.frames, err
}

func (r *Router) peer(name string) (*conn, error) {
	r.nameMu.Lock()
	defer r.nameMu.Unlock()
	if c := r.byName[name]; c != nil {
		return c, nil
	}
	return nil, ErrNoPeer
}

// Send queues one message for a peer. It does not wait: at the high-water mark the message is dropped and the error
// is [ErrFull]. Libzmq's routers do the same and do not say so. A peer that is not there gives [ErrNoPeer].
func (r *Router) Send(to string, frames ...[]byte) error {
	c, err := r.peer(to)
	if err != nil {
		return err
	}
	return c.send(encode(frames))
}

// SendWait is Send, but waits for room in the queue.
func (r *Router) SendWait(ctx context.Context, to string, frames ...[]byte) error {
	c, err := r.peer(to)
	if err != nil {
		return err
	}
	b := encode(frames)
	return c.out.put(ctx, b, len(b))
}
