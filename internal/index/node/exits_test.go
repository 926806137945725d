package node

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
)

// TestSnapshotStatesEnd: a partition with failed, deleted or left snapshots, or in need of a resync, writes snapshots
// again after the end of the cause.
func TestSnapshotStatesEnd(t *testing.T) {
	now := time.Now()
	s := &serving{reading: &reading{kept: &kept{}}}
	s.saved.at = now
	pt := &partition{policy: &policy{snapshotInterval: time.Minute, snapshotBlocks: 1 << 60}, wanted: true, phase: s}
	grown := growth{changes: 1, bytes: 1}
	due := func(when string, at time.Time, grown growth, want bool) {
		t.Helper()
		if got := pt.snapshotDue(at, grown); got != want {
			t.Errorf("%s: a snapshot is due: %t", when, got)
		}
	}
	later := now.Add(2 * time.Minute)
	due("too early", now, grown, false)
	due("after the interval", later, grown, true)

	s.need = &need{cause: "the log was truncated"}
	due("during a resync", later, grown, false)
	s.need = nil
	due("after the resync", later, grown, true)

	for range saveAttempts {
		pt.saveFailed(later, errors.New("no room"), true)
	}
	due("after a failure", later.Add(saveRetry-1), grown, false)
	due("at the next try", later.Add(saveRetry), grown, true)
	if !s.saved.left(later) || s.saved.left(later.Add(saveLeave)) {
		t.Error("three failures leave the snapshots to another node for ten minutes")
	}
	pt.saved(saveState{at: later, grown: grown})
	if s.saved.left(later) || s.saved.err != nil {
		t.Error("a success does not end the problem")
	}

	due("nothing has changed", later.Add(time.Hour), grown, false)
	pt.saveFailed(later, errors.New("no room"), true)
	due("a requested snapshot of the same has failed", later.Add(saveRetry-1), grown, false)
	due("it is tried again", later.Add(saveRetry), grown, true)
	pt.saved(saveState{at: later, grown: grown})
	pt.snapshotsLost()
	due("the snapshots were deleted", later, grown, true)
	pt.saved(saveState{at: later, grown: grown})
	due("they are written again", later.Add(time.Hour), grown, false)
}

// TestCopiesProblemEnds: far more copies than blocks are a problem until a resync, which begins a new incarnation.
func TestCopiesProblemEnds(t *testing.T) {
	m := NewMachine(radix.New(radix.Config{}), 1)
	key := events.RankKey{Instance: "w"}
	begin := events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonRestart}
	next, seq := events.EventID(1), events.StreamSeq(1)
	apply := func(incarnation events.Incarnation, list ...events.Event) string {
		t.Helper()
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: incarnation, FirstID: next, Model: "m",
			BlockSize: 16, Events: list})
		if err != nil || !m.Apply(0, []jetstream.Message{{Seq: seq, Time: 1, Key: key, Data: data}}) {
			t.Fatal(err)
		}
		next, seq = next+events.EventID(len(list)), seq+1
		return strings.Join(m.rankProblems(m.parts[0].ranks[key]), "\n")
	}
	again := slices.Repeat([]events.Event{stored(0, 1, 2)}, 501)
	if p := apply(1, append([]events.Event{begin}, again...)...); !strings.Contains(p, "1000 further copies") {
		t.Errorf("1,000 copies of 2 blocks: %q", p)
	}
	next = 1
	if p := apply(2, begin, stored(0, 1, 2)); p != "" {
		t.Errorf("after a resync: %q", p)
	}
}

// TestMissingEventsEnd: events of a rank are missing after a gap of event ids, until the rank's next incarnation. Later
// events of the same incarnation count meanwhile.
func TestMissingEventsEnd(t *testing.T) {
	m := NewMachine(radix.New(radix.Config{}), 1)
	key, seq := events.RankKey{Instance: "w"}, events.StreamSeq(0)
	for _, step := range []struct {
		what        string
		incarnation events.Incarnation
		id          events.EventID
		blocks      []events.BlockHash // a prompt from its start
		missing     bool
		held        int64
	}{
		{"it begins", 1, 1, []events.BlockHash{1, 2}, false, 2},
		{"a gap", 1, 3, []events.BlockHash{3}, true, 1},
		{"no further gap", 1, 4, []events.BlockHash{4, 5}, true, 3},
		{"a new incarnation", 2, 1, []events.BlockHash{6, 7}, false, 2},
	} {
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: step.incarnation, FirstID: step.id, Model: "m",
			BlockSize: 16, Events: []events.Event{stored(0, step.blocks...)}})
		seq++
		if err != nil || !m.Apply(0, []jetstream.Message{{Seq: seq, Time: 1, Key: key, Data: data}}) {
			t.Fatal(step.what, err)
		}
		held := m.index.RankStats(m.parts[0].ranks[key].id).Holdings[0]
		if missing := len(m.partials(0)) > 0; missing != step.missing || held != step.held {
			t.Errorf("%s: events are missing: %t, %d blocks", step.what, missing, held)
		}
	}
}

// TestBehindEnds: a partition with messages that stay unapplied is behind until all of them are applied.
func TestBehindEnds(t *testing.T) {
	now := time.Now()
	s := &serving{reading: &reading{kept: &kept{last: 10}}}
	pt := &partition{policy: &policy{started: now}, wanted: true, phase: s}
	for _, step := range []struct {
		after   time.Duration
		applied events.StreamSeq
		behind  bool
	}{
		{0, 9, false}, {behindAfter, 9, false}, {behindAfter + 1, 9, true}, {behindAfter + 2, 10, false},
		{2 * behindAfter, 10, false},
	} {
		if pt.tick(now.Add(step.after), step.applied); pt.behind() != step.behind {
			t.Errorf("after %v with %d applied: behind %t", step.after, step.applied, pt.behind())
		}
	}
}

// TestANodeBecomesReady: a node is ready once its partitions are assigned and all of them have caught up, and stays
// ready.
func TestANodeBecomesReady(t *testing.T) {
	reported := 0
	away := partition{phase: &absent{}}
	n := &Node{parts: []*runner{{partition: away}, {partition: away}}, cfg: Config{Shared: true}}
	n.cfg.Ready = func() { reported++ }
	n.unready.Store(2)
	for _, step := range []struct {
		what     string
		assigned bool
		unready  int32
		why      string // part of the error; empty: ready
	}{
		{"it starts", false, 2, "the partitions of this node are not assigned yet"},
		{"its partitions are assigned", true, 2, "2 of 2 partitions are not restored"},
		{"one has caught up", true, 1, "1 of"},
		{"both have", true, 0, ""},
		{"one is restored anew", true, 1, ""},
	} {
		n.assigned.Store(step.assigned)
		n.unready.Store(step.unready)
		n.checkReady()
		err := n.Ready()
		if (err == nil) != (step.why == "") || err != nil && !strings.Contains(err.Error(), step.why) {
			t.Errorf("%s: %v, want %q", step.what, err, step.why)
		}
	}
	if reported != 1 {
		t.Errorf("reported %d times", reported)
	}
}
