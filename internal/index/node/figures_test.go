package node

import (
	"context"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// TestScrapesDoNotWait: a scrape needs no writer, so more scrapes succeed than the busy writer's queue could hold.
func TestScrapesDoNotWait(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(3)
	want := w.awaitAll()
	testkit.Eventually(t, "the writer counts the blocks", func() bool {
		s, _ := w.node.Recent()
		return s.Index.Blocks == want.Index.Blocks
	})
	at, release := make(chan struct{}), make(chan struct{})
	left := make(chan error, 1)
	go func() {
		left <- w.node.do(w.ctx, 0, func(*Machine) {
			close(at)
			<-release
		})
	}()
	<-at
	for range 2 * cap(w.node.shards[0].work) { // more than the queue can hold
		if s, _ := w.node.Recent(); s.Index.Blocks != want.Index.Blocks || s.Index.Distinct != want.Index.Distinct ||
			s.Partitions[0].Ranks != 1 {
			t.Fatalf("got %+v, want %+v", s.Index, want.Index)
		}
	}
	close(release)
	w.must(<-left)
}

// TestEventsAreCounted: events are counted by source, kind and tier, and under a source after its registration.
func TestEventsAreCounted(t *testing.T) {
	m := NewMachine(radix.New(radix.Config{}), 1)
	known := map[events.RankKey]string{{Instance: "a"}: "vllm"}
	m.source = func(key events.RankKey) string { return known[key] }
	seq, id := events.StreamSeq(0), map[string]events.EventID{}
	say := func(worker string, evs ...events.Event) {
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: 1, FirstID: id[worker] + 1, Model: "m",
			BlockSize: 16, Events: evs})
		if err != nil {
			t.Fatal(err)
		}
		id[worker] += events.EventID(len(evs))
		seq++
		if !m.Apply(0, []jetstream.Message{{Seq: seq, Key: events.RankKey{Instance: events.WorkerID(worker)}, Data: data}}) {
			t.Fatal("not applied")
		}
	}
	removed := events.Event{Kind: events.Removed, Tier: events.Host, Blocks: []events.BlockHash{1}}
	cleared := events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonEngine}
	say("a", stored(0, 1), removed, cleared)
	say("b", stored(0, 1))
	m.figures(radix.Stats{})
	say("b", removed)
	known[events.RankKey{Instance: "b"}] = "sglang"
	m.figures(radix.Stats{})
	say("b", removed, removed)
	got := m.figures(radix.Stats{}).applied.Events
	want := map[EventClass]uint64{
		{"vllm", events.Stored, events.Device}: 1, {"vllm", events.Removed, events.Host}: 1,
		{"vllm", events.Cleared, events.AllTiers}: 1, {UnknownSource, events.Stored, events.Device}: 1,
		{UnknownSource, events.Removed, events.Host}: 1, {"sglang", events.Removed, events.Host}: 2,
	}
	if len(got) != len(want) {
		t.Errorf("got %v", got)
	}
	for class, n := range want {
		if got[class] != n {
			t.Errorf("%v: %d, want %d", class, got[class], n)
		}
	}
}

func TestAges(t *testing.T) {
	m := NewMachine(radix.New(radix.Config{}), 1)
	now := time.UnixMilli(100_000)
	m.applied([]jetstream.Message{{Time: 100_001}, {Time: 100_000}, {Time: 99_999}, {Time: 99_995}, {Time: 1}, {}}, now)
	a := m.figures(radix.Stats{}).applied.Ages
	if a.Counts[0] != 3 || a.Counts[2] != 1 || a.Counts[len(AgeBounds)] != 1 || a.Sum != 100_005*time.Millisecond {
		t.Errorf("got %+v", a)
	}
}

// TestCountingInParts: a count in parts equals a count at once.
func TestCountingInParts(t *testing.T) {
	w := newSite(t)
	w.start()
	w.startShim()
	w.grow(20)
	w.awaitAll()
	w.must(w.node.do(context.Background(), 0, func(m *Machine) {
		var c radix.Census
		for range 2 { // the census starts again
			parts := 0
			got, done := m.index.Count(&c, 1)
			for ; !done; got, done = m.index.Count(&c, 1) {
				parts++
			}
			if want := m.index.Stats(); got != want || parts < 1 {
				t.Errorf("in %d parts: %+v, want %+v", parts, got, want)
			}
		}
	}))
}
