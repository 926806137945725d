package zmtp

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/loop"
)

// Conn is a connection after its handshake. The goroutine that calls Run reads. Run starts a second goroutine that
// writes, and waits for its end. All other goroutines only add to out.
type Conn struct {
	cfg  *Config
	nc   net.Conn
	in   reader
	peer Peer
	out  *queue[[]byte] // messages in wire form, shared between peers

	writes    int // size of the buffer for writing
	fills     int // fills of the small read buffer since fillsFrom; the reading goroutine owns both
	fillsFrom time.Time

	silence atomic.Int64  // longest silence of the peer, in nanoseconds; 0 means unlimited
	control chan struct{} // wakes the writer to send pong
	down    chan struct{} // closed when the connection begins to end
	endOnce sync.Once
	cause   error // reason for the end; written before down is closed

	pongMu sync.Mutex
	pong   []byte // the pending reply to the last PING, in wire form; a later PING replaces the reply
}

// timedReader sets a deadline for each read from the socket. Time between reads does not count as silence.
type timedReader struct{ c *Conn }

func (t timedReader) Read(p []byte) (int, error) {
	if d := time.Duration(t.c.silence.Load()); d > 0 {
		if err := t.c.nc.SetReadDeadline(time.Now().Add(d)); err != nil {
			return 0, err
		}
	}
	n, err := t.c.nc.Read(p)
	if len(p) == smallBuffer && n == len(p) {
		t.c.filled(time.Now())
	}
	return n, err
}

// Sizes of a connection's buffers. One process may have a thousand connections on which little comes, or a single one
// on which very much comes.
const (
	smallBuffer = 4 << 10
	largeBuffer = 64 << 10
)

// Data that fills the small buffer busyFills times within busyTime is read with the large one from then on: fewer
// system calls.
const (
	busyFills = 16
	busyTime  = 100 * time.Millisecond
)

// filled notes that the small buffer was filled at once.
func (c *Conn) filled(now time.Time) {
	if now.Sub(c.fillsFrom) > busyTime {
		c.fills, c.fillsFrom = 0, now
	}
	c.fills++
}

// widen gives a busy connection the large buffer.
func (c *Conn) widen() {
	if c.fills >= busyFills && c.in.r.Size() < largeBuffer {
		rest, _ := c.in.r.Peek(c.in.r.Buffered()) // what is buffered can be peeked at
		c.in.r = bufio.NewReaderSize(io.MultiReader(bytes.NewReader(bytes.Clone(rest)), timedReader{c}), largeBuffer)
	}
}

// newConn performs the handshake on nc. It closes nc after a failure, and then the Peer contains the properties
// received so far.
func newConn(ctx context.Context, nc net.Conn, cfg *Config, e endpoint, socketType string) (*Conn, Peer, error) {
	c := &Conn{
		cfg:     cfg,
		nc:      nc,
		peer:    Peer{Endpoint: e.text, Remote: nc.RemoteAddr().String()},
		control: make(chan struct{}, 1),
		down:    make(chan struct{}),
		writes:  largeBuffer,
	}
	if socketType == "SUB" || socketType == "DEALER" { // these send subscriptions, requests and heartbeats
		c.writes = smallBuffer
	}
	stop := context.AfterFunc(ctx, func() { nc.Close() })
	err := nc.SetDeadline(time.Now().Add(cfg.HandshakeTimeout))
	if err == nil {
		c.in = reader{r: bufio.NewReaderSize(timedReader{c}, smallBuffer), maxBytes: maxCommand, maxFrames: cfg.MaxFrames}
		err = handshake(nc, &c.in, socketType, cfg.Identity, &c.peer)
	}
	if err == nil {
		err = nc.SetDeadline(time.Time{})
	}
	if !stop() || err != nil {
		nc.Close()
		if ctx.Err() != nil {
			return nil, c.peer, context.Cause(ctx)
		}
		return nil, c.peer, shakeError(err)
	}
	c.in.maxBytes = cfg.MaxMessage
	c.out = newQueue[[]byte](cfg.SendQueue, cfg.SendBytes)
	if c.pings() {
		c.silence.Store(int64(cfg.HeartbeatTimeout))
	}
	return c, c.peer, nil
}

// pings reports whether we send PINGs. ZMTP 3.0 has no PING.
func (c *Conn) pings() bool { return c.cfg.Heartbeat > 0 && c.peer.Minor >= 1 }

// Peer returns the other side of the connection.
func (c *Conn) Peer() Peer { return c.peer }

// Done returns a channel that is closed when the connection begins to end.
func (c *Conn) Done() <-chan struct{} { return c.down }

// End closes the connection for the given reason. Later calls have no effect.
func (c *Conn) End(cause error) {
	c.endOnce.Do(func() {
		c.cause = cause
		close(c.down)
		c.out.close(cause)
		c.nc.Close()
	})
}

// Run serves the connection until its end and returns the reason. It calls onMessage and onCommand from this goroutine;
// an error of a callback ends the connection.
func (c *Conn) Run(onMessage func([][]byte) error, onCommand func(name string, data []byte) error) error {
	var writer sync.WaitGroup
	writer.Go(func() { c.End(c.write()) })
	c.End(c.read(onMessage, onCommand))
	writer.Wait()
	return c.cause
}

func (c *Conn) read(onMessage func([][]byte) error, onCommand func(string, []byte) error) error {
	for {
		c.widen()
		it, err := c.in.read()
		if err != nil {
			if errors.Is(err, net.ErrClosed) {
				return ErrStopped // only this side closes nc
			}
			if isTimeout(err) {
				return fmt.Errorf("%w: no data for %v", ErrSilent, time.Duration(c.silence.Load()))
			}
			return err
		}
		switch it.name {
		case "":
			err = onMessage(it.frames)
		case "PING":
			err = c.onPing(it.data)
		case "PONG":
		case "ERROR":
			err = fmt.Errorf("%w: the peer sent an ERROR command", ErrProtocol)
		default:
			err = onCommand(it.name, it.data)
		}
		if err != nil {
			return err
		}
	}
}

// onPing schedules a PONG. A PING has a time to live in tenths of a second (2 octets, BE) and a context of up to 16
// octets for the PONG. The peer wants to be considered dead after a silence longer than the time to live.
func (c *Conn) onPing(data []byte) error {
	if len(data) < 2 || len(data) > 2+16 {
		return fmt.Errorf("%w: PING of %d bytes", ErrProtocol, len(data))
	}
	if ttl := time.Duration(binary.BigEndian.Uint16(data)) * 100 * time.Millisecond; ttl > 0 {
		if d := c.silence.Load(); d == 0 || int64(ttl) < d {
			c.silence.Store(int64(ttl))
		}
	}
	c.pongMu.Lock()
	c.pong = appendCommand(c.pong[:0], "PONG", data[2:])
	c.pongMu.Unlock()
	loop.Wake(c.control)
	return nil
}

// burst is the number of messages written before the writer checks the clock and the peer's PINGs.
const burst = 256

func (c *Conn) write() error {
	w := bufio.NewWriterSize(c.nc, c.writes)
	var tick <-chan time.Time
	if c.pings() {
		t := time.NewTicker(c.cfg.Heartbeat)
		defer t.Stop()
		tick = t.C
	}
	ping := appendCommand(nil, "PING", []byte{0, 0})
	for {
		more := true
		for n := 0; more && n < burst; n++ {
			b, ok, err := c.out.tryGet()
			if err != nil {
				return errors.Join(w.Flush(), err)
			}
			if more = ok; ok {
				if _, err := w.Write(b); err != nil {
					return err
				}
			}
		}
		if !more {
			if err := w.Flush(); err != nil {
				return err
			}
			select {
			case <-c.down:
				return ErrStopped
			case <-c.out.ready:
				continue
			case <-c.control:
				loop.Wake(c.control) // the loop handles the PING below
			case <-tick:
				if _, err := w.Write(ping); err != nil {
					return err
				}
			}
		}
		select {
		case <-c.control:
			if err := c.writePong(w); err != nil {
				return err
			}
		default:
		}
		if more { // a PING is due even under a steady flow of messages
			select {
			case <-tick:
				if _, err := w.Write(ping); err != nil {
					return err
				}
			default:
			}
		}
	}
}

func (c *Conn) writePong(w io.Writer) error {
	c.pongMu.Lock()
	defer c.pongMu.Unlock() // a bufio.Writer may block here; then the reader waits too, which is intended
	_, err := w.Write(c.pong)
	return err
}

// Send queues a message in wire form ([Encode]). It waits while the queue is full.
func (c *Conn) Send(ctx context.Context, wire []byte) error { return c.out.put(ctx, wire, len(wire)) }

// TrySend queues a message in wire form. It returns [ErrFull] if the queue has no room.
func (c *Conn) TrySend(wire []byte) error {
	ok, err := c.out.tryPut(wire, len(wire))
	if err == nil && !ok {
		err = ErrFull
	}
	return err
}
