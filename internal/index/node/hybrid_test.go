package node

import (
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestHybridModelsAreAnsweredAsTheirEnginesReuse: workers of a hybrid model are credited with the prefix that all
// groups can reuse. An unknown group makes the credit an upper bound, and the answer has the bound. An explanation
// names the group. A restart from a snapshot changes nothing.
func TestHybridModelsAreAnsweredAsTheirEnginesReuse(t *testing.T) {
	w := newSite(t)
	w.start()
	conn, err := jetstream.Connect(w.ctx, jetstream.ConnOptions{URLs: []string{"nats://" + w.addr}, Wait: true})
	w.must(err)
	defer conn.Close()
	ns, err := jetstream.OpenNamespace(w.ctx, conn, "test")
	w.must(err)
	hasher, err := events.NewHasher(4, events.Space{})
	w.must(err)
	prompt := make([]uint32, 40)
	for i := range prompt {
		prompt[i] = uint32(i)
	}
	main := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull,
		Locals: hasher.Hash(nil, prompt)}
	for i := range main.Locals {
		main.Blocks = append(main.Blocks, events.BlockHash(i+1))
	}
	window := func(tokens uint32, tier events.Tier, blocks ...events.BlockHash) events.Event {
		return events.Event{Kind: events.Stored, Tier: tier, Group: 1, Attention: events.AttentionSlidingWindow,
			Window: tokens, Blocks: blocks}
	}
	silent := main
	silent.Window = 1
	eagle := main
	eagle.Drops = true
	group := &api.PathGroup{Index: 1, Kind: "sliding_window", Window: 12}
	bound := api.BoundFullAttentionOnly
	workers := map[events.WorkerID]struct {
		evs  []events.Event
		want api.Overlap
		stop string
	}{
		"plain": {[]events.Event{main}, api.Overlap{Device: 10}, "query_ends"},
		"eagle": {[]events.Event{eagle}, api.Overlap{Device: 9}, "draft_model"},
		"whole": {[]events.Event{main, window(12, events.Device, 8, 9, 10)}, api.Overlap{Device: 10},
			"query_ends"},
		"earlier": {[]events.Event{main, window(12, events.Device, 3, 4, 5, 7, 9, 10)},
			api.Overlap{Device: 5, Path: &api.Path{Group: group}}, "group_lacks_blocks"},
		"also in host": {[]events.Event{main, window(12, events.Device, 3, 4, 5, 9), window(12, events.Host, 8, 10)},
			api.Overlap{Device: 5, Host: 5}, "query_ends"},
		"unknown": {[]events.Event{main, window(0, events.Device, 1)}, api.Overlap{Device: 10, Bound: bound},
			"query_ends"},
		"unannounced": {[]events.Event{silent}, api.Overlap{Device: 10, Bound: bound}, "query_ends"},
		"nothing": {[]events.Event{main, window(12, events.Device)}, api.Overlap{Path: &api.Path{Group: group}},
			"group_lacks_blocks"},
	}
	var at []api.PartitionSeq
	for name, k := range workers {
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 4,
			Events: k.evs})
		w.must(err)
		log := shim.NewStreamLog(ns, events.RankKey{Instance: name}, nil)
		_, err = log.Last(w.ctx)
		w.must(err)
		seq, err := log.Publish(w.ctx, [][]byte{data})
		w.must(err)
		at = []api.PartitionSeq{{Partition: 0, Seq: max(seq, append(at, api.PartitionSeq{})[0].Seq)}}
	}
	check := func() {
		t.Helper()
		for _, explain := range []bool{false, true} {
			a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: prompt, MinSeq: at, Idle: true,
				Explain: explain})
			w.must(err)
			if len(a.Workers) != len(workers) {
				t.Fatalf("%d workers: %+v", len(a.Workers), a.Workers)
			}
			for _, o := range a.Workers {
				k := workers[o.Instance]
				if o.Device != k.want.Device || o.Host != k.want.Host || o.Bound != k.want.Bound {
					t.Errorf("%s: %+v, want %+v", o.Instance, o, k.want)
				}
				switch {
				case !explain:
				case o.Path.Stop != k.stop || (o.Path.Group != nil) != (k.want.Path != nil) || o.Path.Group != nil &&
					*o.Path.Group != *k.want.Path.Group:
					t.Errorf("%s: stopped by %s %+v, want %s", o.Instance, o.Path.Stop, o.Path.Group, k.stop)
				}
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
