package integration

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/integration/harness"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/hicache"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/tools/mastersim"
)

// TestStoreInAnswersOfManyNodes runs three nodes with a third of the workers each. The workers share a store and load
// by their registrations. Every node's answer must be equal to the answer of a single node with all workers: the
// workers, the store, and the blocks that every worker would load. After the end of a node, only its workers may be
// missing.
func TestStoreInAnswersOfManyNodes(t *testing.T) {
	t.Parallel()
	const (
		workers = 24
		blocks  = 40 // of the longest prompt
	)
	master, err := mastersim.Start("127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer master.Stop()
	host, port, err := net.SplitHostPort(master.Addr())
	if err != nil {
		t.Fatal(err)
	}
	store := hicache.SGLang{Backend: "mooncake", PageSize: harness.BlockSize, TPSize: 2, PPSize: 1,
		Master: hicache.Master{Address: host}}
	if store.MetricsPort, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--partitions", "6", "--l3-hit-life", "1ns", "--l3-miss-life", "1ns"}
	nats := harness.StartNATS(t)
	nodes, https := map[string]*harness.Process{}, map[string]string{}
	for _, id := range []string{"a", "b", "c"} {
		nodes[id] = harness.Start(t, "indexer",
			append([]string{"serve", "--nats", nats, "--node-id", id, "--partition-replicas", "1", "--http-listen",
				"127.0.0.1:0"}, flags...)...)
	}
	for id, p := range nodes {
		https[id] = p.WaitFor(`HTTP is served" listen=(\S+)`)[1]
		p.WaitFor(`msg=ready`)
	}
	alone := harness.StartIndexer(t, t.TempDir(), "", flags...)

	// Every worker holds the beginning of a prompt, and loads by its registration.
	ctx := harness.Context(t)
	rng := rand.New(rand.NewPCG(7, 8))
	common := harness.Tokens(1, blocks*harness.BlockSize)
	prompt := func() []uint32 {
		p := slices.Clone(common[:(1+rng.IntN(blocks))*harness.BlockSize-rng.IntN(2)])
		if rng.IntN(2) == 0 {
			p[rng.IntN(4)*len(p)/4] = 77777
		}
		return p
	}
	hasher, err := events.NewHasher(harness.BlockSize, events.Space{})
	if err != nil {
		t.Fatal(err)
	}
	spaces := []*jetstream.Namespace{harness.OpenNamespace(t, ctx, nats), harness.OpenNamespace(t, ctx, alone.NATS)}
	var names []events.WorkerID
	last := map[events.Partition]api.PartitionSeq{}
	for i := range workers {
		name := events.WorkerID(fmt.Sprint("w", i))
		names = append(names, name)
		e := events.Event{Kind: events.Stored, Tier: events.Device,
			Locals: hasher.Hash(nil, append(prompt(), harness.Tokens(i<<16, harness.BlockSize)...))}
		for j := range e.Locals {
			e.Blocks = append(e.Blocks, events.BlockHash(j+1))
		}
		own := store
		own.PrefetchThreshold = []int{harness.BlockSize, 4 * harness.BlockSize, 0}[rng.IntN(3)]
		own.PrefetchCapacity = []int{0, 8 * harness.BlockSize}[rng.IntN(2)]
		for _, ns := range spaces {
			at := harness.PublishAs(t, ctx, ns, name, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m",
				BlockSize: harness.BlockSize, Events: []events.Event{e}})
			last[at.Partition] = at
			lease, err := registry.NewLease(ns, registry.Record{
				Instance: name, Model: "m", BlockSize: harness.BlockSize, Source: "sglang",
				LeaseMS: (15 * time.Minute).Milliseconds(), L3: &hicache.Config{SGLang: &own},
			}, nil)
			if err != nil {
				t.Fatal(err)
			}
			keeping, stop := context.WithCancel(ctx)
			kept := make(chan error, 1)
			go func() { kept <- lease.Keep(keeping, func() {}) }()
			t.Cleanup(func() {
				stop()
				if err := <-kept; err != nil {
					t.Errorf("the lease of %s: %v", name, err)
				}
			})
		}
	}

	// ask returns an answer without the parts that two deployments cannot share: times, and whether another node has a
	// block. It repeats the query after an incomplete answer, because a process may have been paused.
	ask := func(addr string, q *api.Query, alive bool) (*api.Answer, error) {
		var a api.Answer
		for deadline := time.Now().Add(harness.Patience); ; time.Sleep(20 * time.Millisecond) {
			a = api.Answer{}
			if err := harness.HTTPDo(addr, "POST", "/v1/find", q, &a); err != nil {
				return nil, err
			}
			if (a.Complete || !alive) && !strings.Contains(a.L3.Reason, "did not answer within") {
				break
			}
			if time.Now().After(deadline) {
				return nil, fmt.Errorf("no whole answer: %+v", a)
			}
		}
		a.L3.AgeMS = 0
		for i := range a.Partitions {
			a.Partitions[i].Epoch = time.Time{}
		}
		for _, o := range a.Workers {
			if o.Path != nil && o.Path.Stop == "unknown_block" {
				o.Path.Stop = "not_held"
			}
		}
		return &a, nil
	}
	text := func(a *api.Answer) string {
		b, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	put := func(prompt []uint32, from, to int, some func() bool) {
		keys := store.Keys(store.PageHashes(nil, prompt, hicache.Space{}))
		for _, key := range keys.Keys[from*keys.PerPage : to*keys.PerPage] {
			if some() {
				master.Put(key)
			}
		}
	}

	put(common, 0, blocks, func() bool { return true })
	first := &api.Query{Model: "m", Tokens: common, Idle: true, MinSeq: slices.Collect(maps.Values(last))}
	var want *api.Answer
	harness.Eventually(t, "the single node has all workers and their loading rules", func() (bool, string) {
		var err error
		if want, err = ask(alone.HTTP, first, true); err != nil {
			return false, err.Error()
		}
		stops := map[string]int{}
		for _, o := range want.Workers {
			stops[o.L3Stop]++
		}
		return want.L3.Status == api.L3OK && len(want.Workers) == workers && stops["no_store"] == 0 &&
			stops["capacity"] > 0 && stops["prompt_ends"] > 0, text(want)
	})
	for id, addr := range https {
		harness.Eventually(t, id+" says the same", func() (bool, string) {
			got, err := ask(addr, first, true)
			return err == nil && text(got) == text(want), fmt.Sprintf("%v\n%s\nwant\n%s", err, text(got), text(want))
		})
	}
	harness.AwaitAnnounced(t, ctx, spaces[0], "m", len(nodes))
	for _, key := range store.Keys(store.PageHashes(nil, common, hicache.Space{})).Keys[3*2:] {
		master.Remove(key)
	}

	question := func() *api.Query {
		q := &api.Query{
			Model: "m", Tokens: prompt(), L3: []api.L3Ask{"", api.L3All, api.L3Beyond,
				api.L3Off}[rng.IntN(4)], Idle: rng.IntN(3) == 0, Explain: rng.IntN(4) == 0,
		}
		pages := len(q.Tokens) / harness.BlockSize
		switch from := rng.IntN(pages + 1); rng.IntN(4) {
		case 0:
			put(q.Tokens, from, from+rng.IntN(pages-from+1), func() bool { return true })
		case 1:
			put(q.Tokens, from, from+rng.IntN(pages-from+1), func() bool { return rng.IntN(8) > 0 })
		}
		for range rng.IntN(4) * rng.IntN(2) {
			q.Workers = append(q.Workers, names[rng.IntN(len(names))])
		}
		if rng.IntN(10) == 0 {
			for _, l := range hasher.Hash(nil, q.Tokens) {
				q.Hashes = append(q.Hashes, uint64(l))
			}
			q.Tokens = nil
		}
		return q
	}
	loads := 0
	for i := range 100 {
		q := question()
		want, err := ask(alone.HTTP, q, true)
		if err != nil {
			t.Fatal(err)
		}
		for id, addr := range https {
			if got, err := ask(addr, q, true); err != nil || text(got) != text(want) {
				t.Fatalf("question %d, %+v: node %s, %v:\n%s\none node with everything:\n%s", i, q, id, err, text(got),
					text(want))
			}
		}
		for _, o := range want.Workers {
			loads += int(o.L3)
		}
	}
	if loads == 0 {
		t.Fatal("no answer has loadable blocks")
	}

	nodes["c"].Kill()
	incomplete := 0
	for i := range 30 {
		q := question()
		q.Workers = nil // without the worker's node, the worker's model is unknown
		got, err := ask(https[[]string{"a", "b"}[i%2]], q, false)
		if err != nil {
			t.Fatalf("question %d after a node's end: %v", i, err)
		}
		of := *q
		for p := range events.Partition(6) {
			if !slices.Contains(got.Missing, p) {
				of.Partitions = append(of.Partitions, p)
			}
		}
		want, err := ask(alone.HTTP, &of, true)
		if err != nil {
			t.Fatal(err)
		}
		if !got.Complete {
			incomplete++
		}
		want.Complete, want.Missing, want.Partitions, got.Partitions = got.Complete, got.Missing, nil, nil
		if text(got) != text(want) {
			t.Fatalf("question %d, %+v, after a node's end:\n%s\none node with the same partitions:\n%s", i, q,
				text(got), text(want))
		}
	}
	t.Logf("%d blocks were to be loaded; after a node's end %d of 30 answers lacked its workers", loads, incomplete)
}
