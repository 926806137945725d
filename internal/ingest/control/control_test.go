package control

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// standing is a shim that stalls at the first request until the test releases it.
type standing struct {
	now atomic.Pointer[still]
}

type still struct {
	asked atomic.Int32
	goOn  chan struct{}
}

func (s *standing) Self() Shim {
	if now := s.now.Load(); now.asked.Add(1) == 1 {
		<-now.goOn
	}
	return Shim{Instance: "w", PID: 7}
}

func (s *standing) WantLoads() {}

func (s *standing) Resync(context.Context, ResyncRequest) (Shim, error) { return s.Self(), nil }

// joined starts a NATS server and returns a namespace on it. Both end with the test.
func joined(ctx context.Context, tb testing.TB, partitions uint32) *jetstream.Namespace {
	tb.Helper()
	server := natskit.Start(tb, natsserver.Options{})
	conn := natskit.Connect(tb, server)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: partitions})
	if err != nil {
		tb.Fatal(err)
	}
	return ns
}

// TestStalledShimIsAskedAgain: a stalled shim is not considered gone.
func TestStalledShimIsAskedAgain(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	ns := joined(ctx, t, 1)
	key := events.RankKey{Instance: "w"}
	if found, err := ShimOf(ctx, ns, key); found != nil || err != nil {
		t.Fatalf("of a rank without a shim: %v, %v", found, err)
	}
	s := &standing{}
	stop, err := Serve(ns, key, s)
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	var found *Shim
	for range 10 { // the machine may stall at the second request
		now := &still{goOn: make(chan struct{})}
		s.now.Store(now)
		found, err = ShimOf(ctx, ns, key)
		close(now.goOn)
		if err != nil || found != nil {
			break
		}
	}
	if err != nil || found == nil || found.PID != 7 {
		t.Errorf("of a stalled shim: %v, %v", found, err)
	}
}

// claiming is a shim that answers for another rank.
type claiming struct{ Shim }

func (c claiming) Self() Shim                                          { return c.Shim }
func (c claiming) WantLoads()                                          {}
func (c claiming) Resync(context.Context, ResyncRequest) (Shim, error) { return c.Shim, nil }

// TestAnswersForOtherRanksAreSkipped: answers that name a rank outside of the request are skipped. Other answers count.
func TestAnswersForOtherRanksAreSkipped(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{})
	conn := natskit.Connect(t, server)
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 2})
	if err != nil {
		t.Fatal(err)
	}
	byPartition := map[events.Partition][]events.WorkerID{}
	for i := range 20 {
		name := events.WorkerID(fmt.Sprint("w", i))
		p, err := ns.PartitionOf(name)
		if err != nil {
			t.Fatal(err)
		}
		byPartition[p] = append(byPartition[p], name)
	}
	good, bad, other := byPartition[0][0], byPartition[0][1], byPartition[1][0]
	for name, says := range map[events.WorkerID]Shim{
		good: {Instance: good}, bad: {Instance: other, Incarnation: 1 << 60},
	} {
		stop, err := Serve(ns, events.RankKey{Instance: name}, claiming{says})
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	if found, err := Resync(ctx, ns, events.RankKey{Instance: bad}, ResyncRequest{ID: "1"}); found != nil || err != nil {
		t.Errorf("the shim of %s, with the answer of another rank: %+v, %v", bad, found, err)
	}
	if found, err := ShimOf(ctx, ns,
		events.RankKey{Instance: good}); found == nil || found.Instance != good || err != nil {
		t.Errorf("the shim of %s: %+v, %v", good, found, err)
	}
	stop, err := conn.Subscribe(jetstream.Names("test").Control(0), func(r jetstream.Request) {
		_ = conn.Send(r.Reply, jetstream.ContentJSON, []byte("no JSON"))
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if all, err := ShimsOf(ctx, ns, 0); err != nil || len(all) != 1 || all[0].Instance != good {
		t.Errorf("all shims of partition 0: %+v, %v", all, err)
	}
}

// TestAbsent covers connected shims, stalled shims, and shims after the end of the connection.
func TestAbsent(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 4*time.Minute)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{})
	join := func() *jetstream.Namespace {
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{Server: server})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(conn.Close)
		ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: 2})
		if err != nil {
			t.Fatal(err)
		}
		return ns
	}
	ns, shims := join(), join()
	var ranks []events.RankKey
	for i := range 100 {
		ranks = append(ranks, events.RankKey{Instance: "w", Rank: events.Rank(i)})
	}
	never := &standing{} // must not receive a request
	for _, key := range ranks[1:] {
		stop, err := Serve(shims, key, never)
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
	}
	if err := shims.Conn().NATS().FlushWithContext(ctx); err != nil { // the server has all subscriptions
		t.Fatal(err)
	}
	for _, c := range []struct {
		ranks []events.RankKey
		want  string
	}{{nil, "[]"}, {ranks, "[w/0]"}, {ranks[1:3], "[]"}} {
		absent, err := Absent(ctx, ns, c.ranks)
		if fmt.Sprint(absent) != c.want || err != nil {
			t.Errorf("%d shims, absent are %v, %v; want %s", len(c.ranks), absent, err, c.want)
		}
	}
	shims.Conn().Close()
	for n := 0; n < len(ranks); { // the server may not have seen the end of the connection yet
		absent, err := Absent(ctx, ns, ranks)
		if n = len(absent); err != nil {
			t.Fatalf("once the connection has ended, %d are absent, %v", n, err)
		}
	}
	ns.Conn().Close()
	if _, err := Absent(ctx, ns, ranks); err == nil {
		t.Error("Absent returns no error without a connection")
	}
}

// BenchmarkAbsent measures a look for 10,000 shims, as nodes do once a second, with the server and all shims in this
// process.
func BenchmarkAbsent(b *testing.B) {
	ctx := b.Context()
	ns := joined(ctx, b, 8)
	var ranks []events.RankKey
	for i := range 10_000 {
		ranks = append(ranks, events.RankKey{Instance: events.WorkerID(fmt.Sprint("w", i))})
		if i%10 == 0 { // subjects without subscribers cost more
			continue
		}
		if _, err := Serve(ns, ranks[i], &standing{}); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportAllocs()
	for b.Loop() {
		if absent, err := Absent(ctx, ns, ranks); len(absent) != 1000 || err != nil {
			b.Fatal(len(absent), err)
		}
	}
}
