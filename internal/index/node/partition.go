package node

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// partition decides what the node does with one partition. It is stepped: it starts nothing, waits for nothing and
// reads no clock. Its owner carries out what the phase asks for and what a step returns as [effects]; methods without a
// result of that type change nothing.
//
//	absent ──keep──▶ restoring ──restored──▶ catchingUp ──CaughtUp──▶ serving
//	  ▲                  ▲ │                      │                      │
//	  │                  └─┼──── log unfit ───────┴──────────────────────┤
//	  └──── emptying ◀─────┴──────── not kept any more ──────────────────┘
//
// Invariants:
//  1. It serves only after a restore and after a reader that began there has caught up, with all that it sent applied.
//  2. Messages that are missing are reported once per reader; that reader is interrupted, and another one begins where
//     they are missing. Until that one has reached the log's end the partition is `rereading`.
//  3. What is lost is in `lost` while the partition restores, and in `need` from then on until a resync has ended.
type partition struct {
	policy    *policy
	wanted    bool // by Keep
	phase     phase
	lapses    uint64    // how often it ceased to serve
	notBefore time.Time // the owner waits until then before it carries out what the phase asks for
}

// policy is what is the same for all partitions of a node.
type policy struct {
	started          time.Time
	snapshotInterval time.Duration
	snapshotBlocks   uint64
	resyncPause      time.Duration
	newID            func() string // of resync requests
}

// phase is what the owner is to do: nothing (absent), drop what the index has (emptying), restore (restoring), or read
// the log (catchingUp and serving). Each type holds what exists in that phase only.
type phase interface {
	state() api.PartitionState
	data() *kept // nil while the partition is not kept
}

type absent struct{}

type emptying struct{}

type restoring struct {
	*kept
	lost       string           // what the log was found to have lost; empty if nothing
	divergedAt events.StreamSeq // the log has another message there than was applied, or none; 0: it has not diverged
}

type catchingUp struct{ *reading }

type serving struct {
	*reading
	lag    lag
	behind bool // for longer than behindAfter
}

// kept is what is known of a partition for as long as the node keeps it.
type kept struct {
	epoch    jetstream.Epoch
	last     events.StreamSeq // of the log, as last heard
	err      error            // why the log cannot be read; nil if it can
	restored Restored
	saved    saveState
	usage    usage // of the log
	fresh    freshness
}

// reading is what exists from one restore to the next.
type reading struct {
	*kept
	divergedAt events.StreamSeq // as in restoring, until the reader has caught up
	since      time.Time        // when the present reader began
	need       *need            // nil if no resync is needed
	missing    bool             // messages of the present reader did not arrive
	rereading  bool             // messages were missing, and the log's end has not been reached since
}

func (absent) state() api.PartitionState     { return api.PartitionAbsent }
func (emptying) state() api.PartitionState   { return api.PartitionAbsent }
func (restoring) state() api.PartitionState  { return api.PartitionRestoring }
func (catchingUp) state() api.PartitionState { return api.PartitionCatchingUp }
func (s *serving) state() api.PartitionState {
	if s.need != nil {
		return api.PartitionResync
	}
	return api.PartitionServing
}

func (absent) data() *kept   { return nil }
func (emptying) data() *kept { return nil }
func (k *kept) data() *kept  { return k }

// effects is what a step asks the partition's owner to do, and which hooks it is to call.
type effects struct {
	interrupt bool // break off what is being done for the phase, and do what the phase asks for now

	trouble   error
	recovered bool
	restored  *Restored
	caughtUp  bool             // with all up to seq
	reread    bool             // messages are missing from seq on
	seq       events.StreamSeq // of caughtUp and reread
	unfit     jetstream.Notice
	resynced  bool
	ask       *round // shims are to be asked for a resync
}

const (
	restartPause = 500 * time.Millisecond // the least time between two readers
	failurePause = time.Second            // after a restore failed, or a reader could not begin
)

// serves reports whether queries may be answered from the partition.
func (pt *partition) serves() bool { return pt.phase.state().Serves() }

// owed is 1 if the partition is wanted and does not serve, else 0.
func (pt *partition) owed() int32 {
	if pt.wanted && !pt.serves() {
		return 1
	}
	return 0
}

// readingOf returns what exists while the log is read, else nil.
func readingOf(ph phase) *reading {
	switch ph := ph.(type) {
	case *catchingUp:
		return ph.reading
	case *serving:
		return ph.reading
	}
	return nil
}

func (pt *partition) reading() *reading { return readingOf(pt.phase) }

// need returns why a resync is needed; nil if none is.
func (pt *partition) need() *need {
	if r := pt.reading(); r != nil {
		return r.need
	}
	return nil
}

func (pt *partition) behind() bool {
	s, ok := pt.phase.(*serving)
	return ok && s.behind
}

func (pt *partition) become(next phase) {
	if pt.serves() && !next.state().Serves() {
		pt.lapses++
	}
	pt.phase = next
}

// keep says whether the node is to keep the partition from now on.
func (pt *partition) keep(wanted bool) (e effects) {
	pt.wanted = wanted
	switch pt.phase.(type) {
	case *absent:
		if wanted {
			pt.become(&restoring{kept: &kept{}})
		}
	case *emptying: // wanted says what comes next
	default:
		if e.interrupt = !wanted; e.interrupt {
			pt.become(&emptying{})
		}
	}
	return e
}

func (pt *partition) emptied() (e effects) {
	if _, ok := pt.phase.(*emptying); ok {
		pt.notBefore = time.Time{}
		pt.become(&absent{})
		return pt.keep(pt.wanted)
	}
	return e
}

func (pt *partition) failed(now time.Time, err error) (e effects) {
	if k := pt.phase.data(); k != nil {
		k.err, e.trouble = err, err
		pt.notBefore = now.Add(failurePause)
	}
	return e
}

// restoration is what a restore found: the log, the snapshots that it passed over, and the one that it used, if any.
type restoration struct {
	epoch    jetstream.Epoch
	seq      events.StreamSeq // from which the log goes on
	last     events.StreamSeq // of the log
	took     time.Duration
	rejected []snapshot.Rejection
	used     *snapshot.Manifest // nil: none
	runIndex *snapshot.RunIndex
}

func (pt *partition) restored(now time.Time, r *restoration) (e effects) {
	was, ok := pt.phase.(*restoring)
	if !ok {
		return e
	}
	at := Restored{Seq: r.seq, Took: r.took, Lost: lost(was.lost, r.rejected, r.used != nil, r.seq)}
	if r.used != nil {
		at.Ranks, at.Holdings = r.used.Counts.Ranks, r.used.Counts.Holdings
	}
	k := was.kept
	k.epoch, k.last, k.err, k.restored = r.epoch, r.last, nil, at
	k.saved.begin(r.runIndex, r.used, now)
	next := &reading{kept: k, divergedAt: was.divergedAt, since: now}
	if at.Lost != "" {
		next.need = pt.newNeed(at.Lost)
	}
	pt.become(&catchingUp{next})
	e.restored = &at
	return e
}

// opened says that a reader begins with what follows the last message that was applied.
func (pt *partition) opened(now time.Time) (e effects) {
	if r := pt.reading(); r != nil {
		r.since, r.missing = now, false
	}
	return e
}

// received says what the log's last message was when the reader received some.
func (pt *partition) received(last events.StreamSeq) (e effects) {
	if k := pt.phase.data(); k != nil {
		k.last = last
	}
	return e
}

// missed says that messages after the last one applied did not arrive, though their reader sent what follows them.
func (pt *partition) missed(now time.Time, applied events.StreamSeq) (e effects) {
	r := pt.reading()
	if r == nil || r.missing {
		return e
	}
	r.missing, r.rereading = true, true
	pt.notBefore = now.Add(restartPause)
	return effects{interrupt: true, reread: true, seq: applied + 1}
}

// noticed says what the reader told after messages, of which those up to applied are in the index.
func (pt *partition) noticed(now time.Time, notice jetstream.Notice, applied events.StreamSeq) (e effects) {
	r := pt.reading()
	if r == nil {
		return e
	}
	switch notice := notice.(type) {
	case jetstream.CaughtUp:
		if applied < notice.Seq {
			return pt.missed(now, applied)
		}
		r.err, r.divergedAt = nil, 0
		if !pt.serves() { // else some of it was read again
			pt.become(&serving{reading: r})
			e.caughtUp, e.seq = true, notice.Seq
		}
	case jetstream.AtEnd:
		if applied < notice.Seq {
			return pt.missed(now, applied)
		}
		r.fresh.readTo, r.rereading = notice.Time, false
	case jetstream.Unavailable:
		r.err, e.trouble = notice.Err, notice.Err
	case jetstream.Recovered:
		r.err, e.recovered = nil, true
	default: // the log is not the one that was applied
		again := &restoring{kept: r.kept, divergedAt: r.divergedAt}
		if _, truncated := notice.(jetstream.Truncated); !truncated { // that may be in a snapshot
			again.lost = notice.String()
		}
		if regressed, ok := notice.(jetstream.Regressed); ok {
			again.divergedAt = regressed.Applied
		}
		if now.Sub(r.since) < restartPause { // what could not be read at once will hardly be better now
			pt.notBefore = now.Add(restartPause)
		}
		pt.become(again)
		e.interrupt, e.unfit = true, notice
	}
	return e
}

// tick measures for how long the partition has been behind its log.
func (pt *partition) tick(now time.Time, applied events.StreamSeq) (e effects) {
	if s, ok := pt.phase.(*serving); ok {
		s.behind = s.lag.measure(now, applied, s.last, s.err != nil) > behindAfter
	}
	return e
}

// age is how old what is known of the partition is, in milliseconds; 0: it is of now.
func (pt *partition) age(now time.Time) uint64 {
	if k := pt.phase.data(); k != nil {
		return k.fresh.age(now, pt.policy.started)
	}
	return 0
}

// measured says how full the log was at a time. known says that it is known whether the log takes messages.
func (pt *partition) measured(at time.Time, u usage, refused, known bool) (e effects) {
	if k := pt.phase.data(); k != nil {
		if k.usage = u; known {
			k.fresh.measured(at, refused)
		}
	}
	return e
}

// worthSaving reports whether a snapshot would be one to go back to. It is not while the whole partition needs a
// resync: who restored it would not know that.
func (pt *partition) worthSaving(grown growth) bool {
	s, ok := pt.phase.(*serving)
	return ok && (s.need == nil || s.need.cause == "") && (grown != s.saved.grown || s.saved.lost || s.saved.err != nil)
}

// snapshotDue reports whether a snapshot is to be written now; grown is how much the partition has grown.
func (pt *partition) snapshotDue(now time.Time, grown growth) bool {
	if !pt.worthSaving(grown) {
		return false
	}
	k := pt.phase.data()
	since := grown.since(k.saved.grown)
	if k.saved.err != nil { // also without changes, if the snapshot was requested
		return now.Sub(k.saved.failed) >= saveRetry
	}
	return (since.changes > 0 || k.saved.lost) && (now.Sub(k.saved.at) >= pt.policy.snapshotInterval ||
		since.changes >= pt.policy.snapshotBlocks || k.usage.snapshotDue(since.bytes))
}

func (pt *partition) saved(s saveState) (e effects) {
	if k := pt.phase.data(); k != nil {
		k.saved = s
	}
	return e
}

// snapshotsLost says that the snapshots were deleted. The next one is due at once.
func (pt *partition) snapshotsLost() (e effects) {
	if k := pt.phase.data(); k != nil {
		k.saved = saveState{lost: true}
	}
	return e
}

// saveFailed says that a snapshot could not be written. counted is false if nobody waited for it any more.
func (pt *partition) saveFailed(now time.Time, err error, counted bool) (e effects) {
	if k := pt.phase.data(); k != nil {
		k.saved.failed, k.saved.err = now, err
		if counted {
			k.saved.fails++
		}
	}
	return e
}

func (pt *partition) newNeed(cause string) *need { return &need{cause: cause, id: pt.policy.newID()} }

// ranksSeen says which ranks' events are missing, and whether all incarnations that shims named in the last round have
// begun.
func (pt *partition) ranksSeen(now time.Time, partial []partialRank, begun bool) (e effects) {
	s, ok := pt.phase.(*serving)
	if !ok || s.need == nil && len(partial) == 0 {
		return e
	}
	if s.need == nil {
		s.need = pt.newNeed("")
	}
	d := s.need
	d.partial = partial
	if d.rounds >= minRounds && begun {
		d.cause = ""
	}
	switch {
	case d.cause == "" && len(partial) == 0:
		s.need, e.resynced = nil, true
	case !now.Before(d.next):
		d.pause = min(max(2*d.pause, pt.policy.resyncPause), resyncSlowest)
		d.next = now.Add(d.pause)
		e.ask = &round{cause: d.cause, id: d.id, partial: partial, why: d.String()}
	}
	return e
}

// answered says which incarnations shims have begun in a round of requests, and whether all of it could be asked.
func (pt *partition) answered(id string, answers map[events.RankKey]events.Incarnation, whole bool) (e effects) {
	if d := pt.need(); d != nil && d.id == id {
		if d.answered = answers; whole {
			d.rounds++
		}
	}
	return e
}
