package selection

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// TestSelectByEndpoint limits choices to addresses. The choice equals a choice without other ranks. Unknown addresses
// are reported, also without any remaining rank.
func TestSelectByEndpoint(t *testing.T) {
	f := newFleet(t, 6, 2)
	record := *f.pool.Ranks[3].Record // rank 1 of w01 has a separate address
	record.Endpoint = "http://w01-1"
	f.pool.Ranks[3].Record = &record
	rng := rand.New(rand.NewPCG(1, 2))
	for i := range f.pool.Ranks {
		f.holds[f.pool.Ranks[i].RankKey] = [4]uint32{rng.Uint32N(8), rng.Uint32N(2)}
	}
	addresses := []string{"http://w00", "http://w01", "http://w01-1", "http://w02", "http://w05", "none", "w9"}
	for step := range 300 {
		r := request("", 40)
		for range 1 + rng.IntN(4) {
			r.Endpoints = append(r.Endpoints, addresses[rng.IntN(len(addresses))])
		}
		r.Explain = step%2 == 0
		best, unknown := map[events.RankKey]bool{}, []string{}
		most := float64(-1)
		for _, e := range r.Endpoints {
			found := false
			for i := range f.pool.Ranks {
				rank := &f.pool.Ranks[i]
				if rank.Record.Endpoint != e {
					continue
				}
				found = true
				d := f.holds[rank.RankKey]
				credit := float64(d[0]) + 0.75*float64(d[1])
				if credit > most {
					most = credit
					clear(best)
				}
				if credit == most {
					best[rank.RankKey] = true
				}
			}
			if !found && !slices.Contains(unknown, e) {
				unknown = append(unknown, e)
			}
		}
		s, err := f.service.Select(t.Context(), r)
		if len(best) == 0 {
			if e := api.AsError(err); e.Code != api.CodeNoWorkers || !strings.Contains(e.Message,
				"no worker of the model is registered at "+unknown[0]) {
				t.Fatalf("step %d, %q: %v", step, r.Endpoints, err)
			}
			continue
		}
		if err != nil || !best[events.RankKey{Instance: s.Worker, Rank: s.Rank}] ||
			!slices.Contains(r.Endpoints, s.Endpoint) || !slices.Equal(s.UnknownEndpoints, unknown) {
			t.Fatalf("step %d, %q: %+v, %v, want one of %v and %q", step, r.Endpoints, s, err, best, unknown)
		}
		if x := s.Explanation; x != nil && len(x.Dropped)+len(x.Candidates) != len(f.pool.Ranks) {
			t.Fatalf("step %d: %+v", step, x)
		}
	}
	for _, q := range f.asked {
		if q.Endpoints != nil {
			t.Fatal("the index receives addresses")
		}
	}

	// A disaggregated request finds both workers at the addresses.
	for i := range f.pool.Ranks {
		r := *f.pool.Ranks[i].Record
		if r.Role = api.RoleDecode; i >= 6 {
			r.Role = api.RolePrefill
		}
		f.pool.Ranks[i].Record = &r
	}
	pool := *f.pool
	f.pool = &pool
	r := request("", 40)
	r.Disaggregated, r.Endpoints = true, []string{"http://w02", "http://w04", "other"}
	s, err := f.service.Select(t.Context(), r)
	if err != nil || s.Endpoint != "http://w02" || s.Prefill == nil || s.Prefill.Endpoint != "http://w04" ||
		fmt.Sprint(s.UnknownEndpoints) != "[other]" {
		t.Fatalf("%+v, %v", s, err)
	}
	r.Endpoints, r.Pinned = []string{"http://w04"}, &routing.Target{Worker: "w02"}
	if _, err := f.service.Select(t.Context(), r); api.AsError(err).Code != api.CodeNoWorkers {
		t.Fatal(err)
	}
}
