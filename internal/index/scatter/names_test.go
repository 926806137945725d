package scatter

import (
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestPendingOfAnOlderNode: a node of v0.4.0 sends pending blocks under their old name alone.
func TestPendingOfAnOlderNode(t *testing.T) {
	body, err := api.Marshal(api.MsgPack, map[string]any{"workers": []map[string]any{
		{"instance": "before", "rank": 0, "parked": 3}, {"instance": "now", "rank": 0, "pending": 4, "parked": 4},
	}})
	if err != nil {
		t.Fatal(err)
	}
	l := &listing{list: &api.WorkerList{}}
	l.add([]events.Partition{0}, l.decode(body))
	list := l.finish(nil).Workers
	if len(list) != 2 || list[0].Pending != 3 || list[1].Pending != 4 || list[1].Parked != 4 {
		t.Errorf("gathered %+v", list)
	}
}
