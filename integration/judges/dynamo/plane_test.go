//go:build judges

package dynamo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// plane is a process of Dynamo with a publisher on the event plane for two ranks, the engines of the publishers, and an
// indexer.
type plane struct {
	t         *testing.T
	discovery string // the folder, or the URL of etcd
	workers   *pyenv.DynamoWorkers
	engines   [2]*enginesim.Engine // by rank
	indexer   *harness.Indexer
	client    *client.Client
	prompts   [][]uint32
	rng       *rand.Rand
}

const planeBlock = 4

func startPlane(t *testing.T, discovery string, overNATS bool) *plane {
	p := &plane{t: t, discovery: discovery, rng: rand.New(rand.NewPCG(1, 2)),
		indexer: harness.StartIndexer(t, t.TempDir(), "", "--guess-policy", "off")}
	nats := ""
	if overNATS {
		nats = "nats://" + p.indexer.NATS
	}
	var err error
	if p.client, err = client.HTTP([]string{"http://" + p.indexer.HTTP}, client.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.client.Close() })
	p.workers = pyenv.StartDynamoWorkers(t, p.discovery, nats, planeBlock)
	for rank := range p.engines {
		p.open(rank)
	}
	return p
}

// open opens the publisher of a rank with a new engine, and waits for the publisher's connection.
func (p *plane) open(rank int) {
	p.t.Helper()
	e, err := enginesim.Start(p.t.Context(), enginesim.Config{BlockSize: planeBlock, Capacity: 60, Seed: uint64(rank),
		Rank: events.Rank(rank)})
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(e.Stop)
	p.engines[rank] = e
	p.workers.Do(map[string]any{"op": "open", "rank": rank, "engine": p.engines[rank].Endpoint()}, nil)
	ctx, cancel := context.WithTimeout(p.t.Context(), harness.Patience)
	defer cancel()
	if err := p.engines[rank].WaitSubscribers(ctx, 1); err != nil {
		p.t.Fatal(err)
	}
}

// serve sends prompts to the engines. Some prompts have common prefixes.
func (p *plane) serve(n int) {
	p.t.Helper()
	for range n {
		first := p.rng.IntN(20)
		prompt := harness.Tokens(first*1000, planeBlock*(1+p.rng.IntN(8)))
		if p.prompts = append(p.prompts, prompt); len(p.prompts) > 40 {
			p.prompts = p.prompts[1:]
		}
		if _, err := p.engines[p.rng.IntN(2)].Serve(prompt, nil); err != nil {
			p.t.Fatal(err)
		}
	}
}

// shim starts the tested shim.
func (p *plane) shim() *harness.Process {
	return harness.Start(p.t, "worker-shim", "run", "--source", "dynamo-zmq", "--engine", p.discovery, "--topic",
		"kvatlas.backend", "--model", "m", "--block-size", fmt.Sprint(planeBlock), "--nats", "nats://"+p.indexer.NATS)
}

// equal waits until the index has the engines' blocks for every prompt.
func (p *plane) equal(when string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 2*harness.Patience)
	defer cancel()
	harness.Eventually(p.t, when+", the index is as the engines are", func() (bool, string) {
		some := false
		for _, prompt := range p.prompts {
			answer, err := p.client.Find(ctx, &api.Query{Model: "m", Tokens: prompt})
			if err != nil {
				return false, err.Error()
			}
			got, want := [2]int{}, [2]int{}
			for i := range answer.Workers {
				if o := &answer.Workers[i]; string(o.Instance) == p.workers.Worker && o.Rank < 2 {
					got[o.Rank] = int(o.Device)
				}
			}
			for rank, e := range p.engines {
				want[rank] = e.Hit(prompt)
				some = some || want[rank] > 0
			}
			if got != want {
				return false, fmt.Sprintf("prompt from %d of %d tokens: %v, want %v", prompt[0], len(prompt), got, want)
			}
		}
		return some, "the engines hold nothing"
	})
}

// TestEventPlane runs Dynamo's own publishers that relay engines' events over the ZeroMQ event plane: stored, removed
// and cleared. The index must be equal to the engines, also if the shim missed events before its start and while dead.
// The workers' local indexers keep some or all of the missed events.
func TestEventPlane(t *testing.T) {
	p := startPlane(t, t.TempDir(), false)
	p.serve(30)
	shim := p.shim()
	p.equal("after a late start")
	p.serve(200)
	p.equal("live")

	p.serve(20)
	p.equal("before it dies")
	shim.Kill()
	p.serve(50)
	shim = p.shim()
	p.equal("after a restart")

	for range 3 { // local indexers keep 1,024 events of a rank; the last events are published during the start of the shim
		shim.Kill()
		p.serve(2000)
		shim = p.shim()
		p.equal("after a long absence")
	}
	for _, e := range p.engines {
		if err := e.Clear(); err != nil {
			t.Fatal(err)
		}
	}
	p.serve(10)
	p.equal("after clears")

	// replace the publisher of a rank: the new publisher has another engine and counts from the start
	p.workers.Do(map[string]any{"op": "close", "rank": 1}, nil)
	shim.WaitFor(`has gone".*rank=1`)
	p.open(1)
	p.serve(20)
	p.equal("after another publisher")
	if said := shim.Said(); strings.Contains(said, "another rank") || strings.Contains(said, "of Dynamo's is skipped") {
		t.Errorf("the shim skipped events:\n%s", said)
	}
}

// TestModelCards: the role and the capacities of a worker come from the card that Dynamo's own library writes, also if
// the worker registers its model after its publishers. A gateway request never goes to a prefill worker.
func TestModelCards(t *testing.T) {
	p := startPlane(t, t.TempDir(), false)
	p.serve(10)
	shim := p.shim()
	p.equal("without a card")
	p.workers.Do(map[string]any{"op": "card", "folder": t.TempDir(), "role": "prefill"}, nil)
	shim.WaitFor(`has a new model card.*role=prefill`)
	ctx, cancel := context.WithTimeout(t.Context(), harness.Patience)
	defer cancel()
	harness.Eventually(t, "the worker has the facts of its card", func() (bool, string) {
		list, err := p.client.Workers(ctx)
		if err != nil || len(list.Workers) != len(p.engines) {
			return false, fmt.Sprintf("%+v, %v", list, err)
		}
		for _, w := range list.Workers {
			if r := w.Record; r == nil || r.Role != "prefill" || r.BootstrapPort != 5678 || r.TotalKVBlocks != 123 ||
				r.MaxBatchedTokens != 456 {
				return false, fmt.Sprintf("%+v", r)
			}
		}
		return true, ""
	})
	p.serve(10)
	p.equal("with a card")
}
