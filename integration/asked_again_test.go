package integration

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// TestAskedAgain checks that clients' queries are answered during the kill of the serving node and during a restart of
// the NATS server.
func TestAskedAgain(t *testing.T) {
	t.Parallel()
	const workers, blocks = 64, 64 // enough workers for every partition, as AwaitAnnounced requires
	addr, data := loopback.Reserve(t), filepath.Join(t.TempDir(), "data")
	nats := func() *harness.Process {
		p := harness.Start(t, "nats-server", "-js", "-sd", data, "-a", "127.0.0.1", "-p",
			addr[strings.LastIndex(addr, ":")+1:])
		p.WaitFor(`Server is ready`)
		return p
	}
	server := nats()
	nodes := map[string]*harness.Process{}
	for _, id := range []string{"a", "b", "c"} {
		nodes[id] = harness.Start(t, "indexer", "serve", "--nats", addr, "--node-id", id, "--partition-replicas", "2",
			"--partitions", "8", "--http-listen", "")
	}
	for _, p := range nodes {
		p.WaitFor(`msg=ready`)
	}
	ctx := harness.Context(t)
	var mu sync.Mutex
	again := map[string]int{}
	conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{"nats://" + addr}, Wait: true})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	askedAgain := func(why string) int {
		mu.Lock()
		defer mu.Unlock()
		return again[why]
	}
	ns, err := jetstream.OpenNamespace(ctx, conn, "default")
	if err != nil {
		t.Fatal(err)
	}
	event := events.Event{Kind: events.Stored, Tier: events.Device}
	for i := range blocks {
		event.Locals, event.Blocks = append(event.Locals, events.LocalHash(1000+i)), append(event.Blocks,
			events.BlockHash(1+i))
	}
	for w := range workers {
		harness.PublishAs(t, ctx, ns, events.WorkerID(fmt.Sprint("w", w)), &events.Batch{Incarnation: 1, FirstID: 1,
			Model: "m", BlockSize: 4, Events: []events.Event{event}})
	}
	harness.AwaitAnnounced(t, ctx, ns, "m", len(nodes)) // only then all nodes have workers without leases
	asker := harness.Client(t, conn, "default", client.Options{Absent: harness.Patience, AskedAgain: func(why string) {
		mu.Lock()
		defer mu.Unlock()
		again[why]++
	}})
	// find sends a query with a long deadline, so that only permanent faults fail, and checks the answer.
	find := func() (whole bool, err error) {
		within, cancel := context.WithTimeout(ctx, harness.Patience)
		defer cancel()
		q := api.Query{Model: "m"}
		for _, l := range event.Locals {
			q.Hashes = append(q.Hashes, uint64(l))
		}
		a, err := asker.Find(within, &q)
		if err != nil {
			return false, err
		}
		if a.Complete && len(a.Workers) != workers {
			return false, fmt.Errorf("%d workers of %d in a complete answer", len(a.Workers), workers)
		}
		for _, o := range a.Workers {
			if o.Device != blocks {
				return false, fmt.Errorf("the answer has %s with %d blocks of %d", o.Instance, o.Device, blocks)
			}
		}
		return a.Complete, nil
	}
	settled := func(ids ...string) {
		t.Helper()
		for _, id := range ids {
			node := harness.NodeClient(t, conn, id)
			harness.Eventually(t, fmt.Sprintf("%s has %v with two replicas of all partitions", id, ids),
				func() (bool, string) {
					status, err := node.Status(ctx)
					if err != nil {
						return false, err.Error()
					}
					return len(status.Cluster.Nodes) == len(ids) &&
						len(status.Cluster.Short) == 0, fmt.Sprintf("%+v", status.Cluster)
				})
		}
		harness.Eventually(t, "answers are whole", func() (bool, string) {
			whole, err := find()
			return whole, fmt.Sprint(err)
		})
	}
	settled("a", "b", "c")

	// The node is paused, so that it has queries in progress, and then killed.
	if err := nodes["a"].Cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	const questions = 60
	before := askedAgain(client.AgainSlow)
	var asking sync.WaitGroup
	var sent, answered, partial atomic.Int64
	ask := func() {
		sent.Add(questions)
		for range questions {
			asking.Go(func() {
				whole, err := find()
				if err != nil {
					t.Errorf("a node is killed: %v", err)
				}
				if answered.Add(1); !whole {
					partial.Add(1)
				}
			})
		}
	}
	harness.Eventually(t, "a query is in progress on the paused node", func() (bool, string) {
		if answered.Load() == sent.Load() {
			ask()
		}
		return askedAgain(client.AgainSlow) > before, fmt.Sprintf("%d of %d answered", answered.Load(), sent.Load())
	})
	enough := answered.Load() + questions/4
	ask()
	testkit.Eventually(t, "the other nodes answer", func() bool { return answered.Load() >= enough || t.Failed() })
	nodes["a"].Kill()
	asking.Wait()
	t.Logf("a node is killed: %d of %d queries answered in part; retries: %v", partial.Swap(0), sent.Load(), again)
	settled("b", "c")

	// The NATS server restarts during queries of clients.
	restarting, stop := context.WithCancel(ctx)
	var asked atomic.Int64
	for range 4 {
		asking.Go(func() {
			harness.Load(restarting, func(int) {
				whole, err := find()
				if err != nil {
					t.Errorf("the NATS server restarts: %v", err)
					stop()
					return
				}
				if asked.Add(1); !whole {
					partial.Add(1)
				}
			})
		})
	}
	more := func() {
		enough := asked.Load() + 200
		testkit.Eventually(t, "200 more queries", func() bool { return asked.Load() >= enough || t.Failed() })
	}
	for range 2 {
		more()
		server.Kill()
		server = nats()
	}
	more()
	stop()
	asking.Wait()
	t.Logf("%d queries during two restarts of the NATS server, %d answered in part; retries: %v",
		asked.Load(), partial.Load(), again)
	if askedAgain(client.AgainLost) == 0 {
		t.Error("no client lost a connection")
	}
}
