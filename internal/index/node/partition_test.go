package node

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// put sets a partition's phase.
func (n *Node) put(p events.Partition, ph phase) {
	n.step(p, func(pt *partition) effects {
		pt.become(ph)
		return effects{}
	})
}

// servingAt returns the phase of a partition that serves a log of an epoch.
func servingAt(epoch jetstream.Epoch) phase {
	return &serving{reading: &reading{kept: &kept{epoch: epoch}}}
}

// virtual is a partition's machine in virtual time, with a log, an index, a bucket with one snapshot, shims, and an
// runner that is sometimes slow or fails. Its second half derives the expected state from the actual events.
type virtual struct {
	*rapid.T
	*rand.Rand
	now  time.Time
	pt   partition
	seen map[string]int // counts of each event, over all cases

	epoch       jetstream.Epoch
	first, last events.StreamSeq // of the log
	applied     events.StreamSeq // in the index
	grown       growth
	snap        *snapshot.Manifest // in the bucket
	snapEpoch   jetstream.Epoch

	doing  phase // by the runner; nil: nothing
	left   int   // steps until the end of doing
	reader *virtualReader

	partial []partialRank
	round   *round // sent, without responses so far
	shim    events.Incarnation
	begun   events.Incarnation // the shim's incarnation in the index

	// The expected state.
	wanted   bool
	must     events.StreamSeq // all messages up to this one were in the log at the restore
	suspect  events.StreamSeq // the log has another message here than the applied one, by the latest report
	restored bool             // since the partition was kept, or found unfit
	holes    int              // readers with missing messages
	reported int
	lost     bool // a loss without a later resync
	needed   bool // a resync was found to be needed
	whole    int  // rounds since then for the whole partition
	answer   bool // shims responded in the last round
	asks     []time.Time
	changes  []growth // since the last snapshot
	saved    time.Time
	failed   time.Time
}

// virtualReader sends the messages of the log.
type virtualReader struct {
	sent, target events.StreamSeq
	caughtUp     bool
	hole         bool // some of its messages are missing
	down         bool // it cannot read
}

func (v *virtual) chance(percent int) bool { return v.IntN(100) < percent }

// from returns a number from least to most.
func (v *virtual) from(least, most int) int { return least + v.IntN(most-least+1) }

// do performs a step's effects as the runner would.
func (v *virtual) do(e effects) {
	if e.interrupt {
		v.doing, v.reader = nil, nil
	}
	if e.reread {
		if v.reported++; e.seq != v.applied+1 {
			v.Fatalf("read again from %d with %d applied", e.seq, v.applied)
		}
	}
	if e.unfit != nil {
		v.seen[fmt.Sprintf("%T", e.unfit)]++
		v.restored = false
	}
	if e.caughtUp {
		v.seen["caught up"]++
		v.suspect = 0
	}
}

// own is one step of the runner.
func (v *virtual) own() {
	if v.doing == nil {
		if r := v.pt.reading(); r != nil && r.missing && v.chance(50) { // messages of the previous reader still arrive
			v.do(v.pt.missed(v.now, v.applied))
		}
		if v.now.Before(v.pt.notBefore) {
			return
		}
		v.doing, v.left = v.pt.phase, v.from(0, 3)
		if v.pt.reading() != nil {
			v.do(v.pt.opened(v.now))
			v.reader = &virtualReader{sent: v.applied, target: v.last}
		}
		return
	}
	if v.left--; v.left >= 0 && v.reader == nil {
		return
	}
	switch ph := v.doing.(type) {
	case *absent:
		v.doing = nil
	case *emptying:
		v.applied, v.grown, v.doing = 0, growth{}, nil
		v.do(v.pt.emptied())
	case *restoring:
		v.doing = nil
		v.applied, v.grown = 0, growth{}
		if v.chance(10) {
			v.do(v.pt.failed(v.now, errors.New("no answer")))
			return
		}
		v.restore(ph)
	default:
		v.read()
	}
}

func (v *virtual) restore(ph *restoring) {
	r := &restoration{epoch: v.epoch, seq: v.first - 1, last: v.last}
	if m := v.snap; m != nil && v.snapEpoch == v.epoch && m.Seq+1 >= v.first && m.Seq <= v.last &&
		(ph.divergedAt == 0 || m.Seq < ph.divergedAt) {
		r.seq, r.used = m.Seq, m
	}
	if r.used != nil && v.suspect != 0 && r.used.Seq >= v.suspect {
		v.Fatalf("restored from the snapshot at %d of a log with a different message at %d", r.used.Seq, v.suspect)
	}
	v.lost = v.lost || r.used == nil && v.first > 1
	v.applied, v.must, v.restored, v.needed, v.whole, v.asks = r.seq, v.last, true, v.lost, 0, nil
	v.changes, v.saved, v.failed, v.answer, v.round = nil, v.now, time.Time{}, false, nil
	e := v.pt.restored(v.now, r)
	if (e.restored.Lost != "") != v.lost {
		v.Fatalf("restored %+v of %d to %d, reported loss %q", r, v.first, v.last, e.restored.Lost)
	}
	v.do(e)
}

// read is one step of the reader: a few messages, one of which may be lost, or a notice.
func (v *virtual) read() {
	r := v.reader
	if r.down {
		r.down = false
		v.do(v.pt.noticed(v.now, jetstream.Recovered{}, 0))
		return
	}
	if n := min(v.last-r.sent, events.StreamSeq(v.from(0, 4))); n > 0 {
		lose := events.StreamSeq(0)
		if v.chance(2) {
			lose = r.sent + events.StreamSeq(v.from(1, int(n)))
		}
		v.do(v.pt.received(v.last))
		whole := true
		for range n {
			if r.sent++; r.sent == lose || !whole {
				continue
			}
			if whole = r.sent <= v.applied+1; whole && r.sent == v.applied+1 {
				g := growth{uint64(v.from(1, 20)), uint64(v.from(1, 50))}
				v.applied, v.grown = r.sent, growth{v.grown.changes + g.changes, v.grown.bytes + g.bytes}
				v.changes = append(v.changes, g)
			}
		}
		if !whole {
			v.missed(r)
			v.do(v.pt.missed(v.now, v.applied))
		}
		return
	}
	switch {
	case r.sent >= r.target && !r.caughtUp:
		if r.caughtUp = true; v.applied < r.target {
			v.missed(r)
		}
		v.do(v.pt.noticed(v.now, jetstream.CaughtUp{Seq: r.target}, v.applied))
	case r.sent == v.last:
		if v.applied < r.sent {
			v.missed(r)
		}
		v.do(v.pt.noticed(v.now, jetstream.AtEnd{Seq: r.sent, Time: v.now}, v.applied))
	}
}

// missed counts a reader with missing messages, once.
func (v *virtual) missed(r *virtualReader) {
	if !r.hole {
		r.hole = true
		v.holes++
	}
}

// disturb makes an external event happen.
func (v *virtual) disturb() {
	switch what := v.from(0, 40); {
	case what < 8:
		v.last += events.StreamSeq(v.from(1, 6))
	case what < 10:
		v.keep(!v.wanted || v.chance(50))
	case what < 12 && v.reader != nil:
		if v.do(v.pt.noticed(v.now, jetstream.Unavailable{Err: errors.New("no answer")},
			0)); v.pt.phase.data().err == nil {
			v.Fatal("an unreadable log is no trouble")
		}
		v.reader.down = true
	case what < 13 && v.reader != nil && v.reader.sent < v.last: // the log drops its oldest messages
		v.first += events.StreamSeq(v.from(0, int(v.last+1-v.first)))
		if v.reader.sent+1 < v.first {
			v.find(jetstream.Truncated{Wanted: v.reader.sent + 1, First: v.first})
		}
	case what < 14 && v.reader != nil && v.reader.sent > v.first: // the log loses its end, and grows again
		v.lost = true
		at := v.reader.sent
		v.suspect = at
		v.last = max(v.first, at-1)
		v.find(jetstream.Regressed{Applied: at, Last: v.last})
		v.last += events.StreamSeq(v.from(0, 4))
	case what < 15 && v.reader != nil:
		v.lost = true
		v.suspect = 0
		v.epoch, v.first, v.last = v.epoch+1, 1, events.StreamSeq(v.from(0, 5))
		v.find(jetstream.EpochChanged{Old: v.epoch - 1, New: v.epoch, First: v.first, Last: v.last})
	case what < 17:
		v.partial = nil
		if v.chance(30) {
			v.partial = []partialRank{{events.RankKey{Instance: "w"}, 1}}
		}
	case what < 18:
		v.begun = v.shim
	}
}

func (v *virtual) find(notice jetstream.Notice) {
	v.do(v.pt.noticed(v.now, notice, v.applied))
}

func (v *virtual) keep(wanted bool) {
	if v.wanted && !wanted {
		v.seen["left"]++
		v.restored, v.lost, v.suspect = false, false, 0 // the next restore detects the loss
	}
	v.wanted = wanted
	v.do(v.pt.keep(wanted))
}

// resync is one check of the missing ranks.
func (v *virtual) resync() {
	begun := !v.answer || v.begun >= v.shim
	over := v.whole >= minRounds && begun
	e := v.pt.ranksSeen(v.now, v.partial, begun)
	if !v.pt.serves() {
		if e.request != nil || e.resynced {
			v.Fatal("requests to shims begin or end while the partition does not serve")
		}
		return
	}
	v.lost = v.lost && !over
	lacks := v.lost || len(v.partial) > 0
	if e.resynced != (v.needed && !lacks) || (v.pt.need() != nil) != lacks {
		v.Fatalf("resynced: %v; needed before: %v; lost: %v; partial: %v; need: %v", e.resynced, v.needed, v.lost,
			v.partial, v.pt.need())
	}
	if v.needed && !lacks {
		v.seen["resynced"]++
	}
	if !v.needed && lacks {
		v.asks, v.whole, v.answer = nil, 0, false
	}
	v.needed = lacks
	due := len(v.asks) == 0
	if n := len(v.asks); n > 0 {
		due = v.now.Sub(v.asks[n-1]) >= min(v.pt.policy.resyncPause<<(n-1), resyncSlowest)
	}
	if (e.request != nil) != (lacks && due) {
		v.Fatalf("requested: %v; lacks %v; %v after the requests at %v", e.request, lacks, v.now, v.asks)
	}
	if e.request != nil {
		v.asks, v.round = append(v.asks, v.now), e.request
		if (e.request.cause != "") != v.lost {
			v.Fatalf("requested %+v; lost: %v", e.request, v.lost)
		}
	}
}

// answered makes the shims respond to the round.
func (v *virtual) answered(whole bool) {
	v.shim++
	if v.needed && v.pt.need() != nil && v.round.id == v.pt.need().id {
		if v.answer = true; whole {
			v.whole++
		}
	}
	answers := map[events.RankKey]events.Incarnation{{Instance: "w"}: v.shim}
	v.do(v.pt.answered(v.round.id, answers, whole))
	v.round = nil
}

// save writes a snapshot if one is due.
func (v *virtual) save() {
	var since growth
	for _, g := range v.changes {
		since = growth{since.changes + g.changes, since.bytes + g.bytes}
	}
	why := ""
	switch p := v.pt.policy; {
	case v.now.Sub(v.saved) >= p.snapshotInterval:
		why = "due by time"
	case since.changes >= p.snapshotBlocks:
		why = "due by blocks"
	case since.bytes >= 4000/4:
		why = "due by bytes"
	}
	failed := !v.failed.IsZero()
	worth := v.pt.serves() && !v.lost && (len(v.changes) > 0 || failed)
	want := (why != "" || failed) && worth && v.now.Sub(v.failed) >= saveRetry
	// The next check notices the end of a resync of the whole partition.
	if d := v.pt.need(); d != nil && d.cause != "" {
		want = false
	}
	if got := v.pt.snapshotDue(v.now, v.grown); got != want {
		v.Fatalf("a snapshot is due: %v; must be: %v; %d changes, %v after the last, %v after a failure",
			got, want, len(v.changes), v.now.Sub(v.saved), v.now.Sub(v.failed))
	}
	if !want {
		return
	}
	v.seen[why]++
	if v.chance(30) {
		v.failed = v.now
		v.do(v.pt.saveFailed(v.now, errors.New("no room"), true))
		return
	}
	v.snap, v.snapEpoch = &snapshot.Manifest{Seq: v.applied}, v.epoch
	v.do(v.pt.saved(saveState{grown: v.grown, at: v.now, seq: v.applied}))
	v.changes, v.saved, v.failed = nil, v.now, time.Time{}
}

// check compares the machine's state with the expected state.
func (v *virtual) check() {
	state := v.pt.phase.state()
	if v.pt.serves() && (!v.wanted || !v.restored || v.applied < v.must) {
		v.Fatalf("%s; wanted: %v, restored: %v, %d applied of %d", state, v.wanted, v.restored, v.applied, v.must)
	}
	if !v.wanted && state != api.PartitionAbsent {
		v.Fatalf("%s, and not wanted", state)
	}
	if _, nothing := v.pt.phase.(*absent); nothing && v.applied != 0 {
		v.Fatalf("absent, and %d is applied", v.applied)
	}
	if v.holes != v.reported {
		v.Fatalf("%d readers with missing messages, and %d reports", v.holes, v.reported)
	}
	if (v.pt.owed() == 1) != (v.wanted && !v.pt.serves()) {
		v.Fatalf("owed: %d in state %s", v.pt.owed(), state)
	}
}

// step advances the time and lets every part act.
func (v *virtual) step(calm bool) {
	v.now = v.now.Add(time.Duration(v.from(1, 2000)) * time.Millisecond)
	switch what := v.from(0, 9); {
	case what < 5:
		v.own()
	case what < 6 && !calm:
		v.disturb()
	case what < 7:
		v.resync()
	case what < 8:
		v.save()
	case what < 9 && v.round != nil:
		v.answered(calm || v.chance(80))
	}
	if applied := v.applied; v.pt.reading() != nil {
		v.do(v.pt.measured(v.now, usage{used: 1, limit: 4000}, false, true))
		v.do(v.pt.tick(v.now, applied))
		if behind := v.pt.behind(); behind && applied >= v.pt.phase.data().last && v.pt.phase.data().err == nil {
			v.Fatalf("behind with all applied")
		}
	}
	v.check()
}

// TestPartitionInVirtualTime exposes a partition's machine to random events and compares its state with the expected
// one. After the last failure it has to serve the whole log, without missing messages and without a needed resync.
func TestPartitionInVirtualTime(t *testing.T) {
	seen := map[string]int{}
	rapid.Check(t, func(t *rapid.T) {
		id, seed := 0, rapid.Uint64().Draw(t, "seed")
		v := &virtual{
			T: t, Rand: rand.New(rand.NewPCG(seed, 1)), now: time.Unix(1_000_000, 0), seen: seen, epoch: 1, first: 1,
		}
		v.pt = partition{phase: &absent{}, policy: &policy{
			snapshotInterval: time.Minute, snapshotBlocks: uint64(v.from(50, 600)),
			resyncPause: 2 * time.Second,
			newID:       func() string { id++; return fmt.Sprint(id) },
		}}
		v.keep(true)
		for range v.from(100, 6000) {
			v.step(false)
		}
		v.keep(true)
		v.partial = nil
		calm := func() bool {
			r := v.pt.reading()
			return v.pt.phase.state() == api.PartitionServing && v.applied == v.last && !r.rereading && !v.pt.behind()
		}
		for i := 0; !calm(); i++ {
			if i == 5000 {
				t.Fatalf("after all went well for long: %s with %d of %d applied, %v", v.pt.phase.state(), v.applied,
					v.last, v.pt.need())
			}
			v.begun = v.shim
			v.step(true)
		}
		seen["rereads"] += v.reported
	})
	for _, what := range []string{
		"caught up", "left", "rereads", "resynced", "due by time", "due by blocks", "due by bytes",
		"jetstream.Truncated", "jetstream.Regressed", "jetstream.EpochChanged",
	} {
		if seen[what] == 0 {
			t.Errorf("%s: never; all events: %v", what, seen)
		}
	}
	t.Logf("%v", seen)
}
