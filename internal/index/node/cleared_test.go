package node

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/internal/ingest/shim"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestClearsAreCounted: the list of workers has a rank's number of clears, by the engine and by a gap in the log.
func TestClearsAreCounted(t *testing.T) {
	w := newSite(t)
	w.start()
	defer w.stopNode()
	log := shim.NewStreamLog(w.ns, events.RankKey{Instance: "a"}, nil)
	_, err := log.Last(w.ctx)
	w.must(err)
	cleared := events.Event{Kind: events.Cleared, Tier: events.AllTiers, Reason: events.ReasonEngine}
	for _, b := range []events.Batch{{FirstID: 1, Events: []events.Event{stored(0, 1), cleared}},
		{FirstID: 4, Events: []events.Event{stored(0, 2)}}} { // event 3 is missing
		b.Incarnation, b.Model, b.BlockSize = 1, "m", 4
		data, err := events.AppendBatch(nil, &b)
		w.must(err)
		_, err = log.Publish(w.ctx, [][]byte{data})
		w.must(err)
	}
	testkit.Eventually(t, "the node has all events", func() (bool, string) {
		list, err := w.node.Workers(w.ctx, api.WorkersRequest{})
		w.must(err)
		if len(list.Workers) != 1 || list.Workers[0].LastEvent != 4 {
			return false, fmt.Sprintf("%+v", list)
		}
		if n := list.Workers[0].Cleared; n != 2 {
			t.Errorf("%d clears are counted, want 2", n)
		}
		return true, ""
	})
}
