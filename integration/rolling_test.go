package integration

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	rollingHoldings = flag.Int("rolling.holdings", 64_000, "holdings in TestRollingRestart's index")
	rollingRate     = flag.Int("rolling.rate", 100, "queries per second in TestRollingRestart")
)

// TestRollingRestart restarts three nodes in sequence, as an upgrade does, during queries at a constant rate. No query
// fails, and no answer is incomplete or wrong.
func TestRollingRestart(t *testing.T) {
	t.Parallel()
	const (
		workers = 32
		block   = 4
		batch   = 500 // blocks
	)
	nats := harness.StartNATS(t)
	serve := func(id string) *harness.Process {
		return harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", id, "--partition-replicas", "2",
			"--partitions", "8", "--http-listen", "127.0.0.1:0", "--drain-timeout", "15m")
	}
	ids := []string{"a", "b", "c"}
	nodes := map[string]*harness.Process{}
	for _, id := range ids {
		nodes[id] = serve(id)
	}
	https := map[string]string{}
	for id, p := range nodes {
		https[id] = p.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		p.WaitFor(`msg=ready`)
	}
	ctx := harness.Context(t)
	ns := harness.OpenNamespace(t, ctx, nats)
	hasher, err := events.NewHasher(block, events.Space{})
	if err != nil {
		t.Fatal(err)
	}

	// All workers' prompts have a common prefix of a different length, followed by unique blocks.
	per := max(2*workers, *rollingHoldings/workers)
	common := hasher.Hash(nil, harness.Tokens(1, workers*block))
	name := func(w int) events.WorkerID { return events.WorkerID(fmt.Sprint("w", w)) }
	places := make([]api.PartitionSeq, ns.Partitions())
	for i := range places {
		places[i].Partition = events.Partition(i)
	}
	for w := range workers {
		locals := append(append([]events.LocalHash{}, common[:w+1]...),
			hasher.Hash(nil, harness.Tokens((w+1)<<24, (per-w-1)*block))...)
		var batches []*events.Batch
		for from := 0; from < per; from += batch {
			e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: locals[from:min(per, from+batch)]}
			if from > 0 {
				e.HasParent, e.Parent = true, events.BlockHash(from)
			}
			for i := range e.Locals {
				e.Blocks = append(e.Blocks, events.BlockHash(from+i+1))
			}
			batches = append(batches, &events.Batch{Incarnation: 1, FirstID: events.EventID(from/batch + 1), Model: "m",
				BlockSize: block, Events: []events.Event{e}})
		}
		at := harness.PublishAs(t, ctx, ns, name(w), batches...)
		places[at.Partition] = at
	}
	// wrong checks the answer for the first n blocks of the common prompt.
	wrong := func(a *api.Answer, n int) error {
		got, err := harness.OnDevice(a)
		if err != nil {
			return err
		}
		for w := range workers {
			if want := uint32(min(n, w+1)); got[name(w)] != want {
				return fmt.Errorf("%s holds %d of %d blocks, the answer has %d", name(w), want, n, got[name(w)])
			}
		}
		return nil
	}
	find := func(c *client.Client, n int, at []api.PartitionSeq) error {
		q := api.Query{Model: "m", MinSeq: at}
		for _, l := range common[:n] {
			q.Hashes = append(q.Hashes, uint64(l))
		}
		within, cancel := context.WithTimeout(ctx, harness.Patience)
		defer cancel()
		a, err := c.Find(within, &q)
		if err != nil {
			return err
		}
		return wrong(a, n)
	}
	one := harness.Client(t, ns.Conn(), "default", client.Options{})
	settled := func() {
		t.Helper()
		harness.Eventually(t, "all is kept by two of three", func() (bool, string) {
			status, err := one.Status(ctx)
			if err != nil {
				return false, err.Error()
			}
			n := 0
			for _, k := range status.Cluster.Nodes {
				n += len(k.Ready)
			}
			return len(status.Cluster.Nodes) == len(ids) && len(status.Cluster.Short) == 0 &&
				n == 2*int(ns.Partitions()), fmt.Sprintf("%+v", status.Cluster)
		})
	}
	settled()
	harness.Eventually(t, "all is applied", func() (bool, string) {
		err := find(one, workers, places)
		return err == nil, fmt.Sprint(err)
	})
	harness.AwaitAnnounced(t, ctx, ns, "m", len(ids))
	for id, addr := range https {
		harness.Eventually(t, id+" has all", func() (bool, string) {
			a, err := harness.FindLocals(addr, common)
			if err == nil {
				err = wrong(&a, workers)
			}
			return err == nil, fmt.Sprint(err)
		})
	}

	asking, stop := context.WithCancel(ctx)
	defer stop()
	const clients = 4
	var all sync.WaitGroup
	var sum harness.Tally
	sum.Failures = map[string]int{}
	var mu sync.Mutex
	begun := time.Now()
	last := begun
	var bad []string
	for i := range clients {
		own := harness.Client(t, harness.OpenNamespace(t, ctx, nats).Conn(), "default", client.Options{})
		rng := rand.New(rand.NewPCG(8, uint64(i)))
		all.Go(func() {
			tick := time.NewTicker(clients * time.Second / time.Duration(*rollingRate))
			defer tick.Stop()
			for {
				select {
				case <-tick.C:
				case <-asking.Done():
					return
				}
				asked := time.Now()
				err := find(own, 1+rng.IntN(workers), nil)
				now := time.Now()
				mu.Lock()
				sum.Asked++
				if err != nil {
					bad = append(bad, fmt.Sprintf("after %v, in %v: %v", asked.Sub(begun), now.Sub(asked), err))
				} else {
					sum.Answered, sum.Complete, sum.Took = sum.Answered+1, sum.Complete+1, append(sum.Took,
						now.Sub(asked))
					sum.Gap, last = max(sum.Gap, now.Sub(last)), now
				}
				mu.Unlock()
			}
		})
	}
	for _, id := range ids {
		told := time.Since(begun)
		nodes[id].Stop()
		stopped := time.Since(begun)
		nodes[id] = serve(id)
		nodes[id].WaitFor(`msg=ready`)
		settled()
		t.Logf("node %s: stop signal after %v, ended after %v, settled after %v", id,
			told.Round(time.Millisecond), stopped.Round(time.Millisecond), time.Since(begun).Round(time.Millisecond))
	}
	stop()
	all.Wait()
	t.Logf("%d holdings: %s", workers*per, &sum)
	for i, b := range bad {
		if i < 10 {
			t.Log(b)
		}
	}
	if len(bad) > 0 || sum.Answered == 0 {
		t.Errorf("%d of %d queries failed or had incomplete or wrong answers", len(bad), sum.Asked)
	}
}
