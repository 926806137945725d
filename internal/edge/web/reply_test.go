package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/ops"
	"github.com/kvatlas/kvatlas/pkg/api"
)

// TestReplyOutcomes: a request is canceled if its client disconnects before or during the reply. A reply is unsent if
// the client stays connected and does not read.
func TestReplyOutcomes(t *testing.T) {
	outcome := make(chan string, 1)
	large := make([]byte, 64<<20) // more than socket buffers hold
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body := large
		switch r.URL.Path {
		case "/answered":
			body = large[:10]
		case "/gone":
			<-r.Context().Done()
		case "/deaf":
			_ = http.NewResponseController(w).SetWriteDeadline(time.Now().Add(50 * time.Millisecond))
		}
		outcome <- Reply(w, r, api.JSON, body, http.StatusOK, ops.OK)
	}))
	defer server.Close()
	for _, c := range []struct{ path, want string }{
		{"/answered", ops.OK}, {"/gone", ops.Canceled}, {"/within", ops.Canceled},
		{"/deaf", ops.Unsent},
	} {
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", c.path)
		switch c.path {
		case "/gone":
			conn.Close()
		case "/within":
			if _, err := bufio.NewReader(io.LimitReader(conn, 100)).ReadString('\n'); err != nil {
				t.Error(err)
			}
			conn.Close()
		}
		if got := <-outcome; got != c.want {
			t.Errorf("%s: %s, want %s", c.path, got, c.want)
		}
		conn.Close()
	}
}
