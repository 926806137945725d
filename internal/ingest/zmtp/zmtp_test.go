package zmtp_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/dial"
	. "github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/tools/loopback"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// silence is the bound on a peer's silence in these tests. hold is a longer wait. Both are long compared to the stalls
// of a busy machine.
const (
	silence = 8 * time.Second
	hold    = 10 * time.Second
)

func mustPub(t testing.TB, endpoint string, cfg Config) *zmtpserver.Pub {
	t.Helper()
	p, err := zmtpserver.ListenPub(context.Background(), endpoint, Patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

func mustRouter(t testing.TB, endpoint string, cfg Config) *zmtpserver.Router {
	t.Helper()
	r, err := zmtpserver.ListenRouter(context.Background(), endpoint, Patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
	return r
}

func TestPubSubRoundTrip(t *testing.T) {
	for _, endpoint := range []string{
		"tcp://127.0.0.1:0", "tcp://*:0", "tcp://localhost:0", "tcp://[::1]:0",
		"ipc://" + filepath.Join(t.TempDir(), "s"), fmt.Sprint("ipc://@kvatlas-test-", os.Getpid()),
	} {
		t.Run(endpoint, func(t *testing.T) {
			p := mustPub(t, endpoint, Config{})
			s := MustSub(t, p.Addr(), Config{}, "")
			o := Next(t, s, Opened)
			if o.Peer.SocketType != "PUB" || o.Peer.Minor != 1 || o.Peer.Conn != 1 {
				t.Errorf("peer: %+v", o.Peer)
			}
			if err := p.WaitSubscribers(Within(t), 1); err != nil {
				t.Fatal(err)
			}
			rng := rand.New(rand.NewPCG(1, 2))
			sizes := []int{0, 1, 254, 255, 256, 257, 65535, 70000}
			for i := range 200 {
				want := make([][]byte, 1+rng.IntN(5))
				for j := range want {
					n := sizes[rng.IntN(len(sizes))]
					if i == 100 && j == 0 {
						n = 3<<20 + 1
					}
					want[j] = bytes.Repeat([]byte{byte(i), byte(j), byte(n)}, n/3+1)[:n]
				}
				if err := p.Send(want...); err != nil {
					t.Fatal(err)
				}
				if m := Next(t, s, Data); !Equal(m.Frames, want) {
					t.Fatalf("message %d changed on its way: %d frames, want %d", i, len(m.Frames), len(want))
				}
			}
		})
	}
}

func TestPubMatchesTopics(t *testing.T) {
	p := mustPub(t, "tcp://127.0.0.1:0", Config{})
	all := MustSub(t, p.Addr(), Config{}, "")
	some := MustSub(t, p.Addr(), Config{}, "kv@a", "x")
	if err := p.WaitSubscribers(Within(t), 2); err != nil {
		t.Fatal(err)
	}
	WaitFor(t, func() bool { return p.Has("kv@a") && p.Has("x") })
	Next(t, all, Opened)
	Next(t, some, Opened)
	for _, topic := range []string{"kv@a@m", "kv@b@m", "", "kv@", "xyz", "last kv@a", "kv@a"} {
		if err := p.Send([]byte(topic), []byte("payload")); err != nil {
			t.Fatal(err)
		}
		if m := Next(t, all, Data); string(m.Frames[0]) != topic {
			t.Fatalf("got %q, want %q", m.Frames[0], topic)
		}
	}
	for _, topic := range []string{"kv@a@m", "xyz", "kv@a"} {
		if m := Next(t, some, Data); string(m.Frames[0]) != topic {
			t.Errorf("got %q, want %q", m.Frames[0], topic)
		}
	}
}

// TestSubscriptionForms: unsubscribing and repeated subscriptions work in the form of 3.1 and in the form of 3.0.
func TestSubscriptionForms(t *testing.T) {
	for _, minor := range []byte{0, 1} {
		t.Run(fmt.Sprintf("3.%d", minor), func(t *testing.T) {
			p := mustPub(t, "tcp://127.0.0.1:0", Config{})
			raw := DialRaw(t, p.Addr(), minor, "SUB")
			sub := func(on bool, topic string) []byte {
				if minor == 0 {
					return AppendFrame(nil, 0, append([]byte{b2i(on)}, topic...))
				}
				return AppendCommand(nil, map[bool]string{true: "SUBSCRIBE", false: "CANCEL"}[on], []byte(topic))
			}
			raw.Write(Concat(sub(true, "a"), sub(true, "a"), sub(true, "b"), sub(false, "a"), sub(false, "never"),
				sub(true, "mark")))
			WaitFor(t, func() bool { return p.Has("mark") })
			for _, topic := range []string{"a1", "b1", "c1"} {
				p.Send([]byte(topic))
			}
			raw.Expect(Concat(AppendFrame(nil, 0, []byte("a1")), AppendFrame(nil, 0, []byte("b1"))))
			raw.Write(Concat(sub(false, "a"), sub(true, "mark2")))
			WaitFor(t, func() bool { return p.Has("mark2") })
			p.Send([]byte("a2"))
			p.Send([]byte("b2"))
			raw.Expect(AppendFrame(nil, 0, []byte("b2")))
		})
	}
}

func TestRouterDealer(t *testing.T) {
	r := mustRouter(t, "tcp://127.0.0.1:0", Config{})
	a := MustDealer(t, r.Addr(), Config{Identity: []byte("a")})
	b := MustDealer(t, r.Addr(), Config{})
	for _, d := range []*Dealer{a, b} {
		if err := d.Send(Within(t), nil, []byte("ask")); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		from, got, err := r.Recv(Within(t))
		if err != nil || !Equal(got, Frames("", "ask")) {
			t.Fatalf("%q %q %v", from, got, err)
		}
		if from != "a" && (len(from) != 5 || from[0] != 0) {
			t.Errorf("name of a dealer: %q", from)
		}
		for i := range 3 {
			if err := r.SendWait(Within(t), from, nil, []byte{byte(i)}, []byte(from)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, d := range []*Dealer{a, b} {
		for i := range 3 {
			got, err := d.Recv(Within(t))
			if err != nil || len(got) != 3 || got[1][0] != byte(i) {
				t.Fatalf("%q %v", got, err)
			}
		}
	}
	if err := r.Send("nobody", nil); !errors.Is(err, zmtpserver.ErrNoPeer) {
		t.Errorf("to nobody: %v", err)
	}
	a.Stop()
	a.Stop()
	if _, err := a.Recv(Within(t)); !errors.Is(err, ErrStopped) {
		t.Errorf("after Stop: %v", err)
	}
	WaitFor(t, func() bool { return errors.Is(r.Send("a", nil), zmtpserver.ErrNoPeer) })
}

// TestRouterDropsAtHighWater: a router drops messages at its high-water mark and reports the drops. The accepted
// messages arrive complete and in order.
func TestRouterDropsAtHighWater(t *testing.T) {
	r := mustRouter(t, "tcp://127.0.0.1:0", Config{SendQueue: 10, Heartbeat: -1})
	d := MustDealer(t, r.Addr(), Config{RecvQueue: 1})
	if err := d.Send(Within(t), nil); err != nil {
		t.Fatal(err)
	}
	from, _, err := r.Recv(Within(t))
	if err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 256<<10)
	var taken []uint32
	full := 0
	for i := uint32(0); full < 5; i++ {
		binary.BigEndian.PutUint32(payload, i)
		switch err := r.Send(from, payload); {
		case err == nil:
			taken = append(taken, i)
		case errors.Is(err, ErrFull):
			full++
		default:
			t.Fatal(err)
		}
	}
	for _, want := range taken {
		got, err := d.Recv(Within(t))
		if err != nil || binary.BigEndian.Uint32(got[0]) != want {
			t.Fatalf("got %d %v, want %d", binary.BigEndian.Uint32(got[0]), err, want)
		}
	}
}

func TestPubCountsDrops(t *testing.T) {
	p := mustPub(t, "tcp://127.0.0.1:0", Config{SendQueue: 10, Heartbeat: -1})
	s := MustSub(t, p.Addr(), Config{RecvQueue: 1}, "")
	if err := p.WaitSubscribers(Within(t), 1); err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 256<<10)
	for p.Stats().Dropped < 3 {
		p.Send(payload)
	}
	st := p.Stats()
	Next(t, s, Opened)
	for range st.Sent - st.Dropped {
		Next(t, s, Data)
	}
	p.Stop()
	Next(t, s, Closed)
	if got := p.Stats(); got.Dropped != st.Dropped || got.Subscribers != 0 {
		t.Errorf("after the subscriber left: %+v, before %+v", got, st)
	}
}

// TestSubBackPressure: a full queue of the Sub stops the sender and loses no message. The time of the full queue does
// not count as silence.
func TestSubBackPressure(t *testing.T) {
	if testing.Short() {
		t.Skip("skipped with -short: waits longer than the bound on silence")
	}
	t.Parallel()
	hb := Config{Heartbeat: 20 * time.Millisecond, HeartbeatTimeout: silence}
	send := hb
	send.SendQueue = 5000
	recv := hb
	recv.RecvQueue = 2
	recv.RecvBytes = 1 << 20
	Undisturbed(t, func() error {
		p := mustPub(t, "tcp://127.0.0.1:0", send)
		defer p.Stop()
		s := MustSub(t, p.Addr(), recv, "")
		defer s.Stop()
		if err := p.WaitSubscribers(Within(t), 1); err != nil {
			return err
		}
		const n = 3000
		payload := make([]byte, 16<<10)
		for i := range uint32(n) {
			binary.BigEndian.PutUint32(payload, i)
			p.Send(payload)
		}
		Next(t, s, Opened)
		WaitFor(t, func() bool { return s.Queued() == 2 })
		time.Sleep(hold) // longer than the timeouts of both sides, which is the purpose of the test
		for i := range uint32(n) {
			m, err := s.Recv(Within(t))
			if err != nil || m.Kind != Data || binary.BigEndian.Uint32(m.Frames[0]) != i {
				return fmt.Errorf("got %v %v %v, want %d", err, m.Kind, m.Err, i)
			}
		}
		if st := p.Stats(); st.Dropped != 0 {
			return fmt.Errorf("%d dropped", st.Dropped)
		}
		return nil
	})
}

func TestSubSeesRestarts(t *testing.T) {
	p := mustPub(t, "tcp://"+loopback.Reserve(t), Config{})
	addr := p.Addr()
	s := MustSub(t, addr, Quick(), "")
	for life := range uint64(4) {
		if life > 0 {
			p = mustPub(t, addr, Config{})
		}
		if m := Next(t, s, Opened); m.Peer.Conn != life+1 {
			t.Errorf("connection %d in life %d", m.Peer.Conn, life)
		}
		if err := p.WaitSubscribers(Within(t), 1); err != nil {
			t.Fatal(err)
		}
		p.Send([]byte{byte(life)})
		if m := Next(t, s, Data); m.Frames[0][0] != byte(life) {
			t.Errorf("got %d in life %d", m.Frames[0][0], life)
		}
		p.Stop()
		if m := Next(t, s, Closed); m.Err == nil {
			t.Error("Closed has no reason")
		}
	}
}

func TestSubDialsBeforePublisherIsThere(t *testing.T) {
	addr := "tcp://" + loopback.Reserve(t)
	failed := make(chan error, 1)
	cfg := Quick()
	cfg.Failed = func(_ Peer, err error) {
		select {
		case failed <- err:
		default:
		}
	}
	s := MustSub(t, addr, cfg, "")
	if err := <-failed; err == nil {
		t.Error("a failed dial without a reason")
	}
	p := mustPub(t, addr, Config{})
	Next(t, s, Opened)
	if err := p.WaitSubscribers(Within(t), 1); err != nil {
		t.Fatal(err)
	}
	p.Send([]byte("x"))
	Next(t, s, Data)
}

func TestStopEndsEverything(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	p := mustPub(t, "tcp://127.0.0.1:0", Config{})
	s, err := DialSub(ctx, p.Addr(), []string{""}, Patient(Config{}))
	if err != nil {
		t.Fatal(err)
	}
	Next(t, s, Opened)
	cancel()
	for {
		_, err := s.Recv(Within(t))
		if err != nil {
			if !errors.Is(err, ErrStopped) || !errors.Is(err, context.Canceled) {
				t.Errorf("after the end of the context: %v", err)
			}
			break
		}
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(s.Stop)
		wg.Go(p.Stop)
	}
	wg.Wait()
	if err := p.Send([]byte("x")); !errors.Is(err, ErrStopped) {
		t.Errorf("Send after Stop: %v", err)
	}
	short, end := context.WithTimeout(context.Background(), time.Nanosecond)
	defer end()
	s2 := MustSub(t, "tcp://127.0.0.1:1", Quick(), "")
	if _, err := s2.Recv(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Recv after its context: %v", err)
	}
}

// TestIPCStaleSocket: the socket file of a dead process is replaced, a socket in use is not.
func TestIPCStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := zmtpserver.ListenPub(context.Background(), "ipc://"+path, Config{}); err == nil {
		t.Error("replaced a socket that is in use")
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	mustPub(t, "ipc://"+path, Config{})
}

// TestEndpointsOfClients: endpoints from clients must be TCP and within the rule.
func TestEndpointsOfClients(t *testing.T) {
	rule, err := dial.NewRule([]string{"10.0.0.0/8"})
	if err != nil {
		t.Fatal(err)
	}
	for text, good := range map[string]bool{"tcp://10.0.0.1:5557": true, "tcp://engine-1:5557": true,
		"tcp://127.0.0.1:5557": false, "ipc:///x": false, "tcp://*:5557": false, "tcp://10.0.0.1:0": false,
		"tcp://10.0.0.1:*": false, "tcp://a/b:1": false, "tcp://[fe80::1%lo]:1": false, "inproc://x": false, "10.0.0.1:1": false} {
		if err := CheckRemote(text, rule); (err == nil) != good {
			t.Errorf("%s: %v", text, err)
		}
	}
	at := loopback.Reserve(t)
	mustPub(t, "tcp://"+at, Config{})
	_, port, _ := net.SplitHostPort(at)
	socket := "ipc://" + filepath.Join(t.TempDir(), "s")
	mustPub(t, socket, Config{})
	for _, endpoint := range []string{"tcp://" + at, "tcp://localhost:" + port, socket} {
		if err := Probe(Within(t), endpoint, Patience, rule); !errors.Is(err, dial.ErrDenied) {
			t.Errorf("a probe of %s: %v", endpoint, err)
		}
		if _, err := DialDealer(Within(t), endpoint, Config{Rule: rule}); !errors.Is(err, dial.ErrDenied) {
			t.Errorf("a dealer at %s: %v", endpoint, err)
		}
		failed := make(chan error, 1)
		cfg := Quick()
		cfg.Rule = rule
		cfg.Failed = func(_ Peer, err error) {
			select {
			case failed <- err:
			default:
			}
		}
		MustSub(t, endpoint, cfg, "")
		if err := <-failed; !errors.Is(err, dial.ErrDenied) {
			t.Errorf("a subscriber at %s: %v", endpoint, err)
		}
	}
}

// TestProbe: Probe distinguishes a port with a listener from a port without a listener.
func TestProbe(t *testing.T) {
	at := "tcp://" + loopback.Reserve(t)
	pub := mustPub(t, at, Config{})
	if err := Probe(Within(t), at, Patience, nil); err != nil {
		t.Errorf("%s: %v", at, err)
	}
	pub.Stop()
	if err := Probe(Within(t), at, Patience, nil); err == nil || !Refuses(err) {
		t.Errorf("%s, after its listener stopped: %v", at, err)
	}
	gone := "ipc://" + filepath.Join(t.TempDir(), "s")
	if err := Probe(Within(t), gone, Patience, nil); err == nil || !Refuses(err) {
		t.Errorf("%s: %v", gone, err)
	}
	if err := Probe(Within(t), "tcp://127.0.0.1:0", Patience, nil); err == nil || Refuses(err) {
		t.Errorf("port 0: %v", err)
	}
}

func b2i(b bool) byte {
	if b {
		return 1
	}
	return 0
}

// TestPubBoundsSubscribers: a subscriber cannot exhaust a publisher's memory.
func TestPubBoundsSubscribers(t *testing.T) {
	gone := make(chan error, 10)
	cfg := Config{MaxConns: 2,
		Disconnected: func(_ Peer, err error) { gone <- err },
		Failed:       func(_ Peer, err error) { gone <- err },
	}
	p := mustPub(t, "tcp://127.0.0.1:0", cfg)
	greedy := DialRaw(t, p.Addr(), 1, "SUB")
	go func() {
		topic := make([]byte, 60000)
		for i := range 100 {
			topic[0] = byte(i)
			if _, err := greedy.NC.Write(AppendCommand(nil, "SUBSCRIBE", topic)); err != nil {
				return
			}
		}
	}()
	if err := <-gone; !errors.Is(err, ErrTooLarge) {
		t.Errorf("too many topics: %v", err)
	}
	WaitFor(t, func() bool { return p.Stats().Subscribers == 0 })
	DialRaw(t, p.Addr(), 1, "SUB")
	DialRaw(t, p.Addr(), 1, "XSUB")
	nc, err := net.Dial("tcp", strings.TrimPrefix(p.Addr(), "tcp://"))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	if err := <-gone; !errors.Is(err, ErrTooManyConns) {
		t.Errorf("the connection above the limit: %v", err)
	}
}

// TestRouterHandsOverNames: a router accepts a dealer that reconnects under its name, even before the old connection is
// detected as closed.
func TestRouterHandsOverNames(t *testing.T) {
	r := mustRouter(t, "tcp://127.0.0.1:0", Config{})
	old := MustDealer(t, r.Addr(), Config{Identity: []byte("same")})
	if err := old.Send(Within(t), []byte("1")); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.Recv(Within(t)); err != nil {
		t.Fatal(err)
	}
	fresh := MustDealer(t, r.Addr(), Config{Identity: []byte("same")})
	if _, err := old.Recv(Within(t)); !errors.Is(err, io.EOF) {
		t.Errorf("the old one: %v", err)
	}
	if err := fresh.Send(Within(t), []byte("2")); err != nil {
		t.Fatal(err)
	}
	from, got, err := r.Recv(Within(t))
	if err != nil || from != "same" || string(got[0]) != "2" {
		t.Fatalf("%q %q %v", from, got, err)
	}
	if err := r.Send("same", []byte("hello")); err != nil {
		t.Fatal(err)
	}
	if got, err := fresh.Recv(Within(t)); err != nil || string(got[0]) != "hello" {
		t.Errorf("%q %v", got, err)
	}
}

// BenchmarkSubFromPub measures the path from our Pub through loopback to Recv. The allocations are those of both sides.
func BenchmarkSubFromPub(b *testing.B) {
	for _, size := range PayloadSizes {
		b.Run(fmt.Sprint(size), func(b *testing.B) {
			p := mustPub(b, "tcp://127.0.0.1:0", Config{SendQueue: 1 << 20, Heartbeat: -1})
			s := MustSub(b, p.Addr(), Config{}, "")
			Next(b, s, Opened)
			if err := p.WaitSubscribers(Within(b), 1); err != nil {
				b.Fatal(err)
			}
			topic, seq, payload := []byte("kv@pod@model"), make([]byte, 8), make([]byte, size)
			ctx := context.Background()
			taken := make(chan error, 1)
			tokens := make(chan struct{}, 1024) // at most this many in flight: far below both bounds of the queue
			n := b.N
			b.SetBytes(int64(size))
			b.ReportAllocs()
			b.ResetTimer()
			go func() {
				for range n {
					if _, err := s.Recv(ctx); err != nil {
						taken <- err
						return
					}
					<-tokens
				}
				taken <- nil
			}()
			for range n {
				tokens <- struct{}{}
				if err := p.Send(topic, seq, payload); err != nil {
					b.Fatal(err)
				}
			}
			if err := <-taken; err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkPubSend measures publishing alone: one message to many subscribers that do not read, drops included.
func BenchmarkPubSend(b *testing.B) {
	for _, subscribers := range []int{0, 1, 16} {
		b.Run(fmt.Sprint(subscribers), func(b *testing.B) {
			p := mustPub(b, "tcp://127.0.0.1:0", Config{Heartbeat: -1})
			for range subscribers {
				DialRaw(b, p.Addr(), 1, "SUB").Write(AppendCommand(nil, "SUBSCRIBE", nil))
			}
			if err := p.WaitSubscribers(Within(b), subscribers); err != nil {
				b.Fatal(err)
			}
			topic, seq, payload := []byte("kv@pod@model"), make([]byte, 8), make([]byte, 200)
			b.ReportAllocs()
			for b.Loop() {
				if err := p.Send(topic, seq, payload); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// TestStopFreesTheAddress: a socket is stopped during an incoming connection. The address is free when Stop returns.
func TestStopFreesTheAddress(t *testing.T) {
	address := "tcp://" + loopback.Reserve(t)
	for range 300 {
		p, err := zmtpserver.ListenPub(context.Background(), address, Config{})
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if c, err := net.Dial("tcp", strings.TrimPrefix(address, "tcp://")); err == nil {
				c.Close()
			}
		}()
		p.Stop()
		<-done
	}
}
