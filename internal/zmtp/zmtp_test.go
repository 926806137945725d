package zmtp

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
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/tools/loopback"
)

// patience is how long a test waits for what must happen.
const patience = 4 * time.Minute

// silence is what these tests let a peer be silent, and hold what they then wait: longer, and both long beside what a
// busy machine may do to a process.
const (
	silence = 8 * time.Second
	hold    = 10 * time.Second
)

func within(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// quick is a configuration that dials again soon.
func quick() Config {
	return patient(Config{BackoffMin: 5 * time.Millisecond, BackoffMax: 50 * time.Millisecond})
}

// patient gives nobody up before the test does, unless the test says so.
func patient(cfg Config) Config {
	for _, d := range []*time.Duration{&cfg.ConnectTimeout, &cfg.HandshakeTimeout, &cfg.HeartbeatTimeout} {
		if *d == 0 {
			*d = patience
		}
	}
	return cfg
}

// undisturbed tries something in which nobody may stand still for seconds, again if this process did.
func undisturbed(t *testing.T, try func() error) {
	t.Helper()
	for deadline := time.Now().Add(patience); ; {
		over, stood := make(chan struct{}), make(chan time.Duration, 1)
		go func() {
			longest, before := time.Duration(0), time.Now()
			for {
				select {
				case <-over:
					stood <- max(longest, time.Since(before))
					return
				case <-time.After(10 * time.Millisecond):
				}
				longest, before = max(longest, time.Since(before)), time.Now()
			}
		}()
		err := try()
		close(over)
		longest := <-stood
		if err == nil {
			return
		}
		if longest < time.Second || time.Now().After(deadline) {
			t.Fatal(err)
		}
		t.Logf("the process stood still for %v: %v", longest, err)
	}
}

func mustPub(t testing.TB, endpoint string, cfg Config) *Pub {
	t.Helper()
	p, err := ListenPub(context.Background(), endpoint, patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	return p
}

func mustSub(t testing.TB, endpoint string, cfg Config, topics ...string) *Sub {
	t.Helper()
	s, err := DialSub(context.Background(), endpoint, topics, patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	return s
}

func mustRouter(t testing.TB, endpoint string, cfg Config) *Router {
	t.Helper()
	r, err := ListenRouter(context.Background(), endpoint, patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
	return r
}

func mustDealer(t testing.TB, endpoint string, cfg Config) *Dealer {
	t.Helper()
	d, err := DialDealer(within(t), endpoint, patient(cfg))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Stop)
	return d
}

// next waits for a message of the given kind, which must be the next one.
func next(t testing.TB, s *Sub, kind Kind) Message {
	t.Helper()
	m, err := s.Recv(within(t))
	if err != nil {
		t.Fatalf("waiting for %v: %v", kind, err)
	}
	if m.Kind != kind {
		t.Fatalf("got %v %v %q, want %v", m.Kind, m.Err, m.Frames, kind)
	}
	return m
}

func frames(parts ...string) [][]byte {
	out := make([][]byte, len(parts))
	for i, p := range parts {
		out[i] = []byte(p)
	}
	return out
}

func equal(a, b [][]byte) bool { return bytes.Equal(encode(a), encode(b)) }

func TestPubSubRoundTrip(t *testing.T) {
	for _, endpoint := range []string{
		"tcp://127.0.0.1:0", "tcp://*:0", "tcp://localhost:0", "tcp://[::1]:0",
		"ipc://" + filepath.Join(t.TempDir(), "s"), fmt.Sprint("ipc://@kvatlas-test-", os.Getpid()),
	} {
		t.Run(endpoint, func(t *testing.T) {
			p := mustPub(t, endpoint, Config{})
			s := mustSub(t, p.Addr(), Config{}, "")
			o := next(t, s, Opened)
			if o.Peer.SocketType != "PUB" || o.Peer.Minor != 1 || o.Peer.Conn != 1 {
				t.Errorf("peer: %+v", o.Peer)
			}
			if err := p.WaitSubscribers(within(t), 1); err != nil {
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
				if m := next(t, s, Data); !equal(m.Frames, want) {
					t.Fatalf("message %d changed on its way: %d frames, want %d", i, len(m.Frames), len(want))
				}
			}
		})
	}
}

func TestPubMatchesTopics(t *testing.T) {
	p := mustPub(t, "tcp://127.0.0.1:0", Config{})
	all := mustSub(t, p.Addr(), Config{}, "")
	some := mustSub(t, p.Addr(), Config{}, "kv@a", "x")
	if err := p.WaitSubscribers(within(t), 2); err != nil {
		t.Fatal(err)
	}
	next(t, all, Opened)
	next(t, some, Opened)
	for _, topic := range []string{"kv@a@m", "kv@b@m", "", "kv@", "xyz", "last kv@a", "kv@a"} {
		if err := p.Send([]byte(topic), []byte("payload")); err != nil {
			t.Fatal(err)
		}
		if m := next(t, all, Data); string(m.Frames[0]) != topic {
			t.Fatalf("got %q, want %q", m.Frames[0], topic)
		}
	}
	for _, topic := range []string{"kv@a@m", "xyz", "kv@a"} {
		if m := next(t, some, Data); string(m.Frames[0]) != topic {
			t.Errorf("got %q, want %q", m.Frames[0], topic)
		}
	}
}

// Cancelling, and asking twice, work in the form of 3.1 and in that of 3.0.
func TestSubscriptionForms(t *testing.T) {
	for _, minor := range []byte{0, 1} {
		t.Run(fmt.Sprintf("3.%d", minor), func(t *testing.T) {
			p := mustPub(t, "tcp://127.0.0.1:0", Config{})
			raw := dialRaw(t, p.Addr(), minor, "SUB")
			sub := func(on bool, topic string) []byte {
				if minor == 0 {
					return appendFrame(nil, 0, append([]byte{b2i(on)}, topic...))
				}
				return appendCommand(nil, map[bool]string{true: "SUBSCRIBE", false: "CANCEL"}[on], []byte(topic))
			}
			raw.write(slicesConcat(sub(true, "a"), sub(true, "a"), sub(true, "b"), sub(false, "a"), sub(false, "never"),
				sub(true, "mark")))
			waitFor(t, func() bool { return has(p, "mark") })
			for _, topic := range []string{"a1", "b1", "c1"} {
				p.Send([]byte(topic))
			}
			raw.expect(slicesConcat(appendFrame(nil, 0, []byte("a1")), appendFrame(nil, 0, []byte("b1"))))
			raw.write(slicesConcat(sub(false, "a"), sub(true, "mark2")))
			waitFor(t, func() bool { return has(p, "mark2") })
			p.Send([]byte("a2"))
			p.Send([]byte("b2"))
			raw.expect(appendFrame(nil, 0, []byte("b2")))
		})
	}
}

func b2i(b bool) byte {
	if b {
		return 1
	}
	return 0
}

func slicesConcat(parts ...[]byte) []byte { return bytes.Join(parts, nil) }

func has(p *Pub, topic string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		c.subs.mu.RLock()
		n := c.subs.count[topic]
		c.subs.mu.RUnlock()
		if n > 0 {
			return true
		}
	}
	return false
}

// waitFor polls for what has no event of its own.
func waitFor(t testing.TB, cond func() bool) {
	t.Helper()
	ctx := within(t)
	for !cond() {
		select {
		case <-ctx.Done():
			t.Fatal("waited in vain")
		case <-time.After(time.Millisecond):
		}
	}
}

func TestRouterDealer(t *testing.T) {
	r := mustRouter(t, "tcp://127.0.0.1:0", Config{})
	a := mustDealer(t, r.Addr(), Config{Identity: []byte("a")})
	b := mustDealer(t, r.Addr(), Config{})
	for _, d := range []*Dealer{a, b} {
		if err := d.Send(within(t), nil, []byte("ask")); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		from, got, err := r.Recv(within(t))
		if err != nil || !equal(got, frames("", "ask")) {
			t.Fatalf("%q %q %v", from, got, err)
		}
		if from != "a" && (len(from) != 5 || from[0] != 0) {
			t.Errorf("name of a dealer: %q", from)
		}
		for i := range 3 {
			if err := r.SendWait(within(t), from, nil, []byte{byte(i)}, []byte(from)); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, d := range []*Dealer{a, b} {
		for i := range 3 {
			got, err := d.Recv(within(t))
			if err != nil || len(got) != 3 || got[1][0] != byte(i) {
				t.Fatalf("%q %v", got, err)
			}
		}
	}
	if err := r.Send("nobody", nil); !errors.Is(err, ErrNoPeer) {
		t.Errorf("to nobody: %v", err)
	}
	a.Stop()
	a.Stop()
	if _, err := a.Recv(within(t)); !errors.Is(err, ErrStopped) {
		t.Errorf("after Stop: %v", err)
	}
	waitFor(t, func() bool { return errors.Is(r.Send("a", nil), ErrNoPeer) })
}

// A router drops at its high-water mark, says so, and what it did take arrives whole and in order.
func TestRouterDropsAtHighWater(t *testing.T) {
	var dropped int
	var mu sync.Mutex
	r := mustRouter(t, "tcp://127.0.0.1:0", Config{SendQueue: 10, Heartbeat: -1, Hooks: Hooks{Dropped: func(Peer) {
		mu.Lock()
		dropped++
		mu.Unlock()
	}}})
	d := mustDealer(t, r.Addr(), Config{RecvQueue: 1})
	if err := d.Send(within(t), nil); err != nil {
		t.Fatal(err)
	}
	from, _, err := r.Recv(within(t))
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
		got, err := d.Recv(within(t))
		if err != nil || binary.BigEndian.Uint32(got[0]) != want {
			t.Fatalf("got %d %v, want %d", binary.BigEndian.Uint32(got[0]), err, want)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if dropped != full {
		t.Errorf("the hook saw %d drops, want %d", dropped, full)
	}
}

func TestPubCountsDrops(t *testing.T) {
	p := mustPub(t, "tcp://127.0.0.1:0", Config{SendQueue: 10, Heartbeat: -1})
	s := mustSub(t, p.Addr(), Config{RecvQueue: 1}, "")
	if err := p.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	payload := make([]byte, 256<<10)
	for p.Stats().Dropped < 3 {
		p.Send(payload)
	}
	st := p.Stats()
	next(t, s, Opened)
	for range st.Sent - st.Dropped {
		next(t, s, Data)
	}
	p.Stop()
	next(t, s, Closed)
	if got := p.Stats(); got.Dropped != st.Dropped || got.Subscribers != 0 {
		t.Errorf("after the subscriber left: %+v, before %+v", got, st)
	}
}

// A full queue of the Sub holds the sender back and loses nothing, and the time it is full is not taken for silence.
func TestSubBackPressure(t *testing.T) {
	if testing.Short() {
		t.Skip("left out under -short: waits longer than a peer may be silent")
	}
	t.Parallel()
	hb := Config{Heartbeat: 20 * time.Millisecond, HeartbeatTimeout: silence}
	send := hb
	send.SendQueue = 5000
	recv := hb
	recv.RecvQueue = 2
	recv.RecvBytes = 1 << 20
	undisturbed(t, func() error {
		p := mustPub(t, "tcp://127.0.0.1:0", send)
		defer p.Stop()
		s := mustSub(t, p.Addr(), recv, "")
		defer s.Stop()
		if err := p.WaitSubscribers(within(t), 1); err != nil {
			return err
		}
		const n = 3000
		payload := make([]byte, 16<<10)
		for i := range uint32(n) {
			binary.BigEndian.PutUint32(payload, i)
			p.Send(payload)
		}
		next(t, s, Opened)
		waitFor(t, func() bool { return s.Queued() == 2 })
		time.Sleep(hold) // longer than the time-outs of both: the point of the test
		for i := range uint32(n) {
			m, err := s.Recv(within(t))
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
	s := mustSub(t, addr, quick(), "")
	for life := range uint64(4) {
		if life > 0 {
			p = mustPub(t, addr, Config{})
		}
		if m := next(t, s, Opened); m.Peer.Conn != life+1 {
			t.Errorf("connection %d in life %d", m.Peer.Conn, life)
		}
		if err := p.WaitSubscribers(within(t), 1); err != nil {
			t.Fatal(err)
		}
		p.Send([]byte{byte(life)})
		if m := next(t, s, Data); m.Frames[0][0] != byte(life) {
			t.Errorf("got %d in life %d", m.Frames[0][0], life)
		}
		p.Stop()
		if m := next(t, s, Closed); m.Err == nil {
			t.Error("an end without a reason")
		}
	}
}

func TestSubDialsBeforePublisherIsThere(t *testing.T) {
	addr := "tcp://" + loopback.Reserve(t)
	failed := make(chan error, 1)
	cfg := quick()
	cfg.Hooks.Failed = func(_ Peer, err error) {
		select {
		case failed <- err:
		default:
		}
	}
	s := mustSub(t, addr, cfg, "")
	if err := <-failed; err == nil {
		t.Error("a failed dial without a reason")
	}
	p := mustPub(t, addr, Config{})
	next(t, s, Opened)
	if err := p.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	p.Send([]byte("x"))
	next(t, s, Data)
}

// Publishers dial in to a listening Sub; each has its own connection and its own order.
func TestListenSub(t *testing.T) {
	s, err := ListenSub(context.Background(), "tcp://127.0.0.1:0", []string{"kv"}, patient(Config{}))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Stop)
	const peers = 3
	var raws []*rawPeer
	for range peers {
		raw := dialRaw(t, s.Addr(), 1, "PUB")
		raw.expect(appendCommand(nil, "SUBSCRIBE", []byte("kv")))
		raws = append(raws, raw)
	}
	for i := range byte(50) {
		for _, raw := range raws {
			raw.write(encode([][]byte{[]byte("kv"), {i}}))
		}
	}
	want := map[uint64]byte{}
	for opened, data := 0, 0; opened < peers || data < 50*peers; {
		m, err := s.Recv(within(t))
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
	raws[1].nc.Close()
	if m := next(t, s, Closed); !errors.Is(m.Err, io.EOF) {
		t.Errorf("closed with %v", m.Err)
	}
}

func TestStopEndsEverything(t *testing.T) {
	ctx, cancel := context.WithCancel(context.Background())
	p := mustPub(t, "tcp://127.0.0.1:0", Config{})
	s, err := DialSub(ctx, p.Addr(), []string{""}, patient(Config{}))
	if err != nil {
		t.Fatal(err)
	}
	next(t, s, Opened)
	cancel()
	for {
		_, err := s.Recv(within(t))
		if err != nil {
			if !errors.Is(err, ErrStopped) || !errors.Is(err, context.Canceled) {
				t.Errorf("after the context's end: %v", err)
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
	s2 := mustSub(t, "tcp://127.0.0.1:1", quick(), "")
	if _, err := s2.Recv(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Recv after its context: %v", err)
	}
}

// What is queued goes out within Linger.
func TestLinger(t *testing.T) {
	p := mustPub(t, "tcp://127.0.0.1:0", Config{Linger: patience, SendQueue: 10000})
	s := mustSub(t, p.Addr(), Config{RecvQueue: 4}, "")
	if err := p.WaitSubscribers(within(t), 1); err != nil {
		t.Fatal(err)
	}
	const n = 2000
	payload := make([]byte, 8<<10)
	for i := range uint32(n) {
		binary.BigEndian.PutUint32(payload, i)
		p.Send(payload)
	}
	stopped := make(chan struct{})
	go func() { p.Stop(); close(stopped) }()
	next(t, s, Opened)
	for i := range uint32(n) {
		if m := next(t, s, Data); binary.BigEndian.Uint32(m.Frames[0]) != i {
			t.Fatalf("got %d, want %d", binary.BigEndian.Uint32(m.Frames[0]), i)
		}
	}
	<-stopped
	next(t, s, Closed)
}

func TestBadEndpointsAndConfigs(t *testing.T) {
	for endpoint, want := range map[string]string{
		"127.0.0.1:5557":     "has no transport",
		"udp://127.0.0.1:1":  "is not known",
		"tcp://127.0.0.1":    "missing port",
		"tcp://:5557":        "no host",
		"tcp://h:99999":      "not a number",
		"tcp://h:x":          "not a number",
		"tcp://::1:5557":     "too many colons",
		"ipc://":             "no usable path",
		"tcp://127.0.0.1:0":  "cannot be dialled",
		"inproc://something": "is not known",
	} {
		if _, err := DialSub(context.Background(), endpoint, []string{""}, Config{}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want one that says %q", endpoint, err, want)
		}
		if _, err := DialDealer(within(t), endpoint, Config{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want one that says %q", endpoint, err, want)
		}
	}
	_, err := DialSub(context.Background(), "tcp://h:1", []string{""}, Config{MaxMessage: -1, Linger: -1, BackoffMin: 2,
		BackoffMax: 1})
	for _, want := range []string{"MaxMessage", "Linger", "BackoffMin"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v does not mention %s", err, want)
		}
	}
	if _, err := DialSub(context.Background(), "tcp://h:1", nil, Config{}); err == nil {
		t.Error("a SUB without topics")
	}
}

// A socket file that a dead process left is taken over, one in use is not.
func TestIPCStaleSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s")
	ln, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := ListenPub(context.Background(), "ipc://"+path, Config{}); err == nil {
		t.Error("took a socket that is in use")
	}
	ln.SetUnlinkOnClose(false)
	ln.Close()
	mustPub(t, "ipc://"+path, Config{})
}

// Pauses between attempts double up to a bound, and each is drawn from between half and all of it, so that many readers
// do not come back at the same moment.
func TestBackoffIsJittered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		waits := map[time.Duration]bool{}
		for range 50 {
			b := backoff{min: 100 * time.Millisecond, max: 400 * time.Millisecond}
			for _, most := range []time.Duration{100, 200, 400, 400} {
				most *= time.Millisecond
				began := time.Now()
				if !b.wait(t.Context(), b.pause(b.max)) {
					t.Fatal("the test has ended")
				}
				if d := time.Since(began); d < most/2 || d > most+time.Nanosecond {
					t.Fatalf("waited %v, want %v to %v", d, most/2, most)
				}
				waits[time.Since(began)] = true
			}
		}
		if len(waits) < 100 {
			t.Errorf("only %d different pauses", len(waits))
		}
	})
}

// A host that refuses, or that ends what it has taken, is dialled at least once a second; one that cannot be reached is
// left alone for longer. A call of DialNow ends the pause.
func TestPausesWhileTheHostIsReachable(t *testing.T) {
	cfg, err := Config{}.filled()
	if err != nil {
		t.Fatal(err)
	}
	refused := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	far := &net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.EHOSTUNREACH)}
	synctest.Test(t, func(t *testing.T) {
		s := &Sub{now: make(chan struct{}, 1)}
		b := backoff{min: cfg.BackoffMin, max: cfg.BackoffMax, now: s.now}
		attempt := func(err error) time.Duration {
			began := time.Now()
			b.wait(t.Context(), b.pause(cfg.bound(err)))
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
			t.Errorf("a host that cannot be reached is dialled every %v", longest)
		}
		if d := attempt(refused); d > time.Second {
			t.Errorf("a host that can be reached again was left alone for %v", d)
		}
		attempt(far)
		s.DialNow()
		if d := attempt(far); d != 0 {
			t.Errorf("the pause lasted %v after DialNow", d)
		}
	})
}

// Probe tells a port at which somebody listens from one at which nobody does.
func TestProbe(t *testing.T) {
	at := "tcp://" + loopback.Reserve(t)
	pub := mustPub(t, at, Config{})
	if err := Probe(within(t), at, patience); err != nil {
		t.Errorf("%s: %v", at, err)
	}
	pub.Stop()
	if err := Probe(within(t), at, patience); err == nil || !Refuses(err) {
		t.Errorf("%s, where nobody listens any more: %v", at, err)
	}
	gone := "ipc://" + filepath.Join(t.TempDir(), "s")
	if err := Probe(within(t), gone, patience); err == nil || !Refuses(err) {
		t.Errorf("%s: %v", gone, err)
	}
	if err := Probe(within(t), "tcp://127.0.0.1:0", patience); err == nil || Refuses(err) {
		t.Errorf("port 0: %v", err)
	}
}

// TestStopFreesTheAddress stops a socket while a connection comes in: when Stop returns, its address is free.
func TestStopFreesTheAddress(t *testing.T) {
	address := "tcp://" + loopback.Reserve(t)
	for range 300 {
		p, err := ListenPub(context.Background(), address, Config{})
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
