package doctor

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// hanging is a NATS server that accepts connections and then hangs: at once, or after INFO and the answer to the
// client's first PING.
func hanging(t *testing.T, afterConnect bool) (url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				if afterConnect {
					fmt.Fprint(conn, `INFO {"server_id":"n","version":"2.12.1","max_payload":8388608,"headers":true}`+"\r\n")
					fmt.Fprint(conn, "PONG\r\n")
				}
				io.Copy(io.Discard, conn) // until the client disconnects
			}()
		}
	}()
	return "nats://" + l.Addr().String()
}

// TestServerHangs examines a deployment with a hanging NATS server. The examination ends, with a finding that NATS is
// unreachable, or with timed out requests.
func TestServerHangs(t *testing.T) {
	for afterConnect, connecting := range map[bool]time.Duration{false: time.Second, true: time.Minute} {
		url := hanging(t, afterConnect)
		r := Examine(t.Context(), Config{Namespace: "default", Shown: url, Timeout: 100 * time.Millisecond,
			Connect: func(ctx context.Context) (*jetstream.Conn, error) {
				// On a busy machine the connection may outlast the deadline of a request, which is not under test here.
				return jetstream.Connect(context.WithoutCancel(ctx), jetstream.ConnOptions{URLs: []string{url}, Core: true,
					ConnectTimeout: connecting})
			}})
		if len(r.Checks) != len(checks) {
			t.Errorf("%d checks", len(r.Checks))
		}
		nats := r.Checks[0]
		if afterConnect && (!nats.Unable || !strings.Contains(nats.Skipped, "round trip")) {
			t.Errorf("after the connection: %+v", nats)
		}
		if !afterConnect && (len(nats.Findings) != 1 || nats.Findings[0].ID != natsUnreachable) {
			t.Errorf("at once: %+v", nats)
		}
	}
}
