package node

import (
	"fmt"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// publishAs publishes one batch of eight blocks with any rank, model and block size.
func (w *site) publishAs(key events.RankKey, model string, blockSize uint32) {
	w.Helper()
	subject := fmt.Sprintf("kv.v1.test.ev.0.%s.%d", key.Instance, key.Rank)
	data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: 1, Model: model, BlockSize: blockSize,
		Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1, 2, 3, 4, 5, 6, 7, 8},
			Locals: make([]events.LocalHash, 8)}}})
	w.must(err)
	_, err = w.js.Publish(w.ctx, subject, data)
	w.must(err)
}

// TestOtherBlockSize: a batch with another block size than the model's registered one changes no answer. The status
// counts it and names its rank. The registered size may change.
func TestOtherBlockSize(t *testing.T) {
	w := newSite(t)
	var registered atomic.Uint32
	registered.Store(4)
	w.size = func(model string) uint32 {
		if model == "m" {
			return registered.Load()
		}
		return 0
	}
	w.start()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	w.publishAs(events.RankKey{Instance: "evil"}, "m", 65535)
	w.publishAs(events.RankKey{Instance: "evil", Rank: 1}, "m", 0)
	w.publishAs(events.RankKey{Instance: "free"}, "unregistered", 65535)
	last := w.info()
	for {
		a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
		if err != nil || len(a.Workers) != 1 || a.BlockSize != 4 || a.Workers[0].Instance != "w1" {
			t.Fatalf("%+v, %v", a, err)
		}
		if a.Partitions[0].Seq >= last {
			break
		}
	}
	s, err := w.node.Status(w.ctx)
	w.must(err)
	said := strings.Join(s.Problems, "\n")
	if s.Events["block_size_not_registered"] != 2 || !strings.Contains(said, "evil/0 (65535)") ||
		!strings.Contains(said, "registered block size 4") || strings.Contains(said, "queries must name one") {
		t.Errorf("%v; %s", s.Events, said)
	}
	for _, m := range s.Models {
		if m.Model == "m" && (m.BlockSize != 4 || m.Ranks != 1) {
			t.Errorf("%+v", m)
		}
	}
	if sizes := w.node.BlockSizes("m"); len(sizes) != 1 || sizes[0] != 4 {
		t.Errorf("block sizes %v", sizes)
	}
	if _, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt, BlockSize: 65535}); err == nil {
		t.Error("a query for the size that is not registered")
	}
	if _, err := w.node.Find(w.ctx, &api.Query{Model: "unregistered", Tokens: w.prompt}); err != nil {
		t.Errorf("a model without a registered size: %v", err)
	}
	registered.Store(65535) // forgotten, and registered again
	if a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt}); err != nil || a.BlockSize != 65535 {
		t.Errorf("%+v, %v", a, err)
	}
}

// TestRanksBeyondTheLimit: events of ranks beyond the limit are skipped and counted, and use no memory. A restore drops
// such ranks of an earlier release's snapshot.
func TestRanksBeyondTheLimit(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(1)
	w.awaitAll()
	for i := range 100 {
		w.publishAs(events.RankKey{Instance: "evil", Rank: events.Rank(events.MaxRanks + i*40_000_000)}, "m", 4)
	}
	w.publishAs(events.RankKey{Instance: "last", Rank: events.MaxRanks - 1}, "m", 4)
	last := w.info()
	for at := events.StreamSeq(0); at < last; {
		a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
		w.must(err)
		at = a.Partitions[0].Seq
	}
	list, err := w.node.Workers(w.ctx, api.WorkersRequest{})
	w.must(err)
	s, err := w.node.Status(w.ctx)
	w.must(err)
	if len(list.Workers) != 2 || s.Events["rank_beyond_limit"] != 100 || s.Events["poison"] != 0 {
		t.Errorf("%d workers, %v", len(list.Workers), s.Events)
	}
}

// info returns the last sequence of the log.
func (w *site) info() events.StreamSeq {
	w.Helper()
	info, err := w.ns.StreamInfo(w.ctx, 0)
	w.must(err)
	return info.Last
}
