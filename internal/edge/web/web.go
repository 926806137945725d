// Package web contains the common parts of an indexer's HTTP ports, for internal/serve/server, internal/faces/compat
// and internal/edge/grpcserver.
package web

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// Allowed reports whether the path supports the request's method. If not, it adds the supported methods to the answer's
// header. GET includes HEAD.
func Allowed(w http.ResponseWriter, r *http.Request, methods ...string) bool {
	if at := slices.Index(methods, http.MethodGet); at >= 0 {
		methods = slices.Insert(slices.Clone(methods), at+1, http.MethodHead)
	}
	if slices.Contains(methods, r.Method) {
		return true
	}
	w.Header().Set("Allow", strings.Join(methods, ", "))
	return false
}

// WrongMethod returns the error of a request with an unsupported method, see [Allowed].
func WrongMethod(r *http.Request, methods ...string) *api.Error {
	return api.Errorf(api.CodeWrongMethod, "%s supports %s, not %.40s", r.URL.Path,
		strings.Join(methods, " or "), r.Method)
}

// ReadBody reads a request's body of at most the given size.
func ReadBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, *api.Error) {
	return new(Buffer).Read(w, r, most)
}

// Buffer holds a request's body. Its memory comes from pools and grows with the received bytes, not with the announced
// length.
type Buffer struct {
	bytes []byte
	pool  int // index of the pool of bytes
}

// The sizes of pooled memory. A larger size is used only after the smaller one is full, so slow clients hold little
// unused memory.
var (
	poolSizes = [...]int{4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20}
	pools     [len(poolSizes)]sync.Pool
)

// Read reads a request's body of at most the given size. The body is valid until Free.
func (b *Buffer) Read(w http.ResponseWriter, r *http.Request, most int64) ([]byte, *api.Error) {
	from := http.MaxBytesReader(w, r.Body, most)
	for {
		if len(b.bytes) == cap(b.bytes) {
			b.grow()
		}
		n, err := from.Read(b.bytes[len(b.bytes):cap(b.bytes)])
		b.bytes = b.bytes[:len(b.bytes)+n]
		if err != nil {
			return b.end(err, most)
		}
	}
}

// end returns the body, or the error of its receipt.
func (b *Buffer) end(err error, most int64) ([]byte, *api.Error) {
	if errors.Is(err, io.EOF) {
		return b.bytes, nil
	}
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		return nil, api.Errorf(api.CodeTooLarge,
			"the request has more than %d bytes (%d MiB); send hashes instead of tokens, or a part at a time",
			most, most>>20)
	}
	if failure, is := errors.AsType[*api.Error](err); is {
		return nil, failure
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil, slow(int64(len(b.bytes)))
	}
	return nil, api.Errorf(api.CodeMalformed, "the body ends too early, after %d bytes", len(b.bytes))
}

// grow moves the bytes to a larger buffer.
func (b *Buffer) grow() {
	var larger Buffer
	for larger.pool < len(poolSizes) && poolSizes[larger.pool] <= len(b.bytes) {
		larger.pool++
	}
	if larger.pool == len(poolSizes) {
		b.bytes = slices.Grow(b.bytes, len(b.bytes))
		b.pool = larger.pool
		return
	}
	if kept, is := pools[larger.pool].Get().(*[]byte); is {
		larger.bytes = *kept
	} else {
		larger.bytes = make([]byte, 0, poolSizes[larger.pool])
	}
	larger.bytes = append(larger.bytes, b.bytes...)
	b.Free()
	*b = larger
}

// Free returns the memory to its pool. The body must not be used afterwards.
func (b *Buffer) Free() {
	if cap(b.bytes) > 0 && b.pool < len(poolSizes) {
		kept := b.bytes[:0]
		pools[b.pool].Put(&kept)
	}
	*b = Buffer{}
}

// Reply sends the reply to r and returns the request's outcome. The result is the given outcome if the reply arrived,
// [ops.Canceled] if the client closed its connection, and [ops.Unsent] if the client did not read the
// reply. Refusals other than unavailable are always sent: net/http cancels the context also for a slow body.
func Reply(w http.ResponseWriter, r *http.Request, contentType string, body []byte, status int, outcome string) string {
	ended := outcome == ops.OK || outcome == string(api.CodeUnavailable)
	if ended && errors.Is(r.Context().Err(), context.Canceled) {
		return ops.Canceled
	}
	if err := WriteReply(w, contentType, body, status); err != nil {
		return CutOff(r, err)
	}
	return outcome
}

// CutOff returns the outcome of a request after its reply ended early with err. net/http cancels the request's context
// if a write fails.
func CutOff(r *http.Request, err error) string {
	if errors.Is(r.Context().Err(), context.Canceled) && !errors.Is(err, os.ErrDeadlineExceeded) {
		return ops.Canceled
	}
	return ops.Unsent
}

// WriteReply writes a reply.
func WriteReply(w http.ResponseWriter, contentType string, body []byte, status int) error {
	if len(body) > 0 {
		w.Header().Set("Content-Type", contentType)
	}
	w.WriteHeader(status)
	_, err := w.Write(body)
	return err
}

// Face is the service of one HTTP port.
type Face struct {
	Listen, Flag string // HOST:PORT, and its flag
	What         string // name of the service, for the log
	Handler      http.Handler
	TLS          *tls.Config // nil: plain text
}

// Serve listens and serves until the returned function is called.
func Serve(f Face, log *slog.Logger) (stop func(), err error) {
	l, err := net.Listen("tcp", f.Listen)
	if err != nil {
		return nil, fmt.Errorf("HTTP: %w; choose another with %s", err, f.Flag)
	}
	log.Info(f.What+" is served", "listen", l.Addr().String())
	return serve(l, f.Handler, f.TLS), nil
}

func serve(l net.Listener, handler http.Handler, secure *tls.Config) (stop func()) {
	l = listener{l}
	if secure != nil {
		l = tls.NewListener(l, secure) // above the deadlines, so net/http detects TLS
	}
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: readTimeout, IdleTimeout: 2 * time.Minute,
	}
	go server.Serve(l)
	return sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			server.Close() // a watching client does not disconnect by itself
		}
	})
}

// A client must read writePiece bytes within writeTimeout, or its connection is closed. Otherwise a client that does
// not read would hold a reply and its slot forever. A bound on whole replies, such as [http.Server.WriteTimeout], would
// end streams.
const (
	writeTimeout = 30 * time.Second
	writePiece   = 1 << 20
)

// listener bounds the time of writes to its connections.
type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return conn{c}, nil
}

// conn sets a separate write deadline for each piece. It replaces other deadlines.
type conn struct{ net.Conn }

func (c conn) Write(b []byte) (n int, err error) {
	for {
		if err := c.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
			return n, err
		}
		wrote, err := c.Conn.Write(b[n:min(n+writePiece, len(b))])
		n += wrote
		if err != nil || n == len(b) {
			return n, err
		}
	}
}

// CloseWrite closes the write side. net/http ends a connection with an unread request body in this way, so the
// reply arrives.
func (c conn) CloseWrite() error {
	if half, can := c.Conn.(interface{ CloseWrite() error }); can {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
