package affinity

import (
	"context"
	"encoding/hex"
	"errors"
	"reflect"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/replication"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/natsserver"
)

const patience = 60 * time.Second

func until(t *testing.T, what string, is func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("in vain: %s", what)
		}
	}
}

// TestServices has nodes on one NATS server: a binding reaches the other, and one that starts later.
func TestServices(t *testing.T) {
	server, err := natsserver.Start(t.Context(), natsserver.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	start := func() (*Service, func()) {
		conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{Server: server, Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		s := New(ServiceConfig{Config: Config{TTL: time.Hour}, Conn: conn, Namespace: "n", Hooks: replication.Hooks{
			Listen: func(err error) { t.Errorf("listen: %v", err) }, Send: func(err error) { t.Errorf("send: %v", err) },
		}})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { s.Run(ctx); close(done) }()
		return s, func() {
			cancel()
			<-done
			if err := conn.NATS().Drain(); err != nil {
				t.Error(err)
			}
			for !conn.NATS().IsClosed() {
				time.Sleep(time.Millisecond)
			}
		}
	}
	one, stopOne := start()
	two, stopTwo := start()
	defer stopTwo()
	<-one.Ready()
	<-two.Ready()
	until(t, "they hear each other", func() bool { return one.Status().Peers == 1 && two.Status().Peers == 1 })
	key, where := Key{"m", "s"}, events.RankKey{Instance: "w", Rank: 1}
	if how, err := one.Bind(key, where, "", true); how != Made || err != nil {
		t.Fatal(how, err)
	}
	bound := func(s *Service, where events.RankKey) func() bool {
		return func() bool { r, is := s.Get(key); return is && r == where }
	}
	until(t, "the other node knows the binding", bound(two, where))
	where.Rank = 2
	if how, err := two.Bind(key, where, "", false); how != Moved || err != nil {
		t.Fatal(how, err)
	}
	stopOne() // and nobody has what it had but two
	three, stopThree := start()
	defer stopThree()
	<-three.Ready()
	if !bound(three, where)() || three.Status().Sum != two.Status().Sum {
		t.Errorf("a node that starts: %+v, want %+v", three.Status(), two.Status())
	}
}

// TestBegin: one request initialises a session, others wait for it, or until their deadline.
func TestBegin(t *testing.T) {
	s := New(ServiceConfig{Config: Config{TTL: time.Hour}})
	key, where := Key{"m", "s"}, events.RankKey{Instance: "w"}
	_, bound, end, err := s.Begin(t.Context(), key)
	if bound || err != nil {
		t.Fatal(bound, err)
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, _, err := s.Begin(late, key); !errors.Is(err, context.Canceled) {
		t.Errorf("whose deadline has passed: %v", err)
	}
	var waiting sync.WaitGroup
	turns := make(chan bool, 8)
	for range cap(turns) {
		waiting.Go(func() {
			r, bound, end, err := s.Begin(t.Context(), key)
			if err != nil || bound && r != where {
				t.Error(r, err)
			}
			if turns <- bound; !bound {
				if _, err := s.Bind(key, where, "", true); err != nil {
					t.Error(err)
				}
			}
			end()
		})
	}
	end() // the first one has failed: one of the others is next, the rest finds what it has bound
	waiting.Wait()
	close(turns)
	first := 0
	for bound := range turns {
		if !bound {
			first++
		}
	}
	if first != 1 || len(s.turns) != 0 {
		t.Errorf("%d were first; turns %v", first, s.turns)
	}
}

// TestWire: messages read as they were written; version 1 stays what it is.
func TestWire(t *testing.T) {
	m := message{Kind: kindAnswer, From: 7, To: 9, Question: 3, Part: 1, Parts: 2, Bindings: []wireBinding{
		{"m", "s", "w", 4, 5, 6, 7, 8, 9000}}}
	const want = "9f01040709c2c2c2000000030102c09199a16da173a1770405060708cd2328"
	data := encode(&m)
	if got := hex.EncodeToString(data); got != want {
		t.Errorf("want %s, got %s", want, got)
	}
	got, err := decode(data)
	if err != nil || !reflect.DeepEqual(*got, m) {
		t.Errorf("%+v %v", got, err)
	}
	for _, bad := range []message{
		{Kind: 0}, {Kind: 5}, {Kind: kindBeat, Count: -1}, {Kind: kindAnswer, Part: 2, Parts: 2},
		{Kind: kindQuestion, Sums: make([]uint64, 3)}, {Kind: kindBindings, Bindings: []wireBinding{{}}},
	} {
		if _, err := decode(encode(&bad)); err == nil {
			t.Errorf("%+v is read", bad)
		}
	}
	if _, err := decode(append(data, 0)); err == nil {
		t.Error("what follows a message is not seen")
	}
}

// FuzzReceive: no message breaks a machine, nor what holds between its fields.
func FuzzReceive(f *testing.F) {
	f.Add(encode(&message{Kind: kindBindings, From: 7, Sent: 1, Bindings: []wireBinding{
		{"m", "s", "w", 4, 5, 6, 7, 8, 9000}}}))
	f.Add(encode(&message{Kind: kindBeat, From: 7, Ready: true, Count: 3, Sum: 4, Sent: 9, Calm: true}))
	f.Add(encode(&message{Kind: kindQuestion, From: 7, To: 1}))
	f.Add(encode(&message{Kind: kindAnswer, From: 7, To: 1, Parts: 2}))
	f.Fuzz(func(t *testing.T, data []byte) {
		m := NewMachine(0, Config{Origin: 1, TTL: time.Minute, Sessions: 8})
		_, _ = m.Bind(0, Key{"m", "s"}, rank(1), "", true)
		m.Step(0)
		_ = m.Receive(time.Second, data)
		m.Step(2 * time.Second)
		if err := m.check(); err != nil {
			t.Fatal(err)
		}
	})
}
