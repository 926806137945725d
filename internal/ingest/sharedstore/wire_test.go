package sharedstore

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"
)

// saying is a server that sends some bytes for each request, and closes the connection if hangUp is set.
func saying(t *testing.T, reply string, hangUp bool) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for in := bufio.NewReader(c); ; {
					if _, err := http.ReadRequest(in); err != nil {
						return
					}
					if io.WriteString(c, reply); hangUp {
						return
					}
				}
			}()
		}
	}()
	return l
}

func poolOf(l net.Listener) *pool {
	return newPool(l.Addr().String(), 2, func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
	})
}

// TestPoolAgainstClient compares a pool with the client of net/http.
func TestPoolAgainstClient(t *testing.T) {
	const limit = 100
	long := strings.Repeat("x", limit)
	for _, c := range []struct {
		reply  string
		hangUp bool
	}{
		{"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc", false},
		{"HTTP/1.1 200 OK\r\ncontent-length:3\r\n\r\nabc", true},
		{"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc", true},
		{"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", false},
		{"HTTP/1.1 503 No\r\nContent-Length: 3\r\n\r\nabc", false},
		{"HTTP/1.1 302 No\r\nLocation: /\r\nContent-Length: 0\r\n\r\n", false},
		{"HTTP/1.1 204 No Content\r\n\r\n", false},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n", false},
		{"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc", true},
		{"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\nabc", true},
		{"HTTP/1.0 200 OK\r\n\r\nabc", true},
		{"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + long, false},
		{"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\nx" + long, false},
		{"HTTP/1.1 200 OK\r\n\r\nx" + long, true},
		{"HTTP/1.1 200 OK\r\nX: " + strings.Repeat(long, 2*maxHead/limit) + "\r\nContent-Length: 0\r\n\r\n", true},
		{"HTTP/1.1 200 OK\r\nContent-Length: -3\r\n\r\nabc", true},
		{"HTTP/1.1\r\n\r\n", true},
		{"{}", true},
		{"", true},
	} {
		l := saying(t, c.reply, c.hangUp)
		client := &http.Client{Transport: &http.Transport{MaxResponseHeaderBytes: maxHead}, CheckRedirect: func(
			*http.Request, []*http.Request) error {
			return http.ErrUseLastResponse
		}}
		var want []byte
		status := 0
		res, failed := client.Get("http://" + l.Addr().String() + "/a")
		if failed == nil {
			status = res.StatusCode
			want, failed = io.ReadAll(res.Body)
			res.Body.Close()
		}
		if failed == nil && len(want) > limit {
			failed = fmt.Errorf("%d bytes", len(want))
		}
		client.CloseIdleConnections()
		p := poolOf(l)
		for range 3 { // on kept connections, if possible
			var body []byte
			got := 0
			err := p.get(soon(t), "/a", limit, func(b []byte, status int) error {
				body, got = slices.Clone(b), status
				return nil
			})
			if (err == nil) != (failed == nil) || err == nil && (got != status || string(body) != string(want)) {
				t.Errorf("%.80q: %d %.20q, %v; want %d %.20q, %v", c.reply, got, body, err, status, want, failed)
			}
		}
		p.closeIdle()
	}
}

// TestMooncakeReconnects: a connection that the master has closed since the last use loses no answer. It counts as a
// possible restart of the master.
func TestMooncakeReconnects(t *testing.T) {
	f := startMaster(t)
	f.Put("a")
	reports := 0
	m := storeOf(t, f, MooncakeConfig{Parallel: 1, Changed: func(string) { reports++ }})
	for i := range 5 {
		present, _, err := m.Exists(soon(t), []string{"a"})
		if err != nil || !present.Get(0) || f.Dialled() != i+1 || reports != i {
			t.Fatalf("%v, %d connections, %d reports, want %d", err, f.Dialled(), reports, i)
		}
		f.Drop()
	}
}

// TestMooncakeReportsBrokenIdleConnection: Watch detects that the master has closed an idle connection.
func TestMooncakeReportsBrokenIdleConnection(t *testing.T) {
	f := startMaster(t)
	reports := make(chan string, 10)
	m := storeOf(t, f, MooncakeConfig{Changed: func(why string) { reports <- why }})
	if _, _, err := m.Exists(soon(t), []string{"a"}); err != nil {
		t.Fatal(err)
	}
	if m.asking.closeBroken(); len(reports) > 0 {
		t.Fatal("a working connection counts as broken")
	}
	f.Drop()
	for deadline := soon(t); len(reports) == 0; runtime.Gosched() {
		if m.asking.closeBroken(); deadline.Err() != nil {
			t.Fatal("no report of a broken connection")
		}
	}
	if _, _, err := m.Exists(soon(t), []string{"a"}); err != nil || len(reports) != 1 {
		t.Errorf("%v, %d reports", err, len(reports))
	}
}

// TestPoolAfterAnInterimReply: a pool does not reuse a connection after an interim reply (1xx), because each later
// request would get the reply to the previous request.
func TestPoolAfterAnInterimReply(t *testing.T) {
	l := saying(t, "HTTP/1.1 103 Early Hints\r\n\r\n", false)
	p := poolOf(l)
	for range 3 {
		status := 0
		err := p.get(soon(t), "/", 100, func(_ []byte, got int) error { status = got; return nil })
		if err != nil || status != 103 {
			t.Errorf("%d, %v", status, err)
		}
		open := 0
		if p.eachIdle(func(*kept) bool { open++; return true }); open > 0 {
			t.Errorf("%d connections are kept", open)
		}
	}
}
