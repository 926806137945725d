package node

import (
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
	"github.com/kvatlas/kvatlas/pkg/snapshot"
)

// partition decides the node's actions for one partition. The type is a state machine: no method starts a goroutine,
// waits, or reads a clock. The runner performs the action of the phase and the [effects] of every step. Methods without
// effects as the result change nothing.
//
//	absent ──keep──▶ restoring ──restored──▶ catchingUp ──CaughtUp──▶ serving
//	  ▲                  ▲ │                      │                      │
//	  │                  └─┼──── log unfit ───────┴──────────────────────┤
//	  └──── emptying ◀─────┴──────── no longer kept ─────────────────────┘
//
// Invariants:
//  1. A partition serves only after a restore, and after a reader from the restored position has caught up with all its
//     messages applied.
//  2. Missing messages are reported once per reader. The reader is interrupted, and a new reader starts at the first
//     missing message. The partition is `rereading` until the new reader has reached the log's end.
//  3. A loss is in `lost` while the partition restores, and in `need` afterwards until a resync has ended.
type partition struct {
	policy    *policy
	wanted    bool // set by Keep
	phase     phase
	lapses    uint64    // counts the ends of serving
	notBefore time.Time // the runner delays the action of the phase until then
}

// policy holds the settings common to all partitions of a node.
type policy struct {
	started          time.Time
	snapshotInterval time.Duration
	snapshotBlocks   uint64
	resyncPause      time.Duration
	newID            func() string // makes ids of resync requests
}

// phase determines the runner's action: none (absent), drop the partition from the index (emptying), restore the
// partition (restoring), or read the log (catchingUp and serving). A type has the data of the phase.
type phase interface {
	state() api.PartitionState
	data() *kept // nil while the partition is not kept
}

type absent struct{}

type emptying struct{}

type restoring struct {
	*kept
	lost       string           // the loss found in the log; empty: none
	divergedAt events.StreamSeq // where the log lacks the applied message; 0: no divergence
}

type catchingUp struct{ *reading }

type serving struct {
	*reading
	lag    lag
	behind bool // for longer than behindAfter
}

// kept is the state of a partition while the node keeps the partition.
type kept struct {
	epoch    jetstream.Epoch
	last     events.StreamSeq // of the log, in the latest report
	err      error            // of reading the log; nil: the log is readable
	restored Restored
	saved    saveState
	usage    usage // of the log
	fresh    freshness
}

// reading is the state from one restore to the next.
type reading struct {
	*kept
	divergedAt events.StreamSeq // as in restoring, until the reader has caught up
	since      time.Time        // the start of the present reader
	need       *need            // nil: no resync is needed
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

// effects are the requests of a step to the partition's runner, and the results to report.
type effects struct {
	interrupt bool // stop the present action and begin the action of the present phase

	trouble   error
	recovered bool
	restored  *Restored
	caughtUp  bool             // all messages up to seq are applied
	reread    bool             // messages are missing from seq on
	seq       events.StreamSeq // of caughtUp and reread
	unfit     jetstream.Notice
	resynced  bool
	request   *round // a round of resync requests to shims is due
}

const (
	restartPause = 500 * time.Millisecond // the minimum time between two readers
	failurePause = time.Second            // after a failed restore or a failed start of a reader
)

// serves reports whether the partition serves queries.
func (pt *partition) serves() bool { return pt.phase.state().Serves() }

// owed is 1 if the partition is wanted and does not serve, else 0.
func (pt *partition) owed() int32 {
	if pt.wanted && !pt.serves() {
		return 1
	}
	return 0
}

// readingOf returns the reading state of a phase; nil if the phase reads no log.
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

// need returns the reason for a resync; nil if none is needed.
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

// keep sets whether the node keeps the partition from now on.
func (pt *partition) keep(wanted bool) (e effects) {
	pt.wanted = wanted
	switch pt.phase.(type) {
	case *absent:
		if wanted {
			pt.become(&restoring{kept: &kept{}})
		}
	case *emptying: // wanted determines the next phase
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

// restoration is the result of a restore: the state of the log, the rejected snapshots, and the used snapshot, if any.
type restoration struct {
	epoch    jetstream.Epoch
	seq      events.StreamSeq // the position after which the log continues
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

// opened records that a reader starts after the last applied message.
func (pt *partition) opened(now time.Time) (e effects) {
	if r := pt.reading(); r != nil {
		r.since, r.missing = now, false
	}
	return e
}

// received records the log's last message at the time of a delivery.
func (pt *partition) received(last events.StreamSeq) (e effects) {
	if k := pt.phase.data(); k != nil {
		k.last = last
	}
	return e
}

// missed records missing messages after the last applied message, although the reader sent later messages.
func (pt *partition) missed(now time.Time, applied events.StreamSeq) (e effects) {
	r := pt.reading()
	if r == nil || r.missing {
		return e
	}
	r.missing, r.rereading = true, true
	pt.notBefore = now.Add(restartPause)
	return effects{interrupt: true, reread: true, seq: applied + 1}
}

// noticed applies a notice of the reader, after messages that are in the index up to applied.
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
		if !pt.serves() { // otherwise a part of the log was read again
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
	default: // the log differs from the applied log
		again := &restoring{kept: r.kept, divergedAt: r.divergedAt}
		if _, truncated := notice.(jetstream.Truncated); !truncated { // a snapshot may contain the truncated part
			again.lost = notice.String()
		}
		if regressed, ok := notice.(jetstream.Regressed); ok {
			again.divergedAt = regressed.Applied
		}
		if now.Sub(r.since) < restartPause { // an immediate retry would probably fail again
			pt.notBefore = now.Add(restartPause)
		}
		pt.become(again)
		e.interrupt, e.unfit = true, notice
	}
	return e
}

// tick measures how long the partition has been behind its log.
func (pt *partition) tick(now time.Time, applied events.StreamSeq) (e effects) {
	if s, ok := pt.phase.(*serving); ok {
		s.behind = s.lag.measure(now, applied, s.last, s.err != nil) > behindAfter
	}
	return e
}

// age returns the age of the partition's state in milliseconds; 0: current.
func (pt *partition) age(now time.Time) uint64 {
	if k := pt.phase.data(); k != nil {
		return k.fresh.age(now, pt.policy.started)
	}
	return 0
}

// measured records the usage of the log at a time. With known false, refused is unknown.
func (pt *partition) measured(at time.Time, u usage, refused, known bool) (e effects) {
	if k := pt.phase.data(); k != nil {
		if k.usage = u; known {
			k.fresh.measured(at, refused)
		}
	}
	return e
}

// worthSaving reports whether a snapshot would be useful for a restore. A partition that needs a resync as a whole is
// not saved: a restore from the snapshot would not show the need.
func (pt *partition) worthSaving(grown growth) bool {
	s, ok := pt.phase.(*serving)
	return ok && (s.need == nil || s.need.cause == "") && (grown != s.saved.grown || s.saved.lost || s.saved.err != nil)
}

// snapshotDue reports whether a snapshot is due now; grown is the present growth of the partition.
func (pt *partition) snapshotDue(now time.Time, grown growth) bool {
	if !pt.worthSaving(grown) {
		return false
	}
	k := pt.phase.data()
	since := grown.since(k.saved.grown)
	if k.saved.err != nil { // even without changes, if the snapshot was requested
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

// snapshotsLost records the deletion of the snapshots. The next snapshot is due immediately.
func (pt *partition) snapshotsLost() (e effects) {
	if k := pt.phase.data(); k != nil {
		k.saved = saveState{lost: true}
	}
	return e
}

// saveFailed records the failure of a snapshot. counted is false if the caller had stopped waiting.
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

// ranksSeen updates the ranks with missing events. begun reports whether all incarnations named by shims in the last
// round have begun.
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
		e.request = &round{cause: d.cause, id: d.id, partial: partial, why: d.String()}
	}
	return e
}

// answered records the new incarnations named by shims in a round of requests. whole reports whether all requests
// succeeded.
func (pt *partition) answered(id string, answers map[events.RankKey]events.Incarnation, whole bool) (e effects) {
	if d := pt.need(); d != nil && d.id == id {
		if d.answered = answers; whole {
			d.rounds++
		}
	}
	return e
}
