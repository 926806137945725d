package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/enginesim"
)

// announcedSessions is the naive answer for an engine, from the engine's own announcements.
type announcedSessions struct {
	mu     sync.Mutex
	parent map[events.BlockHash]events.BlockHash // 0: none
	held   map[events.BlockHash]bool
	ends   map[string]events.BlockHash
}

func (a *announcedSessions) add(e enginesim.Announced) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before := events.BlockHash(0)
	if e.HasParent {
		before = e.Parent
	}
	for _, name := range e.Blocks {
		if a.held[name] = e.Kind == events.Stored; a.held[name] {
			a.parent[name], before = before, name
		}
	}
	if e.Session != "" && !slices.Contains(a.chain(e.Session), before) {
		a.ends[e.Session] = before
	}
}

func (a *announcedSessions) chain(session string) (names []events.BlockHash) {
	for name := a.ends[session]; name != 0; name = a.parent[name] {
		names = append(names, name)
	}
	return names
}

func (a *announcedSessions) holding(worker events.WorkerID, session string) (h api.SessionHolding) {
	a.mu.Lock()
	defer a.mu.Unlock()
	h.Model, h.Worker = "m", worker
	for _, name := range a.chain(session) {
		if h.Blocks++; a.held[name] {
			h.Device++
		}
	}
	return h
}

// TestSessionBlocks sends requests of sessions to three nodes with eight engines that announce sessions and evict
// blocks. Every node lists the blocks of each session on each worker, as the engines have announced them, also after a
// restart, long after the removal of a session's last block. The session of an engine without announced sessions is not
// known.
func TestSessionBlocks(t *testing.T) {
	t.Parallel()
	const size, room, workers, sessions = harness.BlockSize, 60, 8, 24
	nats := harness.StartNATS(t)
	var asks []*client.Client
	var nodes []*harness.Process
	startNode := func(name string) *client.Client {
		x := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", name, "--partitions", "6",
			"--partition-replicas", "2", "--http-listen", "127.0.0.1:0")
		http := x.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		x.WaitFor(`msg=ready`)
		c := harness.Ask(t, http)
		nodes = append(nodes, x)
		return c
	}
	for i := range 3 {
		asks = append(asks, startNode(fmt.Sprint("n", i)))
	}
	ctx := harness.Context(t)
	start := func(name string, release enginesim.Release, announced func(enginesim.Announced)) *enginesim.Engine {
		e, err := enginesim.Start(context.Background(), enginesim.Config{BlockSize: size, Capacity: room, Release: release,
			Announced: announced})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(e.Crash)
		harness.StartSimShim(t, e, nats, name)
		return e
	}
	engines, of := map[events.WorkerID]*enginesim.Engine{}, map[events.WorkerID]*announcedSessions{}
	for i := range workers {
		name := events.WorkerID(fmt.Sprint("w", i))
		a := &announcedSessions{parent: map[events.BlockHash]events.BlockHash{}, held: map[events.BlockHash]bool{},
			ends: map[string]events.BlockHash{}}
		of[name], engines[name] = a, start(string(name), enginesim.VLLM026, a.add)
	}
	for i, c := range asks {
		harness.Eventually(t, fmt.Sprintf("node %d may choose all workers", i), func() (bool, string) {
			p, err := c.Select(ctx, &api.SelectRequest{Advisory: true, Query: api.Query{Model: "m",
				Tokens: harness.Tokens(1, size), Explain: true}})
			return err == nil && p.Candidates == workers, fmt.Sprintf("%+v %v", p, err)
		})
	}
	r := rand.New(rand.NewPCG(3, 4))
	prompts := make([][]uint32, sessions)
	for i := range 400 {
		n := r.IntN(sessions)
		if len(prompts[n]) == 0 || len(prompts[n]) > 20*size {
			prompts[n] = harness.Tokens(1, 2*size) // shared by all sessions
		}
		prompts[n] = append(prompts[n], harness.Tokens(10_000*(n+1)+100*i, size+r.IntN(2*size))...)
		// Without the exclusion, the prefix that all sessions share would bring all requests to one worker.
		var excluded []events.WorkerID
		for _, w := range r.Perm(workers)[:workers/2] {
			excluded = append(excluded, events.WorkerID(fmt.Sprint("w", w)))
		}
		s, err := asks[i%len(asks)].Select(ctx, &api.SelectRequest{Excluded: excluded,
			Query: api.Query{Model: "m", Tokens: prompts[n]}})
		if err != nil {
			t.Fatal(err)
		}
		_, err = engines[s.Worker].ServeSession(fmt.Sprint("chat-", n), prompts[n], harness.Tokens(900_000+i, 2*size))
		if err != nil {
			t.Fatal(err)
		}
	}
	// Other requests at two engines evict all blocks of the sessions, and more blocks than the index remembers.
	for i := range 80 {
		engine := engines[events.WorkerID(fmt.Sprint("w", i%2))]
		if _, err := engine.Serve(harness.Tokens(1_000_000+1000*i, 20*size), nil); err != nil {
			t.Fatal(err)
		}
	}
	partly := 0
	answers := map[string][]api.SessionHolding{}
	for n := range sessions {
		id := fmt.Sprint("chat-", n)
		var want []api.SessionHolding
		for i := range workers {
			name := events.WorkerID(fmt.Sprint("w", i))
			if h := of[name].holding(name, id); h.Blocks > 0 {
				if want = append(want, h); h.Device > 0 && h.Device < h.Blocks {
					partly++
				}
			}
		}
		for i, c := range asks {
			harness.Eventually(t, fmt.Sprintf("node %d has the blocks of %s", i, id), func() (bool, string) {
				got, err := c.Sessions(t.Context(), &api.SessionsRequest{SessionID: id})
				return err == nil && slices.Equal(got.Held, want) && got.Missing == nil && got.Unknown == 0,
					fmt.Sprintf("%+v, %v, want %+v", got, err, want)
			})
		}
		answers[id] = want
	}
	if partly == 0 {
		t.Error("no session is held in part: the engines have evicted nothing")
	}
	old := start("old", enginesim.VLLM023, nil)
	if _, err := old.ServeSession("chat-old", harness.Tokens(1, 4*size), nil); err != nil {
		t.Fatal(err)
	}
	if r := harness.Run(t, "indexer", "sessions", "chat-old", "--nats", nats); r.Code != 0 ||
		!strings.Contains(r.Stdout, "blocks: not known") {
		t.Errorf("a session without announcements: %+v", r)
	}
	if r := harness.Run(t, "indexer", "sessions", "chat-0", "--nats", nats); r.Code != 0 ||
		!strings.Contains(r.Stdout, "DEVICE") || strings.Contains(r.Stdout, "not known") {
		t.Errorf("a session with announcements: %+v", r)
	}
	for _, x := range nodes {
		x.Stop()
	}
	restarted := startNode("n0")
	for id, want := range answers {
		harness.Eventually(t, "the restarted node has the blocks of "+id, func() (bool, string) {
			got, err := restarted.Sessions(t.Context(), &api.SessionsRequest{SessionID: id})
			return err == nil && slices.Equal(got.Held, want) && got.Missing == nil && got.Unknown == 0,
				fmt.Sprintf("%+v, %v, want %+v", got, err, want)
		})
	}
}
