package node

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"testing/synctest"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit/natskit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestShardsAnswerAsOne: nodes with 1, 2, 3 and 5 shards and the same logs of five partitions return the same answers,
// checksums, figures and lists of workers.
func TestShardsAnswerAsOne(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 3*patience)
	defer cancel()
	server := natskit.Start(t, natsserver.Options{Listen: "127.0.0.1:0"})
	conn := natskit.Connect(t, server)
	const partitions = 5
	ns, err := jetstream.JoinNamespace(ctx, conn, jetstream.NamespaceConfig{Name: "test", Partitions: partitions})
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		var logs [partitions][]jetstream.Message
		for p := range logs {
			if rapid.IntRange(0, 4).Draw(t, "nothing") == 0 {
				continue
			}
			logs[p] = logOf(t)
			for i := range logs[p] {
				logs[p][i].Key.Instance += events.WorkerID(fmt.Sprintf("-%d", p))
			}
		}
		queries := queriesOf(t, partitions)
		var want []string
		for _, shards := range []int{1, 2, 3, 99} {
			n := New(Config{ID: "n", Namespace: ns, Index: bounds, Shards: shards})
			if got := len(n.shards); got != min(shards, partitions) {
				t.Fatalf("%d shards, where %d are wanted for %d partitions", got, shards, partitions)
			}
			got := said(t, n, logs[:], queries)
			if shards == 1 {
				want = got
			}
			for i := range want {
				if got[i] != want[i] {
					t.Fatalf("%d shards answer\n%s\none shard answers\n%s", shards, got[i], want[i])
				}
			}
		}
	})
}

// TestDoEndsWithItsContext: work for a busy or stopped writer ends with its context and is not done later. Work that
// has begun is completed first.
func TestDoEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &shard{work: make(chan work, 1)}
		ended := make(chan error, 1)
		ctx, cancel := context.WithCancel(t.Context())
		ran := false
		go func() { ended <- s.do(ctx, func(*Machine) { ran = true }) }()
		synctest.Wait()
		cancel()
		if err := <-ended; err != context.Canceled {
			t.Error(err)
		}
		w := <-s.work
		if w.run(nil); ran {
			t.Error("the work ran after the end of its context")
		}
		ctx, cancel = context.WithCancel(t.Context())
		release := make(chan struct{})
		go func() { ended <- s.do(ctx, func(*Machine) { <-release }) }()
		w = <-s.work
		go w.run(nil)
		synctest.Wait()
		cancel()
		synctest.Wait()
		if len(ended) > 0 {
			t.Error("do returned while the writer ran the work")
		}
		close(release)
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// queriesOf draws queries for the logs of logOf.
func queriesOf(t *rapid.T, partitions int) (list []*api.Query) {
	for _, model := range []string{"m0", "m1", "none"} {
		for range 8 {
			q := &api.Query{Model: model, L3: api.L3Off, Idle: rapid.Bool().Draw(t, "idle"),
				Explain: rapid.Bool().Draw(t, "explain")}
			from, n := rapid.IntRange(0, 1).Draw(t, "from"), rapid.IntRange(0, 12).Draw(t, "blocks")
			if rapid.IntRange(0, 3).Draw(t, "by name") == 0 {
				q.EngineHashes, q.Explain = []uint64{}, false
				for i := range n {
					q.EngineHashes = append(q.EngineHashes, uint64(100+from+i))
				}
			} else {
				q.Hashes = []uint64{}
				for i := range n {
					q.Hashes = append(q.Hashes, uint64(7*(from+i)))
				}
			}
			for range rapid.IntRange(0, 2).Draw(t, "workers") {
				q.Workers = append(q.Workers, events.WorkerID(fmt.Sprintf("w%d-%d", rapid.IntRange(0, 1).Draw(t, "worker"),
					rapid.IntRange(0, partitions-1).Draw(t, "of"))))
			}
			if rapid.IntRange(0, 3).Draw(t, "some") == 0 {
				q.Partitions = []events.Partition{events.Partition(rapid.IntRange(0, partitions-1).Draw(t, "partition"))}
			}
			list = append(list, q)
		}
	}
	return list
}

// said applies logs to a node that does not run, and returns all its answers.
func said(t *rapid.T, n *Node, logs [][]jetstream.Message, queries []*api.Query) (list []string) {
	text := func(v any, err error) {
		data, bad := json.Marshal(v)
		if bad != nil {
			t.Fatal(bad)
		}
		list = append(list, fmt.Sprintf("%s %v", data, err))
	}
	for p, log := range logs {
		p := events.Partition(p)
		n.put(p, servingAt(0))
		n.shard(p).machine.Apply(p, log)
		text(n.shard(p).machine.checksum(p), nil)
	}
	for _, q := range queries {
		a, err := n.Find(t.Context(), q)
		text(a, err)
		if a == nil || q.Explain {
			continue
		}
		raw := *q
		raw.Raw, raw.Idle = true, false
		a, err = n.Find(t.Context(), &raw)
		if err != nil {
			t.Fatal(err)
		}
		numbers := map[uint32]bool{}
		for _, w := range a.Workers {
			if numbers[w.Number] || w.Number == 0 {
				t.Fatalf("two ranks have the number %d, or it is 0: %+v", w.Number, a.Workers)
			}
			numbers[w.Number] = true
		}
	}
	for _, s := range n.shards { // otherwise the shards wait for each other's writers
		go func() {
			for w := range s.work {
				w.run(s.machine)
			}
		}()
		defer close(s.work)
	}
	workers, err := n.Workers(t.Context(), api.WorkersRequest{})
	text(workers, err)
	status, err := n.Status(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	status.Index.Distinct, status.Index.Bytes, status.Index.DecoderBytes = 0, 0, 0 // shards do not share blocks
	text([]any{status.Models, status.Index, status.Events, status.Problems}, nil)
	text(n.grown(t.Context()), nil)
	return list
}
