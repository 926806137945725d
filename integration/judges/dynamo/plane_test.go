//go:build judges

package dynamo

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
	"github.com/kvatlas/kvatlas/tools/pyenv"
)

// plane is a process of Dynamo's with a publisher on its event plane for each of two ranks, the engines that
// these hear, and an indexer.
type plane struct {
	t         *testing.T
	discovery string // its folder, or the URL of etcd
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

// open opens the publisher of a rank with a new engine, and waits until it hears that.
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

// serve has the engines serve prompts, of which some begin as others do.
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

// shim starts the shim that is judged.
func (p *plane) shim() *harness.Process {
	return harness.Start(p.t, "worker-shim", "run", "--source", "dynamo-zmq", "--engine", p.discovery, "--topic",
		"kvatlas.backend", "--model", "m", "--block-size", fmt.Sprint(planeBlock), "--nats", "nats://"+p.indexer.NATS)
}

// equal waits until the index says of every prompt what the engines hold of it.
func (p *plane) equal(when string) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), 2*harness.Patience)
	defer cancel()
	harness.Eventually(p.t, when+", the index is as the engines are", func() (bool, string) {
		some := false
		for _, prompt := range p.prompts {
			answer, err := p.client.Find(ctx, &client.Query{Model: "m", Tokens: prompt})
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

// TestEventPlane has Dynamo's own publishers relay engines' events over the ZeroMQ event plane: stored, removed and
// cleared. The index is as the engines are, whatever the shim has missed: before it started, and while it was dead,
// less than the workers' local indexers keep, or more.
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

	for range 3 { // local indexers keep 1,024 events of each rank; the last are published while the shim starts
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

	// a publisher ends, and another one of the rank, with another engine, begins to count anew
	p.workers.Do(map[string]any{"op": "close", "rank": 1}, nil)
	shim.WaitFor(`has gone".*rank=1`)
	p.open(1)
	p.serve(20)
	p.equal("after another publisher")
	if said := shim.Said(); strings.Contains(said, "another rank") || strings.Contains(said, "of Dynamo's is skipped") {
		t.Errorf("the shim passed something over:\n%s", said)
	}
}
