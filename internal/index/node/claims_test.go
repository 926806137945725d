package node

import (
	"slices"
	"sync/atomic"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// claimed is a machine with workers that have claimed some models.
type claimed struct {
	*testing.T
	*Machine
	models map[events.WorkerID]string
	seq    events.StreamSeq
}

func newClaimed(t *testing.T) *claimed {
	c := &claimed{T: t, Machine: NewMachine(radix.New(radix.Config{}), 1), models: map[events.WorkerID]string{}}
	c.claimed = func(instance events.WorkerID, model string) bool { return c.models[instance] == model }
	return c
}

// announces makes a worker announce two blocks under a model, in a new incarnation.
func (c *claimed) announces(instance events.WorkerID, model string, blockSize uint32) {
	c.Helper()
	c.seq++
	b := events.Batch{Incarnation: events.Incarnation(c.seq), FirstID: 1, Model: model, BlockSize: blockSize,
		Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1, 2},
			Locals: []events.LocalHash{11, 12}}}}
	data, err := events.AppendBatch(nil, &b)
	if err != nil {
		c.Fatal(err)
	}
	if !c.Apply(0, []jetstream.Message{{Seq: c.seq, Key: events.RankKey{Instance: instance}, Data: data}}) {
		c.Fatal("the message is not applied")
	}
}

// check checks the workers of a model in the view, and the number of hidden ranks.
func (c *claimed) check(model string, hidden int, want ...events.WorkerID) {
	c.Helper()
	v := c.View()
	var got []events.WorkerID
	for _, served := range v.Models[model] {
		for _, r := range served.Ranks {
			got = append(got, r.Key.Instance)
			if v.Rank(0, r.ID) != r {
				c.Errorf("%v is not found by its number", r.Key)
			}
		}
	}
	if !slices.Equal(got, want) || len(v.Hidden) != hidden {
		c.Fatalf("the view has %v under %s and hides %v; want %v and %d hidden", got, model, v.Hidden, want, hidden)
	}
}

// TestARankWithoutAClaimIsHidden: the view has a rank only while its worker has claimed the announced model.
func TestARankWithoutAClaimIsHidden(t *testing.T) {
	c := newClaimed(t)
	c.models["good"] = "llama"
	c.announces("good", "llama", 16)
	c.announces("bad", "llama", 65535)
	c.check("llama", 1, "good")
	// An unclaimed block size does not make the model's block size ambiguous.
	if served, err := c.View().serving(&api.Query{Model: "llama"}, 0); err != nil || served.BlockSize != 16 {
		t.Errorf("a query without a block size: %+v, %v", served, err)
	}
	before := c.View()
	if c.Recheck(); c.View() != before {
		t.Error("a new view, and no claim has changed")
	}
	c.models["bad"] = "llama"
	c.Recheck()
	if list := c.View().Models["llama"]; len(list) != 2 || len(c.View().Hidden) != 0 {
		t.Errorf("with the claim: %d block sizes, %v hidden", len(list), c.View().Hidden)
	}
	delete(c.models, "bad")
	c.Recheck()
	c.check("llama", 1, "good")
	c.announces("bad", "own", 16)
	c.models["bad"] = "own"
	c.Recheck()
	c.check("own", 0, "bad")
	c.announces("good", "own", 16) // the worker switches to an unclaimed model
	c.check("own", 1, "bad")
	c.check("llama", 1)
}

// TestAnswersLeaveOutUnclaimedRanks: of two workers with blocks under a model, only one has claimed the model. Answers
// exclude the other until its claim appears.
func TestAnswersLeaveOutUnclaimedRanks(t *testing.T) {
	w := newSite(t)
	var other atomic.Bool // has claimed the model
	w.claimed = func(instance events.WorkerID, model string) bool { return instance == "w1" || other.Load() }
	w.start()
	tokens := []uint32{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12}
	announce := func(instance events.WorkerID, blocks int) {
		t.Helper()
		hasher, err := events.NewHasher(4, events.Space{})
		w.must(err)
		names := []events.BlockHash{101, 102, 103}[:blocks]
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: 1, Model: "m", BlockSize: 4,
			Events: []events.Event{{Kind: events.Stored, Tier: events.Device, Blocks: names,
				Locals: hasher.Hash(nil, tokens[:4*blocks])}}})
		w.must(err)
		log := shim.NewStreamLog(w.ns, events.RankKey{Instance: instance}, nil)
		_, err = log.Last(w.ctx)
		w.must(err)
		_, err = log.Publish(w.ctx, [][]byte{data})
		w.must(err)
	}
	announce("w1", 2)
	announce("w2", 3)
	at := []api.PartitionSeq{{Partition: 0, Seq: 2}}
	holders := func(explain bool) (list []events.WorkerID) {
		t.Helper()
		a, err := w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: tokens, MinSeq: at, Explain: explain})
		w.must(err)
		for _, o := range a.Workers {
			list = append(list, o.Instance)
		}
		slices.Sort(list)
		return list
	}
	for _, explain := range []bool{false, true} {
		if got := holders(explain); !slices.Equal(got, []events.WorkerID{"w1"}) {
			t.Errorf("the prompt is held by %v", got)
		}
	}
	for instance, want := range map[events.WorkerID]bool{"w1": true, "w2": true, "w3": false} {
		holds, err := w.node.Holds(w.ctx, instance)
		w.must(err)
		if holds != want {
			t.Errorf("the index holds blocks of %s: %v", instance, holds)
		}
	}
	list, err := w.node.Workers(w.ctx, api.WorkersRequest{})
	w.must(err)
	if len(list.Workers) != 1 || list.Workers[0].Instance != "w1" {
		t.Errorf("workers: %+v", list.Workers)
	}
	status, err := w.node.Status(w.ctx)
	w.must(err)
	want := []api.UnclaimedRank{{Instance: "w2", Model: "m", Events: true}}
	if c := status.Claims; c.Ranks != 1 || !slices.Equal(c.Unclaimed, want) || status.Models[0].Ranks != 1 {
		t.Errorf("status: %+v, models %+v", c, status.Models)
	}
	prefixes := func() (blocks uint64) {
		t.Helper()
		trees, err := w.node.Prefixes(&api.PrefixesRequest{Model: "m"})
		w.must(err)
		for _, tree := range trees {
			blocks += uint64(tree.TotalBlocks)
		}
		return blocks
	}
	if got := prefixes(); got != 2 {
		t.Errorf("prefixes have %d blocks, want 2", got)
	}
	other.Store(true)
	w.node.ClaimsChanged()
	w.until("the claim shows the worker", func(api.PartitionStatus) bool { return len(holders(false)) == 2 })
	if got := prefixes(); got != 3 {
		t.Errorf("prefixes have %d blocks, want 3", got)
	}
	other.Store(false)
	w.node.ClaimsChanged()
	w.until("the worker is hidden again", func(api.PartitionStatus) bool { return len(holders(false)) == 1 })
}
