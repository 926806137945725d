//go:build judges

package zmtp_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	. "github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// libzmq is a peer that uses the real library: testdata/peer.py.
type libzmq struct {
	t        testing.TB
	cmd      *exec.Cmd
	in       io.WriteCloser
	out      *bufio.Reader
	killOnce sync.Once
	Endpoint string
}

type opts map[string]any

func startLibzmq(t testing.TB, kind string, o opts) *libzmq {
	t.Helper()
	python := pyenv.Python(t)
	arg, err := json.Marshal(o)
	if err != nil {
		t.Fatal(err)
	}
	p := &libzmq{t: t, cmd: exec.Command(python, "testdata/peer.py", kind, string(arg))}
	p.cmd.Stderr = os.Stderr
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.kill)
	var hello struct{ Endpoint string }
	p.answer(&hello)
	p.Endpoint = hello.Endpoint
	return p
}

func (p *libzmq) kill() {
	p.killOnce.Do(func() {
		p.cmd.Process.Kill()
		p.cmd.Wait()
	})
}

// send sends a command. The caller must read the answer.
func (p *libzmq) send(op string, args opts) {
	p.t.Helper()
	line := opts{"op": op}
	for k, v := range args {
		line[k] = v
	}
	b, err := json.Marshal(line)
	if err == nil {
		_, err = p.in.Write(append(b, '\n'))
	}
	if err != nil {
		p.t.Fatal(err)
	}
}

func (p *libzmq) answer(into any) {
	p.t.Helper()
	guard := time.AfterFunc(Patience, p.kill)
	defer guard.Stop()
	line, err := p.out.ReadBytes('\n')
	if err != nil {
		p.t.Fatalf("no answer from the libzmq peer: %v", err)
	}
	if into == nil {
		return
	}
	if err := json.Unmarshal(line, into); err != nil {
		p.t.Fatalf("%s: %v", line, err)
	}
}

func (p *libzmq) do(op string, args opts) {
	p.t.Helper()
	p.send(op, args)
	p.answer(nil)
}

func number(m [][]byte) uint64 { return binary.BigEndian.Uint64(m[len(m)-1]) }

// sendUntilHeard publishes a number repeatedly until s yields a message. A plain publisher does not report its
// subscribers, so the test cannot wait for the subscription.
func (p *libzmq) sendUntilHeard(n int, s *Sub, check func(Message)) {
	p.t.Helper()
	ctx := Within(p.t)
	got := make(chan Message, 1)
	go func() {
		m, err := s.Recv(ctx)
		if err != nil {
			m = Message{Kind: Closed, Err: err}
		}
		got <- m
	}()
	for {
		p.do("burst", opts{"n": 1, "first": n, "size": 8})
		select {
		case m := <-got:
			check(m)
			return
		case <-time.After(time.Millisecond):
		}
	}
}

const anyPort = "tcp://127.0.0.1:*"

// everywhere lists the addresses to bind: IPv4, IPv6, a Unix socket.
func everywhere(t testing.TB) map[string]string {
	return map[string]string{"tcp": anyPort, "tcp6": "tcp://[::1]:*", "ipc": "ipc://" + filepath.Join(t.TempDir(), "s")}
}

func TestLibzmqPublisher(t *testing.T) {
	for name, bind := range everywhere(t) {
		t.Run(name, func(t *testing.T) {
			p := startLibzmq(t, "XPUB", opts{"bind": bind})
			s := MustSub(t, p.Endpoint, Config{}, "kv@", "other")
			if o := Next(t, s, Opened); o.Peer.SocketType != "XPUB" || o.Peer.Minor != 1 {
				t.Errorf("peer: %+v", o.Peer)
			}
			p.do("subscribed", opts{"n": 2})
			big := make([]byte, 300000)
			for i := range big {
				big[i] = byte(i * 7)
			}
			for _, f := range [][][]byte{
				Frames("kv@pod", "\x00\x00\x00\x00\x00\x00\x00\x00", "payload"),
				Frames("nobody asked", "x"),
				Frames("other"),
				{[]byte("kv@"), {}, big, {}},
			} {
				var h []string
				for _, b := range f {
					h = append(h, hex.EncodeToString(b))
				}
				p.do("send", opts{"frames": h})
				if string(f[0]) == "nobody asked" {
					continue
				}
				if m := Next(t, s, Data); !Equal(m.Frames, f) {
					t.Errorf("got %d frames %.60q, want %.60q", len(m.Frames), m.Frames, f)
				}
			}
		})
	}
}

// TestLibzmqBurst: a publisher sends at full speed to a reader with a small queue. No message is lost below the
// publisher's high-water mark.
func TestLibzmqBurst(t *testing.T) {
	const n = 200_000
	p := startLibzmq(t, "XPUB", opts{"bind": anyPort, "hwm": n})
	s := MustSub(t, p.Endpoint, Config{RecvQueue: 100}, "")
	Next(t, s, Opened)
	p.do("subscribed", opts{"n": 1})
	p.send("burst", opts{"n": n, "first": 0, "size": 200})
	began := time.Now()
	for i := range uint64(n) {
		if m := Next(t, s, Data); number(m.Frames) != i || len(m.Frames[1]) != 200 {
			t.Fatalf("got %d, want %d", number(m.Frames), i)
		}
	}
	t.Logf("%d messages in %v", n, time.Since(began).Round(time.Millisecond))
	p.answer(nil)
}

func TestLibzmqPublisherKilledAndRestarted(t *testing.T) {
	p := startLibzmq(t, "XPUB", opts{"bind": "tcp://" + loopback.Reserve(t)})
	s := MustSub(t, p.Endpoint, Quick(), "")
	for life := range 3 {
		if life > 0 {
			p = startLibzmq(t, "XPUB", opts{"bind": p.Endpoint})
		}
		Next(t, s, Opened)
		p.do("subscribed", opts{"n": 1})
		p.do("burst", opts{"n": 10, "first": 100 * life, "size": 8})
		for i := range 10 {
			if m := Next(t, s, Data); number(m.Frames) != uint64(100*life+i) {
				t.Errorf("life %d: got %d, want %d", life, number(m.Frames), 100*life+i)
			}
		}
		p.kill()
		Next(t, s, Closed)
	}
}

// TestLibzmqOversize: a frame above the bound ends the connection. The next connection brings the following messages.
func TestLibzmqOversize(t *testing.T) {
	p := startLibzmq(t, "XPUB", opts{"bind": anyPort})
	cfg := Quick()
	cfg.MaxMessage = 10_000
	s := MustSub(t, p.Endpoint, cfg, "")
	Next(t, s, Opened)
	p.do("subscribed", opts{"n": 1})
	p.do("burst", opts{"n": 1, "first": 0, "size": 10_000})
	Next(t, s, Data)
	p.do("burst", opts{"n": 1, "first": 1, "size": 10_001})
	if m := Next(t, s, Closed); !errors.Is(m.Err, ErrTooLarge) {
		t.Errorf("closed with %v", m.Err)
	}
	Next(t, s, Opened)
	p.sendUntilHeard(2, s, func(m Message) {
		if m.Kind != Data || number(m.Frames) != 2 {
			t.Errorf("got %v %v", m.Kind, m.Err)
		}
	})
}

// TestLibzmqPublisherDialsIn: a plain PUB dials our listening SUB, as some engines do.
func TestLibzmqPublisherDialsIn(t *testing.T) {
	for name, endpoint := range everywhere(t) {
		t.Run(name, func(t *testing.T) { dialIn(t, endpoint) })
	}
}

func dialIn(t *testing.T, endpoint string) {
	s, err := ListenSub(context.Background(), endpoint, []string{""}, Patient(Config{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	a := startLibzmq(t, "XPUB", opts{"connect": s.Addr()})
	Next(t, s, Opened)
	b := startLibzmq(t, "PUB", opts{"connect": s.Addr(), "hwm": 100})
	if o := Next(t, s, Opened); o.Peer.SocketType != "PUB" || o.Peer.Conn != 2 {
		t.Errorf("peer: %+v", o.Peer)
	}
	a.do("subscribed", opts{"n": 1})
	a.do("burst", opts{"n": 5, "first": 0, "size": 8})
	for i := range uint64(5) {
		if m := Next(t, s, Data); number(m.Frames) != i || m.Peer.Conn != 1 {
			t.Errorf("got %d of %v", number(m.Frames), m.Peer)
		}
	}
	b.sendUntilHeard(7, s, func(m Message) {
		if m.Kind != Data || number(m.Frames) != 7 || m.Peer.Conn != 2 {
			t.Errorf("got %v", m)
		}
	})
}

// TestLibzmqHeartbeatsWhileIdle: both sides send heartbeats on an idle connection. Neither side closes the connection.
func TestLibzmqHeartbeatsWhileIdle(t *testing.T) {
	t.Parallel()
	Undisturbed(t, func() error {
		p, s := beating(t)
		defer p.kill()
		defer s.Stop()
		p.do("sleep", opts{"ms": hold.Milliseconds()})
		p.do("burst", opts{"n": 1, "first": 0, "size": 8})
		return expectNumber(t, s, 0)
	})
}

// expectNumber receives the next message, which must contain the number.
func expectNumber(t *testing.T, s *Sub, want uint64) error {
	m, err := s.Recv(Within(t))
	if err != nil || m.Kind != Data || number(m.Frames) != want {
		return fmt.Errorf("got %v %v %v, want %d", err, m.Kind, m.Err, want)
	}
	return nil
}

// TestLibzmqHeartbeatsWhileFull: neither side closes the connection while our queue is full and PINGs stay unread.
func TestLibzmqHeartbeatsWhileFull(t *testing.T) {
	t.Parallel()
	Undisturbed(t, func() error {
		p, s := beating(t)
		defer p.kill()
		defer s.Stop()
		const n = 2000
		p.do("burst", opts{"n": n, "first": 0, "size": 10000})
		p.do("sleep", opts{"ms": hold.Milliseconds()})
		for i := range uint64(n) {
			if err := expectNumber(t, s, i); err != nil {
				return err
			}
		}
		return nil
	})
}

func beating(t *testing.T) (*libzmq, *Sub) {
	t.Helper()
	p := startLibzmq(t, "XPUB", opts{"bind": anyPort, "hwm": 100000, "ivl": 50, "timeout": silence.Milliseconds()})
	s := MustSub(t, p.Endpoint, Config{Heartbeat: 50 * time.Millisecond, HeartbeatTimeout: silence, RecvQueue: 1}, "")
	Next(t, s, Opened)
	p.do("subscribed", opts{"n": 1})
	return p, s
}

func TestLibzmqDemandsSecurity(t *testing.T) {
	for _, security := range []string{"plain", "curve"} {
		for _, kind := range []string{"XPUB", "ROUTER"} {
			t.Run(security+" "+kind, func(t *testing.T) {
				want := map[string]string{"plain": "PLAIN", "curve": "CURVE"}[security]
				p := startLibzmq(t, kind, opts{"bind": anyPort, "security": security})
				var err error
				if kind == "ROUTER" {
					_, err = DialDealer(Within(t), p.Endpoint, Patient(Config{}))
				} else {
					failed := make(chan error, 1)
					cfg := Quick()
					cfg.Failed = func(_ Peer, err error) {
						select {
						case failed <- err:
						default:
						}
					}
					MustSub(t, p.Endpoint, cfg, "")
					err = <-failed
				}
				var refused *RefusedError
				if !errors.As(err, &refused) || refused.Mechanism != want {
					t.Errorf("%v, want a refusal of %s", err, want)
				}
			})
		}
	}
}

func TestLibzmqRouter(t *testing.T) {
	for name, bind := range everywhere(t) {
		t.Run(name, func(t *testing.T) { askRouter(t, bind) })
	}
}

func askRouter(t *testing.T, bind string) {
	p := startLibzmq(t, "ROUTER", opts{"bind": bind, "hwm": 200000})
	for _, identity := range []string{"", "kvatlas"} {
		d := MustDealer(t, p.Endpoint, Config{Identity: []byte(identity)})
		const n = 10_100
		p.send("answer", opts{"n": n, "size": 500})
		if err := d.Send(Within(t), nil, []byte("from 5")); err != nil {
			t.Fatal(err)
		}
		for i := range uint64(n) {
			m, err := d.Recv(Within(t))
			if err != nil || len(m) != 2 || len(m[0]) != 0 || number(m) != i {
				t.Fatalf("got %q %v, want number %d", m, err, i)
			}
		}
		if m, err := d.Recv(Within(t)); err != nil || !Equal(m, Frames("", "end:from 5")) {
			t.Errorf("got %q %v, want the last message", m, err)
		}
		var answer struct{ Who string }
		p.answer(&answer)
		if who, _ := hex.DecodeString(answer.Who); identity != "" && string(who) != identity {
			t.Errorf("the router's name for us is %q, want %q", who, identity)
		}
	}
}

// TestLibzmqRouterDropsAtHighWater: libzmq's router drops messages at its high-water mark without an error. The
// received messages are in order, but with holes, so a reader of a replay must detect holes.
func TestLibzmqRouterDropsAtHighWater(t *testing.T) {
	t.Parallel()
	p := startLibzmq(t, "ROUTER", opts{"bind": anyPort, "hwm": 10})
	d := MustDealer(t, p.Endpoint, Config{RecvQueue: 1})
	if err := d.Send(Within(t), nil, []byte("all")); err != nil {
		t.Fatal(err)
	}
	const n = 300
	p.do("answer", opts{"n": n, "size": 1 << 20})
	got, last := 0, int64(-1)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), silence)
		m, err := d.Recv(ctx)
		cancel()
		if errors.Is(err, context.DeadlineExceeded) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if string(m[1]) == "end:all" {
			break
		}
		if i := int64(number(m)); i <= last {
			t.Fatalf("%d after %d", i, last)
		} else {
			last = i
		}
		got++
	}
	if got == 0 || got == n {
		t.Errorf("%d of %d arrived; the test needs dropped messages", got, n)
	}
}

func TestLibzmqSubscriber(t *testing.T) {
	const n = 200_000
	p := mustPub(t, "tcp://127.0.0.1:0", Config{SendQueue: n})
	all := startLibzmq(t, "SUB", opts{"connect": p.Addr(), "topics": []string{""}, "hwm": n})
	some := startLibzmq(t, "SUB", opts{"connect": p.Addr(), "topics": []string{"kv@", "x"}, "hwm": n})
	if err := p.WaitSubscribers(Within(t), 2); err != nil {
		t.Fatal(err)
	}
	WaitFor(t, func() bool { return p.Has("x") && p.Has("kv@") })
	for i := range uint64(n) {
		topic := "kv@"
		if i%100 == 0 {
			topic = "another"
		}
		if err := p.Send([]byte(topic), binary.BigEndian.AppendUint64(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	type counted struct{ First, Last, Broken int }
	var got counted
	all.send("count", opts{"n": n})
	all.answer(&got)
	if got != (counted{0, n - 1, 0}) {
		t.Errorf("the subscriber of every topic: %+v", got)
	}
	some.send("count", opts{"n": n - n/100})
	some.answer(&got)
	if got != (counted{1, n - 1, n/100 - 1}) {
		t.Errorf("the subscriber of some topics: %+v", got)
	}
	big := make([]byte, 3<<20)
	p.Send([]byte("x"), nil, big)
	var m struct{ Messages [][]string }
	some.send("recv", opts{"n": 1})
	some.answer(&m)
	if len(m.Messages[0]) != 3 || m.Messages[0][2] != hex.EncodeToString(big) {
		t.Errorf("a big message: %d frames", len(m.Messages[0]))
	}
	if st := p.Stats(); st.Dropped != 0 {
		t.Errorf("%+v", st)
	}
}

// TestLibzmqSlowSubscriber: a subscriber does not read. Our publisher drops messages at its high-water mark and
// counts them; libzmq's publisher drops without a count.
func TestLibzmqSlowSubscriber(t *testing.T) {
	p := mustPub(t, "tcp://127.0.0.1:0", Config{SendQueue: 10, Heartbeat: -1})
	s := startLibzmq(t, "SUB", opts{"connect": p.Addr(), "topics": []string{""}, "hwm": 10})
	if err := p.WaitSubscribers(Within(t), 1); err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 256<<10)
	sent := uint64(0)
	for ; p.Stats().Dropped < 5; sent++ {
		binary.BigEndian.PutUint64(payload, sent)
		p.Send(payload)
	}
	want := sent - p.Stats().Dropped
	s.do("count", opts{"n": want}) // blocks for good if fewer arrive
	p.Send([]byte("last"))
	var m struct{ Messages [][]string }
	s.send("recv", opts{"n": 1})
	s.answer(&m)
	if m.Messages[0][0] != hex.EncodeToString([]byte("last")) {
		t.Errorf("more than %d arrived: %.40q", want, m.Messages[0][0])
	}
}

// TestLibzmqSubscriberReconnects: a libzmq subscriber reconnects to our publisher by itself. It repeats its
// subscriptions only while its owner waits in a call.
func TestLibzmqSubscriberReconnects(t *testing.T) {
	p := mustPub(t, "tcp://"+loopback.Reserve(t), Config{})
	addr := p.Addr()
	s := startLibzmq(t, "SUB", opts{"connect": addr, "topics": []string{"a", "b"}, "ivl": 100,
		"timeout": Patience.Milliseconds()})
	for life := range uint64(3) {
		if life > 0 {
			p = mustPub(t, addr, Config{})
		}
		s.send("recv", opts{"n": 1})
		WaitFor(t, func() bool { return p.Has("a") && p.Has("b") })
		p.Send([]byte("a"), binary.BigEndian.AppendUint64(nil, life))
		var m struct{ Messages [][]string }
		s.answer(&m)
		if want := hex.EncodeToString(binary.BigEndian.AppendUint64(nil, life)); m.Messages[0][1] != want {
			t.Errorf("life %d: %v", life, m.Messages)
		}
		p.Stop()
	}
}

func TestLibzmqDealers(t *testing.T) {
	r := mustRouter(t, "tcp://127.0.0.1:0", Config{})
	d := startLibzmq(t, "DEALER", opts{"connect": r.Addr(), "identity": "dora", "hwm": 100000})
	q := startLibzmq(t, "REQ", opts{"connect": r.Addr()})
	d.do("send", opts{"frames": []string{"", "0000000000000005"}})
	from, got, err := r.Recv(Within(t))
	if err != nil || from != "dora" || !Equal(got, Frames("", "\x00\x00\x00\x00\x00\x00\x00\x05")) {
		t.Fatalf("%q %q %v", from, got, err)
	}
	const n = 20_000
	for i := range uint64(n) {
		if err := r.SendWait(Within(t), from, nil, binary.BigEndian.AppendUint64(nil, i)); err != nil {
			t.Fatal(err)
		}
	}
	var count struct{ First, Last, Broken int }
	d.send("count", opts{"n": n})
	d.answer(&count)
	if count.First != 0 || count.Last != n-1 || count.Broken != 0 {
		t.Errorf("%+v", count)
	}
	q.do("send", opts{"frames": []string{"77"}})
	from, got, err = r.Recv(Within(t))
	if err != nil || len(from) != 5 || !Equal(got, Frames("", "w")) {
		t.Fatalf("a REQ: %q %q %v", from, got, err)
	}
	if err := r.Send(from, nil, []byte("z")); err != nil {
		t.Fatal(err)
	}
	var m struct{ Messages [][]string }
	q.send("recv", opts{"n": 1})
	q.answer(&m)
	if len(m.Messages[0]) != 1 || m.Messages[0][0] != "7a" {
		t.Errorf("the REQ got %v", m.Messages)
	}
}

// TestLibzmqSecureClient: a CURVE client that dials in is refused by name. Other clients are not affected.
func TestLibzmqSecureClient(t *testing.T) {
	failed := make(chan error, 100)
	p := mustPub(t, "tcp://127.0.0.1:0", Config{Failed: func(_ Peer, err error) {
		select {
		case failed <- err:
		default:
		}
	}})
	startLibzmq(t, "SUB", opts{"connect": p.Addr(), "topics": []string{""}, "security": "curve"})
	var refused *RefusedError
	if err := <-failed; !errors.As(err, &refused) || refused.Mechanism != "CURVE" {
		t.Errorf("%v", err)
	}
	s := MustSub(t, p.Addr(), Config{}, "")
	Next(t, s, Opened)
}

// BenchmarkSubFromLibzmq receives from libzmq in another process. The Python driver is the bottleneck.
func BenchmarkSubFromLibzmq(b *testing.B) {
	for _, size := range PayloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			p := startLibzmq(b, "XPUB", opts{"bind": anyPort, "hwm": 0})
			s := MustSub(b, p.Endpoint, Config{}, "")
			Next(b, s, Opened)
			p.do("subscribed", opts{"n": 1})
			ctx := context.Background()
			n := b.N
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			p.send("burst", opts{"n": n, "first": 0, "size": size, "topic": "kv@pod@model"})
			for range n {
				if _, err := s.Recv(ctx); err != nil {
					b.Fatal(err)
				}
			}
			b.StopTimer()
			p.answer(nil)
		})
	}
}
