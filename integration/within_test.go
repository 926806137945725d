package integration

import (
	"fmt"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/client"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestWithin queries two nodes with a part of the partitions each for depths within some tiers, by tokens, hashes and
// engine hashes, over HTTP, NATS and the command line. The workers have blocks in different tiers, and some have hybrid
// models. The answers must be the naive twin's.
func TestWithin(t *testing.T) {
	t.Parallel()
	nats := harness.StartNATS(t)
	ctx := harness.Context(t)
	var clients []*client.Client
	for i := range 2 {
		p := harness.Start(t, "indexer", "serve", "--nats", nats, "--node-id", fmt.Sprint("n", i), "--partitions", "4",
			"--partition-replicas", "1", "--http-listen", "127.0.0.1:0")
		at := p.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		p.WaitFor(`msg=ready`)
		c := harness.Ask(t, at)
		clients = append(clients, c)
	}
	ns := harness.OpenNamespace(t, ctx, nats)
	clients = append(clients, harness.Client(t, ns.Conn(), "default", client.Options{}))
	const blocks = 40
	prompt := harness.Tokens(1, blocks*harness.BlockSize)
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	locals := hasher.Hash(nil, prompt)
	var names []events.BlockHash
	var hashes, engine api.Hashes
	for i, l := range locals {
		names = append(names, events.BlockHash(1000+i))
		hashes, engine = append(hashes, uint64(l)), append(engine, uint64(1000+i))
	}
	sets := [][]events.Tier{{events.Device, events.Host}, {events.Host}, {events.Disk, events.Device}, {events.Device},
		{events.External, events.Disk, events.Host, events.Device}}
	within := []api.Tiers{"device+host", "host", "disk+device", "device", "external+disk+host+device"}
	rng := rand.New(rand.NewPCG(16, 3))
	var at []api.PartitionSeq
	want, deeper := map[events.WorkerID]api.Overlap{}, 0
	for i, groups := range []string{"full", "full", "full", "full,swa:40", "full,mamba", "full,mamba", "full:eagle",
		"full"} {
		kinds, err := events.ParseGroups(groups)
		if err != nil {
			t.Fatal(err)
		}
		worker, truth := events.WorkerID(fmt.Sprint("w", i)), harness.NewTruth()
		b := &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: harness.BlockSize}
		for n := range blocks - rng.IntN(8) {
			for g, k := range kinds {
				e := events.Event{Kind: events.Stored, Group: events.GroupIndex(g), Attention: k.Kind, Window: k.Window,
					Drops: k.Drops, Tier: events.Tier(1 + rng.IntN(2+rng.IntN(3))), Blocks: names[n : n+1]}
				if i == 7 { // no block in device
					e.Tier = events.Host
				}
				if e.HasParent = n > 0; n > 0 && g == 0 {
					e.Parent = names[n-1]
				}
				if g == 0 {
					e.Locals = locals[n : n+1]
				} else {
					e.HasParent = false
				}
				for range 1 + rng.IntN(2) { // in a tier or two
					b.Events = append(b.Events, e)
					if e.Tier = 1 + e.Tier%2; i == 7 {
						break
					}
				}
			}
		}
		truth.Apply(0, b.Events)
		at = append(at, harness.PublishAs(t, ctx, ns, worker, b))
		d := truth.Match(locals)
		o := api.Overlap{Instance: worker, Device: d[0], Host: d[1], Disk: d[2], External: d[3]}
		for _, tiers := range sets {
			o.Within = append(o.Within, uint32(truth.Within(locals, tiers...)))
		}
		if o.Within[0] > d[0]+d[1] {
			deeper++
		}
		want[worker] = o
	}
	if deeper < 3 {
		t.Errorf("only %d workers have more blocks in device and host together than in sequence", deeper)
	}
	for i, ask := range clients {
		for _, q := range []api.Query{{Tokens: prompt}, {Hashes: hashes}, {EngineHashes: engine}} {
			q.Model, q.Within, q.MinSeq = "m", within, at
			harness.Eventually(t, fmt.Sprintf("client %d is answered %+v", i, want), func() (bool, string) {
				a, err := ask.Find(ctx, &q)
				if err != nil {
					return false, err.Error()
				}
				got := map[events.WorkerID]api.Overlap{}
				for _, o := range a.Workers {
					got[o.Instance] = o
				}
				return reflect.DeepEqual(got, want), fmt.Sprintf("%+v", got)
			})
			q.Within = nil
			a, err := ask.Find(ctx, &q)
			if err != nil {
				t.Fatal(err)
			}
			for _, o := range a.Workers {
				if o.Within != nil {
					t.Errorf("an unexpected answer: %+v", o)
				}
			}
		}
		for name, q := range map[string]api.Query{"no tokens": {Tokens: api.Tokens{}}, "few tokens": {Tokens: prompt[:3]},
			"no hashes": {Hashes: api.Hashes{}}} {
			q.Model, q.Within = "m", within
			if a, err := ask.Find(ctx, &q); err != nil || a.Reason != api.ReasonNoBlocks || a.Blocks != 0 ||
				len(a.Workers) > 0 {
				t.Errorf("client %d: %s: %+v, %v", i, name, a, err)
			}
		}
		q := api.Query{Model: "m", Tokens: prompt, Within: []api.Tiers{"ssd"}}
		if _, err := ask.Find(ctx, &q); client.CodeOf(err) != api.CodeMalformed || !strings.Contains(err.Error(), `"ssd"`) {
			t.Errorf("client %d: %v", i, err)
		}
	}
	r := harness.Run(t, "indexer", "query", "--nats", nats, "--model", "m", "--tokens",
		strings.Trim(harness.JSONList(prompt), "[]"), "--within", "host", "--within", "device+host", "--worker", "w7")
	if n := fmt.Sprint(want["w7"].Within[0]); r.Code != 0 || !strings.Contains(r.Stdout, "HOST  DEVICE+HOST") ||
		strings.Count(r.Stdout, " "+n) < 3 {
		t.Errorf("query printed %d %q %q", r.Code, r.Stdout, r.Stderr)
	}
}
