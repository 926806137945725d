package web

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// pipes is a listener of connections in memory, without buffers: a write waits for the reader.
type pipes struct {
	dialed chan net.Conn
	closed chan struct{}
}

func (p pipes) Accept() (net.Conn, error) {
	select {
	case c := <-p.dialed:
		return c, nil
	case <-p.closed:
		return nil, net.ErrClosed
	}
}

func (pipes) Addr() net.Addr { return &net.TCPAddr{} }

func (p pipes) Close() error {
	close(p.closed)
	return nil
}

// request sends a request to a handler. The handler is served until the returned function is called.
func request(t *testing.T, handle http.HandlerFunc) (c net.Conn, stop func()) {
	t.Helper()
	l := pipes{make(chan net.Conn), make(chan struct{})}
	end := serve(l, handle, nil)
	c, there := net.Pipe()
	l.dialed <- there
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	return c, func() {
		c.Close()
		end()
	}
}

// TestUnread: a client that does not read its reply holds the reply only for a limited time.
func TestUnread(t *testing.T) {
	for name, read := range map[string]int64{"nothing": 0, "a part": writePiece + 1000} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ended := make(chan error, 1)
				c, stop := request(t, func(w http.ResponseWriter, _ *http.Request) {
					ended <- WriteReply(w, "text/plain", make([]byte, 3*writePiece), http.StatusOK)
				})
				defer stop()
				if _, err := io.CopyN(io.Discard, c, read); err != nil {
					t.Fatal(err)
				}
				select {
				case err := <-ended:
					if err == nil {
						t.Error("Write reports success")
					}
				case <-time.After(time.Hour): // on the test's clock
					t.Error("the handler does not end")
				}
			})
		})
	}
}

// TestSlowReader: a client that reads slowly, but steadily, receives the complete reply.
func TestSlowReader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const size = 8 * writePiece
		c, stop := request(t, func(w http.ResponseWriter, _ *http.Request) {
			if err := WriteReply(w, "text/plain", make([]byte, size), http.StatusOK); err != nil {
				t.Error(err)
			}
		})
		defer stop()
		reply, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		begun := time.Now()
		for range 2 * size / writePiece {
			time.Sleep(writeTimeout / 4)
			if _, err := io.CopyN(io.Discard, reply.Body, writePiece/2); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(begun); took < 2*writeTimeout {
			t.Errorf("the reader finished after %v, too fast for the test", took)
		}
		if n, err := io.Copy(io.Discard, reply.Body); n > 0 || err != nil {
			t.Errorf("%d bytes more, %v", n, err)
		}
	})
}

// TestStream: a stream continues as long as the client reads each part, even through long pauses.
func TestStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lines = 10
		c, stop := request(t, func(w http.ResponseWriter, _ *http.Request) {
			for range lines {
				if _, err := io.WriteString(w, "line\n"); err != nil {
					t.Error(err)
				}
				if err := http.NewResponseController(w).Flush(); err != nil {
					t.Error(err)
				}
				time.Sleep(2 * writeTimeout)
			}
		})
		defer stop()
		reply, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		text, err := io.ReadAll(reply.Body)
		if err != nil || string(text) != strings.Repeat("line\n", lines) {
			t.Errorf("%q, %v", text, err)
		}
	})
}

// TestCloseWrite: net/http can close the write side of a connection, so a reply arrives although the client still
// sends.
func TestCloseWrite(t *testing.T) {
	on, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer on.Close()
	c, err := net.Dial("tcp", on.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	there, err := listener{on}.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer there.Close()
	half, can := there.(interface{ CloseWrite() error })
	if !can {
		t.Fatal("it cannot")
	}
	if err := half.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if n, err := io.Copy(io.Discard, c); n > 0 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
}
