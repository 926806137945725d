package node

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/cluster"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/radix"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// TestSnapshotProblemOfTheWriter: a failed snapshot is a problem of the node that writes the partition's snapshots, as
// long as it does.
func TestSnapshotProblemOfTheWriter(t *testing.T) {
	w := newSite(t)
	var view atomic.Pointer[cluster.View]
	view.Store(&cluster.View{Writer: []string{""}})
	w.view = view.Load
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	w.node.step(0, func(pt *partition) effects {
		return pt.saveFailed(time.Now(), errors.New("somebody else wrote one"), true)
	})
	for _, step := range []struct {
		writer  string
		problem bool
	}{{"", true}, {"another", false}, {"", true}} {
		view.Store(&cluster.View{Writer: []string{step.writer}})
		s, err := w.node.Status(w.ctx)
		w.must(err)
		if said := strings.Join(s.Problems, "\n"); strings.Contains(said, "somebody else wrote one") != step.problem {
			t.Errorf("while %q is to write the snapshots: %q", step.writer, said)
		}
	}
}

// TestUnreadableLogInStatus: the status of an unreadable log claims no unseen messages.
func TestUnreadableLogInStatus(t *testing.T) {
	w := newSite(t)
	w.room = time.Hour // only the test measures
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(3)
	applied := w.awaitAll().Partitions[0].Seq
	for _, c := range []struct {
		behind     bool
		err        error
		last       events.StreamSeq
		says, not  string
		unreadable bool
	}{
		{false, nil, applied, "", "partition 0", false},
		{true, nil, applied + 7, "far behind the log; queries go to current nodes first: 7 messages are not applied",
			"readable", false},
		{false, errors.New("no server"), applied, "could not be read: no server", "queries go to", true},
		{true, errors.New("no server"), applied, LogUnreadable + ": no server", "0 messages", true},
	} {
		var said string
		var state api.PartitionState
		w.node.step(0, func(pt *partition) effects {
			s := pt.phase.(*serving)
			s.behind, s.err, s.last = c.behind, c.err, c.last
			return effects{}
		})
		s, err := w.node.Status(w.ctx)
		w.must(err)
		said, state = strings.Join(s.Problems, "\n"), s.Partitions[0].State
		if !strings.Contains(said, c.says) || strings.Contains(said, c.not) ||
			(state == api.PartitionUnavailable) != c.unreadable {
			t.Errorf("%+v: the partition is %s, with the problems %q", c, state, said)
		}
	}
}

// TestRankWithoutPlacedBlocks: a rank with blocks that all wait for unseen parents is a problem, also after they
// expired, until one of its blocks has a place.
func TestRankWithoutPlacedBlocks(t *testing.T) {
	m := NewMachine(radix.New(radix.Config{PendingFor: 1000}), 1)
	key, next, seq := events.RankKey{Instance: "w"}, events.EventID(1), events.StreamSeq(1)
	incarnation := events.Incarnation(0)
	for _, step := range []struct {
		what    string
		at      events.Millis
		event   events.Event
		problem string
	}{
		{"it begins", 1, events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonRestart}, ""},
		{"after unseen blocks", 2, stored(7, 100, 101), "w/0: none of the engine's 2 announced blocks"},
		{"after that", 3, stored(101, 102), "w/0: none of the engine's 3 announced blocks"},
		{"too late", 5000, stored(8, 200), "w/0: none of the engine's 4 announced blocks"},
		{"a prompt from its start", 5001, stored(0, 300), ""},
		{"the blocks go, and a further block waits for good", 5002, events.Event{Kind: events.Removed, Tier: events.Device,
			Blocks: []events.BlockHash{300}}, ""},
		{"all goes", 5003, events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonEngine}, ""},
		{"it restarts", 5004, events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonRestart}, ""},
		{"a block waits", 5005, stored(9, 400), "w/0: none of the engine's 1 announced blocks"},
		{"it is removed", 5006, events.Event{Kind: events.Removed, Tier: events.Device, Blocks: []events.BlockHash{400}}, ""},
		{"another waits", 5007, stored(9, 500), "w/0: none of the engine's 2 announced blocks"},
		{"all goes", 5008, events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonEngine}, ""},
	} {
		if step.event.Reason == events.ReasonRestart {
			incarnation, next = incarnation+1, 1
		}
		data, err := events.AppendBatch(nil, &events.Batch{Incarnation: incarnation, FirstID: next, Model: "m",
			BlockSize: 16, Events: []events.Event{step.event}})
		if err != nil || !m.Apply(0, []jetstream.Message{{Seq: seq, Time: step.at, Key: key, Data: data}}) {
			t.Fatalf("%s: %v", step.what, err)
		}
		next, seq = next+1, seq+1
		problems := strings.Join(m.rankProblems(m.parts[0].ranks[key]), "\n")
		if step.problem == "" && problems != "" || !strings.Contains(problems, step.problem) || problems != "" &&
			!strings.Contains(problems, "what to do: ") {
			t.Errorf("%s: %q, want %q", step.what, problems, step.problem)
		}
	}
	// Only the end of the blocks before the snapshot is in the machine.
	for want, s := range map[bool]radix.RankStats{true: {Pending: 2}, false: {}} {
		r := &rank{RankState: snapshot.RankState{Stored: 5}, restored: true}
		if p := waitingProblem(r, s, 0); (p != "") != want {
			t.Errorf("restored with %d that wait: %q", s.Pending, p)
		}
		if r.placed = true; waitingProblem(r, s, 0) != "" {
			t.Errorf("restored with %d that wait, and further blocks have a place", s.Pending)
		}
	}
	counts := m.counts.byName()
	for name, old := range map[string]string{"blocks_pending": "blocks_parked", "pending_expired": "parked_expired"} {
		if counts[name] == 0 || counts[old] != counts[name] {
			t.Errorf("%s is %d, and %s %d", name, counts[name], old, counts[old])
		}
	}
}

// stored returns an event of blocks after a parent, or, for parent 0, from a prompt's start.
func stored(parent events.BlockHash, blocks ...events.BlockHash) events.Event {
	e := events.Event{Kind: events.Stored, Tier: events.Device, Attention: events.AttentionFull, HasParent: parent != 0,
		Parent: parent, Blocks: blocks}
	for _, b := range blocks {
		e.Locals = append(e.Locals, events.LocalHash(b))
	}
	return e
}

// TestLateReplyOfWaitingShims: a reply of shims about a log that accepts writes again is dropped.
func TestLateReplyOfWaitingShims(t *testing.T) {
	n := &Node{}
	n.capacity.asking = true // the reply comes below
	n.askWaiting(t.Context(), []events.Partition{1, 2})
	n.askWaiting(t.Context(), []events.Partition{2})
	n.capacity.setWaiting(map[events.Partition]string{1: "1 of 2 shims wait", 2: "2 of 2 shims wait"})
	if w := n.capacity.waiting; len(w) != 1 || w[2] == "" {
		t.Errorf("partition 1 accepts writes: %v", w)
	}
	n.askWaiting(t.Context(), nil)
	if w := n.capacity.waiting; w != nil {
		t.Errorf("all partitions accept writes: %v", w)
	}
}

// TestFullDiskIsReportedOnce: the NATS server's own problem is omitted if a log or the bucket reports the same error.
func TestFullDiskIsReportedOnce(t *testing.T) {
	const cause = "write /data/$G/streams/KV_EVENTS_n_0/msgs/1.blk: no space left on device"
	full := fmt.Errorf("write to stream KV_EVENTS_n_0: %w: %s", jetstream.ErrFull, cause)
	other := "server: not available: JetStream stream '$G > X' is not current"
	for name, c := range map[string]struct {
		log, bucket error
		health      string
		want        []string
	}{
		"nothing": {nil, nil, "", nil},
		"a log that rejects writes": {full, nil, "server: write error: " + cause,
			[]string{"the log of partition 0"}},
		"the bucket alone":          {nil, full, "server: write error: " + cause, []string{"the snapshot bucket"}},
		"a log, and something else": {full, nil, other, []string{"the log of partition 0", other}},
		"no write so far":           {nil, nil, "server: write error: " + cause, []string{"server: write error"}},
	} {
		n := &Node{cfg: Config{Health: func() error {
			if c.health == "" {
				return nil
			}
			return errors.New(c.health)
		}}}
		n.parts = []*runner{{partition: partition{phase: &restoring{kept: &kept{usage: usage{refused: c.log}}}}}}
		n.capacity.bucket.refused = c.bucket
		got := n.capacityProblems()
		if !slices.EqualFunc(got, c.want, strings.HasPrefix) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		for _, shims := range []string{"", "1 of 2 shims wait"} {
			n.capacity.waiting = map[events.Partition]string{0: shims}
			named := slices.Contains(n.capacityProblems(), "partition 0: "+shims)
			if wait := n.ShimsWait(0); wait != (shims != "") || wait != named {
				t.Errorf("%s: waiting shims %q: %v, in the status: %v", name, shims, wait, named)
			}
		}
	}
}
