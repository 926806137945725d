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

// hanging is a NATS server that takes connections and then hangs: at once, or after it has said who it is and answered
// the first PING, which is what a client asks for when it connects.
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
				io.Copy(io.Discard, conn) // until the client has gone
			}()
		}
	}()
	return "nats://" + l.Addr().String()
}

// TestServerHangs examines a deployment whose NATS server hangs: it ends, and says that NATS is not reached, or that
// nothing could be looked at because nobody answered in time.
func TestServerHangs(t *testing.T) {
	for afterConnect, connecting := range map[bool]time.Duration{false: time.Second, true: time.Minute} {
		url := hanging(t, afterConnect)
		r := Examine(t.Context(), Config{Namespace: "default", Shown: url, Timeout: 100 * time.Millisecond,
			Connect: func(ctx context.Context) (*jetstream.Conn, error) {
				// The time of a question may be over when a busy machine has connected, and is not what is tested here.
				return jetstream.Connect(context.WithoutCancel(ctx), jetstream.ConnOptions{URLs: []string{url}, Core: true,
					ConnectTimeout: connecting})
			}})
		if len(r.Checks) != len(checks) {
			t.Errorf("%d checks", len(r.Checks))
		}
		nats := r.Checks[0]
		if afterConnect && (!nats.Unable || !strings.Contains(nats.Skipped, "round trip")) {
			t.Errorf("after it has connected: %+v", nats)
		}
		if !afterConnect && (len(nats.Findings) != 1 || nats.Findings[0].ID != natsUnreachable) {
			t.Errorf("at once: %+v", nats)
		}
	}
}
