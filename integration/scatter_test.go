package integration

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// errLacks reports an answer that is marked as incomplete.
var errLacks = errors.New("the answer lacks something")

// holder is a worker with the tokens of its blocks.
type holder struct {
	name   events.WorkerID
	hasher *events.Hasher
	held   []uint32
}

// depth returns the number of leading blocks of a prompt on the worker.
func (h *holder) depth(prompt []uint32) (n uint32) {
	asked, held := h.hasher.Hash(nil, prompt), h.hasher.Hash(nil, h.held)
	for int(n) < min(len(asked), len(held)) && asked[n] == held[n] {
		n++
	}
	return n
}

// TestAnyNodeAnswersForAll runs three nodes with a part of the partitions each, with the least rights. All nodes'
// answers, over NATS and HTTP, must be equal to the twin's. After the kill of a node, an answer may be incomplete.
// Such an answer is marked. All answers are complete after the other nodes have taken over.
func TestAnyNodeAnswersForAll(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	keys := filepath.Join(dir, "keys")
	example := harness.Run(t, "indexer", "auth", "create", "--namespace", "red", "--keys", keys)
	if example.Code != 0 {
		t.Fatal(example.Stderr)
	}
	addr, config := loopback.Reserve(t), filepath.Join(dir, "nats.conf")
	text := fmt.Sprintf("listen: %q\njetstream { store_dir: %q, max_file_store: 1TB }\n%s", addr,
		filepath.Join(dir, "data"), example.Stdout)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Start(t, "nats-server", "-c", config).WaitFor(`Server is ready`)

	nodes, https := map[string]*harness.Process{}, map[string]string{}
	for _, id := range []string{"n.1", "n.2", "n.3"} {
		nodes[id] = harness.Start(t, "indexer", "serve", "--nats", addr, "--namespace", "red", "--nats-nkey",
			filepath.Join(keys, "red-node.nk"), "--nats-inbox-prefix", "_INBOX_node",
			"--node-id", id, "--partition-replicas", "2", "--partitions", "8", "--http-listen", "127.0.0.1:0")
	}
	for id, p := range nodes {
		https[id] = p.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		p.WaitFor(`msg=ready`)
	}
	ctx := harness.Context(t)
	connect := func(user string) *jetstream.Conn {
		conn, err := jetstream.Connect(ctx, jetstream.ConnOptions{
			URLs: []string{"nats://" + addr}, NkeyFile: filepath.Join(keys, "red-"+user+".nk"), InboxPrefix: "_INBOX_" +
				user, Wait: true, Core: user == "reader",
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(conn.Close)
		return conn
	}
	node := connect("node")
	client := harness.Client(t, connect("reader"), "red", client.Options{})

	rng := rand.New(rand.NewPCG(8, 8))
	prompt := make([]uint32, 200)
	for i := range prompt {
		prompt[i] = rng.Uint32N(4)
	}
	ns, err := jetstream.OpenNamespace(ctx, node, "red")
	if err != nil {
		t.Fatal(err)
	}
	holders := make([]holder, 48)
	latest := map[events.Partition]api.PartitionSeq{}
	for i := range holders {
		h := &holders[i]
		ahead := uint32(i % 3 / 2)
		h.name, h.held = events.WorkerID(fmt.Sprint("w.", i)), slices.Clone(prompt[:rng.IntN(len(prompt))])
		if h.hasher, err = events.NewLookaheadHasher(4, ahead, events.Space{}); err != nil {
			t.Fatal(err)
		}
		e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: h.hasher.Hash(nil, h.held),
			Lookahead: ahead}
		for j := range e.Locals {
			e.Blocks = append(e.Blocks, events.BlockHash(j+1))
		}
		batch := &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 4, Events: []events.Event{e}}
		if len(e.Blocks) == 0 {
			batch.Events[0] = events.Event{Kind: events.Cleared, Reason: events.ReasonGap}
		}
		if err := registry.Claim(ctx, ns, h.name, "m"); err != nil {
			t.Fatal(err)
		}
		at := harness.PublishAs(t, ctx, ns, h.name, batch)
		latest[at.Partition] = at
	}
	places := slices.Collect(maps.Values(latest))

	// same checks an answer.
	same := func(a *api.Answer, asked []uint32) error {
		got, err := harness.OnDevice(a)
		if err != nil {
			return err
		}
		for i := range holders {
			if want := holders[i].depth(asked); got[holders[i].name] != want {
				return fmt.Errorf("%s holds %d blocks of %d tokens, the answer has %d: %+v", holders[i].name, want,
					len(asked), got[holders[i].name], a)
			}
		}
		return nil
	}
	question := func(rng *rand.Rand) []uint32 {
		asked := slices.Clone(prompt[:1+rng.IntN(len(prompt))])
		if rng.IntN(2) == 0 {
			asked[rng.IntN(len(asked))] += 5
		}
		return asked
	}
	harness.Eventually(t, "a client reads the written blocks", func() (bool, string) {
		a, err := client.Find(ctx, &api.Query{Model: "m", Tokens: prompt, MinSeq: places})
		if err == nil {
			err = same(a, prompt)
		}
		return err == nil, fmt.Sprint(err)
	})
	for range 300 {
		asked := question(rng)
		harness.Eventually(t, "there is a whole answer", func() (bool, string) {
			a, err := client.Find(ctx, &api.Query{Model: "m", Tokens: asked, MinSeq: places})
			if err == nil && !a.Complete { // a node stood still
				return false, fmt.Sprintf("%+v", a)
			}
			if err == nil {
				err = same(a, asked)
			}
			if err != nil {
				t.Fatal(err)
			}
			return true, ""
		})
	}
	for id, at := range https {
		harness.Eventually(t, "node "+id+" answers whole over HTTP", func() (bool, string) {
			var a api.Answer
			var l api.WorkerList
			err := errors.Join(harness.HTTPDo(at, "POST", "/v1/find", api.Query{Model: "m", Tokens: prompt,
				MinSeq: places}, &a), harness.HTTPDo(at, "GET", "/v1/workers", nil, &l))
			if err != nil {
				t.Fatal(err)
			}
			if !a.Complete || !l.Complete { // a node stood still
				return false, fmt.Sprintf("%+v, %+v", a, l)
			}
			if err := same(&a, prompt); err != nil {
				t.Errorf("node %s over HTTP: %v", id, err)
			}
			if len(l.Workers) != len(holders) {
				t.Errorf("node %s lists %d workers; there are %d", id, len(l.Workers), len(holders))
			}
			return true, ""
		})
	}
	var unknown *api.Error
	if _, err := client.Find(ctx, &api.Query{Model: "other", Tokens: prompt}); !errors.As(err, &unknown) ||
		unknown.Code != api.CodeUnknownModel {
		t.Errorf("an unserved model: %v", err)
	}

	settled := func(nodes int) {
		t.Helper()
		harness.Eventually(t, fmt.Sprintf("%d nodes have two replicas of every partition", nodes), func() (bool, string) {
			r := harness.Run(t, "indexer", "cluster", "--json", "--nats", addr, "--namespace", "red", "--nats-nkey",
				filepath.Join(keys, "red-node.nk"), "--nats-inbox-prefix", "_INBOX_node")
			var c api.ClusterStatus
			if r.Code != 0 || json.Unmarshal([]byte(r.Stdout), &c) != nil {
				return false, r.Stdout + r.Stderr
			}
			return len(c.Nodes) == nodes && len(c.Short) == 0, r.Stdout
		})
	}
	settled(3)
	harness.AwaitAnnounced(t, ctx, ns, "m", len(nodes))
	// Kill a node during queries.
	type asked struct {
		at, took time.Duration
		err      error
	}
	var mu sync.Mutex
	var log []asked
	whole := map[bool]int{} // answers: to questions from before the node was killed, and from then on
	begun := time.Now()
	killed := time.Duration(math.MaxInt64)
	asking, stop := context.WithCancel(ctx)
	var clients sync.WaitGroup
	for i := range 4 {
		clients.Go(func() {
			rng := rand.New(rand.NewPCG(9, uint64(i)))
			harness.Load(asking, func(int) {
				tokens := question(rng)
				within, cancel := context.WithTimeout(ctx, harness.Patience)
				at := time.Since(begun)
				a, err := client.Find(within, &api.Query{Model: "m", Tokens: tokens})
				took := time.Since(begun) - at
				cancel()
				if err != nil || a.Complete {
					if err == nil {
						err = same(a, tokens)
					}
					if err != nil {
						t.Errorf("query after %v: %v", at, err)
					}
				} else {
					err = errLacks
				}
				mu.Lock()
				log = append(log, asked{at, took, err})
				if err == nil {
					whole[at > killed]++
				}
				mu.Unlock()
			})
		})
	}
	more := func(after bool, n int) {
		t.Helper()
		harness.Eventually(t, "clients have whole answers", func() (bool, string) {
			mu.Lock()
			defer mu.Unlock()
			return whole[after] >= n, fmt.Sprint(whole)
		})
	}
	more(false, 300)
	mu.Lock()
	nodes["n.2"].Kill()
	killed = time.Since(begun)
	mu.Unlock()
	settled(2) // the other nodes detect the end, and have taken over
	redundant := time.Since(begun)
	mu.Lock()
	whole[true] = 0
	mu.Unlock()
	more(true, 300)
	stop()
	clients.Wait()
	quantile := func(from, to time.Duration) (n int, p50, p99, most time.Duration) {
		var took []time.Duration
		for _, a := range log {
			if a.at >= from && a.at < to && a.err == nil {
				took = append(took, a.took)
			}
		}
		slices.Sort(took)
		if len(took) == 0 {
			return 0, 0, 0, 0
		}
		return len(took), took[len(took)/2], took[len(took)*99/100], took[len(took)-1]
	}
	for _, span := range []struct {
		name     string
		from, to time.Duration
	}{{"before", 0, killed}, {"the second after", killed, killed + time.Second}, {"later", killed + time.Second,
		math.MaxInt64}} {
		n, p50, p99, most := quantile(span.from, span.to)
		t.Logf("%s: %d whole answers, p50 %v, p99 %v, longest %v", span.name, n, p50, p99, most)
	}
	lacking, last := 0, time.Duration(0)
	for _, a := range log {
		if a.err == nil {
			continue
		}
		lacking, last = lacking+1, max(last, a.at-killed)
		if a.at > redundant || a.at+a.took < killed {
			t.Errorf("query %v after the kill, without a missing node: %v", a.at-killed, a.err)
		}
	}
	t.Logf(
		"%d of %d answers were incomplete, the last query %v after the kill; two replicas of every partition after %v", lacking, len(log), last, redundant-killed)
}
