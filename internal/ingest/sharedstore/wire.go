package sharedstore

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"syscall"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
)

// pool sends requests to a server over a fixed number of kept connections. The caller's goroutine writes and reads.
// [http.Transport] uses goroutines of its own, and their wake-up costs almost as much as a request with a few keys. A
// pool supports only GET, without redirects, proxies and trailers.
type pool struct {
	host  string
	dial  func(context.Context) (net.Conn, error)
	slots chan *kept    // a slot for each possible connection; nil: not open
	usual *http.Request // the request for http.ReadResponse
}

// kept is a connection with a limit on the bytes of a reply.
type kept struct {
	net.Conn
	bound io.LimitedReader
	in    *bufio.Reader
	buf   []byte // buffer of the request
	body  []byte // body of the reply
}

// maxHead limits the head of a reply.
const maxHead = 64 << 10

func newPool(host string, size int, dial func(context.Context) (net.Conn, error)) *pool {
	p := &pool{host: host, dial: dial, slots: make(chan *kept, size), usual: &http.Request{Method: http.MethodGet}}
	for range size {
		p.slots <- nil
	}
	return p
}

// get sends a GET request and calls read with the reply of at most limit bytes. The body is valid only during the call.
// A longer reply is ErrReply. If a kept connection breaks during the request, get repeats the request on a new
// connection, because the server had closed the old one.
func (p *pool) get(ctx context.Context, path string, limit int64, read func(body []byte, status int) error) error {
	var c *kept
	select {
	case c = <-p.slots:
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { p.slots <- c }()
	for fresh := c == nil; ; fresh = true {
		if fresh {
			var err error
			if c, err = p.open(ctx); err != nil {
				return err
			}
		}
		body, status, begun, keep, err := p.request(ctx, c, path, limit)
		said := err == nil
		if said {
			err = read(body, status)
		}
		if !keep {
			c.Close()
			c = nil
		}
		switch {
		case said:
			return err
		case ctx.Err() != nil:
			return ctx.Err()
		case begun || fresh:
			return err
		}
	}
}

func (p *pool) open(ctx context.Context) (*kept, error) {
	conn, err := p.dial(ctx)
	if err != nil {
		return nil, err
	}
	c := &kept{Conn: conn, bound: io.LimitedReader{R: conn}}
	c.in = bufio.NewReaderSize(&c.bound, 32<<10)
	return c, nil
}

// keptBody is the maximum size of a buffer that a connection keeps for the next reply.
const keptBody = 1 << 20

// request sends a request on a connection. begun reports whether any byte of the reply arrived, keep whether the
// connection is reusable. The body belongs to the connection.
func (p *pool) request(ctx context.Context, c *kept, path string, limit int64) (body []byte, status int,
	begun, keep bool, err error) {
	c.bound.N = maxHead + limit + 1
	stop := context.AfterFunc(ctx, func() { c.SetDeadline(time.Unix(1, 0)) })
	defer func() { keep = stop() && keep }()
	c.buf = append(append(append(append(c.buf[:0], "GET "...), path...), " HTTP/1.1\r\nHost: "...), p.host...)
	c.buf = append(c.buf, "\r\n\r\n"...)
	if _, err = c.Write(c.buf); err != nil {
		return nil, 0, false, false, err
	}
	if _, err = c.in.Peek(1); err != nil {
		return nil, 0, false, false, err
	}
	res, err := http.ReadResponse(c.in, p.usual)
	if err != nil {
		return nil, 0, true, false, fmt.Errorf("%w: %w", ErrReply, dial.Fixed(err)) // the text has a part of the reply
	}
	if n := res.ContentLength; 0 <= n && n <= limit {
		if n > keptBody {
			body = make([]byte, n)
		} else {
			c.body = slices.Grow(c.body[:0], int(n))
			body = c.body[:n]
		}
		_, err = io.ReadFull(res.Body, body)
	} else {
		body, err = io.ReadAll(io.LimitReader(res.Body, limit+1))
	}
	interim := res.StatusCode < 200 // the final reply may follow, and would look like the reply to the next request
	if err == nil && int64(len(body)) > limit {
		err = fmt.Errorf("%w: the reply has more than %d bytes", ErrReply, limit)
	}
	return body, res.StatusCode, true, err == nil && !res.Close && !interim && c.in.Buffered() == 0, err
}

// eachIdle calls keep for each open idle connection, and closes the connection if keep returns false.
func (p *pool) eachIdle(keep func(*kept) bool) {
	for range cap(p.slots) {
		select {
		case c := <-p.slots:
			if c != nil && !keep(c) {
				c.Close()
				c = nil
			}
			p.slots <- c
		default:
			return
		}
	}
}

func (p *pool) closeIdle() { p.eachIdle(func(*kept) bool { return false }) }

// closeBroken closes the idle connections that the other side has closed. Only this check detects them.
func (p *pool) closeBroken() { p.eachIdle(func(c *kept) bool { return !hungUp(c.Conn) }) }

// hungUp reports whether the other side has closed an idle connection, or sent unexpected bytes.
func hungUp(conn net.Conn) bool {
	if w, is := conn.(*watchedConn); is {
		gone := hungUp(w.Conn)
		if gone {
			w.judge(io.EOF)
		}
		return gone
	}
	tcp, is := conn.(syscall.Conn)
	if !is {
		return false
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return true
	}
	gone := false
	err = raw.Read(func(fd uintptr) bool {
		_, _, err := syscall.Recvfrom(int(fd), make([]byte, 1), syscall.MSG_PEEK) // does not block
		gone = !errors.Is(err, syscall.EAGAIN) && !errors.Is(err, syscall.EINTR)
		return true
	})
	return gone || err != nil
}
