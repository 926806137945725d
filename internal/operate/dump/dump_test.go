package dump

import (
	"flag"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/tools/twin"
	"pgregory.net/rapid"
)

func init() { flag.Set("rapid.seed", "1") } // the same cases each time; `make explore` uses others

var bounds = radix.Config{MaxPending: 8, PendingFor: 1000, MaxTombstones: 4, TombstoneFor: 1000}

// layouts are the groups of ranks. If a main group has a window, the engine announces no other groups.
var layouts = [][]events.GroupSpec{
	{{Kind: events.AttentionFull}}, {{Kind: events.AttentionFull}},
	{{Kind: events.AttentionFull, Window: 1}},
	{{Kind: events.AttentionMLA, Drops: true}},
	{{Kind: events.AttentionFull}, {Kind: events.AttentionSlidingWindow, Window: 33}},
	{{Kind: events.AttentionMamba}, {Kind: events.AttentionFull, Drops: true},
		{Kind: events.AttentionChunkedLocal, Window: 64}},
	{{Kind: events.AttentionSlidingWindow, Window: 20}, {Kind: events.AttentionSlidingWindow},
		{Kind: events.AttentionSinkFull}},
	{{Kind: events.AttentionFull}, {Kind: events.AttentionFull}, {Kind: events.AttentionMamba}},
}

// several reports whether a layout has more than one main group.
func several(layout []events.GroupSpec) bool {
	mains := 0
	for _, g := range layout {
		if g.Kind.Main() {
			mains++
		}
	}
	return mains > 1
}

// eventOf draws an event over a tree of a few blocks. The position of block n follows from n. With a single main group,
// blocks sometimes have a second name.
func eventOf(t *rapid.T, layout []events.GroupSpec) events.Event {
	e := events.Event{
		Tier:  events.Tier(rapid.IntRange(1, 4).Draw(t, "tier")),
		Group: events.GroupIndex(rapid.IntRange(0, len(layout)-1).Draw(t, "group")),
	}
	of := layout[e.Group]
	e.Attention, e.Window, e.Drops = of.Kind, of.Window, of.Drops
	from, n := rapid.IntRange(0, 9).Draw(t, "from"), rapid.IntRange(1, 4).Draw(t, "n")
	branch := rapid.IntRange(0, 2).Draw(t, "branch")
	// Branches leave the trunk at block 3.
	name := func(i int) events.BlockHash { return events.BlockHash(100*min(i/3, 1)*branch + i + 1) }
	second := events.BlockHash(0)
	if !several(layout) && rapid.IntRange(0, 5).Draw(t, "renamed") == 0 {
		second = 10_000
	}
	for i := from; i < from+n; i++ {
		e.Blocks = append(e.Blocks, name(i)+second)
		e.Locals = append(e.Locals, events.LocalHash(7*name(i)))
	}
	switch rapid.IntRange(0, 24).Draw(t, "kind") {
	case 0:
		return events.Event{Kind: events.Cleared, Tier: events.Tier(rapid.IntRange(0, 4).Draw(t, "cleared")),
			Reason: events.ReasonEngine}
	case 1, 2, 3, 4, 5, 6, 7:
		e.Kind, e.Locals, e.Attention, e.Window, e.Drops = events.Removed, nil, 0, 0, false
	default:
		e.Kind = events.Stored
		if e.HasParent = from > 0; e.HasParent {
			e.Parent = name(from - 1)
		}
	}
	return e
}

// TestDumpRestoresTheSameHoldings dumps random contents, reads the lines back and applies them to another index. The
// test compares the new index with the original and with the naive twin: the engine's possible reuse, the kind of
// bound, and the checksum. With several main groups, a dump contains the common prefix.
func TestDumpRestoresTheSameHoldings(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		layout := rapid.SampledFrom(layouts).Draw(t, "layout")
		x := radix.New(bounds)
		type worker struct {
			key  events.RankKey
			id   radix.RankID
			twin *twin.Rank
		}
		var workers []*worker
		for i := range rapid.IntRange(1, 3).Draw(t, "ranks") {
			workers = append(workers, &worker{
				events.RankKey{Instance: events.WorkerID([]string{"7", "w\"1", "007"}[i]),
					Rank: events.Rank(i)}, x.AddRank(1, 16), twin.New(twin.Config(bounds), 16),
			})
		}
		for now := range events.Millis(rapid.IntRange(1, 60).Draw(t, "events")) {
			w := rapid.SampledFrom(workers).Draw(t, "rank")
			e := eventOf(t, layout)
			x.Apply(w.id, now, []events.Event{e})
			w.twin.Apply(now, []events.Event{e})
		}
		var ids []radix.RankID
		for _, w := range workers {
			ids = append(ids, w.id)
		}
		image := NewImage()
		export := x.StartExport(ids)
		for done := false; !done; {
			var err error
			if done, err = export.Step(5, image); err != nil {
				t.Fatal(err)
			}
		}
		y := radix.New(radix.Config{MaxPending: -1})
		for i, w := range workers {
			id := y.AddRank(1, 16)
			next := events.EventID(0)
			if _, err := image.Events(i, func(e *events.Event, groups ...events.Event) error {
				next++
				text := events.AppendRouterEvent(nil, w.key, next, e, groups...)
				line, err := events.ReadRouterEvent(text)
				if err != nil || line.Skipped != "" || line.Key != w.key || line.ID != uint64(next) {
					t.Fatalf("line %s read as %+v, %v", text, line, err)
				}
				if c := y.Apply(id, 0,
					line.Events()); c.Pending+c.Conflicts+c.UnknownRemovals+c.Overflowed+c.Malformed > 0 {
					t.Fatalf("line %s came to %+v", text, c)
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			if got, want := y.Bounded(id), x.Bounded(w.id); got != want {
				t.Fatalf("%s: bounded is %v, want %v", w.key, got, want)
			}
			if !several(layout) {
				if got, want := y.Checksum(id), w.twin.Checksum(); got != want {
					t.Fatalf("%s: checksum %x, the twin's %x", w.key, got, want)
				}
			}
			for branch := range 3 {
				var locals []events.LocalHash
				for i := range 14 {
					locals = append(locals, events.LocalHash(7*(100*min(i/3, 1)*branch+i+1)))
				}
				var a radix.Answer
				y.Match(1, locals, nil, &a)
				var got [events.NumTiers]uint32
				for _, o := range a.Ranks {
					if o.Rank == id {
						got = o.Depth
					}
				}
				if want := w.twin.Match(locals); got != want {
					t.Fatalf("%s, branch %d: depths %v, the twin's %v", w.key, branch, got, want)
				}
			}
		}
	})
}

// TestReadForms reads the output of releases of Dynamo; the first four lines come from its documentation.
func TestReadForms(t *testing.T) {
	one := events.Event{Kind: events.Stored, Tier: events.Device, Blocks: []events.BlockHash{1},
		Locals: []events.LocalHash{2}}
	for _, c := range []struct {
		text    string
		worker  events.WorkerID
		event   events.Event
		skipped string
	}{
		{`{"worker_id":7,"event":{"event_id":1,"data":{"stored":{"parent_hash":null,"blocks":[{"block_hash":1,"tokens_hash":2}]}}}}`, "7", one, ""},
		{`{"worker_id":7,"storage_tier":"device","residency_domain":"worker","event":{"event_id":1,"data":{"stored":{"parent_hash":null,"start_position":null,"blocks":[{"block_hash":1,"tokens_hash":2,"mm_extra_info":null}]}},"dp_rank":0},"session_id":"x","state_source":{}}`, "7", one, ""},
		{`{"worker_id":-7,"storage_tier":"host_pinned","event":{"event_id":2,"data":{"removed":{"block_hashes":[-1,18446744073709551614]}},"dp_rank":0}}`, "-7",
			events.Event{Kind: events.Removed, Tier: events.Host, Blocks: []events.BlockHash{1<<64 - 1, 1<<64 - 2}},
			""},
		{`{"worker_id":"w1","event":{"event_id":3,"data":"cleared","dp_rank":0}}`, "w1",
			events.Event{Kind: events.Cleared, Reason: events.ReasonEngine}, ""},
		{`{"worker_id":7,"residency_domain":"cache_owner","event":{"event_id":3,"data":"cleared"}}`, "7",
			events.Event{Kind: events.Cleared, Reason: events.ReasonEngine}, ""},
		{`{"worker_id":7,"residency_domain":null,"event":{"event_id":3,"data":"cleared"}}`, "7", events.Event{},
			"residency domain"},
		{`{"worker_id":7,"residency_domain":"moon","event":{"event_id":3,"data":"cleared"}}`, "7", events.Event{},
			"residency domain"},
		{`{"worker_id":7,"storage_tier":"tape","event":{"event_id":3,"data":"cleared"}}`, "7", events.Event{},
			"storage tier"},
		{`{"worker_id":7,"event":{"event_id":3,"data":{"renamed":{}}}}`, "7", events.Event{}, "kind of event"},
	} {
		line, err := events.ReadRouterEvent([]byte(c.text))
		same := line.Event.Kind == c.event.Kind && line.Event.Tier == c.event.Tier &&
			len(line.Event.Blocks) == len(c.event.Blocks) && len(line.Event.Locals) == len(c.event.Locals)
		for i := range c.event.Blocks {
			same = same && line.Event.Blocks[i] == c.event.Blocks[i]
		}
		if err != nil || !same || line.Key.Instance != c.worker || line.Skipped != c.skipped {
			t.Errorf("%s: got %+v, %v", c.text, line, err)
		}
	}
	for text, want := range map[string]string{
		``:                "unexpected end",
		`{"worker_id":7}`: "missing",
		`{"worker_id":1.5,"event":{"data":"cleared"}}`:                                         "1.5 is not a 64-bit number",
		`{"worker_id":7,"event":{"data":"gone"}}`:                                              "neither",
		`{"worker_id":7,"event":{"data":{"stored":{"blocks":[{"block_hash":1}]}}}}`:            "block 0 lacks",
		`{"worker_id":7,"event":{"data":{"stored":{"blocks":[]}}}}`:                            "without blocks",
		`{"worker_id":7,"event":{"data":{"removed":{}}}}`:                                      "without block_hashes",
		`{"worker_id":7,"event":{"data":{"removed":{"block_hashes":[99999999999999999999]}}}}`: "not a 64-bit number",
	} {
		if line, err := events.ReadRouterEvent([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: got %+v, %v; want %q", text, line, err, want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(
		[]byte(
			`{"worker_id":7,"storage_tier":"disk","event":{"event_id":1,"data":{"stored":{"parent_hash":-3,"blocks":[{"block_hash":1,"tokens_hash":2}]}},"dp_rank":1}}`))
	f.Add(
		[]byte(
			`{"worker_id":"w","residency_domain":"worker","event":{"event_id":2,"data":{"removed":{"block_hashes":[1]}}}}`))
	f.Add([]byte(`{"worker_id":7,"event":{"event_id":3,"data":"cleared"}}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		line, err := events.ReadRouterEvent(text)
		if err != nil || line.Event.Kind == 0 {
			return
		}
		written := events.AppendRouterEvent(nil, line.Key, events.EventID(line.ID), &line.Event, line.Groups...)
		again, err := events.ReadRouterEvent(written)
		if err != nil || again.Event.Kind != line.Event.Kind || again.Event.Tier != line.Event.Tier ||
			len(again.Event.Blocks) != len(line.Event.Blocks) || again.Key.Rank != line.Key.Rank {
			t.Fatalf("%q was read as %+v, written and read as %+v, %v", text, line, again, err)
		}
	})
}
