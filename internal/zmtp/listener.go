package zmtp

import "context"

// Listener is a listening socket of an engine's kind. The product has none: simulators and tests make PUB and ROUTER
// sockets of it (tools/zmtpserver).
type Listener struct{ socket }

// Listen opens a socket of a kind, PUB or ROUTER, at an endpoint, until ctx ends or Stop is called. Each connection is
// handed to serve, in a goroutine of its own; serve calls [Conn.Run] and returns when that does.
func Listen(ctx context.Context, kind, endpoint string, cfg Config, serve func(*Conn)) (*Listener, error) {
	l := &Listener{}
	if err := l.init(ctx, kind, endpoint, cfg); err != nil {
		return nil, err
	}
	return l, l.listen(func(c *Conn) {
		l.cfg.Hooks.Connected(c.peer)
		serve(c)
	})
}

// Done is closed when the socket has been stopped.
func (l *Listener) Done() <-chan struct{} { return l.ctx.Done() }
