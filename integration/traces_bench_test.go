package integration

import (
	"flag"
	"fmt"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

var (
	tracesBefore  = flag.String("traces.before", "", "an indexer to compare with in BenchmarkTraces, without traces")
	tracesQueries = flag.Int("traces.queries", 4000, "queries of each arm in each round of BenchmarkTraces")
)

// BenchmarkTraces measures the cost of a query on an indexer without traces, with traces of a hundredth of the queries,
// and with traces of all queries. See compare.
func BenchmarkTraces(b *testing.B) {
	collector := harness.StartCollector(b)
	prompt := harness.Tokens(1, 64*harness.BlockSize)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		b.Fatal(err)
	}
	query := &api.Query{Model: "m", Tokens: prompt}
	var arms []*arm
	for _, name := range []string{"off", "before", "1%", "100%"} {
		args := []string{"serve", "--data", b.TempDir(), "--nats-listen", "127.0.0.1:0", "--http-listen", "127.0.0.1:0",
			"--partitions", "4"}
		program := "indexer"
		switch name {
		case "before":
			if program = *tracesBefore; program == "" {
				continue
			}
		case "1%", "100%":
			ratio := map[string]string{"1%": "0.01", "100%": "1"}[name]
			args = append(args, "--otlp-endpoint", collector.URL, "--otlp-headers-file", collector.Headers, "--trace-sample",
				ratio)
		}
		p := harness.Start(b, program, args...)
		nats := p.WaitFor(`in this process" listen=(\S+)`)[1]
		p.WaitFor(`msg=ready`)
		ns := harness.OpenNamespace(b, b.Context(), nats)
		for w := range 8 {
			e := events.Event{Kind: events.Stored, Tier: events.Device,
				Locals: hasher.Hash(nil, prompt[:(w+1)*8*harness.BlockSize])}
			for i := range e.Locals {
				e.Blocks = append(e.Blocks, events.BlockHash(i+1))
			}
			harness.PublishAs(b, b.Context(), ns, events.WorkerID(fmt.Sprint("w", w)), &events.Batch{Incarnation: 1, FirstID: 1,
				Model: "m", BlockSize: harness.BlockSize, Events: []events.Event{e}})
		}
		ask, err := client.NATS(connectNATS(b, "nats://"+nats), "default", client.Options{})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(ask.Close)
		harness.Eventually(b, "all workers are registered", func() (bool, string) {
			answer, err := ask.Find(b.Context(), query)
			return err == nil && len(answer.Workers) == 8, fmt.Sprint(answer, err)
		})
		arms = append(arms, &arm{name: name, pid: p.Cmd.Process.Pid, send: func(queries int) {
			var all sync.WaitGroup
			const clients = 8
			for range clients {
				all.Go(func() {
					for range queries / clients {
						if answer, err := ask.Find(b.Context(), query); err != nil || len(answer.Workers) != 8 {
							b.Errorf("%s: %+v, %v", name, answer, err)
							return
						}
					}
				})
			}
			all.Wait()
		}})
	}
	compare(b, arms, *tracesQueries)
}
