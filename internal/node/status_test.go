package node

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/cluster"
)

// TestWhoseSnapshotIsAProblem: a snapshot that could not be written is a problem of the node that is to write it, for as long as it is.
func TestWhoseSnapshotIsAProblem(t *testing.T) {
	w := newSite(t)
	view := &cluster.View{Writer: []string{""}}
	w.view = func() *cluster.View { return view }
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
		view.Writer[0] = step.writer
		s, err := w.node.Status(w.ctx)
		w.must(err)
		if said := strings.Join(s.Problems, "\n"); strings.Contains(said, "somebody else wrote one") != step.problem {
			t.Errorf("while %q is to write the snapshots: %q", step.writer, said)
		}
	}
}
