package registry

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/internal/testkit/logtest"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// site has two nodes' registries and some shims on a real server.
type site struct {
	*testing.T
	ctx    context.Context
	server *natsserver.Server
	conn   *jetstream.Conn
	ns     *jetstream.Namespace
	bucket *jetstream.Bucket
	nodes  []*Registry
	mended chan struct{} // has an element for each recreation of the bucket

	replaced []string // declared workers, by the calls of the test

	mu      sync.Mutex
	cleared []events.WorkerID
	hangs   events.WorkerID // the worker with a blocked clear
	hanging chan struct{}   // receives a value when a clear blocks
}

func newSite(t *testing.T) *site {
	return newSiteOn(t, natsserver.Options{}, jetstream.ConnOptions{})
}

// newSiteOn returns a site on a server with the options, and nodes with the connection options. The test is parallel.
func newSiteOn(t *testing.T, on natsserver.Options, as jetstream.ConnOptions) *site {
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*testkit.Patience)
	t.Cleanup(cancel)
	s := &site{T: t, ctx: ctx, server: natskit.Start(t, on), mended: make(chan struct{}, 100),
		hanging: make(chan struct{}, 1)}
	as.Server, as.Wait = s.server, true
	var err error
	s.conn, err = jetstream.Connect(ctx, as)
	s.must(err)
	t.Cleanup(s.conn.Close)
	s.ns, err = jetstream.JoinNamespace(ctx, s.conn, jetstream.NamespaceConfig{Name: "n", Partitions: 4})
	s.must(err)
	s.bucket, err = s.ns.EnsureWorkers(ctx, jetstream.BucketConfig{})
	s.must(err)
	for range 2 {
		r := New(Config{
			Namespace: s.ns, Bucket: s.bucket,
			Recreate: func(ctx context.Context) error {
				_, err := s.ns.EnsureWorkers(ctx, jetstream.BucketConfig{})
				return err
			},
			Clear: func(ctx context.Context, r Record, still func(context.Context) (bool, error)) error {
				s.mu.Lock()
				hangs := s.hangs == r.Instance
				s.mu.Unlock()
				if hangs {
					select {
					case s.hanging <- struct{}{}:
					default:
					}
					<-ctx.Done()
					return ctx.Err()
				}
				is, err := still(ctx)
				if is && err == nil {
					s.mu.Lock()
					s.cleared = append(s.cleared, r.Instance)
					s.mu.Unlock()
				}
				return err
			},
			Log: logtest.New(func(l logtest.Line) {
				switch l.Text {
				case "the bucket of workers' registrations was gone; it is recreated":
					s.mended <- struct{}{}
				case "a worker is registered at the serving address of another, which is removed":
					s.replaced = append(s.replaced, fmt.Sprint(l.Attrs["removed"], " by ", l.Attrs["worker"]))
				}
			}),
		})
		running, end := context.WithCancel(ctx)
		done := make(chan struct{})
		go func() {
			defer close(done)
			r.Run(running)
		}()
		t.Cleanup(func() {
			end()
			<-done
		})
		s.nodes = append(s.nodes, r)
	}
	return s
}

// leaseTaken calls taken when the lease is held.
type leaseTaken struct {
	UnobservedLease
	taken func()
}

func (l leaseTaken) LeaseTaken() { l.taken() }

func (s *site) must(err error) {
	s.Helper()
	if err != nil {
		s.Fatal(err)
	}
}

// shim holds a lease; end kills the shim.
func (s *site) shim(name string, lease time.Duration) (end func()) {
	s.Helper()
	taken := make(chan struct{})
	r := record(name, lease)
	r.Source = "vllm"
	l, err := NewLease(s.ns, r, leaseTaken{taken: sync.OnceFunc(func() { close(taken) })})
	s.must(err)
	running, cancel := context.WithCancel(s.ctx)
	done := make(chan error, 1)
	go func() { done <- l.Keep(running, func() {}) }()
	end = sync.OnceFunc(func() {
		cancel()
		s.must(<-done)
	})
	s.Cleanup(end)
	<-taken
	return end
}

func (s *site) admin(verb string) {
	s.Helper()
	r, err := s.conn.Request(s.ctx, "$JS.API.STREAM."+verb+".KV_"+s.bucket.Name(), "", nil)
	s.must(err)
	if !strings.Contains(string(r.Body), `"success":true`) {
		s.Fatalf("%s: %s", verb, r.Body)
	}
}

func (s *site) until(what string, ok func() bool) {
	s.Helper()
	testkit.Eventually(s, what, ok)
}

// know reports whether both nodes have exactly these workers.
func (s *site) know(names ...events.WorkerID) bool {
	for _, r := range s.nodes {
		var list []events.WorkerID
		for _, w := range r.Workers() {
			list = append(list, w.Record.Instance)
		}
		if !slices.Equal(list, names) {
			return false
		}
	}
	return true
}

func (s *site) wasCleared(name events.WorkerID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Contains(s.cleared, name)
}

// TestLostBucketOfWorkers deletes the bucket with all records, and empties the bucket. Live shims stay registered and
// are not cleared; dead shims are cleared.
func TestLostBucketOfWorkers(t *testing.T) {
	s := newSite(t)
	// a live shim has five times the expected time for a renewal
	const short, long = 2 * time.Second, 15 * time.Second
	s.shim("lives", long)
	end := s.shim("dies-1", short)
	s.until("both are known", func() bool { return s.know("dies-1", "lives") })
	end()
	s.admin("DELETE")
	<-s.mended
	s.until("the worker that died with the bucket is cleared", func() bool { return s.wasCleared("dies-1") })
	s.until("the live worker is registered", func() bool { return s.know("lives") })

	end = s.shim("dies-2", short)
	s.until("another is known", func() bool { return s.know("dies-2", "lives") })
	end()
	s.admin("PURGE")
	s.until("the worker that died before the bucket was emptied is cleared", func() bool { return s.wasCleared("dies-2") })
	s.until("the live worker is registered", func() bool { return s.know("lives") })
	key := must(jetstream.WorkerKey(must(s.ns.PartitionOf("lives")), events.RankKey{Instance: "lives"}))
	s.until("the live worker is in the bucket", func() bool {
		_, err := s.bucket.Latest(s.ctx, key)
		return err == nil
	})

	end = s.shim("dies-3", short)
	s.until("a third worker is registered", func() bool { return s.know("dies-3", "lives") })
	end()
	s.admin("PURGE")
	s.must(s.server.Restart(s.ctx)) // the watches restart without the lost records
	s.until("the forgotten worker that died before the bucket was emptied is cleared",
		func() bool { return s.wasCleared("dies-3") })
	s.until("the live worker is registered", func() bool { return s.know("lives") })
	if s.wasCleared("lives") {
		t.Error("the live worker was cleared")
	}
	if got := s.nodes[0].Partitions("m"); len(got) != 1 || got[0] != must(s.ns.PartitionOf("lives")) {
		t.Errorf("model m is in partitions %v", got)
	}
	if got := s.nodes[0].Partitions("other"); len(got) != 0 {
		t.Errorf("another model is in partitions %v", got)
	}
}

// TestUnreadableLease overwrites the record of a worker without renewals. After the end of the lease, the nodes drop
// the worker, like a new node. The worker is not cleared, and the record stays.
func TestUnreadableLease(t *testing.T) {
	s := newSite(t)
	s.shim("other", time.Hour)
	const lease = 6 * time.Second // a live shim has three times the expected time for a renewal
	end := s.shim("w", lease)
	s.until("both are known", func() bool { return s.know("other", "w") })
	end()
	key := must(jetstream.WorkerKey(must(s.ns.PartitionOf("w")), events.RankKey{Instance: "w"}))
	later := record("w", lease)
	later.Version = recordVersion + 1
	revision := must(s.bucket.Put(s.ctx, key, must(later.encode())))
	s.until("the worker is dropped", func() bool { return s.know("other") })
	if entry := must(s.bucket.Latest(s.ctx, key)); entry.Revision != revision || s.wasCleared("w") {
		t.Errorf("revision %d has %s; cleared: %v", entry.Revision, entry.Value, s.wasCleared("w"))
	}
	s.shim("w", time.Hour)
	s.until("the worker is registered again", func() bool { return s.know("other", "w") })
}

// TestExpiredAreNamed: both nodes list the expired leases with the last holders, until the shim returns, an operator
// removes the worker, or an hour has passed. A drained worker is not listed.
func TestExpiredAreNamed(t *testing.T) {
	s := newSite(t)
	named := func(now time.Time, names ...events.WorkerID) {
		t.Helper()
		for i, r := range s.nodes {
			var list []api.ExpiredWorker
			s.until(fmt.Sprintf("node %d names %v", i, names), func() bool {
				var got []events.WorkerID
				list = r.Expired(now)
				for _, w := range list {
					got = append(got, w.Instance)
				}
				return slices.Equal(got, names)
			})
			for _, w := range list {
				if l := w.Lease; w.Model != "m" || l.PID != os.Getpid() || l.Expires.Sub(l.Renewed) != MinLease ||
					l.State != string(Expired) {
					t.Errorf("node %d: %+v", i, w)
				}
			}
		}
	}
	end, drain := s.shim("drained", MinLease), true
	s.until("a worker is drained", func() bool {
		_, err := s.nodes[0].Change(s.ctx, &api.WorkerChange{Instance: "drained", Drain: &drain})
		return err == nil
	})
	end()
	for _, name := range []string{"back", "gone"} {
		s.shim(name, MinLease)()
	}
	named(time.Now(), "back", "gone")
	if !s.wasCleared("back") || !s.wasCleared("gone") {
		t.Error("a rank was removed before the end of its incarnation")
	}
	s.shim("back", time.Hour)
	named(time.Now(), "gone")
	s.until("the worker is schedulable again", func() bool {
		r := s.nodes[1].Pool("m").Rank(events.RankKey{Instance: "back"})
		return r != nil && r.Record.State == api.WorkerSchedulable
	})
	if _, err := s.nodes[0].Remove(s.ctx, "never"); code(err) != api.CodeUnknownWorker {
		t.Error(err)
	}
	must(s.nodes[1].Remove(s.ctx, "gone"))
	named(time.Now())

	s.shim("late", MinLease)()
	named(time.Now(), "late")
	named(time.Now().Add(2 * time.Hour))
}

// TestUnseenExpiry: a watch merges several changes of a record, so a node may see only the deletion, or after a break
// only the missing record. The rank is listed nevertheless.
func TestUnseenExpiry(t *testing.T) {
	now := time.Now()
	r := New(Config{Namespace: &jetstream.Namespace{}})
	var entries []jetstream.Entry
	for i, name := range []string{"deleted", "lives", "missing"} {
		held := record(name, MinLease)
		entries = append(entries, jetstream.Entry{Key: must(jetstream.WorkerKey(0, held.Key())), Value: must(held.encode()),
			Revision: uint64(i + 1), Written: now})
	}
	r.apply(jetstream.Watched{Anew: true})
	r.apply(jetstream.Watched{Entries: entries, Current: true})
	r.apply(jetstream.Watched{Entries: []jetstream.Entry{{Key: entries[0].Key, Deleted: true, Revision: 4}}})
	r.apply(jetstream.Watched{Anew: true})
	r.apply(jetstream.Watched{Entries: entries[1:2], Current: true})
	got := r.Expired(now)
	if len(got) != 2 || got[0].Instance != "deleted" || got[1].Instance != "missing" {
		t.Fatalf("named are %+v", got)
	}
	for _, w := range got {
		if w.Lease.State != string(Expired) || !w.Lease.Renewed.Equal(now) {
			t.Errorf("%+v", w)
		}
	}
	r.apply(jetstream.Watched{Entries: entries[2:]})
	if got = r.Expired(now); len(got) != 1 || got[0].Instance != "deleted" {
		t.Errorf("after a return the list has %+v", got)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// TestAFailedWatchInterruptsThePass: a write into a deleted bucket does not delay the bucket's recreation.
func TestAFailedWatchInterruptsThePass(t *testing.T) {
	r := New(Config{})
	pass, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.interrupt = cancel
	r.apply(jetstream.Watched{Err: errors.New("stream not found")})
	if pass.Err() == nil || len(r.hurry) != 1 {
		t.Errorf("the pass: %v, %d wake-ups", pass.Err(), len(r.hurry))
	}
}
