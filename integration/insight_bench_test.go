package integration

import (
	"fmt"
	"net/http"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
)

// BenchmarkInsight measures the cost of a choice with capacity curves and with sums of tenants, beside an indexer
// without both. See compare. The rate of requests is constant and below the limit of the funnel, so every request is
// recorded.
func BenchmarkInsight(b *testing.B) {
	const size, blocks, tenants, workers = harness.BlockSize, 64, 200, 2
	var arms []*arm
	for _, of := range []struct {
		name  string
		flags []string
	}{
		{"off", []string{"--capacity-samples", "0"}},
		{"capacity", nil},
		{"tenants", []string{"--capacity-samples", "0", "--tenants", "salt"}},
	} {
		x := harness.StartIndexer(b, b.TempDir(), "", of.flags...)
		for w := range workers {
			harness.StartSimShim(b, harness.StartSimEngine(b), x.NATS, fmt.Sprint("w", w))
		}
		ask, err := client.NATS(connectNATS(b, "nats://"+x.NATS), "default", client.Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(ask.Close)
		next := 0
		query := func() *api.SelectRequest {
			next++
			return &api.SelectRequest{Query: api.Query{Model: "m", CacheSalt: fmt.Sprint("tenant-", next%tenants),
				Tokens: append(harness.Tokens(100_000*(next%16), blocks/2*size), harness.Tokens(2_000_000+next, blocks/2*size)...)}}
		}
		harness.Eventually(b, "all workers are registered", func() (bool, string) {
			q := query()
			q.Explain, q.Advisory = true, true
			answer, err := ask.Select(b.Context(), q)
			return err == nil && answer.Candidates == workers, fmt.Sprint(answer, err)
		})
		arms = append(arms, &arm{name: of.name, pid: x.Cmd.Process.Pid,
			send:        func(requests int) { sendSteadily(b, ask, query, requests) },
			allocations: func() float64 { return allocations(b, x.HTTP) }})
	}
	compare(b, arms, 4000)
}

// sendSteadily sends requests at a constant rate. A request waits for no earlier answer.
func sendSteadily(b *testing.B, ask *client.Client, query func() *api.SelectRequest, requests int) {
	const rate = 1000 // per second; the funnel records 100,000 blocks per second
	var all sync.WaitGroup
	defer all.Wait()
	tick := time.NewTicker(time.Second / rate)
	defer tick.Stop()
	for range requests {
		<-tick.C
		q := query()
		all.Go(func() {
			if _, err := ask.Select(b.Context(), q); err != nil {
				b.Error(err)
			}
		})
	}
}

var mallocs = regexp.MustCompile(`(?m)^go_memstats_mallocs_total (\S+)$`)

// allocations returns the number of allocations of an indexer since its start, from its metrics.
func allocations(b *testing.B, address string) float64 {
	_, text, err := harness.Request(address, http.MethodGet, "/metrics", "")
	found := mallocs.FindStringSubmatch(text)
	if err != nil || found == nil {
		b.Fatalf("no number of allocations: %v", err)
	}
	n, err := strconv.ParseFloat(found[1], 64)
	if err != nil {
		b.Fatal(err)
	}
	return n
}
