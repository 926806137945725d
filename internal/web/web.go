// Package web is what the faces of an indexer's ports have in common: internal/server's, internal/compat's and
// internal/grpcserver's.
package web

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// Mux is where paths are registered: an [http.ServeMux].
type Mux interface {
	HandleFunc(path string, handle func(http.ResponseWriter, *http.Request))
}

// Allowed reports whether a request has a method that its path takes; else the answer's header says which these are.
// Where GET is taken, so is HEAD.
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

// WrongMethod is the error of a request that [Allowed] does not let pass.
func WrongMethod(r *http.Request, methods ...string) *api.Error {
	return api.Errorf(api.CodeWrongMethod, "%s takes %s, not %.40s", r.URL.Path, strings.Join(methods, " or "), r.Method)
}

// ReadBody reads a request's body of so many bytes at most.
func ReadBody(w http.ResponseWriter, r *http.Request, most int64) ([]byte, *api.Error) {
	return ReadBodyInto(new(bytes.Buffer), w, r, most)
}

// ReadBodyInto is [ReadBody] into a buffer, which is empty: the body is the buffer's.
func ReadBodyInto(b *bytes.Buffer, w http.ResponseWriter, r *http.Request, most int64) ([]byte, *api.Error) {
	const before = 64 << 10 // that is set aside before anything has come
	if r.ContentLength > 0 {
		b.Grow(int(min(r.ContentLength, before)) + bytes.MinRead)
	}
	_, err := b.ReadFrom(http.MaxBytesReader(w, r.Body, most))
	body := b.Bytes()
	switch _, large := errors.AsType[*http.MaxBytesError](err); {
	case err == nil:
		return body, nil
	case large:
		return nil, api.Errorf(api.CodeTooLarge,
			"the request has more than %d bytes (%d MiB); ask with hashes instead of tokens, or for a part at a time",
			most, most>>20)
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, api.Errorf(api.CodeRequestTimeout, "of the body %d bytes came in time, and not its end", len(body))
	}
	return nil, api.Errorf(api.CodeMalformed, "the body ends too early, after %d bytes", len(body))
}

// Bearer returns what tells whether the value of an Authorization header has the token. Without a token every value
// has.
func Bearer(token []byte) func(header string) bool {
	if token == nil {
		return func(string) bool { return true }
	}
	want := sha256.Sum256(token)
	return func(header string) bool {
		scheme, given, _ := strings.Cut(header, " ")
		got := sha256.Sum256([]byte(given)) // of one length, so that comparing takes the same time whatever was given
		return subtle.ConstantTimeCompare(got[:], want[:]) == 1 && strings.EqualFold(scheme, "Bearer")
	}
}

// WriteReply answers a request.
func WriteReply(w http.ResponseWriter, contentType string, body []byte, status int) error {
	w.Header().Set("Content-Type", contentType)
	w.WriteHeader(status)
	_, err := w.Write(body)
	return err
}

// Face is what answers on one HTTP port.
type Face struct {
	Listen, Flag string // HOST:PORT, and the flag that says it
	What         string // is served, for the log
	Handler      http.Handler
}

// Serve listens and serves until the returned function is called.
func Serve(f Face, secure *tls.Config, log *slog.Logger) (stop func(), err error) {
	l, err := net.Listen("tcp", f.Listen)
	if err != nil {
		return nil, fmt.Errorf("HTTP: %w; choose another with %s", err, f.Flag)
	}
	log.Info(f.What+" is served", "listen", l.Addr().String())
	return serve(l, f.Handler, secure), nil
}

func serve(l net.Listener, handler http.Handler, secure *tls.Config) (stop func()) {
	l = listener{l}
	if secure != nil {
		l = tls.NewListener(l, secure) // above the deadlines, as net/http must see that it is TLS
	}
	server := &http.Server{
		Handler: handler, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 30 * time.Second, IdleTimeout: 2 * time.Minute,
	}
	go server.Serve(l)
	return sync.OnceFunc(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
		defer cancel()
		if server.Shutdown(ctx) != nil {
			server.Close() // who watches does not end by himself
		}
	})
}

// A client must take writePiece bytes within writeTimeout, or its connection ends: one that reads nothing would hold a
// reply and its room for ever. A bound of whole replies, such as [http.Server.WriteTimeout], would end streams.
const (
	writeTimeout = 30 * time.Second
	writePiece   = 1 << 20
)

// listener bounds how long writing to its connections takes.
type listener struct{ net.Listener }

func (l listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return conn{c}, nil
}

// conn has a deadline of its own for each piece that is written, in place of what was set.
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

// CloseWrite is what net/http ends a connection with whose request it has not read to its end, so that the reply
// arrives.
func (c conn) CloseWrite() error {
	if half, can := c.Conn.(interface{ CloseWrite() error }); can {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}
