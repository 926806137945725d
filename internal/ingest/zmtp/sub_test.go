package zmtp

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

// TestListenSub: publishers dial a listening Sub. Each has a separate connection with its own order.
func TestListenSub(t *testing.T) {
	s, err := ListenSub(context.Background(), "tcp://127.0.0.1:0", []string{"kv"}, Patient(Config{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	const peers = 3
	var raws []*RawPeer
	for range peers {
		raw := DialRaw(t, s.Addr(), 1, "PUB")
		raw.Expect(appendCommand(nil, "SUBSCRIBE", []byte("kv")))
		raws = append(raws, raw)
	}
	for i := range byte(50) {
		for _, raw := range raws {
			raw.Write(Encode([][]byte{[]byte("kv"), {i}}))
		}
	}
	want := map[uint64]byte{}
	for opened, data := 0, 0; opened < peers || data < 50*peers; {
		m, err := s.Recv(Within(t))
		if err != nil {
			t.Fatal(err)
		}
		switch m.Kind {
		case Opened:
			opened++
		case Data:
			if m.Frames[1][0] != want[m.Peer.Conn] {
				t.Fatalf("connection %d: got %d, want %d", m.Peer.Conn, m.Frames[1][0], want[m.Peer.Conn])
			}
			want[m.Peer.Conn]++
			data++
		}
	}
	raws[1].NC.Close()
	if m := Next(t, s, Closed); !errors.Is(m.Err, io.EOF) {
		t.Errorf("closed with %v", m.Err)
	}
}

// TestListenEach: a waiting handler delays only its own publisher, and ends when the socket stops.
func TestListenEach(t *testing.T) {
	got := make(chan Message)
	s, err := ListenEach(context.Background(), "tcp://127.0.0.1:0", []string{""}, Patient(Config{}), func(p *Peer) Handler {
		return func(ctx context.Context, m Message) error {
			if p.Conn == 1 && m.Kind == Data {
				<-ctx.Done()
				return ctx.Err()
			}
			select {
			case got <- m:
			case <-ctx.Done():
			}
			return ctx.Err()
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	next := func(conn uint64, kind Kind) {
		t.Helper()
		select {
		case m := <-got:
			if m.Peer.Conn != conn || m.Kind != kind {
				t.Fatalf("%v of connection %d, want %v of %d", m.Kind, m.Peer.Conn, kind, conn)
			}
		case <-Within(t).Done():
			t.Fatalf("no %v of connection %d", kind, conn)
		}
	}
	slow := DialRaw(t, s.Addr(), 1, "PUB")
	next(1, Opened)
	slow.Write(Encode([][]byte{{1}}))
	slow.Write(Encode([][]byte{{2}}))
	other := DialRaw(t, s.Addr(), 1, "PUB")
	next(2, Opened)
	for range 100 {
		other.Write(Encode([][]byte{{1}}))
		next(2, Data)
	}
	other.NC.Close()
	next(2, Closed)
}

func TestBadEndpointsAndConfigs(t *testing.T) {
	for endpoint, want := range map[string]string{
		"127.0.0.1:5557":     "has no transport",
		"udp://127.0.0.1:1":  "unknown transport",
		"tcp://127.0.0.1":    "missing port",
		"tcp://:5557":        "no host",
		"tcp://h:99999":      "not a number",
		"tcp://h:x":          "not a number",
		"tcp://::1:5557":     "too many colons",
		"ipc://":             "no usable path",
		"tcp://127.0.0.1:0":  "cannot be dialled",
		"inproc://something": "unknown transport",
	} {
		if _, err := DialSub(context.Background(), endpoint, []string{""}, Config{}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with the text %q", endpoint, err, want)
		}
		if _, err := DialDealer(Within(t), endpoint, Config{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error with the text %q", endpoint, err, want)
		}
	}
	_, err := DialSub(context.Background(), "tcp://h:1", []string{""}, Config{MaxMessage: -1, BackoffMin: 2,
		BackoffMax: 1})
	for _, want := range []string{"MaxMessage", "BackoffMin"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %s", err, want)
		}
	}
	if _, err := DialSub(context.Background(), "tcp://h:1", nil, Config{}); err == nil {
		t.Error("a SUB without topics")
	}
}

// TestPausesWhileTheHostIsReachable: a host that refuses or closes connections is dialled at least once a second. An
// unreachable host is dialled less often. DialNow ends the pause.
func TestPausesWhileTheHostIsReachable(t *testing.T) {
	cfg, err := Config{}.filled()
	if err != nil {
		t.Fatal(err)
	}
	refused := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	far := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}
	synctest.Test(t, func(t *testing.T) {
		s := &Sub{now: make(chan struct{}, 1)}
		b := newBackoff(&cfg, s.now)
		attempt := func(err error) time.Duration {
			began := time.Now()
			b.wait(t.Context(), cfg.bound(err))
			return time.Since(began)
		}
		for range 100 {
			for _, err := range []error{refused, nil} {
				if d := attempt(err); d > time.Second {
					t.Fatalf("after %v: %v until the next attempt", err, d)
				}
			}
		}
		longest := time.Duration(0)
		for range 20 {
			longest = max(longest, attempt(far))
		}
		if longest <= time.Second || longest > cfg.BackoffMax {
			t.Errorf("an unreachable host is dialled every %v", longest)
		}
		if d := attempt(refused); d > time.Second {
			t.Errorf("a host that is reachable again was not dialled for %v", d)
		}
		attempt(far)
		s.DialNow()
		if d := attempt(far); d != 0 {
			t.Errorf("the pause lasted %v after DialNow", d)
		}
	})
}
