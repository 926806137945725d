package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/load"
	"github.com/kvatlas/kvatlas/internal/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestLoadsOfThreeNodes has whole nodes: what is booked on one is under way on all, on one that starts later too, and a
// worker that leaves takes its requests along.
func TestLoadsOfThreeNodes(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	nats, err := jetstream.StartServer(ctx, jetstream.ServerOptions{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	defer nats.Stop()
	start := func(name string) (s *Server, stop func()) {
		t.Helper()
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: nats, Wait: true})
		if err != nil {
			t.Fatal(err)
		}
		s, err = New(ctx, Settings{ID: name, Conn: conn, Namespace: "n", Partitions: 2,
			Drain: 4 * time.Second, MaxRequests: 12, LogBytes: 1 << 20, SnapshotInterval: time.Hour},
			slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		running, end := context.WithCancel(ctx)
		done := make(chan error, 1)
		go func() { done <- s.Run(running) }()
		return s, func() {
			end()
			if err := <-done; err != nil {
				t.Errorf("node %s: %v", name, err)
			}
			conn.Close()
		}
	}
	until := func(what string, is func() bool) {
		t.Helper()
		for !is() {
			select {
			case <-time.After(5 * time.Millisecond):
			case <-ctx.Done():
				t.Fatalf("in vain: %s", what)
			}
		}
	}
	a, stopA := start("a")
	defer stopA()
	b, stopB := start("b")
	defer stopB()
	for _, s := range []*Server{a, b} {
		select {
		case <-s.loads.Ready():
		case <-ctx.Done():
			t.Fatalf("node %s is not ready", s.ID)
		}
	}

	key := events.RankKey{Instance: "w"}
	p, err := a.ns.PartitionOf(key.Instance)
	if err != nil {
		t.Fatal(err)
	}
	name, err := jetstream.WorkerKey(p, key)
	if err != nil {
		t.Fatal(err)
	}
	workers, err := a.ns.EnsureWorkers(ctx, jetstream.BucketConfig{})
	if err != nil {
		t.Fatal(err)
	}
	record, _ := json.Marshal(registry.Record{Version: 1, Instance: key.Instance, Model: "m", BlockSize: 16,
		LeaseMS: time.Hour.Milliseconds(), State: registry.Held})
	revision, err := workers.Put(ctx, name, record)
	if err != nil {
		t.Fatal(err)
	}
	there := func(s *Server) bool { _, is := s.registry.Worker(key); return is }
	until("the worker is registered", func() bool { return there(a) && there(b) })

	m := load.Model{Name: "m"}
	for i := range 10 {
		if err := a.loads.Book(ctx, m, load.Booking{ID: fmt.Sprint(i), Rank: key, PrefillTokens: 100}); err != nil {
			t.Fatal(err)
		}
	}
	loaded := func(s *Server, requests int32) func() bool {
		return func() bool {
			l := loadsOf(s, m)
			return requests == 0 && len(l) == 0 || len(l) == 1 && l[0].Requests == requests
		}
	}
	until("b has what was booked on a", loaded(b, 10))
	if err := b.loads.Book(ctx, m, load.Booking{ID: "3", Rank: key}); !errors.Is(err, load.ErrConflict) {
		t.Errorf("booked twice: %v", err)
	}
	if err := b.loads.Free(ctx, m, "3"); err != nil {
		t.Error(err)
	}
	until("a has what was freed on b", loaded(a, 9))
	for i := range 4 {
		err := b.loads.Book(ctx, m, load.Booking{ID: fmt.Sprint("more", i), Rank: key})
		if full := errors.Is(err, load.ErrFull); full != (i == 3) || err != nil && !full {
			t.Errorf("request %d of 12 at most: %v", 10+i, err)
		}
	}
	for i := range 3 {
		if err := b.loads.Free(ctx, m, fmt.Sprint("more", i)); err != nil {
			t.Error(err)
		}
	}
	until("a has 9 again", loaded(a, 9))

	status := func(s *Server) api.ModelDigest {
		st, err := s.Status(ctx)
		if err != nil || st.Load == nil || !st.Load.Ready || st.Load.Peers != 1 || len(st.Load.Models) != 1 {
			t.Fatalf("%s says of its loads: %+v, %v", s.ID, st.Load, err)
		}
		return st.Load.Models[0]
	}
	until("the digests are equal", func() bool { return status(a).Hash == status(b).Hash })
	if of := status(b); of.Model != "m" || of.Requests != 9 || of.PrefillTokens != 900 || of.Conflicts != 1 {
		t.Errorf("b says %+v", of)
	}

	c, stopC := start("c")
	defer stopC()
	select {
	case <-c.loads.Ready():
	case <-ctx.Done():
		t.Fatal("node c is not ready")
	}
	if !loaded(c, 9)() {
		t.Errorf("c is ready with %+v", loadsOf(c, m))
	}
	until("the worker is known to c", func() bool { return there(c) })
	if _, err := workers.Delete(ctx, name, revision); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Server{a, b, c} {
		until("the worker's requests have gone on "+s.ID, loaded(s, 0))
	}
	if err := c.loads.Free(ctx, m, "1"); !errors.Is(err, load.ErrUnknown) {
		t.Errorf("the end of a request whose worker has left: %v", err)
	}

	// One whose registration is not complete any more takes its requests along too.
	if _, err := workers.Put(ctx, name, record); err != nil {
		t.Fatal(err)
	}
	until("the worker is back", func() bool { return there(a) && there(b) && there(c) })
	if err := a.loads.Book(ctx, m, load.Booking{ID: "again", Rank: key}); err != nil {
		t.Fatal(err)
	}
	until("c has what was booked on a", loaded(c, 1))
	incomplete, _ := json.Marshal(registry.Record{Version: 1, Instance: key.Instance, Model: "m", BlockSize: 16,
		LeaseMS: time.Hour.Milliseconds(), State: registry.Held, Worker: &api.WorkerSpec{Role: "none of ours"}})
	if _, err := workers.Put(ctx, name, incomplete); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Server{a, b, c} {
		until("the incomplete worker's requests have gone on "+s.ID, loaded(s, 0))
	}
}

// loadsOf lists the loads of all ranks that have, or had, requests of a model.
func loadsOf(s *Server, m load.Model) (list []load.Load) {
	s.loads.Read(m, func(t *load.Table) { list = t.Loads(nil, nil) })
	return list
}
