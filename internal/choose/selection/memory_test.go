package selection

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// TestEvictionCost lets a worker compute prompts repeatedly, while answers of the index report its device memory as
// full. The explanation of a new prompt then has an eviction cost for this worker alone, also after a change of the
// registrations. An answer of an older node, without the two figures, has no such cost.
func TestEvictionCost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFleet(t, 2, 1)
		full := uint32(20)
		f.service.cfg.Find = func(_ context.Context, q *api.Query) (*api.Answer, error) {
			return &api.Answer{Model: "m", BlockSize: block, Complete: true, Workers: []api.Overlap{
				{Instance: "w00", Device: 1, Held: full, Full: full},
				{Instance: "w01", Device: 1, Held: 10}}}, nil // it has not evicted a block
		}
		ask := func() (evict [2]float64, memory *routing.Memory) {
			r := request("", 400)
			r.Policy, r.Explain = "kvatlas", true
			s, err := f.service.Select(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			for i, c := range s.Explanation.Candidates {
				if last := c.Scores[len(c.Scores)-1]; last.Scorer == "evict" {
					evict[i] = last.Cost
				}
				if c.Memory != nil {
					memory = c.Memory
				}
			}
			return evict, memory
		}
		for i := range 50 {
			r := request(fmt.Sprint("r", i), 400)
			if _, err := f.service.Select(t.Context(), r); err != nil {
				t.Fatal(err)
			}
			time.Sleep(20 * time.Millisecond)
			ref := &api.RequestRef{Model: "m", RequestID: r.RequestID}
			if err := f.service.Free(t.Context(), ref); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(time.Second)
		evict, memory := ask()
		if evict[0] <= 0 || evict[1] != 0 {
			t.Errorf("eviction costs %v", evict)
		}
		if memory == nil || memory.Free != 0 || memory.Unique <= 0 || memory.Unique > 0.2 || memory.Again <= 0 {
			t.Errorf("the rank that evicts has %+v", memory)
		}
		f.pool = &registry.Pool{Model: "m", Ranks: f.pool.Ranks}
		time.Sleep(time.Second)
		if again, _ := ask(); again[0] < evict[0]/2 {
			t.Errorf("after a change of the registrations: %v, before it %v", again, evict)
		}
		full = 0
		for range 2 * memoryChoices {
			time.Sleep(memoryLife)
			ask()
		}
		if evict, memory := ask(); evict != [2]float64{} || memory != nil {
			t.Errorf("by an older node: %v, %+v", evict, memory)
		}
	})
}
