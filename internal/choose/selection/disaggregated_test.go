package selection

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// configured changes the constants of the service.
func (f *fleet) configured(t testing.TB, change func(*routing.Config)) {
	t.Helper()
	change(&f.service.cfg.Routing)
	service, err := New(f.service.cfg)
	if err != nil {
		t.Fatal(err)
	}
	f.service = service
}

// record changes the registration of worker i.
func (f *fleet) record(i int, change func(*api.WorkerRecord)) {
	record := *f.pool.Ranks[i].Record
	change(&record)
	pool := *f.pool
	pool.Ranks = slices.Clone(pool.Ranks)
	pool.Ranks[i].Record = &record
	f.pool = &pool
}

func ptr[T any](v T) *T { return &v }

// inZone is a worker of a role in a zone.
func inZone(role api.Role, zone string) func(*api.WorkerRecord) {
	return func(r *api.WorkerRecord) {
		r.Role, r.TopologyDomains = role, map[string]string{"zone": zone}
	}
}

// TestDisaggregated sends a prompt to a decode and a prefill worker: each has its booking, and both are freed.
func TestDisaggregated(t *testing.T) {
	f := newFleet(t, 4, 1) // w00 and w01 decode, w02 and w03 prefill
	for i, zone := range []string{"a", "b", "a", "b"} {
		f.record(i, inZone([]api.Role{api.RoleDecode, api.RolePrefill}[i/2], zone))
	}
	f.holds[f.pool.Ranks[0].RankKey] = [4]uint32{5, 0, 0, 0} // no attraction for decode
	f.holds[f.pool.Ranks[3].RankKey] = [4]uint32{4, 0, 0, 0}
	busy := load.Booking{ID: "busy", Rank: f.pool.Ranks[0].RankKey, Hashes: make([]events.SeqHash, 9), NoReuse: true}
	if err := f.loads.Book(t.Context(), table("m"), busy); err != nil {
		t.Fatal(err)
	}
	r := request("r1", 42)
	r.Disaggregated, r.Explain = true, true
	s, err := f.service.Select(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	if s.Worker != "w01" || s.Cost != 10 || s.TrackPrefillTokens || s.Prefill == nil || s.Prefill.Worker != "w03" ||
		s.Prefill.Cost != 42.0/4-4 || s.Prefill.EffectivePrefillTokens != 26 || s.Prefill.Blocks != 10 ||
		s.Explanation == nil || s.Prefill.Explanation == nil || s.Disaggregation.Bypass ||
		s.Disaggregation.NetNewTokens != 42 {
		t.Fatalf("%+v\n%+v\n%+v", s, s.Prefill, s.Disaggregation)
	}
	loads := func(want ...api.RankLoad) {
		t.Helper()
		list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
		if err != nil || !slices.Equal(list.Models[0].Ranks[1:], want) {
			t.Fatalf("%+v %v, want %+v", list, err, want)
		}
	}
	decode, idle, none := api.RankLoad{Worker: "w01", ActiveBlocks: 10, ActiveRequests: 1}, api.RankLoad{Worker: "w02"},
		api.RankLoad{Worker: "w03"}
	loads(decode, idle, api.RankLoad{Worker: "w03", ActivePrefillTokens: 26, ActiveRequests: 1})
	if _, err := f.service.Select(t.Context(), r); code(err) != api.CodeConflict {
		t.Fatalf("the id again: %v", err)
	}
	ref := &api.RequestRef{Model: "m", RequestID: "r1"}
	if err := f.service.PrefillComplete(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	loads(decode, idle, none)
	if err := f.service.Free(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	loads(api.RankLoad{Worker: "w01"}, idle, none)

	// Chosen first, and booked by id; freed before the prefill was complete.
	r.Book = false
	if _, err := f.service.Select(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	pending := &api.BookRequest{Prompt: api.Prompt{Model: "m"}, RequestID: "r1"}
	if _, err := f.service.Book(t.Context(), pending); err != nil {
		t.Fatal(err)
	}
	loads(decode, idle, api.RankLoad{Worker: "w03", ActivePrefillTokens: 26, ActiveRequests: 1})
	if err := f.service.Free(t.Context(), ref); err != nil {
		t.Fatal(err)
	}
	loads(api.RankLoad{Worker: "w01"}, idle, none)

	// A conflict books neither part.
	busy.ID, busy.Rank, busy.Hashes = "r2", f.pool.Ranks[0].RankKey, nil
	if err := f.loads.Book(t.Context(), table("m"), busy); err != nil {
		t.Fatal(err)
	}
	r.RequestID, r.Book = "r2", true
	if _, err := f.service.Select(t.Context(), r); code(err) != api.CodeConflict {
		t.Fatal(err)
	}
	loads(api.RankLoad{Worker: "w01"}, idle, none)

	// Without a prefill worker there is no choice, and the error has the empty pool.
	r.RequestID = "r3"
	r.Workers = []events.WorkerID{"w00", "w01"}
	if _, err := f.service.Select(t.Context(), r); code(err) != api.CodeNoWorkers ||
		!strings.Contains(err.Error(), "prefill worker: no worker may serve") || api.AsError(err).Explanation == nil {
		t.Errorf("no prefill worker: %v", err)
	}
}

// TestPrefillOptional: without an eligible worker in one of the pools, a worker that answers alone is chosen by the
// whole cost of the request, and booked with its prefill.
func TestPrefillOptional(t *testing.T) {
	f := newFleet(t, 4, 1)
	for i, role := range []api.Role{api.RoleAggregated, api.RoleDecode, api.RoleEncode, api.RolePrefill} {
		f.record(i, func(r *api.WorkerRecord) { r.Role = role })
	}
	f.holds[f.pool.Ranks[1].RankKey] = [4]uint32{5, 0, 0, 0}
	f.holds[f.pool.Ranks[2].RankKey] = [4]uint32{10, 0, 0, 0}
	f.holds[f.pool.Ranks[3].RankKey] = [4]uint32{9, 0, 0, 0}
	for _, c := range []struct {
		gone    int
		outcome string
		worker  events.WorkerID
	}{{0, api.WithPrefill, "w01"}, {3, api.NoPrefillWorker, "w01"}, {1, api.NoDecodeWorker, "w00"}} {
		was := f.pool
		f.record(c.gone, func(r *api.WorkerRecord) { r.State = api.WorkerUnschedulable })
		r := request("r", 42)
		r.Disaggregated, r.PrefillOptional = true, true
		s, err := f.service.Select(t.Context(), r)
		if err != nil {
			t.Fatalf("%s: %v", c.outcome, err)
		}
		if d := s.Disaggregation; s.Worker != c.worker || d.Outcome != c.outcome || d.Bypass != (s.Prefill == nil) ||
			d.Bypass != (c.outcome != api.WithPrefill) || s.TrackPrefillTokens != d.Bypass {
			t.Errorf("%s: %+v, %+v", c.outcome, s, d)
		}
		if err := f.service.Free(t.Context(), &api.RequestRef{Model: "m", RequestID: "r"}); err != nil {
			t.Errorf("%s: %v", c.outcome, err)
		}
		list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range list.Models[0].Ranks {
			if l.ActivePrefillTokens+l.ActiveBlocks+l.ActiveRequests > 0 {
				t.Errorf("%s: a load remains: %+v", c.outcome, l)
			}
		}
		f.pool = was
	}
	r := request("r", 42)
	r.Disaggregated, r.PrefillOptional, r.Workers = true, true, []events.WorkerID{"w02", "w03"}
	if s, err := f.service.Select(t.Context(), r); code(err) != api.CodeNoWorkers {
		t.Errorf("only workers that answer no requests: %+v, %v", s, err)
	}
}

// TestPrefillPoolCountsNoBlocks: a request for the prefill pool alone adds tokens there, not blocks.
func TestPrefillPoolCountsNoBlocks(t *testing.T) {
	f := newFleet(t, 1, 1)
	f.record(0, func(r *api.WorkerRecord) { r.Role, r.MaxBatchedTokens = api.RolePrefill, 4096 })
	r := request("r1", 42)
	r.Role = routing.Prefill
	if s, err := f.service.Select(t.Context(), r); err != nil || s.Cost != 42.0/4 || s.Blocks != 10 {
		t.Fatalf("%+v %v", s, err)
	}
	r.RequestID, r.Book, r.Advisory = "", false, true
	s, err := f.service.Select(t.Context(), r)
	want := api.WorkerLoad{ActivePrefillTokens: 42, PrefillTokenCapacity: 4096}
	if err != nil || s.WorkerLoad == nil || *s.WorkerLoad != want || s.Cost != 84.0/4 {
		t.Fatalf("%+v %+v %v", s, s.WorkerLoad, err)
	}
}

// TestDisaggregatedAgainstTheRules compares random choices with a calculation from index, loads and rules.
func TestDisaggregatedAgainstTheRules(t *testing.T) {
	rng := rand.New(rand.NewPCG(17, 6))
	chance := func(n int) bool { return rng.IntN(n) == 0 }
	saw := map[string]int{}
	for range 4000 {
		f := newFleet(t, 6, 1)
		for i := range f.pool.Ranks {
			f.record(i, func(r *api.WorkerRecord) {
				r.Role = []api.Role{api.RoleDecode, api.RolePrefill}[i%2]
				if !chance(5) {
					r.TopologyDomains = map[string]string{"zone": fmt.Sprint(rng.IntN(2))}
				}
				r.TotalKVBlocks, r.MaxBatchedTokens = uint64(rng.IntN(3)*20), uint64(rng.IntN(3)*100)
				if chance(4) {
					r.State = api.WorkerDraining
				}
			})
		}
		d := &routing.Disaggregation{}
		d.Bypass = []routing.BypassMode{"", routing.BypassISLBounding, routing.BypassPrefillLoad,
			routing.BypassISLOrLoad}[rng.IntN(4)]
		if d.Bypass == routing.BypassPrefillLoad || d.Bypass == routing.BypassISLOrLoad || chance(2) {
			d.PrefillBusyThreshold = ptr(rng.Float64())
		}
		if chance(2) {
			d.DecodeBusyThreshold = ptr(rng.Float64() * 2)
		}
		tokensBound, ratioBound := 2048.0, 0.7
		if chance(2) {
			tokensBound, ratioBound = float64(rng.IntN(60)), rng.Float64()
			d.ISLTokens, d.ISLRatio = &tokensBound, &ratioBound
		}
		weight := 1.0
		switch rng.IntN(3) {
		case 0:
			d.KVTransferDomain, d.KVTransferEnforcement = "zone", routing.KVTransferRequired
		case 1:
			d.KVTransferDomain = "zone"
			if chance(2) {
				weight = 2
				d.KVTransferPreferredWeight = &weight
			}
		}
		f.configured(t, func(c *routing.Config) { c.Disaggregation = d })
		n := 4 + rng.IntN(60)
		for i, r := range f.pool.Ranks {
			f.holds[r.RankKey] = [4]uint32{uint32(rng.IntN(n/block + 1))}
			b := load.Booking{ID: fmt.Sprint(i), Rank: r.RankKey}
			if i%2 == 0 {
				b.Hashes, b.NoReuse = make([]events.SeqHash, rng.IntN(20)), true
			} else {
				b.PrefillTokens = rng.Int64N(100)
			}
			if err := f.loads.Book(t.Context(), table("m"), b); err != nil {
				t.Fatal(err)
			}
		}
		loads, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		at := func(i int) (*api.WorkerRecord, api.RankLoad, float64, string) {
			r := f.pool.Ranks[i]
			return r.Record, loads.Models[0].Ranks[i], float64(f.holds[r.RankKey][0]), r.Record.TopologyDomains["zone"]
		}
		prefillCosts := func(zone string) map[events.WorkerID]float64 {
			costs := map[events.WorkerID]float64{}
			for i := 1; i < 6; i += 2 {
				record, has, holds, its := at(i)
				required := d.KVTransferEnforcement == routing.KVTransferRequired
				if record.State != api.WorkerSchedulable || required && (zone == "" || its != zone) {
					continue
				}
				cost := (float64(has.ActivePrefillTokens)+float64(n))/block - holds
				if !required && d.KVTransferDomain != "" && zone != "" && its == zone {
					cost *= math.Exp(-math.Tanh(weight))
				}
				costs[has.Worker] = cost
			}
			return costs
		}
		least := func(costs map[events.WorkerID]float64) float64 {
			least := math.Inf(1)
			for _, c := range costs {
				least = min(least, c)
			}
			return least
		}
		decodeCosts := map[events.WorkerID]float64{}
		for i := 0; i < 6; i += 2 {
			record, has, _, zone := at(i)
			near := d.KVTransferEnforcement != routing.KVTransferRequired || len(prefillCosts(zone)) > 0
			if record.State == api.WorkerSchedulable && near {
				decodeCosts[has.Worker] = float64(has.ActiveBlocks) + float64(n/block)
			}
		}
		r := request("r", n)
		r.Disaggregated = true
		s, err := f.service.Select(t.Context(), r)
		if len(decodeCosts) == 0 {
			if saw["no decode"]++; code(err) != api.CodeNoWorkers || !strings.Contains(err.Error(), "decode worker: ") {
				t.Fatalf("no decode worker: %+v %v", s, err)
			}
			continue
		}
		if err != nil {
			if saw["no prefill"]++; len(prefillCosts("0"))+len(prefillCosts("1")) > 0 &&
				d.KVTransferEnforcement == routing.KVTransferRequired || code(err) != api.CodeNoWorkers ||
				!strings.Contains(err.Error(), "prefill worker: ") {
				t.Fatalf("%v, with %+v", err, d)
			}
			continue
		}
		if decodeCosts[s.Worker] != least(decodeCosts) || s.Cost != least(decodeCosts) {
			t.Fatalf("decode: %+v of %v", s, decodeCosts)
		}
		i := slices.IndexFunc(f.pool.Ranks, func(r registry.PoolRank) bool { return r.Instance == s.Worker })
		record, has, holds, zone := at(i)
		net := float64(n) - holds*block
		potential := float64(has.ActiveBlocks) + math.Ceil(float64(n)/block)
		busy := d.DecodeBusyThreshold != nil && record.TotalKVBlocks > 0 &&
			potential > *d.DecodeBusyThreshold*float64(record.TotalKVBlocks)
		short := d.Bypass != "" && d.Bypass != routing.BypassPrefillLoad && net < tokensBound && net/float64(n) < ratioBound
		costs := prefillCosts(zone)
		loaded, free := false, false // among the cheapest, there is a busy one and a free one
		for i := 1; i < 6; i += 2 {
			record, has, _, _ := at(i)
			if c, is := costs[has.Worker]; !is || c > least(costs)+1e-9 {
				continue
			}
			capacity := float64(record.MaxBatchedTokens)
			if capacity == 0 {
				capacity = 10_000_000
			}
			if d.PrefillBusyThreshold != nil && float64(has.ActivePrefillTokens) > *d.PrefillBusyThreshold*capacity {
				loaded = true
			} else {
				free = true
			}
		}
		byLoad := d.Bypass == routing.BypassPrefillLoad || d.Bypass == routing.BypassISLOrLoad
		may, must := !busy && (short || byLoad && loaded), !busy && (short || byLoad && loaded && !free)
		bypass := s.Disaggregation.Bypass
		if bypass && !may || !bypass && must || bypass != (s.Prefill == nil) || s.Disaggregation.Reason == "" ||
			float64(s.Disaggregation.NetNewTokens) != net {
			t.Fatalf("bypass %v, may %v, must %v: %+v, with %+v", bypass, may, must, s.Disaggregation, d)
		}
		if s.Prefill != nil && math.Abs(s.Prefill.Cost-costs[s.Prefill.Worker]) > 1e-9 ||
			s.Prefill != nil && s.Prefill.Cost > least(costs)+1e-9 {
			t.Fatalf("prefill: %+v of %v", s.Prefill, costs)
		}
		after, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range after.Models[0].Ranks {
			want := loads.Models[0].Ranks[i]
			switch {
			case l.Worker == s.Worker:
				want.ActiveRequests, want.ActiveBlocks = want.ActiveRequests+1, want.ActiveBlocks+uint64(n/block)
				if bypass {
					want.ActivePrefillTokens += uint64(net)
				}
			case s.Prefill != nil && l.Worker == s.Prefill.Worker:
				want.ActiveRequests++
				want.ActivePrefillTokens += s.Prefill.EffectivePrefillTokens
			}
			if l != want {
				t.Fatalf("load %+v, want %+v", l, want)
			}
		}
		outcome := fmt.Sprintf("%s bypass %v", d.Bypass, bypass)
		if busy && (short || byLoad && loaded) {
			outcome = "veto"
		}
		saw[outcome]++
	}
	t.Log(saw)
	for _, outcome := range []string{"no decode", "no prefill", "veto", " bypass false", "isl_bounding bypass true",
		"isl_bounding bypass false", "prefill_load bypass true", "prefill_load bypass false", "isl_or_load bypass true",
		"isl_or_load bypass false"} {
		if saw[outcome] < 20 {
			t.Errorf("%q came up %d times", outcome, saw[outcome])
		}
	}
}

// TestOverloadedPrefillPool: an overloaded pool is bypassed in the modes by load, and refused otherwise.
func TestOverloadedPrefillPool(t *testing.T) {
	for mode, want := range map[routing.BypassMode]api.Code{
		routing.BypassNever: api.CodeOverloaded, routing.BypassPrefillLoad: "",
	} {
		f := newFleet(t, 2, 1)
		f.record(0, func(r *api.WorkerRecord) { r.Role = api.RoleDecode })
		f.record(1, func(r *api.WorkerRecord) { r.Role = api.RolePrefill })
		f.configured(t, func(c *routing.Config) {
			c.ActivePrefillTokensThreshold = ptr(1.0)
			c.Disaggregation = &routing.Disaggregation{Bypass: mode, PrefillBusyThreshold: ptr(1.0)}
		})
		full := load.Booking{ID: "full", Rank: f.pool.Ranks[1].RankKey, PrefillTokens: 2}
		if err := f.loads.Book(t.Context(), table("m"), full); err != nil {
			t.Fatal(err)
		}
		r := request("r", 20)
		r.Disaggregated = true
		s, err := f.service.Select(t.Context(), r)
		if code(err) != want || err == nil && (s.Prefill != nil || !strings.Contains(s.Disaggregation.Reason, "overloaded")) {
			t.Errorf("%q: %+v %v", mode, s, err)
		}
	}
}
