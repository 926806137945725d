package node

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	natsjs "github.com/nats-io/nats.go/jetstream"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

const patience = testkit.Patience

// site is one node with a NATS server of its own and one engine with its shim, all real.
type site struct {
	*testing.T
	ctx    context.Context
	dir    string
	addr   string
	server *natsserver.Server
	conn   *jetstream.Conn
	raw    *nats.Conn
	js     natsjs.JetStream
	ns     *jetstream.Namespace
	bucket *jetstream.Bucket
	engine *enginesim.Engine
	prompt []uint32 // the engine's prompt, 4 tokens a block

	node     *Node
	stopNode func()
	stopping chan struct{} // closed at the stop of the node
	mend     func(context.Context) error

	mendBucket func(context.Context) error
	view       func() *cluster.View
	claimed    func(events.WorkerID, string) bool
	index      radix.Config
	interval   time.Duration       // between snapshots
	room       time.Duration       // between measurements of the usage
	blocks     uint64              // blocks after which a snapshot is due earlier; 0: the default
	strict     bool                // the shim clears its rank after an unreadable message
	size       func(string) uint32 // the registered block size of a model; nil: none

	mu     sync.Mutex
	logged []string
	script []string // the actions of the test and the events of the node; see transcript_test.go

	caughtUp chan struct{} // closed after the catch-up that follows a restore, once it is in the script
}

func newSite(t *testing.T) *site {
	t.Helper()
	t.Parallel()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	t.Cleanup(cancel)
	w := &site{T: t, ctx: ctx, dir: t.TempDir(), addr: loopback.Reserve(t), interval: time.Hour,
		room: 100 * time.Millisecond}
	w.startServer()
	t.Cleanup(func() { w.server.Stop() })
	var err error
	w.conn, err = jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + w.addr}, Wait: true})
	w.must(err)
	t.Cleanup(w.conn.Close)
	w.raw, err = nats.Connect("nats://"+w.addr, nats.MaxReconnects(-1), nats.ReconnectWait(20*time.Millisecond),
		nats.Timeout(patience))
	w.must(err)
	t.Cleanup(w.raw.Close)
	w.js, err = natsjs.New(w.raw)
	w.must(err)
	w.ns, err = jetstream.JoinNamespace(ctx, w.conn, jetstream.NamespaceConfig{Name: "test", Partitions: 1})
	w.must(err)
	w.must(w.ns.EnsureStreams(ctx, jetstream.LogConfig{MaxBytes: 16 << 20}))
	w.bucket, err = w.ns.EnsureSnapshots(ctx, jetstream.BucketConfig{})
	w.must(err)
	w.engine, err = enginesim.Start(ctx, enginesim.Config{BlockSize: 4, Capacity: 1000})
	w.must(err)
	t.Cleanup(w.engine.Crash)
	return w
}

func (w *site) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

func (w *site) startServer() {
	w.Helper()
	server, err := natsserver.Start(w.ctx, natsserver.Options{Dir: w.dir, Listen: w.addr,
		SyncInterval: time.Minute})
	w.must(err)
	w.server = server
}

// record adds the event of a log line.
func (w *site) record(format string, args ...any) {
	w.mu.Lock()
	w.logged = append(w.logged, fmt.Sprintf(format, args...))
	w.mu.Unlock()
}

func (w *site) forget() {
	w.mu.Lock()
	w.logged = nil
	w.mu.Unlock()
}

func (w *site) recorded() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return strings.Join(w.logged, "\n")
}

// start starts the node; the previous one must have been stopped.
func (w *site) start() {
	w.Helper()
	w.act("the node starts")
	ready := make(chan struct{})
	w.stopping = make(chan struct{})
	w.node = New(Config{
		ID: "n", Namespace: w.ns, Snapshots: w.bucket, SnapshotInterval: w.interval, SnapshotBlocks: w.blocks,
		Watch:       50 * time.Millisecond,
		ResyncPause: 50 * time.Millisecond, CapacityCheck: w.room, Recreate: w.mend, Index: w.index, View: w.view,
		RecreateSnapshots: w.mendBucket, Claimed: w.claimed,
		BlockSize: w.size,
		Ready:     func() { close(ready) },
		Log:       w.logger(),
	})
	running, cancel := context.WithCancel(w.ctx)
	var done sync.WaitGroup
	done.Go(func() { w.node.Run(running) })
	w.stopNode = sync.OnceFunc(func() { close(w.stopping); cancel(); done.Wait() })
	w.Cleanup(w.stopNode)
	select {
	case <-ready:
	case <-w.ctx.Done():
		w.Fatalf("not ready; events:\n%s", w.recorded())
	}
	w.mu.Lock()
	caughtUp := w.caughtUp
	w.mu.Unlock()
	<-caughtUp // the node is ready slightly before its log line
}

// startShim runs the engine's shim until the returned function is called.
func (w *site) startShim() (stop func()) {
	w.Helper()
	w.act("%s", strings.TrimPrefix(shimStarts, "> "))
	key := events.RankKey{Instance: "w1"}
	conn, err := jetstream.Connect(w.ctx, jetstream.ConnOptions{URLs: []string{"nats://" + w.addr},
		AttemptTimeout: 500 * time.Millisecond, Wait: true})
	w.must(err)
	ns, err := jetstream.OpenNamespace(w.ctx, conn, "test")
	w.must(err)
	server, err := shim.Claim(w.ctx, ns, key, true)
	w.must(err)
	decoder, err := events.NewDecoder(events.DecoderConfig{Engine: events.VLLM, BlockSize: 4})
	w.must(err)
	running, cancel := context.WithCancel(w.ctx)
	done := make(chan error, 1)
	go func() {
		done <- shim.Run(running, shim.Config{
			Engine: w.engine.Endpoint(), Replay: w.engine.Replay(), Identity: shim.Identity{Model: "m", BlockSize: 4},
			Decoder: decoder, Log: shim.NewStreamLog(ns, key, func(error) {}), Control: server, IdleCheck: time.Hour,
			ClearUnreadable: w.strict,
		})
	}()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.Errorf("the shim: %v", err)
		}
		server.Close()
		conn.Close()
	})
	w.Cleanup(stop)
	return stop
}

// grow makes the engine hold n more blocks of the prompt.
func (w *site) grow(n int) {
	w.Helper()
	w.act("the engine stores %d blocks", n)
	for range 4 * n {
		w.prompt = append(w.prompt, uint32(len(w.prompt)+1))
	}
	_, err := w.engine.Serve(w.prompt, nil)
	w.must(err)
}

// awaitAll waits until the node serves, has the whole prompt on the worker, and has no problems.
func (w *site) awaitAll() *api.Status {
	w.Helper()
	var s *api.Status
	testkit.Eventually(w, fmt.Sprintf("the worker has %d blocks", len(w.prompt)/4), func() (bool, string) {
		a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
		if err != nil {
			return false, err.Error()
		}
		if len(a.Workers) == 1 && int(a.Workers[0].Device) > len(w.prompt)/4 {
			w.Fatalf("the worker is credited with absent blocks: %+v", a)
		}
		s, err = w.node.Status(w.ctx)
		w.must(err)
		return len(a.Workers) == 1 && int(a.Workers[0].Device) == len(w.prompt)/4 &&
			s.Partitions[0].State == api.PartitionServing, fmt.Sprintf("%+v; status %+v; events:\n%s", a, s, w.recorded())
	})
	return s
}

func (w *site) snapshot() {
	w.Helper()
	w.act("a snapshot is written")
	if _, err := w.node.Snapshot(w.ctx); err != nil {
		w.Fatal(err)
	}
}

// purge trims the log without the node.
func (w *site) purge(keepFrom events.StreamSeq) {
	w.Helper()
	w.act("a foreign client trims the log")
	s, err := w.js.Stream(w.ctx, jetstream.Names("test").Stream(0))
	w.must(err)
	w.must(s.Purge(w.ctx, natsjs.WithPurgeSequence(uint64(keepFrom))))
}

// expect checks that events were logged.
func (w *site) expect(words ...string) {
	w.Helper()
	logged := w.recorded()
	for _, word := range words {
		if !strings.Contains(logged, word) {
			w.Errorf("no event with %q:\n%s", word, logged)
		}
	}
}

func (w *site) expectNot(word string) {
	w.Helper()
	if logged := w.recorded(); strings.Contains(logged, word) {
		w.Errorf("an event has %q:\n%s", word, logged)
	}
}

// restart ends the node and starts another.
func (w *site) restart() {
	w.Helper()
	w.stopNode()
	w.start()
}
