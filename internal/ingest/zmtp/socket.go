package zmtp

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// socket is the common part of all kinds: the lifetime that Stop ends, and the open connections.
type socket struct {
	cfg  Config
	kind string // SUB, PUB, DEALER, ROUTER
	ep   endpoint

	ctx    context.Context // cancelled by Stop
	cancel context.CancelCauseFunc
	wg     sync.WaitGroup // counts every goroutine of the socket
	ln     net.Listener   // nil for a dialling socket

	mu       sync.Mutex
	stopped  bool
	conns    map[*Conn]struct{}
	pending  int // accepted, handshake not finished
	lastConn uint64
}

func (s *socket) init(ctx context.Context, kind, address string, cfg Config) error {
	cfg, err := cfg.filled()
	if err != nil {
		return err
	}
	if s.ep, err = parseEndpoint(address); err != nil {
		return err
	}
	s.cfg, s.kind, s.conns = cfg, kind, make(map[*Conn]struct{})
	s.ctx, s.cancel = context.WithCancelCause(ctx)
	return nil
}

// listen opens the listener and serves each connection in its own goroutine.
func (s *socket) listen(serve func(*Conn)) error {
	ln, err := s.ep.listen(s.ctx)
	if err != nil {
		s.cancel(err)
		return err
	}
	s.ln = ln
	s.wg.Go(func() { // Stop waits for this goroutine, so the address is free when Stop returns
		<-s.ctx.Done()
		ln.Close()
	})
	s.wg.Go(func() { s.accept(serve) })
	return nil
}

var errTooManyConns = errors.New("zmtp: too many connections")

func (s *socket) accept(serve func(*Conn)) {
	retry := loop.Backoff{Min: s.cfg.BackoffMin, Max: s.cfg.BackoffMax}
	for {
		nc, err := s.ln.Accept()
		if s.ctx.Err() != nil {
			if err == nil {
				nc.Close()
			}
			return
		}
		if err != nil { // most likely no file descriptors are left
			s.cfg.Failed(Peer{Endpoint: s.ep.text}, err)
			retry.Wait(s.ctx)
			continue
		}
		retry.Reset()
		if !s.admit() {
			s.cfg.Failed(Peer{Endpoint: s.ep.text, Remote: nc.RemoteAddr().String()}, errTooManyConns)
			nc.Close()
			continue
		}
		s.wg.Go(func() { s.shakeAndServe(nc, true, serve) })
	}
}

// admit counts a connection at the beginning of its handshake.
func (s *socket) admit() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pending+len(s.conns) >= s.cfg.MaxConns {
		return false
	}
	s.pending++
	return true
}

// shakeAndServe serves nc from the handshake to the end.
func (s *socket) shakeAndServe(nc net.Conn, admitted bool, serve func(*Conn)) error {
	c, peer, err := newConn(s.ctx, nc, &s.cfg, s.ep, s.kind)
	s.mu.Lock()
	if admitted {
		s.pending--
	}
	if err == nil && s.stopped {
		nc.Close()
		err = ErrStopped
	}
	if err == nil {
		s.lastConn++
		c.peer.Conn = s.lastConn
		s.conns[c] = struct{}{}
	}
	s.mu.Unlock()
	if err != nil {
		if s.ctx.Err() == nil {
			s.cfg.Failed(peer, err)
		}
		return err
	}
	stop := context.AfterFunc(s.ctx, func() { c.End(ErrStopped) })
	serve(c)
	stop()
	s.mu.Lock()
	delete(s.conns, c)
	s.mu.Unlock()
	s.cfg.Disconnected(c.peer, c.cause)
	return nil
}

// keepDialling dials the endpoint and serves the connection, again and again until the socket stops. A value in now
// ends the current pause.
func (s *socket) keepDialling(serve func(*Conn), now chan struct{}) {
	retry := newBackoff(&s.cfg, now)
	for {
		nc, err := s.ep.dial(s.ctx, s.cfg.ConnectTimeout, s.cfg.Rule)
		if err == nil {
			began := time.Now()
			if s.shakeAndServe(nc, false, serve) == nil && time.Since(began) >= s.cfg.BackoffMax {
				retry.Reset()
			}
		} else if s.ctx.Err() == nil {
			s.cfg.Failed(Peer{Endpoint: s.ep.text}, err)
		}
		if !retry.wait(s.ctx, s.cfg.bound(err)) {
			return
		}
	}
}

// Addr returns the endpoint at which this host can dial a listening socket. For a dialling socket, Addr returns the
// dialled endpoint.
func (s *socket) Addr() string {
	if s.ln == nil {
		return s.ep.text
	}
	return listenAddr(s.ep, s.ln)
}

// Stop ends the socket and returns when all its goroutines have ended. Repeated calls are harmless. A hook must not
// call Stop.
func (s *socket) Stop() {
	s.mu.Lock()
	s.stopped = true
	s.mu.Unlock()
	s.cancel(ErrStopped)
	s.wg.Wait()
}

// backoff is the pause between attempts to dial.
type backoff struct {
	loop.Backoff
	now chan struct{} // a value ends the current pause and resets its length
}

func newBackoff(cfg *Config, now chan struct{}) *backoff {
	return &backoff{loop.Backoff{Min: cfg.BackoffMin}, now}
}

// wait waits for a pause of at most most. It returns false if ctx ended.
func (b *backoff) wait(ctx context.Context, most time.Duration) bool {
	b.Max = most
	t := time.NewTimer(b.Next())
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-b.now:
		b.Reset()
		return true
	case <-ctx.Done():
		return false
	}
}

// stopCause returns the error of Recv or Send for a finished context.
func stopCause(ctx context.Context) error {
	cause := context.Cause(ctx)
	if errors.Is(cause, ErrStopped) {
		return cause
	}
	return fmt.Errorf("%w: %w", ErrStopped, cause)
}

// Listener is a socket of the engine's side. Only simulators and tests use it, for PUB and ROUTER sockets
// (tools/zmtpserver).
type Listener struct{ socket }

// Listen opens a socket of the kind PUB or ROUTER at an endpoint, until ctx ends or Stop is called. It calls serve in a
// separate goroutine for each connection. serve calls [Conn.Run] and returns after Run.
func Listen(ctx context.Context, kind, endpoint string, cfg Config, serve func(*Conn)) (*Listener, error) {
	l := &Listener{}
	if err := l.init(ctx, kind, endpoint, cfg); err != nil {
		return nil, err
	}
	return l, l.listen(serve)
}

// Dial opens a socket of a kind that keeps one connection to an endpoint, until ctx ends or Stop is called. The
// parameter serve is described at [Listen].
func Dial(ctx context.Context, kind, endpoint string, cfg Config, serve func(*Conn)) (*Listener, error) {
	l := &Listener{}
	if err := l.init(ctx, kind, endpoint, cfg); err != nil {
		return nil, err
	}
	if err := l.ep.dialable(); err != nil {
		l.cancel(err)
		return nil, err
	}
	l.wg.Go(func() { l.keepDialling(serve, nil) })
	return l, nil
}

// Done returns a channel that is closed when the socket has been stopped.
func (l *Listener) Done() <-chan struct{} { return l.ctx.Done() }
