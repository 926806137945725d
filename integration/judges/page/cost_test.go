//go:build judges

package page

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var cost = flag.Duration("cost", 0, "measure the cost of ten open pages on three nodes with 1,000 workers, for this time each")

// TestCost prints measurements without a judgement, because the figures depend on the machine.
func TestCost(t *testing.T) {
	if *cost == 0 {
		t.Skip("measures only with -cost")
	}
	const workers, watchers, storing = 1000, 10, 20 // number of concurrently storing workers
	nats := harness.StartNATS(t)
	var nodes []*harness.Process
	var addresses []string
	for i := range 3 {
		nodes = append(nodes, harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i+1),
			"--partition-replicas", "2", "--partitions", "8", "--http-listen", "127.0.0.1:0"))
	}
	for _, n := range nodes {
		addresses = append(addresses, n.WaitFor(`HTTP is served" listen=(\S+)`)[1])
		n.WaitFor(`msg=ready`)
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ns := harness.OpenNamespace(t, ctx, nats)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	logs := make([]*shim.StreamLog, workers)
	var published atomic.Int64
	publish := func(i, round int) {
		from := round * 16
		e := events.Event{Kind: events.Stored, Tier: events.Device,
			Locals: hasher.Hash(nil, harness.Tokens(i*1_000_000+round*1000, 16*harness.BlockSize))}
		for b := range 16 {
			e.Blocks = append(e.Blocks, events.BlockHash(1+from+b))
		}
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: events.EventID(1 + round), Model: "m",
			BlockSize: harness.BlockSize, Events: []events.Event{e}})
		if err == nil {
			_, err = logs[i].Publish(ctx, [][]byte{data})
		}
		if err != nil && ctx.Err() == nil {
			t.Error(err)
		}
		published.Add(1)
	}
	for i := range logs {
		logs[i] = shim.NewStreamLog(ns, events.RankKey{Instance: events.WorkerID(fmt.Sprintf("worker-%04d", i))}, nil)
		if _, err := logs[i].Last(ctx); err != nil {
			t.Fatal(err)
		}
		publish(i, 0)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		every := time.NewTicker(100 * time.Millisecond)
		defer every.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			for i := range storing {
				publish((n*storing+i)%workers, 1+n*storing/workers)
			}
			<-every.C
		}
	}()
	used := func(n *harness.Process) time.Duration { // processor time
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", n.Cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+2:]))
		var user, system int64
		fmt.Sscan(words[11], &user)
		fmt.Sscan(words[12], &system)
		return time.Duration(user+system) * 10 * time.Millisecond
	}
	measure := func(what string) {
		var before [3]time.Duration
		for i, n := range nodes {
			before[i] = used(n)
		}
		begun, batches := time.Now(), published.Load()
		time.Sleep(*cost)
		t.Logf("%s: %.0f blocks stored a second", what, 16*float64(published.Load()-batches)/time.Since(begun).Seconds())
		for i, n := range nodes {
			took := used(n) - before[i]
			t.Logf("%s: n%d %.2f %% of a core", what, i+1, 100*float64(took)/float64(time.Since(begun)))
		}
	}
	measure("nobody watches")
	var looks, received atomic.Int64
	for range watchers {
		r, err := http.Get("http://" + addresses[0] + "/v1/watch")
		if err != nil {
			t.Fatal(err)
		}
		defer r.Body.Close()
		go func() {
			lines := bufio.NewReaderSize(r.Body, 1<<20)
			for {
				line, err := lines.ReadSlice('\n')
				received.Add(int64(len(line)))
				if strings.HasPrefix(string(line), "event: fleet") {
					looks.Add(1)
				}
				if err != nil && err != bufio.ErrBufferFull {
					return
				}
			}
		}()
	}
	measure("ten watch the fleet on n1")
	t.Logf("%d updates of the fleet and %d KiB to every page", looks.Load()/watchers, received.Load()/watchers>>10)
	measure("the same again")
	// the requests of the views of prefixes and of the funnel, every five seconds
	asking := func(view string, ask func() error) {
		asked, leave := context.WithCancel(ctx)
		var pages sync.WaitGroup
		for range watchers {
			pages.Go(func() {
				for every := time.NewTicker(5 * time.Second); asked.Err() == nil; {
					if err := ask(); err != nil && asked.Err() == nil {
						t.Error(err)
					}
					select {
					case <-every.C:
					case <-asked.Done():
					}
				}
			})
		}
		measure("and have the view of " + view)
		leave()
		pages.Wait()
	}
	asking("prefixes", func() error {
		var tree api.PrefixTree
		err := harness.HTTPDo(addresses[0], "POST", "/v1/prefixes", api.PrefixesRequest{Model: "m"}, &tree)
		if err == nil && (!tree.Complete || tree.Ranks != workers) {
			err = fmt.Errorf("%d ranks, complete: %v", tree.Ranks, tree.Complete)
		}
		return err
	})
	asking("the funnel", func() error {
		return harness.HTTPDo(addresses[0], "GET", "/v1/funnel?model=m", nil, &api.Funnel{})
	})
	measure("the fleet only, at the end")
	cancel()
	<-ended
}
