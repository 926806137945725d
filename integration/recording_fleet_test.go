package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/operate/recording"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// TestRecordingEqualsFunnel sends concurrent requests to three recording nodes with eight engines. The sums of the
// recording equal the sums of the funnel: requests, reports, and the tokens of prompts, of the choices, and of the
// reported reuse.
func TestRecordingEqualsFunnel(t *testing.T) {
	t.Parallel()
	const size, room, workers, clients, each = harness.BlockSize, 60, 8, 6, 60
	nats := harness.StartNATS(t)
	var asks []*client.Client
	for i := range 3 {
		x := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i), "--partitions", "4",
			"--http-listen", "127.0.0.1:0", "--record")
		http := x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		c := harness.Ask(t, http)
		asks = append(asks, c)
	}
	ctx := harness.Context(t)
	engines := map[events.WorkerID]*enginesim.Engine{}
	for i := range workers {
		name := fmt.Sprint("w", i)
		e, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: size, Capacity: room})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Crash)
		engines[events.WorkerID(name)] = e
		harness.StartSimShim(t, e, nats, name)
	}
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d may choose all workers", i), func() (bool, string) {
			p, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: harness.Tokens(1, size), Explain: true}})
			return err == nil && p.Candidates == workers, fmt.Sprintf("%+v %v", p, err)
		})
	}
	var load sync.WaitGroup
	for of := range clients {
		load.Go(func() {
			r := rand.New(rand.NewPCG(5, uint64(of)))
			for i := range each {
				ask, id := asks[r.IntN(len(asks))], fmt.Sprintf("r-%d-%d", of, i)
				tokens := append(harness.Tokens(1000*r.IntN(6), size*(1+r.IntN(12))), harness.Tokens(100_000*(of+1)+100*i,
					r.IntN(3*size))...)
				s, err := ask.Select(ctx, &api.SelectRequest{RequestID: id, Book: true, Query: api.Query{Model: "m",
					BlockSize: size, Tokens: tokens}})
				if err != nil {
					t.Error(err)
					return
				}
				hit, err := engines[s.Worker].Serve(tokens, nil)
				if err == nil && i%3 > 0 {
					err = ask.Report(ctx, &api.Report{RequestID: id, CachedTokens: uint64(hit * size)})
				}
				if err == nil {
					err = ask.Free(ctx, "m", id)
				}
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	load.Wait()
	harness.Eventually(t, "the recording has all requests, and its sums are the funnel's", func() (bool, string) {
		f, err := asks[1].Funnel(t.Context(), &api.FunnelRequest{Model: "m", Since: "30m"})
		r := harness.Run(t, "indexer", "record", "export", "--nats", nats, "--format", "json", "--model", "m")
		if err != nil || r.Code != 0 {
			return false, fmt.Sprint(err, r.Code, r.Stderr)
		}
		requests, reported, prompts, selected, reused, freed := uint64(0), uint64(0), uint64(0), uint64(0), uint64(0), 0
		nodes := map[string]bool{}
		for line := range strings.Lines(r.Stdout) {
			var l recording.Line
			if err := json.Unmarshal([]byte(line), &l); err != nil {
				t.Fatal(err)
			}
			requests, prompts, nodes[l.Node] = requests+1, prompts+l.InputLength, true
			held := uint64(l.Choice.Device * size)
			selected += held
			if l.ReportedTokens != nil { // the funnel counts at most the blocks that the node had
				reported, reused = reported+1, reused+min(*l.ReportedTokens, held)
			}
			if l.Freed {
				freed++
			}
		}
		last := f.Steps[len(f.Steps)-1]
		return requests == clients*each && f.Requests == requests && f.Routed == requests && f.Reported == reported &&
				reported == clients*each*2/3 && f.Steps[0].Tokens == prompts &&
				f.Steps[3].Tokens == selected && last.Tokens == reused && reused > 0 &&
				freed == clients*each && len(nodes) == len(asks),
			fmt.Sprintf("%d requests, %d reported, %d tokens of prompts, %d reused, %d freed, nodes %v; funnel: %d requests, %d routed, %d reported, steps %+v", requests,
				reported, prompts, reused, freed, nodes, f.Requests, f.Routed, f.Reported, f.Steps)
	})
}
