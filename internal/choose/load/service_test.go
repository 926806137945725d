package load

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// fleet runs services on a real NATS server.
type fleet struct {
	*testing.T
	ctx    context.Context
	server *natsserver.Server
}

// node starts a service. The returned function stops the service.
func (f *fleet) node() (*Service, func()) {
	f.Helper()
	conn, err := jetstream.Connect(f.ctx, jetstream.ConnOptions{Server: f.server, Wait: true})
	if err != nil {
		f.Fatal(err)
	}
	s := New(Config{Conn: conn, Namespace: "loads", Log: logtest.Quiet(f)})
	ctx, cancel := context.WithCancel(f.ctx)
	done := make(chan struct{})
	go func() {
		s.Run(ctx)
		close(done)
	}()
	stop := func() {
		cancel()
		<-done
		if err := conn.NATS().Drain(); err != nil {
			f.Errorf("drain: %v", err)
		}
		testkit.Eventually(f, "the connection is closed", conn.NATS().IsClosed)
	}
	return s, stop
}

func (f *fleet) until(what string, is func() bool) {
	f.Helper()
	testkit.Eventually(f, what, is)
}

func (f *fleet) ready(s *Service) {
	f.Helper()
	select {
	case <-s.Ready():
	case <-f.ctx.Done():
		f.Fatal("the service is not ready")
	}
}

func TestThreeNodes(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{})
	f := &fleet{t, ctx, server}
	m := Model{Name: "org/model 1.0", Group: "a.b"}
	var nodes []*Service
	for range 3 {
		s, stop := f.node()
		defer stop()
		nodes = append(nodes, s)
	}
	for _, s := range nodes {
		f.ready(s)
	}
	equal := func(nodes ...*Service) bool {
		var first Digest
		nodes[0].Read(m, func(t *Table) { first = t.Digest() })
		for _, s := range nodes {
			same := false
			s.Read(m, func(t *Table) { same = t.Digest() == first && t.Check() == nil })
			if !same {
				return false
			}
		}
		return true
	}

	// A request is booked on one node and changed on different nodes.
	rank := events.RankKey{Instance: "w", Rank: 3}
	for i := range 300 {
		id := fmt.Sprint(i)
		if err := nodes[i%3].Book(ctx, m, Booking{ID: id, Rank: rank, Hashes: []events.SeqHash{1, 2, events.SeqHash(i)},
			PrefillTokens: 10}); err != nil {
			t.Fatal(err)
		}
	}
	f.until("all have 300 requests", func() bool {
		for _, s := range nodes {
			n := 0
			s.Read(m, func(t *Table) { n = t.Len() })
			if n != 300 {
				return false
			}
		}
		return equal(nodes...)
	})
	for i := range 300 {
		id := fmt.Sprint(i)
		if err := nodes[(i+1)%3].Book(ctx, m, Booking{ID: id, Rank: rank}); !errors.Is(err, ErrConflict) {
			t.Fatalf("%s is booked again: %v", id, err)
		}
		if err := errors.Join(nodes[(i+1)%3].PrefillComplete(ctx, m, id), nodes[(i+2)%3].OutputBlock(ctx, m, id, 0.5),
			nodes[i%3].OutputBlock(ctx, m, id, 0.25)); err != nil {
			t.Fatal(err)
		}
		if i < 100 {
			if err := nodes[(i+1)%3].Free(ctx, m, id); err != nil {
				t.Fatal(err)
			}
		}
	}
	if at, ok := nodes[1].Locate("250", func(Model) bool { return true }); !ok || at != m {
		t.Errorf("request 250 is of %v", at)
	}
	if err := nodes[0].Free(ctx, m, "unknown"); !errors.Is(err, ErrUnknown) {
		t.Errorf("%v", err)
	}
	f.until("all have 200 requests", func() bool {
		l := nodes[2].Loads(m)
		return len(l) == 1 && l[0].Requests == 200 && l[0].PrefillTokens == 0 && equal(nodes...)
	})

	// A late node becomes ready only with all requests.
	late, stop := f.node()
	f.ready(late)
	if !equal(nodes[0], late) {
		t.Errorf("a starting node is ready with %+v, want %+v", late.Status(), nodes[0].Status())
	}
	if err := late.Book(ctx, m, Booking{ID: "last", Rank: rank}); err != nil {
		t.Fatal(err)
	}
	stop() // at once
	f.until("the last booking of a stopped node has arrived", func() bool {
		return nodes[0].Free(ctx, m, "last") == nil
	})

	// The removal of a rank ends the rank's requests on all nodes.
	nodes[1].RemoveRank(rank)
	f.until("the rank's requests are gone", func() bool {
		for _, s := range nodes {
			for _, l := range s.Loads(m) {
				if l.Requests > 0 {
					return false
				}
			}
		}
		return true
	})
	if err := nodes[2].Book(ctx, m, Booking{ID: "299", Rank: rank}); !errors.Is(err, ErrConflict) {
		t.Errorf("booking with the id of a removed rank: %v", err)
	}
	if err := nodes[2].Free(ctx, m, "299"); !errors.Is(err, ErrUnknown) {
		t.Errorf("free of a request of a removed rank: %v", err)
	}
	if err := nodes[2].Book(ctx, m, Booking{ID: "299", Rank: rank}); err != nil {
		t.Errorf("booking with the id after a free: %v", err)
	}
	st := nodes[0].Status()
	if !st.Ready || len(st.Models) != 1 || st.Models[0].Model != m || st.Counts.Received == 0 || st.Counts.Malformed > 0 {
		t.Errorf("%+v", st)
	}
}

// TestAwaitBooking: a call waits up to a second for a booking, and checks for it often.
func TestAwaitBooking(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		for _, late := range []time.Duration{0, 3 * time.Millisecond, 400 * time.Millisecond, time.Hour} {
			begun, checks := time.Now(), 0
			if err := awaitBooking(t.Context(), func() bool {
				checks++
				return time.Since(begun) >= late
			}); err != nil {
				t.Error(err)
			}
			if took := time.Since(begun); took < min(late, lag) || took > min(late+50*time.Millisecond, lag) || checks > 50 {
				t.Errorf("a booking after %v: a wait of %v with %d checks", late, took, checks)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), lag/2)
		defer cancel()
		if err := awaitBooking(ctx, func() bool { return false }); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a deadline before the end of the wait: %v", err)
		}
		if err := awaitBooking(ctx, func() bool { return true }); err != nil {
			t.Errorf("a known booking after the deadline: %v", err)
		}
	})
}

// TestServiceAlone calls Alone on the only service. The service is ready at once.
func TestServiceAlone(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testkit.Patience)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{})
	f := &fleet{t, ctx, server}
	s, stop := f.node()
	s.Alone()
	f.ready(s)
	m := Model{Name: "m"}
	if s.Loads(m) != nil || s.Read(m, func(*Table) {}) {
		t.Error("a model without bookings has a table")
	}
	if err := s.Free(ctx, m, "x"); !errors.Is(err, ErrUnknown) {
		t.Error(err)
	}
	stop()
	if err := s.Book(context.Background(), m, Booking{ID: "x", Rank: rankKey(0)}); err != nil {
		t.Errorf("after the stop: %v", err)
	}
}

// Loads lists the loads of all ranks with present or past requests of a model.
func (s *Service) Loads(model Model) (list []Load) {
	s.Read(model, func(t *Table) { list = t.Loads(nil, nil) })
	return list
}
