package affinity

import (
	"context"
	"encoding/hex"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/msgp"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/shared"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestServices has nodes on one NATS server: a binding reaches the other node, and a node that starts later.
func TestServices(t *testing.T) {
	t.Parallel()
	server := natskit.Start(t, natsserver.Options{})
	start := func() (*Service, func()) {
		conn, err := jetstream.Connect(t.Context(), jetstream.ConnOptions{Server: server, Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		s := New(ServiceConfig{Config: Config{TTL: time.Hour}, Conn: conn, Namespace: "n", Log: logtest.Quiet(t)})
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan struct{})
		go func() { s.Run(ctx); close(done) }()
		return s, func() {
			cancel()
			<-done
			if err := conn.NATS().Drain(); err != nil {
				t.Error(err)
			}
			testkit.Eventually(t, "the connection is closed", conn.NATS().IsClosed)
		}
	}
	one, stopOne := start()
	two, stopTwo := start()
	defer stopTwo()
	<-one.Ready()
	<-two.Ready()
	testkit.Eventually(t, "the nodes have found each other", func() bool {
		return one.Status().Peers == 1 && two.Status().Peers == 1
	})
	key, where := Key{"m", "s"}, events.RankKey{Instance: "w", Rank: 1}
	if how, _, err := one.Bind(key, where, "", never); how != Made || err != nil {
		t.Fatal(how, err)
	}
	bound := func(s *Service, where events.RankKey) func() bool {
		return func() bool { r, is := s.Get(key); return is && r == where }
	}
	testkit.Eventually(t, "the other node knows the binding", bound(two, where))
	where.Rank = 2
	if how, _, err := two.Bind(key, where, "", always); how != Moved || err != nil {
		t.Fatal(how, err)
	}
	stopOne() // two has the entries
	three, stopThree := start()
	defer stopThree()
	<-three.Ready()
	if !bound(three, where)() || three.Status().Sum != two.Status().Sum {
		t.Errorf("a node that starts: %+v, want %+v", three.Status(), two.Status())
	}
}

// TestBegin: one request initialises a session. Other requests wait for the session, or until a deadline.
func TestBegin(t *testing.T) {
	s := New(ServiceConfig{Config: Config{TTL: time.Hour}})
	key, where := Key{"m", "s"}, events.RankKey{Instance: "w"}
	_, bound, end, err := s.Begin(t.Context(), key, always)
	if bound || err != nil {
		t.Fatal(bound, err)
	}
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, _, err := s.Begin(late, key, always); !errors.Is(err, context.Canceled) {
		t.Errorf("after the deadline: %v", err)
	}
	var waiting sync.WaitGroup
	turns := make(chan bool, 8)
	for range cap(turns) {
		waiting.Go(func() {
			r, bound, end, err := s.Begin(t.Context(), key, always)
			if err != nil || bound && r != where {
				t.Error(r, err)
			}
			if turns <- bound; !bound {
				if _, _, err := s.Bind(key, where, "", never); err != nil {
					t.Error(err)
				}
			}
			end()
		})
	}
	end() // the first one has failed: one waiter binds the session for all others
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

	// The rank departs: one request moves the session, and the others wait for the new rank.
	next := events.RankKey{Instance: "next"}
	departed := func(rank events.RankKey) bool { return rank == where }
	alive := func(rank events.RankKey) bool { return !departed(rank) }
	if _, bound, end, err = s.Begin(t.Context(), key, alive); bound || err != nil {
		t.Fatalf("the session has a departed rank: %v, %v", bound, err)
	}
	if _, _, _, err := s.Begin(late, key, alive); !errors.Is(err, context.Canceled) {
		t.Errorf("another request did not wait: %v", err)
	}
	if how, from, err := s.Bind(key, next, "", departed); how != Moved || from != where || err != nil {
		t.Errorf("moved: %v, %v, %v", how, from, err)
	}
	end()
	if rank, bound, _, err := s.Begin(t.Context(), key, alive); rank != next || !bound || err != nil {
		t.Errorf("the session has rank %v, %v, %v", rank, bound, err)
	}
	if _, from, err := s.Bind(key, where, "", departed); from != next || !errors.Is(err, ErrElsewhere) {
		t.Errorf("a request without a turn moved the session from %v: %v", from, err)
	}
}

// TestWire: decoded bindings equal the encoded bindings, and the form stays.
func TestWire(t *testing.T) {
	b := binding{key: Key{"m", "s"}, rank: events.RankKey{Instance: "w", Rank: 4}, at: shared.Key{Owner: 7, Seq: 1},
		is: version{5, 6}, used: version{7, 8}, ends: 9 * time.Second}
	const want = "0708cd2328a16da173a177040506"
	data := appendBinding(nil, &b, 0, true)
	if got := hex.EncodeToString(data); got != want {
		t.Errorf("want %s, got %s", want, got)
	}
	r := &shared.Reader{Reader: msgp.Reader{Data: data}}
	got, hash := readBinding(r, b.at, true)
	if wire := (wireBinding{b.key, b.rank, b.is, b.used, b.ends}); r.Bad || r.Left() > 0 || got != wire ||
		hash != b.sum() {
		t.Errorf("%+v is read as %+v, hash %x of %x", wire, got, hash, b.sum())
	}
	for n := range data {
		r := &shared.Reader{Reader: msgp.Reader{Data: data[:n]}}
		if readBinding(r, b.at, true); !r.Bad {
			t.Errorf("%d bytes are read", n)
		}
	}
}

// FuzzReceive: no message breaks a machine, and the fields keep the invariants.
func FuzzReceive(f *testing.F) {
	w := newWorld(*seed, 3, time.Minute)
	w.Run(2 * time.Second)
	w.Keep = true
	for range 30 {
		w.op()
		w.Run(10 * time.Millisecond)
	}
	for _, data := range w.Sent {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		m := NewMachine(0, Config{Origin: 1, TTL: time.Minute, Sessions: 8})
		m.Alone()
		_, _, _ = m.Bind(0, Key{"m", "s"}, rank(1), "", never)
		m.Step(0)
		m.Receive(time.Second, data)
		m.Step(2 * time.Second)
		if err := m.check(); err != nil {
			t.Fatal(err)
		}
	})
}
