package server

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestFindRanks queries random ranks of a fleet. The answer must have the requested ranks with blocks, or the reason
// for an empty answer.
func TestFindRanks(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 2000 {
		var fleet []api.Overlap
		for w := range 3 {
			for r := range rng.IntN(3) {
				fleet = append(fleet, api.Overlap{Instance: events.WorkerID(fmt.Sprint("w", w)), Rank: events.Rank(r),
					Device: rng.Uint32N(3)})
			}
		}
		find := func(_ context.Context, q *api.Query) (*api.Answer, error) { // as a node of any version answers
			a := &api.Answer{Workers: []api.Overlap{}}
			if q.Ranks != nil {
				t.Fatal("another node gets a query with ranks")
			}
			why := api.ReasonNotAllowed
			for _, o := range fleet {
				if slices.Contains(q.Workers, o.Instance) {
					a.Workers, why = append(a.Workers, o), api.ReasonNotCached
				}
			}
			a.Finish(q.Idle, why)
			return a, nil
		}
		q, want := &api.Query{Idle: rng.IntN(2) == 0}, []api.Overlap{}
		for range 1 + rng.IntN(4) {
			q.Ranks = append(q.Ranks, api.RankPlace{Instance: events.WorkerID(fmt.Sprint("w", rng.IntN(4))),
				Rank: events.Rank(rng.IntN(3))})
		}
		why, cached := api.ReasonNotAllowed, false
		for _, o := range fleet {
			if slices.Contains(q.Ranks, api.RankPlace{Instance: o.Instance, Rank: o.Rank}) {
				why, cached = api.ReasonNotCached, cached || o.Device > 0
				if q.Idle || o.Device > 0 {
					want = append(want, o)
				}
			}
		}
		if cached {
			why = ""
		}
		api.SortOverlaps(want)
		got, err := findRanks(t.Context(), q, find)
		if err != nil || !reflect.DeepEqual(got.Workers, want) || got.Reason != why {
			t.Fatalf("%+v of %+v:\n%+v %q, %v, want\n%+v %q", q.Ranks, fleet, got.Workers, got.Reason, err, want, why)
		}
	}
}
