//go:build judges

package page

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/shim"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var cost = flag.Duration("cost", 0, "measure what ten watchers cost at 1,000 workers, for so long each")

// TestCost measures; nothing of it is judged, as it is a matter of the machine.
func TestCost(t *testing.T) {
	if *cost == 0 {
		t.Skip("measures only with -cost")
	}
	const workers, watchers, storing = 1000, 10, 20 // workers that store at each moment
	x := harness.StartIndexer(t, t.TempDir(), "")
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	ns := harness.OpenNamespace(t, ctx, x.NATS)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	logs := make([]*shim.StreamLog, workers)
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
	used := func() time.Duration { // processor time of the indexer
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", x.Cmd.Process.Pid))
		if err != nil {
			t.Fatal(err)
		}
		words := strings.Fields(string(text[strings.LastIndexByte(string(text), ')')+2:]))
		var user, system int64
		fmt.Sscan(words[11], &user)
		fmt.Sscan(words[12], &system)
		return time.Duration(user+system) * 10 * time.Millisecond
	}
	measure := func(what string) time.Duration {
		before := used()
		time.Sleep(*cost)
		took := used() - before
		t.Logf("%s: %v in %v, %.2f %% of one core", what, took, *cost, 100*float64(took)/float64(*cost))
		return took
	}
	alone := measure("without watchers")
	var events, received atomic.Int64
	for range watchers {
		r, err := http.Get("http://" + x.HTTP + "/v1/watch")
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
					events.Add(1)
				}
				if err == io.EOF || err != nil && err != bufio.ErrBufferFull {
					return
				}
			}
		}()
	}
	with := measure("with ten watchers")
	t.Logf("watchers: %.2f %% of one core more; %d fleet events and %d KiB to each", 100*float64(with-alone)/float64(*cost),
		events.Load()/watchers, received.Load()/watchers>>10)
	measure("with ten watchers, again")
	cancel()
	<-ended
}
