package node

import (
	"errors"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestWhoseSnapshotIsAProblem: a snapshot that could not be written is a problem of the node that is to write it, for as long as it is.
func TestWhoseSnapshotIsAProblem(t *testing.T) {
	w := newSite(t)
	var view atomic.Pointer[cluster.View]
	view.Store(&cluster.View{Writer: []string{""}})
	w.view = view.Load
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	w.node.set(0, func(s *standing) { s.save.failed, s.save.err = time.Now(), errors.New("somebody else wrote one") })
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

// TestWhatIsSaidOfALog: a log that cannot be read is not said to have what it was not seen to have.
func TestWhatIsSaidOfALog(t *testing.T) {
	w := newSite(t)
	w.room = time.Hour // nothing is looked at but what the test says
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
		{true, nil, applied + 7, "far behind its log: 7 messages are not applied", "readable", false},
		{false, errors.New("nobody there"), applied, "partition 0: nobody there", "asked first", true},
		{true, errors.New("nobody there"), applied, "its log has not been readable for a while", "0 messages", true},
	} {
		var said string
		var state string
		w.node.set(0, func(s *standing) { s.behind, s.err, s.last = c.behind, c.err, c.last })
		s, err := w.node.Status(w.ctx)
		w.must(err)
		said, state = strings.Join(s.Problems, "\n"), s.Partitions[0].State
		if !strings.Contains(said, c.says) || strings.Contains(said, c.not) || (state == stateUnavailable) != c.unreadable {
			t.Errorf("%+v: the partition is %s, and %q is said", c, state, said)
		}
	}
}
