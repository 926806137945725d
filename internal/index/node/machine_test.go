package node

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
	"github.com/kvatlas/kvatlas/tools/twin"
)

// bounds are small, so they apply often.
var bounds = radix.Config{MaxPending: 6, PendingFor: 400, MaxTombstones: 4, TombstoneFor: 300}

// logOf draws the log of one partition: batches of a few ranks, with all possible errors on the way.
func logOf(t *rapid.T) (msgs []jetstream.Message) {
	type shim struct {
		key         events.RankKey
		model       string
		incarnation events.Incarnation
		next        events.EventID
	}
	var shims []*shim
	for i := range rapid.IntRange(1, 3).Draw(t, "ranks") {
		shims = append(shims, &shim{
			key:   events.RankKey{Instance: events.WorkerID(fmt.Sprintf("w%d", i/2)), Rank: events.Rank(i % 2)},
			model: fmt.Sprintf("m%d", i%2), incarnation: 1, next: 1,
		})
	}
	now := events.Millis(1000)
	for i := range rapid.IntRange(1, 60).Draw(t, "messages") {
		now += events.Millis(rapid.IntRange(0, 100).Draw(t, "ms"))
		s := rapid.SampledFrom(shims).Draw(t, "rank")
		b := events.Batch{Incarnation: s.incarnation, FirstID: s.next, Model: s.model, BlockSize: 16}
		what := rapid.IntRange(0, 39).Draw(t, "what")
		switch what {
		case 0:
			s.incarnation, s.next = s.incarnation+1, 1 // a new incarnation
			b.Incarnation, b.FirstID = s.incarnation, 1
		case 1:
			b.FirstID += events.EventID(rapid.IntRange(1, 3).Draw(t, "gap"))
		case 2, 3:
			b.FirstID -= min(b.FirstID-1, events.EventID(rapid.IntRange(1, 4).Draw(t, "again")))
		case 4:
			b.Incarnation-- // stale
		case 5:
			b.Shutdown = true
		}
		for range rapid.IntRange(0, 4).Draw(t, "events") {
			b.Events = append(b.Events, eventOf(t))
		}
		b.Cursor = events.Cursor{Known: true, Seq: events.EngineSeq(i), Digest: uint64(i)}
		if b.Incarnation == s.incarnation {
			s.next = max(s.next, b.FirstID+events.EventID(len(b.Events)))
		}
		data, err := events.AppendBatch(nil, &b)
		if err != nil {
			t.Fatal(err)
		}
		m := jetstream.Message{Seq: events.StreamSeq(i + 1), Time: now, Key: s.key, Data: data}
		switch what {
		case 6:
			m.Data = data[:len(data)/2]
		case 7:
			m.Key = events.RankKey{}
		}
		msgs = append(msgs, m)
	}
	return msgs
}

// eventOf draws an event over a few blocks, so that events overlap: block n has the engine hash 100+n, and its local
// hash depends on n.
func eventOf(t *rapid.T) events.Event {
	e := events.Event{Tier: rapid.SampledFrom([]events.Tier{events.Device, events.Device, events.Host,
		events.Disk}).Draw(t, "tier")}
	from := rapid.IntRange(0, 9).Draw(t, "from")
	n := rapid.IntRange(1, 4).Draw(t, "n")
	for i := range n {
		e.Blocks = append(e.Blocks, events.BlockHash(100+from+i))
		e.Locals = append(e.Locals, events.LocalHash(7*(from+i)))
	}
	switch rapid.IntRange(0, 19).Draw(t, "kind") {
	case 0:
		return events.Event{Kind: events.Cleared,
			Tier: rapid.SampledFrom([]events.Tier{events.AllTiers, events.Device, events.Host}).Draw(t,
				"cleared"), Reason: events.ReasonEngine}
	case 1, 2, 3, 4, 5, 6:
		e.Kind, e.Locals = events.Removed, nil
	default:
		e.Kind = events.Stored
		e.HasParent, e.Parent = from > 0, events.BlockHash(99+from)
		e.Lookahead = rapid.SampledFrom([]uint32{0, 0, 0, 1, 3}).Draw(t, "lookahead")
	}
	return e
}

// naive is the reference for a partition's log, with one twin for each rank.
type naive map[events.RankKey]*naiveRank

type naiveRank struct {
	model       string
	incarnation events.Incarnation
	last        events.EventID
	lookahead   uint32
	twin        *twin.Rank
}

func (n naive) apply(m jetstream.Message) {
	var b events.Batch
	if m.Key == (events.RankKey{}) || events.DecodeBatch(m.Data, &b) != nil {
		return
	}
	r := n[m.Key]
	if r != nil && b.Incarnation < r.incarnation {
		return
	}
	if r == nil || b.Incarnation > r.incarnation {
		r = &naiveRank{b.Model, b.Incarnation, 0, 0, twin.New(twin.Config(bounds), b.BlockSize)}
		n[m.Key] = r
	}
	if b.FirstID > r.last+1 {
		r.twin.Apply(m.Time, []events.Event{{Kind: events.Cleared}})
	}
	var news []events.Event
	for i, e := range b.Events {
		if b.FirstID+events.EventID(i) > r.last {
			news = append(news, e)
			if len(e.Locals) > 0 {
				r.lookahead = e.Lookahead
			}
		}
	}
	r.twin.Apply(m.Time, news)
	r.last = max(r.last, b.LastID())
	if b.Shutdown {
		delete(n, m.Key)
	}
}

// checksums returns the checksums of all ranks of a machine's partition.
func checksums(m *Machine) map[events.RankKey]uint64 {
	out := map[events.RankKey]uint64{}
	for _, part := range m.parts {
		for key, r := range part.ranks {
			out[key] = m.index.Checksum(r.id)
		}
	}
	return out
}

func (n naive) checksums() map[events.RankKey]uint64 {
	out := map[events.RankKey]uint64{}
	for key, r := range n {
		out[key] = r.twin.Checksum()
	}
	return out
}

// agree compares a machine with the naive twin: checksums, and the answers to some prompts.
func agree(t *rapid.T, m *Machine, n naive, what string) {
	if got, want := checksums(m), n.checksums(); !maps.Equal(got, want) {
		t.Fatalf("%s: the checksums are %v, the twin's %v", what, got, want)
	}
	for model, list := range m.View().Models {
		want := map[uint32]bool{}
		for _, r := range n {
			if r.model == model {
				want[r.lookahead] = true
			}
		}
		if got := list[0].Lookaheads; !slices.Equal(got, slices.Sorted(maps.Keys(want))) {
			t.Fatalf("%s: the view of %s has lookaheads %d, the twin's are %v", what, model, got, want)
		}
		for _, r := range list[0].Ranks {
			if want := n[r.Key].lookahead; r.Lookahead != want {
				t.Fatalf("%s: the view of %s has a lookahead of %d, the twin %d", what, r.Key, r.Lookahead, want)
			}
		}
	}
	for length := range 14 {
		locals := make([]events.LocalHash, length)
		for i := range locals {
			locals[i] = events.LocalHash(7 * i)
		}
		for model, list := range m.View().Models {
			var a radix.Answer
			m.index.Match(list[0].Space, locals, nil, &a)
			got := map[events.RankKey][events.NumTiers]uint32{}
			for _, o := range a.Ranks {
				if r := m.View().Rank(0, o.Rank); r != nil { // otherwise the rank is forgotten
					got[r.Key] = o.Depth
				}
			}
			want := map[events.RankKey][events.NumTiers]uint32{}
			for key, r := range n {
				if d := r.twin.Match(locals); r.model == model && d != [events.NumTiers]uint32{} {
					want[key] = d
				}
			}
			if !maps.Equal(got, want) {
				t.Fatalf("%s: %d blocks of %s: the index has %v, the twin %v", what, length, model, got, want)
			}
		}
	}
}

func newMachine() *Machine {
	m := NewMachine(radix.New(bounds), 1)
	m.Begin(0, 0, 0)
	return m
}

func TestApplyInAnySplitEqualsApplyAtOnceEqualsTheTwin(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		log := logOf(t)
		whole, split, replica, n := newMachine(), newMachine(), newMachine(), naive{}
		whole.Apply(0, log)
		for at := 0; at < len(log); {
			to := rapid.IntRange(at+1, len(log)).Draw(t, "to")
			from := at - rapid.IntRange(0, at).Draw(t, "again") // applied messages come again
			if !split.Apply(0, log[from:to]) {
				t.Fatal("a hole where there is none")
			}
			at = to
		}
		for _, msg := range log {
			replica.Apply(0, []jetstream.Message{msg})
			n.apply(msg)
		}
		agree(t, whole, n, "at once")
		agree(t, split, n, "split")
		agree(t, replica, n, "one by one")
		if whole.counts != replica.counts {
			t.Fatalf("counted %+v at once and %+v one by one", whole.counts, replica.counts)
		}
	})
}

func TestAHoleStopsThePartition(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		log := logOf(t)
		at := rapid.IntRange(0, len(log)-1).Draw(t, "hole")
		holed := append(slices.Clone(log[:at]), log[at+1:]...)
		m := newMachine()
		if ok := m.Apply(0, holed); ok != (at == len(log)-1) || m.Applied(0) != events.StreamSeq(at) {
			t.Fatalf("without message %d of %d: %v, applied %d", at+1, len(log), ok, m.Applied(0))
		}
	})
}

// failing is a test.
type failing interface{ Fatal(args ...any) }

// save writes a partition's snapshot into a bucket, a map, and calls between between the steps.
func save(t failing, m *Machine, bucket map[string][]byte, runIndex *snapshot.RunIndex,
	between func()) (*snapshot.Manifest, *snapshot.RunIndex) {
	c := m.capture(0)
	seen := snapshot.Bucket{Manifests: map[string][]byte{}, Keys: slices.Sorted(maps.Keys(bucket))}
	for key, value := range bucket {
		if k, _ := snapshot.ParseKey(key); k.Type != snapshot.ChunkKey {
			seen.Manifests[key] = value
		}
	}
	plan, err := snapshot.PlanWrite(seen, snapshot.Log{Stream: "stream", Epoch: time.Unix(1, 0), First: 1, Last: c.seq},
		c.seq)
	if err != nil {
		t.Fatal(err)
	}
	w, err := snapshot.NewWriter(snapshot.Config{
		Stream: "stream", Epoch: time.Unix(1, 0), Seq: c.seq, SeqTime: c.time, Created: time.Unix(2,
			0), Spaces: c.spaces, Ranks: c.ranks,
	}, plan, runIndex, func(key string, data []byte) error {
		bucket[key] = slices.Clone(data)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for done := false; !done; between() {
		if done, err = c.export.Step(3, w); err != nil {
			t.Fatal(err)
		}
	}
	manifest, runIndex, err := w.Close()
	if err != nil {
		t.Fatal(err)
	}
	text, err := manifest.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if plan.CopyKey != "" {
		bucket[plan.CopyKey] = plan.Copy
	}
	bucket[snapshot.ManifestKey(0)] = text
	for _, key := range plan.After(manifest, slices.Collect(maps.Keys(bucket))).Delete {
		delete(bucket, key)
	}
	return manifest, runIndex
}

// load restores a partition into an index that may hold others.
func load(t failing, m *Machine, bucket map[string][]byte) *snapshot.RunIndex {
	manifest, err := snapshot.ParseManifest(bucket[snapshot.ManifestKey(0)])
	if err != nil {
		t.Fatal(err)
	}
	var to *imageSink
	runIndex, err := snapshot.Read(manifest, func(key string) ([]byte, error) {
		if data, ok := bucket[key]; ok {
			return data, nil
		}
		return nil, snapshot.ErrMissing
	}, func(ranks []snapshot.RankState) (snapshot.Sink, error) {
		to = m.restore(0, manifest, ranks)
		return to, nil
	})
	if err = errors.Join(err, to.finish()); err != nil {
		t.Fatal(err)
	}
	m.Begin(0, manifest.Seq, manifest.SeqTime)
	return runIndex
}

func TestSnapshotThenTailEqualsTailFromTheStart(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		log := logOf(t)
		n := naive{}
		for _, msg := range log {
			n.apply(msg)
		}
		m, bucket, applied := newMachine(), map[string][]byte{}, 0
		var runIndex *snapshot.RunIndex
		apply := func(upTo int) {
			upTo = min(upTo, len(log))
			m.Apply(0, log[min(applied, upTo):upTo])
			applied = max(applied, upTo)
		}
		for range rapid.IntRange(1, 3).Draw(t, "snapshots") {
			apply(rapid.IntRange(applied, len(log)).Draw(t, "upTo"))
			_, runIndex = save(t, m, bucket, runIndex,
				func() { apply(applied + rapid.IntRange(0, 2).Draw(t, "meanwhile")) })
			if rapid.Bool().Draw(t, "crash") {
				m = newMachine()
				m.spaces.number(spaceKey{"other", 8}, 0) // numbers may differ in another process
				runIndex = load(t, m, bucket)
				applied = int(m.Applied(0))
			}
		}
		m = newMachine()
		load(t, m, bucket)
		if !m.Apply(0, log[m.Applied(0):]) {
			t.Fatal("the tail does not follow the snapshot")
		}
		agree(t, m, n, "snapshot and tail")
	})
}

// TestDecodingKeepsLittleMemory: the memory for decoding a burst of large messages is released after the burst.
func TestDecodingKeepsLittleMemory(t *testing.T) {
	m := newMachine()
	first := events.EventID(1)
	for i := range 64 {
		b := events.Batch{Incarnation: 1, FirstID: first, Model: "m", BlockSize: 16, Events: make([]events.Event, 2000)}
		for j := range b.Events {
			b.Events[j] = events.Event{Kind: events.Removed, Tier: events.Device, Blocks: make([]events.BlockHash, 1)}
		}
		for j := range 4 { // at different places each time
			b.Events[(37*i+500*j)%len(b.Events)].Blocks = make([]events.BlockHash, events.MaxBlocksPerEvent)
		}
		first += events.EventID(len(b.Events))
		data, err := events.AppendBatch(nil, &b)
		if err != nil {
			t.Fatal(err)
		}
		if !m.Apply(0, []jetstream.Message{{Seq: events.StreamSeq(i + 1), Time: 1, Key: events.RankKey{Instance: "w"},
			Data: data}}) {
			t.Fatal("not applied")
		}
	}
	reachable := 0 // from the reused batch
	for _, e := range m.batch.Events[:cap(m.batch.Events)] {
		reachable += 8 * cap(e.Blocks)
	}
	if kept := m.batch.MemoryBytes(); kept > 4<<20 || reachable > 4<<20 || m.counts.Poison > 0 {
		t.Errorf("%d bytes are kept, %d are reachable from events; %+v", kept, reachable, m.counts)
	}
}
