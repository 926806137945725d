package web

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
)

// one is a set with a slot for one request.
type one struct{ free chan struct{} }

func newOne() one {
	p := one{make(chan struct{}, 1)}
	p.Leave()
	return p
}

func (p one) Take() *api.Error {
	select {
	case <-p.free:
		return nil
	default:
		return api.Errorf(api.CodeBusy, "the place is taken")
	}
}

func (p one) Leave() { p.free <- struct{}{} }

// receiver is a server in memory that reads bodies into an Intake and has one slot for requests.
type receiver struct {
	t      *testing.T
	in     *Intake
	place  one
	dialed chan net.Conn
	hold   chan struct{} // blocks the requests for /hold until it is closed
}

func newReceiver(t *testing.T, most int64) (r *receiver, stop func()) {
	l := pipes{make(chan net.Conn), make(chan struct{})}
	r = &receiver{t, &Intake{Most: most}, newOne(), l.dialed, make(chan struct{})}
	return r, serve(l, http.HandlerFunc(r.answer), nil)
}

func (r *receiver) answer(w http.ResponseWriter, q *http.Request) {
	failure := r.place.Take()
	if failure == nil {
		defer r.in.Receive(w, q, r.place)()
		var b Buffer
		defer b.Free()
		if _, failure = b.Read(w, q, 8<<20); failure == nil && q.URL.Path == "/hold" {
			<-r.hold
		}
	}
	if failure != nil {
		_ = WriteReply(w, api.JSON, failure.Body(api.JSON), failure.Code.HTTPStatus())
	}
}

// begin sends the head of a request and a part of its body.
func (r *receiver) begin(path, head, body string) net.Conn {
	r.t.Helper()
	c, there := net.Pipe()
	r.dialed <- there
	if _, err := fmt.Fprintf(c, "POST %s HTTP/1.1\r\nHost: localhost\r\n%s\r\n%s", path, head, body); err != nil {
		r.t.Fatal(err)
	}
	synctest.Wait()
	return c
}

// whole sends a request with a body of the given size and returns the status of the answer.
func (r *receiver) whole(path string, bytes int) (status int) {
	r.t.Helper()
	c := r.begin(path, fmt.Sprintf("Content-Length: %d\r\nConnection: close\r\n", bytes), "")
	defer c.Close()
	go io.WriteString(c, strings.Repeat("x", bytes)) // an unread body ends with the connection
	return r.statusOf(c)
}

// statusOf returns the status of the answer on a connection.
func (r *receiver) statusOf(c net.Conn) int {
	r.t.Helper()
	reply, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		r.t.Fatal(err)
	}
	return reply.StatusCode
}

const chunked = "Transfer-Encoding: chunked\r\n"

// TestSlowBodies: clients that send slowly, or not at all, do not block others, and are disconnected.
func TestSlowBodies(t *testing.T) {
	for name, slow := range map[string]struct{ head, begun, more string }{
		"unknown length":     {chunked, "1\r\n \r\n", "1\r\n \r\n"},
		"nothing":            {chunked, "", ""},
		"a large length":     {"Content-Length: 8388608\r\n", "{", " "},
		"a large length but": {"Content-Length: 8388608\r\n", "", ""},
		"too large a length": {"Content-Length: 99999999999\r\n", "{", " "},
		"almost all":         {"Content-Length: 20001\r\n", strings.Repeat("x", 20000), ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r, stop := newReceiver(t, 64<<20)
				defer stop()
				begun := time.Now()
				var clients []net.Conn
				for range 200 {
					c := r.begin("/", slow.head, slow.begun)
					defer c.Close()
					clients = append(clients, c)
				}
				for range int(window/time.Second) - 1 {
					time.Sleep(time.Second)
					for _, c := range clients {
						if _, err := io.WriteString(c, slow.more); err != nil {
							t.Fatal("a slow client after ", time.Since(begun), ": ", err)
						}
					}
					for range 3 {
						if status := r.whole("/", 100<<10); status != 200 {
							t.Fatalf("another client is answered with %d", status)
						}
					}
				}
				for _, c := range clients {
					if status := r.statusOf(c); status != 408 {
						t.Errorf("a slow client is answered with %d", status)
					}
				}
				if took := time.Since(begun); took > 2*window {
					t.Errorf("slow clients end after %v", took)
				}
				synctest.Wait()
				if held := r.in.Held(); held != 0 {
					t.Errorf("%d bytes are held at the end", held)
				}
			})
		})
	}
}

// TestSteadyBody: a steady body is accepted until readTimeout.
func TestSteadyBody(t *testing.T) {
	for pieces, want := range map[int]int{5: 200, 100: 408} {
		synctest.Test(t, func(t *testing.T) {
			r, stop := newReceiver(t, 64<<20)
			defer stop()
			begun, size := time.Now(), pieces*minWindow
			c := r.begin("/", fmt.Sprintf("Content-Length: %d\r\n", size), "")
			var sender sync.WaitGroup
			defer sender.Wait()
			defer c.Close()
			sender.Go(func() {
				for range pieces {
					time.Sleep(window - time.Second)
					if _, err := io.WriteString(c, strings.Repeat("x", minWindow)); err != nil {
						return
					}
				}
			})
			if status := r.statusOf(c); status != want {
				t.Errorf("%d pieces are answered with %d", pieces, status)
			}
			if took := time.Since(begun); took > readTimeout {
				t.Errorf("%d pieces are answered after %v", pieces, took)
			}
		})
	}
}

// TestRoomForBodies: slow bodies make room if memory is full. Complete bodies are kept.
func TestRoomForBodies(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 1 << 20
		r, stop := newReceiver(t, most)
		defer stop()
		var stalled []net.Conn
		for range 4 {
			c := r.begin("/", "Content-Length: 8388608\r\n", strings.Repeat("x", most/4-minHeld/4))
			defer c.Close()
			stalled = append(stalled, c)
		}
		fast := r.begin("/", "Content-Length: 8388608\r\n", "x")
		defer fast.Close()
		if held := r.in.Held(); held < most*9/10 || held > most {
			t.Errorf("%d bytes count", held)
		}
		if status := r.whole("/", most/4); status != 429 {
			t.Errorf("a client is answered with %d, while all others are new", status)
		}
		time.Sleep(grace)
		if _, err := io.WriteString(fast, strings.Repeat("x", most/2)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		for _, c := range stalled[:2] {
			if status := r.statusOf(c); status != 408 {
				t.Errorf("a stalled client is answered with %d", status)
			}
		}
		if status := r.whole("/", most/4); status != 200 {
			t.Errorf("a client is answered with %d", status)
		}
		fast.Close()
		synctest.Wait()
		held := r.begin("/hold", fmt.Sprintf("Content-Length: %d\r\n", 2*most), strings.Repeat("x", 2*most))
		defer held.Close() // a body above the bound is accepted if others can make room
		time.Sleep(grace)
		if status := r.whole("/", 1); status != 429 {
			t.Errorf("a client beside a complete body is answered with %d", status)
		}
		close(r.hold)
		if status := r.statusOf(held); status != 200 {
			t.Errorf("the complete body is answered with %d", status)
		}
		synctest.Wait()
		if status := r.whole("/", most/4); status != 200 {
			t.Errorf("a client at the end is answered with %d", status)
		}
	})
}

// TestBuffer: the buffer returns the sent body, and memory grows with the received bytes.
func TestBuffer(t *testing.T) {
	for _, size := range []int{0, 1, 4095, 4096, 4097, 70_000, 1<<20 - 1, 1 << 20, 1<<20 + 1, 5 << 20} {
		for range 3 { // later rounds use pooled memory
			text := strings.Repeat("abcdefg", size/7+1)[:size]
			parts := io.MultiReader(strings.NewReader(text[:size/3]), strings.NewReader(text[size/3:]))
			r, _ := http.NewRequest("POST", "/", parts)
			var b Buffer
			body, failure := b.Read(nil, r, 5<<20)
			if failure != nil || string(body) != text || cap(body) > 4*size+4096 {
				t.Errorf("%d bytes: %d in %d, %v", size, len(body), cap(body), failure)
			}
			b.Free()
		}
	}
	r, _ := http.NewRequest("POST", "/", strings.NewReader("12345"))
	if _, failure := new(Buffer).Read(nil, r, 4); failure == nil || failure.Code != api.CodeTooLarge {
		t.Error(failure)
	}
}

func BenchmarkBuffer(b *testing.B) {
	for _, size := range []int{1 << 10, 50 << 10, 800 << 10} {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			text := strings.Repeat("x", size)
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				r := &http.Request{Body: io.NopCloser(strings.NewReader(text))}
				var buffer Buffer
				if _, failure := buffer.Read(nil, r, 8<<20); failure != nil {
					b.Fatal(failure)
				}
				buffer.Free()
			}
		})
	}
}
