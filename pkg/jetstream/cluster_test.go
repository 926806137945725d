package jetstream

import (
	"fmt"
	"net"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// cluster is three servers in this process. All must have routes to each other from the start, and a leader is
// there after some five seconds.
type cluster struct {
	servers []*server.Server
	opts    []*server.Options
}

func startCluster(t testing.TB) *cluster {
	t.Helper()
	var addrs []string
	var routes []*url.URL
	for range 3 {
		addr := loopback.Reserve(t)
		addrs = append(addrs, addr)
		routes = append(routes, &url.URL{Scheme: "nats", Host: addr})
	}
	cl := &cluster{}
	for i, addr := range addrs {
		cl.opts = append(cl.opts, &server.Options{
			ServerName: fmt.Sprint("n", i), Host: "127.0.0.1", Port: portOf(t, loopback.Reserve(t)), NoSigs: true,
			JetStream: true, StoreDir: t.TempDir(), JetStreamMaxStore: 1 << 40, JetStreamMaxMemory: 1 << 30,
			Cluster: server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: portOf(t, addr)}, Routes: routes,
		})
		cl.servers = append(cl.servers, nil)
	}
	t.Cleanup(func() {
		for i := range cl.servers {
			cl.stop(i)
		}
	})
	for i := range cl.servers {
		cl.start(t, i)
	}
	for _, s := range cl.servers {
		if !s.ReadyForConnections(patience) {
			t.Fatal("the cluster is not ready")
		}
	}
	// A leader that does not know all the others yet would refuse streams with three replicas.
	complete := func(s *server.Server) bool { return len(s.JetStreamClusterPeers()) == len(cl.servers) }
	for ctx := ctxFor(t); !slices.ContainsFunc(cl.servers, complete); {
		if !loop.Wait(ctx, 10*time.Millisecond) {
			t.Fatal("no leader knows all servers")
		}
	}
	return cl
}

// attemptOfCluster is how long a request waits that a server may have forgotten, as while leaders change.
const attemptOfCluster = 2 * time.Second

func portOf(t testing.TB, addr string) (port int) {
	t.Helper()
	_, text, err := net.SplitHostPort(addr)
	if err == nil {
		port, err = strconv.Atoi(text)
	}
	if err != nil {
		t.Fatal(err)
	}
	return port
}

func (cl *cluster) start(t testing.TB, i int) {
	t.Helper()
	s, err := server.NewServer(cl.opts[i])
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	cl.servers[i] = s
}

func (cl *cluster) stop(i int) {
	if s := cl.servers[i]; s != nil {
		s.Shutdown()
		s.WaitForShutdown()
		cl.servers[i] = nil
	}
}

func (cl *cluster) urls() []string {
	var urls []string
	for _, s := range cl.servers {
		urls = append(urls, s.ClientURL())
	}
	return urls
}

// world is a namespace of its own with three replicas.
func (cl *cluster) world(t testing.TB, name string) *world {
	t.Helper()
	w := &world{t: t, ctx: ctxFor(t)}
	w.c = connect(t, ConnOptions{URLs: cl.urls(), AttemptTimeout: attemptOfCluster})
	var err error
	if w.ns, err = JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: name, Partitions: 1, Replicas: 3}); err != nil {
		t.Fatal(err)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{}); err != nil {
		t.Fatal(err)
	}
	return w
}

// stepDown makes another server the leader of the log.
func (w *world) stepDown() {
	w.t.Helper()
	if err := w.c.call(w.ctx, "step down", "STREAM.LEADER.STEPDOWN."+StreamName(w.ns.name, 0), nil, nil); err != nil {
		w.t.Fatal(err)
	}
}

// TestCluster is what must also hold with replicas and changing leaders.
func TestCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("three servers need ten seconds; run without -short")
	}
	t.Parallel()
	cl := startCluster(t)
	t.Run("replicas stay", func(t *testing.T) {
		w := cl.world(t, "replicas")
		if _, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{}); err != nil {
			t.Fatal(err)
		}
		ns, err := JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "replicas"}) // who says nothing changes nothing
		if err != nil {
			t.Fatal(err)
		}
		if err := ns.EnsureStreams(w.ctx, LogConfig{}); err != nil {
			t.Fatal(err)
		}
		if _, err := ns.EnsureSnapshots(w.ctx, BucketConfig{}); err != nil {
			t.Fatal(err)
		}
		for _, stream := range []string{StreamName("replicas", 0), bucketStream(metaBucket("replicas")),
			bucketStream(snapshotBucket("replicas"))} {
			if a, err := w.c.streamInfo(w.ctx, stream); err != nil || a.Config.Replicas != 3 {
				t.Errorf("%s: %+v, %v", stream, a, err)
			}
		}
	})
	t.Run("replicas are raised", func(t *testing.T) {
		ctx, c := ctxFor(t), connect(t, ConnOptions{URLs: cl.urls(), AttemptTimeout: attemptOfCluster})
		for _, replicas := range []int{1, 3} {
			ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "raised", Partitions: 1, Replicas: replicas})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := ns.EnsureNodes(ctx, time.Hour); err != nil {
				t.Fatal(err)
			}
			for _, bucket := range []string{metaBucket("raised"), nodesBucket("raised")} {
				a, err := c.streamInfo(ctx, bucketStream(bucket))
				if err != nil || a.Config.Replicas != replicas {
					t.Errorf("%s, of which %d replicas are wanted: %+v, %v", bucket, replicas, a, err)
				}
			}
		}
	})
	t.Run("publishers race", func(t *testing.T) {
		for i, n := range []int{1, 3} {
			cl.world(t, fmt.Sprint("race-", i)).publishersRace(n)
		}
	})
	t.Run("writers at random", func(t *testing.T) {
		for i, atomic := range []bool{true, false} {
			w := cl.world(t, fmt.Sprint("writers-", i))
			b, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{})
			if err != nil {
				t.Fatal(err)
			}
			b.atomic = atomic
			w.writersAtRandom(b, 10)
		}
	})
	t.Run("own last message", func(t *testing.T) {
		took := cl.world(t, "own").ownIsNeverOld(cl, 60)
		slices.Sort(took)
		t.Logf("median %v, slowest %v", took[len(took)/2], took[len(took)-1])
	})
	t.Run("leaders change", func(t *testing.T) {
		w := cl.world(t, "leaders")
		p := w.publisher(w1)
		rd := startReaderWith(t, w.ns, ReaderConfig{Watch: 100 * time.Millisecond})
		rd.notice(CaughtUp{0})
		next := 1
		step := func() {
			for _, n := range []int{1, 5, 50} {
				w.publish(p, next, n)
				rd.messages(events.StreamSeq(next), events.StreamSeq(next+n-1))
				next += n
			}
		}
		step()
		for range 3 {
			w.stepDown()
			step()
		}
		// A purge, on every replica.
		w.purge(50)
		w.stepDown()
		step()
		// One server goes and comes back; what is published meanwhile is there.
		for i := range cl.servers {
			cl.stop(i)
			step()
			cl.start(t, i)
			if !cl.servers[i].ReadyForConnections(patience) {
				t.Fatal("the server did not come back")
			}
		}
		step()
		rd.r.Stop()
		after := rd.at
		if after.Seq != w.info().Last {
			t.Fatalf("read to %d, the log ends at %d", after.Seq, w.info().Last)
		}
		startReader(t, w.ns, after).notice(CaughtUp{after.Seq})
		startReader(t, w.ns, Position{}).notice(Truncated{Wanted: 1, First: 50})
	})
}
