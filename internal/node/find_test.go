package node

import (
	"errors"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestWhatCannotBeSeenIsNamed: while a partition is restored anew the node does not know which workers are in it. An answer says so, whether
// or not ranks of the partition are still known, and a model that only it may serve is not called unknown.
func TestWhatCannotBeSeenIsNamed(t *testing.T) {
	w := newSite(t)
	w.start()
	defer w.stopNode()
	w.startShim()
	w.grow(3)
	w.awaitAll()
	find := func() (*api.Answer, error) {
		return w.node.Find(w.ctx, &api.Query{Model: "m", Tokens: w.prompt})
	}

	w.node.set(0, func(s *standing) { s.state = stateRestoring })
	a, err := find()
	w.must(err)
	if a.Complete || !slices.Equal(a.Missing, []events.Partition{0}) || len(a.Workers) != 1 {
		t.Errorf("while the partition is restored, its ranks still there: %+v", a)
	}
	w.must(w.node.forget(w.ctx, 0))
	var failure *api.Error
	if a, err := find(); !errors.As(err, &failure) || failure.Code != api.CodeNotReady {
		t.Errorf("while the partition is empty: %+v, %v", a, err)
	}
	w.node.set(0, func(s *standing) { s.state = stateServing })
	if a, err := find(); !errors.As(err, &failure) || failure.Code != api.CodeUnknownModel {
		t.Errorf("when the partition is there and empty: %+v, %v", a, err)
	}
}
