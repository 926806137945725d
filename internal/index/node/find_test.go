package node

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestMissingPartitionsAreListed: while a partition is restored again, the node does not have its workers. An answer
// lists the partition as missing, whether or not some of its ranks remain. A model that only this partition may serve
// is not reported as unknown.
func TestMissingPartitionsAreListed(t *testing.T) {
	w := newSite(t)
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	find := func() (*api.Answer, error) {
		return w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
	}

	w.node.put(0, &restoring{kept: &kept{}})
	a, err := find()
	w.must(err)
	if a.Complete || !slices.Equal(a.Missing, []events.Partition{0}) || len(a.Workers) != 0 || len(a.Partitions) != 0 {
		t.Errorf("while the partition is restored, its ranks still there: %+v", a)
	}
	if _, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt,
		Partitions: []events.Partition{1}}); !errors.As(err, new(*api.Error)) {
		t.Errorf("a partition that does not exist: %v", err)
	}
	w.must(w.node.empty(w.ctx, 0))
	var failure *api.Error
	if a, err := find(); !errors.As(err, &failure) || failure.Code != api.CodeNotReady ||
		!slices.Equal(failure.Missing, []events.Partition{0}) ||
		!strings.HasPrefix(failure.Message, "this node does not serve partitions [0] now") {
		t.Errorf("while the partition is empty: %+v, %v", a, err)
	}
	w.node.put(0, servingAt(0))
	if a, err := find(); !errors.As(err, &failure) || failure.Code != api.CodeUnknownModel {
		t.Errorf("when the partition is there and empty: %+v, %v", a, err)
	}
}

// TestQueriesReadAheadAsEnginesDo: workers of a model with engines that hash zero, one or three tokens beyond a block
// are found by the same tokens, each with its held blocks. Hashes with a worker's lookahead find it too, also after a
// restart.
func TestQueriesReadAheadAsEnginesDo(t *testing.T) {
	w := newSite(t)
	w.start()
	conn, err := jetstream.Connect(w.ctx, jetstream.ConnOptions{URLs: []string{"nats://" + w.addr}, Wait: true})
	w.must(err)
	defer conn.Close()
	ns, err := jetstream.OpenNamespace(w.ctx, conn, "test")
	w.must(err)
	rng := rand.New(rand.NewPCG(1, 2))
	prompt := make([]uint32, 41)
	for i := range prompt {
		prompt[i] = rng.Uint32N(3)
	}
	type worker struct {
		name   events.WorkerID
		ahead  uint32
		tokens int // of the worker's prompt
		hasher *events.Hasher
	}
	workers := []worker{{"plain", 0, 40, nil}, {"eagle", 1, 41, nil}, {"eagle, shorter", 1, 24, nil},
		{"further", 3, 30, nil}}
	var at []api.PartitionSeq
	for i := range workers {
		k := &workers[i]
		k.hasher, err = events.NewLookaheadHasher(4, k.ahead, events.Space{LoRA: "a"})
		w.must(err)
		e := events.Event{Kind: events.Stored, Tier: events.Device, Locals: k.hasher.Hash(nil, prompt[:k.tokens]),
			Lookahead: k.ahead}
		for j := range e.Locals {
			e.Blocks = append(e.Blocks, events.BlockHash(j+1))
		}
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 4,
			Events: []events.Event{e}})
		w.must(err)
		log := shim.NewStreamLog(ns, events.RankKey{Instance: k.name}, nil)
		_, err = log.Last(w.ctx)
		w.must(err)
		seq, err := log.Publish(w.ctx, [][]byte{data})
		w.must(err)
		at = []api.PartitionSeq{{Partition: 0, Seq: seq}}
	}
	check := func() {
		t.Helper()
		for n := 1; n <= len(prompt); n++ {
			for _, differs := range []int{-1, n - 1, n / 2} {
				asked := slices.Clone(prompt[:n])
				if differs >= 0 {
					asked[differs] += 7
				}
				a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: append(api.Tokens{}, asked...), LoRA: "a",
					MinSeq: at})
				w.must(err)
				got := map[events.WorkerID]uint32{}
				for _, o := range a.Workers {
					got[o.Instance] = o.Device
				}
				for _, k := range workers {
					held, want := k.hasher.Hash(nil, prompt[:k.tokens]), uint32(0)
					hashes := k.hasher.Hash(nil, asked)
					for int(want) < min(len(held), len(hashes)) && held[want] == hashes[want] {
						want++
					}
					if got[k.name] != want {
						t.Fatalf("of %d tokens, with a changed token at %d, %s holds %d blocks; the answer has %d",
							n, differs, k.name, want, got[k.name])
					}
				}
				if a.Blocks != n/4 {
					t.Fatalf("%d tokens are %d blocks", n, a.Blocks)
				}
				// Another node sends the same query with hashes, with or without idle ranks.
				q := &api.Query{Model: "m", MinSeq: at}
				for _, k := range []worker{workers[0], workers[1], workers[3]} {
					h := api.Hashed{Lookahead: k.ahead}
					for _, local := range k.hasher.Hash(nil, asked) {
						h.Hashes = append(h.Hashes, uint64(local))
					}
					q.Hashed = append(q.Hashed, h)
				}
				b, err := w.node.Find(w.ctx, q)
				w.must(err)
				if !reflect.DeepEqual(b.Workers, a.Workers) || !slices.Equal(b.Lookaheads, []uint32{0, 1, 3}) ||
					b.Blocks != a.Blocks || b.Reason != a.Reason {
					t.Fatalf("of %d tokens: by tokens %+v, by hashes of them %+v", n, a, b)
				}
				q.Idle = true
				b, err = w.node.Find(w.ctx, q)
				w.must(err)
				if len(b.Workers) != len(workers) || !reflect.DeepEqual(b.Workers[:len(a.Workers)], a.Workers) ||
					b.Reason != a.Reason {
					t.Fatalf("of %d tokens, with idle workers: %+v, without %+v", n, b, a)
				}
			}
		}
		for _, k := range workers {
			var hashes api.Hashes
			for _, h := range k.hasher.Hash(nil, prompt[:k.tokens]) {
				hashes = append(hashes, uint64(h))
			}
			a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Hashes: hashes, MinSeq: at})
			w.must(err)
			if i := slices.IndexFunc(a.Workers, func(o api.Overlap) bool { return o.Instance == k.name }); i < 0 ||
				int(a.Workers[i].Device) != len(hashes) {
				t.Errorf("by its own hashes %s is credited with %+v, want %d", k.name, a.Workers, len(hashes))
			}
		}
		list, err := w.node.Workers(w.ctx, api.WorkersRequest{})
		w.must(err)
		for _, k := range workers {
			i := slices.IndexFunc(list.Workers, func(i api.WorkerInfo) bool { return i.Instance == k.name })
			if i < 0 || list.Workers[i].Lookahead != k.ahead {
				t.Errorf("%s is listed as %+v", k.name, list.Workers)
			}
		}
	}
	check()
	w.snapshot()
	w.restart()
	defer w.stopNode()
	if s, err := w.node.Status(w.ctx); err != nil || s.Partitions[0].RestoredFrom == 0 {
		t.Fatalf("no snapshot was restored: %+v, %v", s, err)
	}
	check()
}

// TestAnswersHaveDeviceMemory: answers to other nodes, and to callers in the process, have a rank's number of blocks
// and its eviction threshold. Answers to clients do not.
func TestAnswersHaveDeviceMemory(t *testing.T) {
	w := newSite(t)
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(600)
	w.awaitAll()
	find := func(raw bool, list ...events.Partition) (held, full uint32) {
		a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt, Raw: raw, Partitions: list})
		w.must(err)
		return a.Workers[0].Held, a.Workers[0].Full
	}
	if held, full := find(true); held != 600 || full != 0 {
		t.Errorf("before evictions: %d blocks held, full with %d", held, full)
	}
	first := w.prompt
	w.prompt = nil
	for i := range first {
		w.prompt = append(w.prompt, uint32(len(first)+i))
	}
	_, err := w.engine.Serve(w.prompt, nil) // the engine has room for 1,000 blocks
	w.must(err)
	w.awaitAll()
	for name, query := range map[string]func() (uint32, uint32){
		"a caller in the process": func() (uint32, uint32) { return find(true) },
		"another node":            func() (uint32, uint32) { return find(false, 0) },
	} {
		if held, full := query(); held < 900 || held > 1000 || full < held || full > 1000 {
			t.Errorf("%s: %d blocks held, full with %d", name, held, full)
		}
	}
	if held, full := find(false); held != 0 || full != 0 {
		t.Errorf("a client: %d, %d", held, full)
	}
}

// TestFindDropsLapsedPartitions: one of two partitions ceases to serve during a query. Its rank may have been emptied
// during the search, so the answer lacks the rank and lists the partition as missing.
func TestFindDropsLapsedPartitions(t *testing.T) {
	server := natskit.Start(t, natsserver.Options{Listen: "127.0.0.1:0"})
	conn := natskit.Connect(t, server)
	ns, err := jetstream.JoinNamespace(t.Context(), conn, jetstream.NamespaceConfig{Name: "test", Partitions: 2})
	if err != nil {
		t.Fatal(err)
	}
	n := New(Config{ID: "n", Namespace: ns, Shards: 2})
	for p := range events.Partition(2) {
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 16,
			Events: []events.Event{{Kind: events.Cleared, Reason: events.ReasonEngine}, {Kind: events.Stored,
				Tier: events.Device, Blocks: []events.BlockHash{1}, Locals: []events.LocalHash{7}}}})
		if err != nil {
			t.Fatal(err)
		}
		key := events.RankKey{Instance: events.WorkerID(fmt.Sprintf("w%d", p))}
		if !n.shard(p).machine.Apply(p, []jetstream.Message{{Seq: 1, Time: 1000, Key: key, Data: data}}) {
			t.Fatal("the machine refuses the log")
		}
		n.put(p, servingAt(0))
	}
	for lapsed := range events.Partition(2) {
		f := finding{n: n, q: &api.Query{Model: "m", Hashes: api.Hashes{7}}, s: new(scratch)}
		if err := f.open(); err != nil {
			t.Fatal(err)
		}
		shared, err := f.match(t.Context())
		if err != nil || len(f.answer.Workers) != 2 {
			t.Fatalf("two ranks hold the block: %+v, %v", f.answer, err)
		}
		n.put(lapsed, &restoring{kept: &kept{}})
		f.filter()
		a, err := f.merge(t.Context(), shared)
		left := events.WorkerID(fmt.Sprintf("w%d", 1-lapsed))
		if err != nil || a.Complete || !slices.Equal(a.Missing, []events.Partition{lapsed}) || len(a.Workers) != 1 ||
			a.Workers[0].Instance != left {
			t.Errorf("partition %d lapsed: %+v, %v", lapsed, a, err)
		}
		n.put(lapsed, servingAt(0))
	}
}
