package node

import (
	"errors"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/radix"
)

// TestSnapshotStatesEnd: a partition whose snapshots failed, are left to another node, were deleted or wait for a
// resync writes them again when the cause has ended.
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
		t.Error("a success does not end that")
	}

	due("nothing has changed", later.Add(time.Hour), grown, false)
	pt.snapshotsLost()
	due("the snapshots were deleted", later, grown, true)
	pt.saved(saveState{at: later, grown: grown})
	due("they are written again", later.Add(time.Hour), grown, false)
}

// TestCopiesProblemEnds: far more copies than blocks are a problem until they are gone.
func TestCopiesProblemEnds(t *testing.T) {
	r := &rank{}
	if copiesProblem(r, radix.RankStats{Copies: 1000}, 20) == "" || copiesProblem(r, radix.RankStats{}, 20) != "" {
		t.Error("1,000 copies of 20 blocks are a problem, and none are not")
	}
}
