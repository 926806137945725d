package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// fleet is a group of complete nodes of a namespace, on a separate NATS server.
type fleet struct {
	t       *testing.T
	ctx     context.Context // of the test
	nats    *natsserver.Server
	workers *jetstream.Bucket // once a worker is registered
}

func newFleet(t *testing.T) *fleet {
	t.Helper()
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 10*testkit.Patience) // each wait has its own limit
	t.Cleanup(cancel)
	nats := natskit.Start(t, natsserver.Options{})
	return &fleet{t: t, ctx: ctx, nats: nats}
}

// start starts a node. set may change the settings.
func (f *fleet) start(name string, set ...func(*Settings)) (s *Server, stop func()) {
	f.t.Helper()
	conn, err := jetstream.Connect(f.ctx, jetstream.ConnOptions{Server: f.nats, Wait: true})
	if err != nil {
		f.t.Fatal(err)
	}
	settings := Settings{ID: name, Conn: conn, Namespace: "n", Partitions: 2, Drain: 4 * time.Second, MaxRequests: 12,
		LogBytes: 1 << 20, SnapshotInterval: time.Hour, AwayPatience: testkit.Patience}
	for _, change := range set {
		change(&settings)
	}
	s, err = New(f.ctx, settings, slog.New(slog.DiscardHandler))
	if err != nil {
		f.t.Fatal(err)
	}
	running, end := context.WithCancel(f.ctx)
	done := make(chan error, 1)
	go func() { done <- s.Run(running) }()
	return s, func() {
		end()
		if err := <-done; err != nil {
			f.t.Errorf("node %s: %v", name, err)
		}
		conn.Close()
	}
}

func (f *fleet) until(what string, is func() bool) {
	f.t.Helper()
	testkit.Eventually(f.t, what, is)
}

// register writes a worker's record.
func (f *fleet) register(s *Server, r registry.Record) (revision uint64) {
	f.t.Helper()
	var err error
	if f.workers == nil {
		if f.workers, err = s.ns.EnsureWorkers(f.ctx, jetstream.BucketConfig{}); err != nil {
			f.t.Fatal(err)
		}
	}
	record, _ := json.Marshal(r)
	revision, err = f.workers.Put(f.ctx, f.name(s, events.RankKey{Instance: r.Instance, Rank: r.Rank}), record)
	if err != nil {
		f.t.Fatal(err)
	}
	return revision
}

// name returns the name of a rank's record.
func (f *fleet) name(s *Server, key events.RankKey) string {
	f.t.Helper()
	p, err := s.ns.PartitionOf(key.Instance)
	if err != nil {
		f.t.Fatal(err)
	}
	name, err := jetstream.WorkerKey(p, key)
	if err != nil {
		f.t.Fatal(err)
	}
	return name
}

// TestLoadsOfThreeNodes: a booking at one node counts at all nodes, and at a node that starts later. The bookings of a
// worker end with the worker.
func TestLoadsOfThreeNodes(t *testing.T) {
	f := newFleet(t)
	ctx, start, until := f.ctx, f.start, f.until
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
	record := registry.Record{Version: 1, Instance: key.Instance, Model: "m", BlockSize: 16,
		LeaseMS: time.Hour.Milliseconds(), State: registry.Held}
	revision := f.register(a, record)
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
	until("b has the bookings of a", loaded(b, 10))
	if err := b.loads.Book(ctx, m, load.Booking{ID: "3", Rank: key}); !errors.Is(err, load.ErrConflict) {
		t.Errorf("booked twice: %v", err)
	}
	if err := b.loads.Free(ctx, m, "3"); err != nil {
		t.Error(err)
	}
	until("a has the ends of b", loaded(a, 9))
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
			t.Fatalf("the load status of %s is %+v, %v", s.ID, st.Load, err)
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
	until("c has the worker", func() bool { return there(c) })
	if _, err := f.workers.Delete(ctx, f.name(a, key), revision); err != nil {
		t.Fatal(err)
	}
	for _, s := range []*Server{a, b, c} {
		until("the worker's requests have gone on "+s.ID, loaded(s, 0))
	}
	if err := c.loads.Free(ctx, m, "1"); !errors.Is(err, load.ErrUnknown) {
		t.Errorf("the end of a request whose worker has left: %v", err)
	}

	// An incomplete registration ends the worker's requests too.
	f.register(a, record)
	until("the worker is back", func() bool { return there(a) && there(b) && there(c) })
	if err := a.loads.Book(ctx, m, load.Booking{ID: "again", Rank: key}); err != nil {
		t.Fatal(err)
	}
	until("c has the bookings of a", loaded(c, 1))
	record.Worker = &api.WorkerSpec{Role: "none of ours"}
	f.register(a, record)
	for _, s := range []*Server{a, b, c} {
		until("the incomplete worker's requests have gone on "+s.ID, loaded(s, 0))
	}
}

// TestLastRequestsOverGRPC checks that the request of an open gateway stream is freed on other nodes too when its node
// stops.
func TestLastRequestsOverGRPC(t *testing.T) {
	f := newFleet(t)
	listen := loopback.Reserve(t)
	a, stopA := f.start("a", func(s *Settings) { s.GRPCListen = listen })
	b, stopB := f.start("b")
	defer stopB()
	for _, s := range []*Server{a, b} {
		f.until("node "+s.ID+" is ready", func() bool { return s.admitChoice() == nil })
	}
	f.register(a, registry.Record{Version: 1, Instance: "w", Model: "m", BlockSize: 16, State: registry.Held,
		LeaseMS: time.Hour.Milliseconds(), Worker: &api.WorkerSpec{Endpoint: "http://10.0.0.1:8000"}})
	f.until("the worker can be chosen", func() bool { return len(a.registry.Pool("m").Ranks) == 1 })

	conn, err := grpc.NewClient(listen, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stream, err := extprocv3.NewExternalProcessorClient(conn).Process(f.ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range []*extprocv3.ProcessingRequest{
		{Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
			Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{
				{Key: ":method", RawValue: []byte("POST")}, {Key: "content-type", RawValue: []byte("application/json")}}}}}},
		{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{
			Body: []byte(`{"model":"m","prompt":"hello"}`), EndOfStream: true}}},
	} {
		if err := stream.Send(r); err != nil {
			t.Fatal(err)
		}
	}
	m := load.Model{Name: "m"}
	booked := func() bool { l := loadsOf(b, m); return len(l) == 1 && l[0].Requests == 1 }
	f.until("b has the gateway's booking on a", booked)
	stopA()
	f.until("b has the end of the booking", func() bool { return !booked() })
}

// loadsOf lists the loads of all ranks that have, or had, requests of a model.
func loadsOf(s *Server, m load.Model) (list []load.Load) {
	s.loads.Read(m, func(t *load.Table) { list = t.Loads(nil, nil) })
	return list
}
