package node

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"strconv"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/mastersim"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// TestStoreFollowsTheReuseOfHybridEngines: workers of a hybrid model are credited with their loads from the shared
// store after the reusable part of their own blocks, which windows, chunks, states and draft models shorten. SGLang
// loads the blocks after that part; vLLM loads by the store's own groups from the prompt's start. The blocks of workers
// and store are random; the naive twin and the store's rules are the reference.
func TestStoreFollowsTheReuseOfHybridEngines(t *testing.T) {
	const block, blocks, workers = 16, 20, 6
	master, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer master.Stop()
	host, port, err := net.SplitHostPort(master.Addr())
	if err != nil {
		t.Fatal(err)
	}
	at := hicache.Master{Address: host}
	if at.MetricsPort, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	least, most := 3, 7
	sglang := hicache.Config{SGLang: &hicache.SGLang{
		Backend: "mooncake", PageSize: block, TPSize: 1, PPSize: 1, IsMLA: true, Master: at,
		PrefetchThreshold: least * block, PrefetchCapacity: most * block,
	}}
	rng := rand.New(rand.NewPCG(13, 3))
	cut, loads := 0, 0
	for round, text := range []string{
		"full,swa:40", "full:eagle,swa:40:eagle", "full,chunked:64", "full,mamba", "full,swa:33,swa:80",
		"full,swa:20,mamba", "full", "full,full:eagle",
	} {
		groups, err := events.ParseGroups(text)
		if err != nil {
			t.Fatal(err)
		}
		x := newL3Node(t, blocks*block+5, 0, nil, nil)
		hasher, err := events.NewHasher(block, events.Space{})
		if err != nil {
			t.Fatal(err)
		}
		locals := hasher.Hash(nil, x.prompt)
		own := map[events.WorkerID]*twin.Rank{}
		var msgs []jetstream.Message
		for w := range workers {
			r := twin.New(twin.Config{}, block)
			batch := events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: block}
			for g, of := range groups {
				for tier := events.Device; tier <= events.Host; tier++ {
					e := events.Event{Kind: events.Stored, Tier: tier, Group: events.GroupIndex(g), Attention: of.Kind,
						Window: of.Window, Drops: of.Drops}
					held := rng.IntN(blocks)
					for i := range locals {
						if of.Kind.Main() && i < held {
							e.Blocks, e.Locals = append(e.Blocks, events.BlockHash(i+1)), append(e.Locals, locals[i])
						} else if !of.Kind.Main() && rng.IntN(4) > 0 {
							e.Blocks = append(e.Blocks, events.BlockHash(i+1))
						}
					}
					batch.Events = append(batch.Events, e)
				}
			}
			r.Apply(1000, batch.Events)
			name := events.WorkerID(fmt.Sprint("w", w))
			own[name] = r
			data, err := events.AppendBatch(nil, &batch)
			if err != nil {
				t.Fatal(err)
			}
			msgs = append(msgs, jetstream.Message{Seq: events.StreamSeq(w + 1), Time: 1000, Key: events.RankKey{Instance: name},
				Data: data})
		}
		if !x.shards[0].machine.Apply(0, msgs) {
			t.Fatal("the machine rejects the log")
		}
		vllm := hicache.VLLM{
			ModelName: "org/m", TPSize: 1, PPSize: 1, NumKVHead: 1, HashBlockSize: block, SchedulerBlockSize: block,
			EngineVersion: "0.32.0", Master: at,
		}
		for _, g := range groups {
			kind := map[events.Attention]hicache.Kind{events.AttentionFull: hicache.Full,
				events.AttentionMamba:         hicache.Mamba,
				events.AttentionSlidingWindow: hicache.Sliding,
				events.AttentionChunkedLocal:  hicache.ChunkedLocal}[g.Kind]
			vllm.Groups = append(vllm.Groups, hicache.Group{Kind: kind, BlockSize: block, Window: int(g.Window),
				Eagle: g.Drops})
		}
		for _, engine := range []struct {
			name   string
			config hicache.Config
		}{{"SGLang", sglang}, {"vLLM", hicache.Config{VLLM: &vllm}}} {
			name, config := engine.name, engine.config
			for range 12 {
				prompt, err := config.Prompt(x.prompt, "", "", block)
				if err != nil {
					t.Fatal(err)
				}
				there := make([][]bool, len(prompt.Lanes))
				for g, lane := range prompt.Lanes {
					there[g] = make([]bool, lane.Pages)
					until := rng.IntN(lane.Pages + 1)
					for i := range there[g] {
						keys := lane.Names(i, i+1).Keys
						if there[g][i] = i < until && rng.IntN(8) > 0 || rng.IntN(4) == 0; there[g][i] {
							master.Put(keys...)
						} else {
							master.Remove(keys...)
						}
					}
				}
				// load returns the load of a worker with n blocks.
				load := func(n int) int {
					end := n
					for end < blocks && there[0][end] {
						end++
					}
					if end-n < least {
						return 0
					}
					return min(end-n, most)
				}
				if config.VLLM != nil {
					co, err := hicache.NewCoordinator(vllm.Layout())
					if err != nil {
						t.Fatal(err)
					}
					hit, _, err := co.Lookup(there, len(x.prompt))
					if err != nil {
						t.Fatal(err)
					}
					load = func(n int) int { return max(n, hit/block) - n }
				}
				x.Node.l3 = newL3(L3Config{
					Models: map[string]hicache.Config{"m": config}, Timeout: patience, Check: patience,
					Cache: hicache.CacheConfig{HitLife: time.Hour, MissLife: time.Hour, Patience: patience},
				})
				x.l3.watch(x.ctx)
				for _, explain := range []bool{false, true} {
					a, err := x.Find(x.ctx, &api.Query{Model: "m", Tokens: x.prompt, Idle: true, Explain: explain})
					if err != nil || a.L3.Status != api.L3OK {
						t.Fatalf("%+v, %v", a, err)
					}
					got, want := map[events.WorkerID][3]int{}, map[events.WorkerID][3]int{}
					for _, o := range a.Workers {
						got[o.Instance] = [3]int{int(o.Device), int(o.Host), int(o.L3)}
					}
					for name, r := range own {
						d := r.Match(locals)
						n := int(d[0] + d[1])
						want[name] = [3]int{int(d[0]), int(d[1]), load(n)}
						if d != r.Held(locals) {
							cut++
						}
						if load(n) > 0 {
							loads++
						}
					}
					if !maps.Equal(got, want) || int(a.L3.FromStart) != load(0) {
						t.Fatalf("round %d, %s, %s: %v and %d from the start, want %v and %d", round, text, name, got,
							a.L3.FromStart, want, load(0))
					}
				}
			}
		}
	}
	t.Logf("%d answers are cut short, with %d something is loaded", cut, loads)
	if cut < 200 || loads < 200 {
		t.Errorf("%d answers are cut short, with %d something is loaded: no test", cut, loads)
	}
}
