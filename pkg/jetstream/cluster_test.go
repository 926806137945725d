package jetstream

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/child"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// clusterEnv makes the test binary a server of a cluster, with these settings in JSON, until its input ends.
const clusterEnv = "KVATLAS_TEST_CLUSTER"

// clusterServer has the settings of a server of a cluster.
type clusterServer struct {
	Name                  string
	Port, Routes, Monitor int // ports
	Dir                   string
	Cluster               []string // route addresses of all servers
	process               *exec.Cmd
	input                 io.Closer
}

// cluster has three servers, in separate processes: nats-server 2.15.3 has a data race between a stream's leader and
// the replication (jetstream_batching.go, commit, and jetstream_cluster.go, applyStreamMsgOp), and the race detector
// would fail the test. All servers must have routes to all from the start. A leader exists after some five seconds.
type cluster struct{ servers []*clusterServer }

// serveInCluster runs a server of a cluster until the process's input ends.
func serveInCluster(settings string) int {
	var c clusterServer
	if err := json.Unmarshal([]byte(settings), &c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	opts := &server.Options{
		ServerName: c.Name, Host: "127.0.0.1", Port: c.Port, HTTPHost: "127.0.0.1", HTTPPort: c.Monitor, NoSigs: true,
		JetStream: true, StoreDir: c.Dir, JetStreamMaxStore: 1 << 40, JetStreamMaxMemory: 1 << 30,
		Cluster: server.ClusterOpts{Name: "test", Host: "127.0.0.1", Port: c.Routes},
	}
	for _, addr := range c.Cluster {
		opts.Routes = append(opts.Routes, &url.URL{Scheme: "nats", Host: addr})
	}
	s, err := server.NewServer(opts)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	go s.Start()
	_, _ = io.Copy(io.Discard, os.Stdin)
	s.Shutdown()
	s.WaitForShutdown()
	return 0
}

func startCluster(t testing.TB) *cluster {
	t.Helper()
	cl, routes := &cluster{}, []string{}
	for range 3 {
		routes = append(routes, loopback.Reserve(t))
	}
	for i, addr := range routes {
		cl.servers = append(cl.servers, &clusterServer{Name: fmt.Sprint("n", i), Port: portOf(t, loopback.Reserve(t)),
			Routes: portOf(t, addr), Monitor: portOf(t, loopback.Reserve(t)), Dir: t.TempDir(), Cluster: routes})
	}
	t.Cleanup(func() {
		for i := range cl.servers {
			cl.stop(t, i)
		}
	})
	for i := range cl.servers {
		cl.start(t, i)
	}
	for i := range cl.servers {
		cl.await(t, i)
	}
	// A leader without all servers would refuse streams with three replicas.
	for ctx := ctxFor(t); !slices.ContainsFunc(cl.servers, cl.leads); {
		if !loop.Wait(ctx, 10*time.Millisecond) {
			t.Fatal("no leader has all servers")
		}
	}
	return cl
}

// attemptOfCluster is the time of an attempt. A server may forget a request while leaders change.
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
	c := cl.servers[i]
	settings, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	c.process = exec.Command(os.Args[0])
	c.process.Env = append(os.Environ(), clusterEnv+"="+string(settings))
	c.process.SysProcAttr = child.DiesWithUs()
	if c.input, err = c.process.StdinPipe(); err == nil {
		err = c.process.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
}

// await returns when a server accepts clients.
func (cl *cluster) await(t testing.TB, i int) {
	t.Helper()
	for ctx := ctxFor(t); ; {
		if conn, err := net.Dial("tcp", fmt.Sprint("127.0.0.1:", cl.servers[i].Port)); err == nil {
			conn.Close()
			return
		}
		if !loop.Wait(ctx, 10*time.Millisecond) {
			t.Fatalf("server %d does not accept clients", i)
		}
	}
}

// leads reports whether a server is the leader of the cluster's metadata, and both others are its replicas.
func (cl *cluster) leads(c *clusterServer) bool {
	reply, err := http.Get(fmt.Sprintf("http://127.0.0.1:%d/jsz", c.Monitor))
	if err != nil {
		return false
	}
	defer reply.Body.Close()
	var info struct {
		Meta *server.MetaClusterInfo `json:"meta_cluster"`
	}
	return json.NewDecoder(reply.Body).Decode(&info) == nil && info.Meta != nil && info.Meta.Leader == c.Name &&
		len(info.Meta.Replicas) == len(cl.servers)-1
}

// stop shuts a server down, if it runs.
func (cl *cluster) stop(t testing.TB, i int) {
	t.Helper()
	c := cl.servers[i]
	if c.process == nil {
		return
	}
	c.input.Close()
	if err := c.process.Wait(); err != nil {
		t.Logf("server %d: %v", i, err) // a race within nats-server exits with 66
	}
	c.process = nil
}

// url returns the address for clients.
func (c *clusterServer) url() string { return fmt.Sprint("nats://127.0.0.1:", c.Port) }

func (cl *cluster) urls() (urls []string) {
	for _, c := range cl.servers {
		urls = append(urls, c.url())
	}
	return urls
}

// world is a separate namespace with three replicas.
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
	if err := w.c.call(w.ctx, "step down", "STREAM.LEADER.STEPDOWN."+w.ns.name.Stream(0), nil, nil); err != nil {
		w.t.Fatal(err)
	}
}

// TestCluster repeats tests with replicas and changing leaders.
func TestCluster(t *testing.T) {
	if testing.Short() {
		t.Skip("three servers need ten seconds; run without -short")
	}
	t.Parallel()
	cl := startCluster(t)
	var replicated testkit.Group // these tests need all servers
	replicated.Run(t, "replicas stay", func(t *testing.T) {
		w := cl.world(t, "replicas")
		if _, err := w.ns.EnsureSnapshots(w.ctx, BucketConfig{}); err != nil {
			t.Fatal(err)
		}
		ns, err := JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "replicas"}) // zero keeps the replicas
		if err != nil {
			t.Fatal(err)
		}
		if err := ns.EnsureStreams(w.ctx, LogConfig{}); err != nil {
			t.Fatal(err)
		}
		if _, err := ns.EnsureSnapshots(w.ctx, BucketConfig{}); err != nil {
			t.Fatal(err)
		}
		for _, stream := range []string{Names("replicas").Stream(0), BucketStream(Names("replicas").MetaBucket()),
			BucketStream(Names("replicas").SnapshotBucket())} {
			if a, err := w.c.streamInfo(w.ctx, stream); err != nil || a.Config.Replicas != 3 {
				t.Errorf("%s: %+v, %v", stream, a, err)
			}
		}
	})
	replicated.Run(t, "replicas are raised", func(t *testing.T) {
		ctx, c := ctxFor(t), connect(t, ConnOptions{URLs: cl.urls(), AttemptTimeout: attemptOfCluster})
		for _, replicas := range []int{1, 3} {
			ns, err := JoinNamespace(ctx, c, NamespaceConfig{Name: "raised", Partitions: 1, Replicas: replicas})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := ns.EnsureNodes(ctx, time.Hour); err != nil {
				t.Fatal(err)
			}
			for _, bucket := range []string{Names("raised").MetaBucket(), Names("raised").NodesBucket()} {
				a, err := c.streamInfo(ctx, BucketStream(bucket))
				if err != nil || a.Config.Replicas != replicas {
					t.Errorf("%s with %d replicas wanted: %+v, %v", bucket, replicas, a, err)
				}
			}
		}
	})
	replicated.Run(t, "publishers race", func(t *testing.T) {
		for i, n := range []int{1, 3} {
			cl.world(t, fmt.Sprint("race-", i)).publishersRace(n)
		}
	})
	replicated.Run(t, "writers at random", func(t *testing.T) {
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
	replicated.Run(t, "own last message", func(t *testing.T) {
		took := cl.world(t, "own").ownIsNeverOld(cl, 60)
		slices.Sort(took)
		t.Logf("median %v, slowest %v", took[len(took)/2], took[len(took)-1])
	})
	replicated.Wait()
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
		// A purge on every replica.
		w.purge(50)
		w.stepDown()
		step()
		// One server stops and starts again. Messages published meanwhile are in the log.
		for i := range cl.servers {
			cl.stop(t, i)
			step()
			cl.start(t, i)
			cl.await(t, i)
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
