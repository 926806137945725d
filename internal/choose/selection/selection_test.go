package selection

import (
	"context"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

const block = 4

// fleet is a registered fleet with the test's depths.
type fleet struct {
	pool    *registry.Pool
	holds   map[events.RankKey][4]uint32
	asked   []*api.Query
	deaf    bool // the index does not answer
	loads   *load.Service
	service *Service
}

func newFleet(t testing.TB, workers, ranks int) *fleet {
	f := &fleet{pool: &registry.Pool{Model: "m"}, holds: map[events.RankKey][4]uint32{}, loads: load.New(load.Config{})}
	for w := range workers {
		record := &api.WorkerRecord{State: api.WorkerSchedulable}
		record.Role, record.Events = api.RoleAggregated, api.EventsShim
		record.Endpoint = fmt.Sprintf("http://w%02d", w)
		for r := range ranks {
			key := events.RankKey{Instance: events.WorkerID(fmt.Sprintf("w%02d", w)), Rank: events.Rank(r)}
			f.pool.Ranks = append(f.pool.Ranks, registry.PoolRank{RankKey: key, BlockSize: block, Record: record})
		}
	}
	config := routing.DefaultConfig()
	service, err := New(Config{
		Find: f.find, Loads: f.loads, Routing: config, Policy: routing.DynamoPolicy, // no measurements
		Pool: func(model string) *registry.Pool {
			if model == "m" {
				return f.pool
			}
			return &registry.Pool{Model: model}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	f.service = service
	return f
}

func (f *fleet) find(ctx context.Context, q *api.Query) (*api.Answer, error) {
	f.asked = append(f.asked, q)
	if f.deaf {
		<-ctx.Done()
		return nil, &api.Error{Code: api.CodeNotReady, Missing: []events.Partition{3}}
	}
	a := &api.Answer{Model: q.Model, BlockSize: block, Complete: true}
	for key, d := range f.holds {
		a.Workers = append(a.Workers, api.Overlap{Instance: key.Instance, Rank: key.Rank, Device: d[0], Host: d[1],
			Disk: d[2], External: d[3]})
	}
	a.Finish(false, "")
	return a, nil
}

func tokens(n int) api.Tokens {
	list := make(api.Tokens, n)
	for i := range list {
		list[i] = uint32(i)
	}
	return list
}

func request(id string, n int) *api.SelectRequest {
	return &api.SelectRequest{Query: api.Query{Model: "m", Tokens: tokens(n)}, RequestID: id, Book: id != ""}
}

// TestSelectByEngineHashes: the index receives the hashes unchanged, and blocks under way are counted by them.
func TestSelectByEngineHashes(t *testing.T) {
	f := newFleet(t, 2, 1)
	f.holds[events.RankKey{Instance: "w01"}] = [4]uint32{3, 0, 0, 0}
	r := &api.SelectRequest{Query: api.Query{Model: "m", EngineHashes: api.Hashes{7, 8, 9}}, RequestID: "r1", Book: true,
		ISLTokens: 14}
	s, err := f.service.Select(t.Context(), r)
	if err != nil || s.Worker != "w01" || s.Blocks != 3 || s.ISLTokens != 14 || s.CachedTokens != 12 {
		t.Fatalf("%+v, %v", s, err)
	}
	if q := f.asked[0]; !slices.Equal(q.EngineHashes, r.EngineHashes) || q.Hashes != nil {
		t.Fatalf("%+v", q)
	}
	p, err := f.service.PotentialLoads(t.Context(), &api.PotentialRequest{Prompt: api.Prompt{Model: "m",
		EngineHashes: api.Hashes{7, 8, 1}}})
	if err != nil || p.Ranks[0].PotentialDecodeBlocks != 3 || p.Ranks[1].PotentialDecodeBlocks != 4 {
		t.Fatalf("%+v, %v", p, err)
	}
	if s, err = f.service.Select(t.Context(), &api.SelectRequest{Query: api.Query{Model: "m",
		EngineHashes: api.Hashes{}}}); err != nil || s.Blocks != 0 {
		t.Fatalf("%+v, %v", s, err)
	}
}

// TestSelectByDeadline: without an answer of the index by the request's deadline, the loads decide.
func TestSelectByDeadline(t *testing.T) {
	f := newFleet(t, 2, 1)
	f.deaf = true
	r := request("r1", 40)
	r.DeadlineMS = 1
	s, err := f.service.Select(t.Context(), r)
	if err != nil || !s.Booked || s.Complete || !slices.Equal(s.Missing, []events.Partition{3}) {
		t.Fatalf("%+v, %v", s, err)
	}
	r = request("r2", 40)
	r.DeadlineMS = 1
	if other, err := f.service.Select(t.Context(), r); err != nil || other.Worker == s.Worker {
		t.Fatalf("%+v, %v", other, err)
	}
}

// TestSelectBooksWhatItChose sends requests to a fleet of two: each goes to the least cost, and counts there.
func TestSelectBooksWhatItChose(t *testing.T) {
	f := newFleet(t, 2, 1)
	f.holds[events.RankKey{Instance: "w01"}] = [4]uint32{5, 0, 0, 0}
	s, err := f.service.Select(t.Context(), request("r1", 42)) // 10 whole blocks of 4, and 2 tokens
	if err != nil {
		t.Fatal(err)
	}
	want := &api.Selection{
		Model: "m", BlockSize: block, Blocks: 10, ISLTokens: 42, RequestID: "r1", Booked: true,
		Worker: "w01", Endpoint: "http://w01", Device: 5, Policy: "dynamo", Candidates: 2,
		// (0 + 42 tokens) / 4 - 5 of credit + 10 new blocks
		Cost: 42.0/4 - 5 + 10, Probability: 1, RequiredBlocks: 11, EffectiveOverlap: 5, CachedTokens: 20,
		EffectivePrefillTokens: 22, TrackPrefillTokens: true, PotentialDecodeBlocks: 11, Complete: true,
	}
	if !reflect.DeepEqual(s, want) {
		t.Fatalf("got  %+v\nwant %+v", s, want)
	}
	check := func(want ...api.RankLoad) {
		t.Helper()
		list, err := f.service.Loads(t.Context(), &api.LoadsRequest{})
		if err != nil || len(list.Models) != 1 || !reflect.DeepEqual(list.Models[0].Ranks, want) {
			t.Fatalf("%+v %v, want %+v", list, err, want)
		}
	}
	check(api.RankLoad{Worker: "w00"},
		api.RankLoad{Worker: "w01", ActivePrefillTokens: 22, ActiveBlocks: 10, ActiveRequests: 1})

	// The same prompt again: w01 has all its blocks under way, w00 is idle.
	if s, err = f.service.Select(t.Context(), request("r2", 42)); err != nil {
		t.Fatal(err)
	}
	if s.Worker != "w00" || s.Cost != 42.0/4+10 { // w01: (22 + 42) / 4 - 5 + 10
		t.Fatalf("%+v", s)
	}
	p, err := f.service.PotentialLoads(t.Context(), &api.PotentialRequest{Prompt: api.Prompt{Model: "m",
		Tokens: tokens(42)}})
	if err != nil || len(p.Ranks) != 2 {
		t.Fatal(p, err)
	}
	for _, ref := range []struct {
		do   func(context.Context, *api.RequestRef) error
		id   string
		code api.Code
	}{
		{f.service.PrefillComplete, "r1", ""}, {f.service.PrefillComplete, "r1", ""},
		{f.service.OutputBlock, "r1", ""}, {f.service.Free, "r2", ""}, {f.service.Free, "r2", api.CodeUnknownRequest},
		{f.service.OutputBlock, "r3", api.CodeUnknownRequest},
	} {
		err := ref.do(t.Context(), &api.RequestRef{Model: "m", RequestID: ref.id})
		if code(err) != ref.code {
			t.Errorf("%s: %v, want %q", ref.id, err, ref.code)
		}
	}
	check(api.RankLoad{Worker: "w00"}, api.RankLoad{Worker: "w01", ActiveBlocks: 11, ActiveRequests: 1})
	if _, err := f.service.Select(t.Context(), request("r1", 8)); code(err) != api.CodeConflict {
		t.Errorf("a live id again: %v", err)
	}
}

func code(err error) api.Code {
	if err == nil {
		return ""
	}
	return api.AsError(err).Code
}

// TestSelectLater books a choice by id: once, for a while, and the last choice.
func TestSelectLater(t *testing.T) {
	f := newFleet(t, 1, 2)
	now := time.Now()
	f.service.pending.now = func() time.Time { return now }
	choose := func(id string) *api.Selection {
		r := request(id, 8)
		r.Book = false
		s, err := f.service.Select(t.Context(), r)
		if err != nil || s.Booked {
			t.Fatal(s, err)
		}
		return s
	}
	book := func(id string) (*api.Booking, api.Code) {
		b, err := f.service.Book(t.Context(), &api.BookRequest{Prompt: api.Prompt{Model: "m"}, RequestID: id})
		return b, code(err)
	}
	first := choose("a")
	if b, c := book("a"); c != "" || b.Worker != first.Worker || b.Rank != first.Rank {
		t.Errorf("%+v %q", b, c)
	}
	if _, c := book("a"); c != api.CodeUnknownRequest {
		t.Errorf("used twice: %q", c)
	}
	choose("a")
	if _, c := book("a"); c != api.CodeConflict {
		t.Errorf("the request is under way: %q", c)
	}
	if err := f.service.Free(t.Context(), &api.RequestRef{Model: "m", RequestID: "a"}); err != nil {
		t.Fatal(err)
	}
	if _, c := book("a"); c != "" {
		t.Errorf("a failed booking drops the choice: %q", c)
	}
	choose("b")
	now = now.Add(120 * time.Second)
	if _, c := book("b"); c != api.CodeUnknownRequest {
		t.Errorf("expired: %q", c)
	}
	choose("c")
	explicit := &api.BookRequest{Prompt: api.Prompt{Model: "m", Tokens: tokens(8)}, RequestID: "c", Worker: "w00", Rank: 1,
		EffectivePrefillTokens: 9}
	if _, err := f.service.Book(t.Context(), explicit); code(err) != api.CodeMalformed {
		t.Errorf("more prefill than prompt: %v", err)
	}
	explicit.EffectivePrefillTokens = 8
	if _, err := f.service.Book(t.Context(), explicit); err != nil {
		t.Error(err)
	}
	explicit.RequestID, explicit.Rank = "d", 2
	if _, err := f.service.Book(t.Context(), explicit); code(err) != api.CodeUnknownWorker {
		t.Errorf("an unknown rank: %v", err)
	}
}

// TestPendingIsBounded by entries and bytes.
func TestPendingIsBounded(t *testing.T) {
	p := newPending(PendingLimits{Entries: 10, Bytes: 5000})
	for i := range 20 {
		p.add("m", &chosen{booking: load.Booking{ID: fmt.Sprint(i)}})
	}
	if p.lru.Len() != 10 {
		t.Errorf("%d entries", p.lru.Len())
	}
	p.add("m", &chosen{booking: load.Booking{ID: "big", Hashes: make([]events.SeqHash, 500)}})
	if p.bytes > 5000 || p.lru.Len() > 4 {
		t.Errorf("%d bytes of %d entries", p.bytes, p.lru.Len())
	}
	if _, ok := p.claim("m", "big"); !ok {
		t.Error("the last is gone")
	}
	for p.lru.Len() > 0 {
		p.lru.RemoveOldest()
	}
	if p.bytes != 0 {
		t.Errorf("%d bytes of nothing", p.bytes)
	}
}

// TestSelectRefusals checks the reasons of refusals.
func TestSelectRefusals(t *testing.T) {
	for _, c := range []struct {
		name   string
		change func(f *fleet, r *api.SelectRequest)
		code   api.Code
		want   string
	}{
		{"unknown model", func(_ *fleet, r *api.SelectRequest) { r.Model = "x" }, api.CodeUnknownModel,
			"no worker is registered"},
		{"block size", func(_ *fleet, r *api.SelectRequest) { r.BlockSize = 16 }, api.CodeBlockSizeMismatch,
			"blocks of 16 tokens; the workers have blocks of 4"},
		{"several block sizes", func(f *fleet, _ *api.SelectRequest) { f.pool.Ranks[0].BlockSize = 8 },
			api.CodeBlockSizeMismatch, "8, 4; the request must name one"},
		{"policy", func(_ *fleet, r *api.SelectRequest) { r.Policy = "best" }, api.CodeMalformed, "least_load"},
		{"all drained", func(f *fleet, _ *api.SelectRequest) {
			for i := range f.pool.Ranks {
				f.pool.Ranks[i].Record = &api.WorkerRecord{State: api.WorkerDraining, Reasons: []string{"maintenance"}}
			}
		}, api.CodeNoWorkers, "no worker may serve"},
		{"nobody allowed", func(_ *fleet, r *api.SelectRequest) { r.Workers = []events.WorkerID{"z"} }, api.CodeNoWorkers,
			"allowed_worker_ids"},
		{"temperature", func(_ *fleet, r *api.SelectRequest) {
			heat := -1.0
			r.Overrides = &routing.Overrides{RouterTemperature: &heat}
		}, api.CodeMalformed, "router_temperature is -1"},
		{"short isl", func(_ *fleet, r *api.SelectRequest) {
			r.Tokens, r.Hashes, r.ISLTokens = nil, api.Hashes{1, 2}, 7
		}, api.CodeMalformed, "2 whole blocks of 4 tokens have 8"},
		{"sequence hashes", func(_ *fleet, r *api.SelectRequest) { r.SequenceHashes = api.Hashes{1} }, api.CodeMalformed,
			"the tokens have 2 whole blocks"},
	} {
		f := newFleet(t, 2, 1)
		r := request("r", 8)
		r.Explain = true
		c.change(f, r)
		_, err := f.service.Select(t.Context(), r)
		if code(err) != c.code || !strings.Contains(fmt.Sprint(err), c.want) {
			t.Errorf("%s: %v, want %s %q", c.name, err, c.code, c.want)
		}
		if c.name == "all drained" && (api.AsError(err).Explanation == nil ||
			!strings.Contains(api.AsError(err).Explanation.Dropped[0].Reason, "maintenance")) {
			t.Errorf("%s: %+v", c.name, api.AsError(err).Explanation)
		}
	}
}

// TestSelectAgainstTheFormula compares random selections with a calculation from index, load and formula.
func TestSelectAgainstTheFormula(t *testing.T) {
	rng := rand.New(rand.NewPCG(15, 1))
	f := newFleet(t, 5, 2)
	var live []string
	for step := range 3000 {
		if len(live) > 0 && rng.IntN(3) == 0 {
			k := rng.IntN(len(live))
			ref := &api.RequestRef{Model: "m", RequestID: live[k]}
			switch rng.IntN(3) {
			case 0:
				if err := f.service.PrefillComplete(t.Context(), ref); err != nil {
					t.Fatal(err)
				}
			case 1:
				if err := f.service.OutputBlock(t.Context(), ref); err != nil {
					t.Fatal(err)
				}
			default:
				if err := f.service.Free(t.Context(), ref); err != nil {
					t.Fatal(err)
				}
				live = slices.Delete(live, k, k+1)
			}
			continue
		}
		clear(f.holds)
		n := rng.IntN(60)
		for i := range f.pool.Ranks {
			if rng.IntN(2) == 0 {
				left := uint32(n/block) + 1
				var d [4]uint32
				for tier := range d {
					d[tier] = rng.Uint32N(left)
					left -= d[tier]
				}
				f.holds[f.pool.Ranks[i].RankKey] = d
			}
		}
		id := fmt.Sprint("r", step)
		prompt := tokens(n)
		if n > 0 {
			prompt[rng.IntN(n)] += rng.Uint32N(2) // prompts share different lengths
		}
		p, err := f.service.PotentialLoads(t.Context(), &api.PotentialRequest{Prompt: api.Prompt{Model: "m",
			Tokens: prompt}})
		if err != nil {
			t.Fatal(err)
		}
		loads, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
		if err != nil {
			t.Fatal(err)
		}
		least := 1e300
		costs := map[events.RankKey]float64{}
		for i, w := range p.Ranks {
			key := events.RankKey{Instance: w.Worker, Rank: w.Rank}
			var d [4]uint32
			if n >= block {
				d = f.holds[key]
			}
			device, host, disk := float64(d[0]), float64(d[1]), float64(d[2]+d[3])
			cached := float64(int((device+0.75*host+0.25*disk)*block + 0.5))
			active := float64(loads.Models[0].Ranks[i].ActivePrefillTokens)
			if want := active + max(float64(n)-cached, 0); float64(w.PotentialPrefillTokens) != want {
				t.Fatalf("step %d: %+v, want %v potential prefill tokens", step, w, want)
			}
			cost := max((active+max(float64(n), cached))/block-(device+0.75*host+0.25*disk), 0) +
				float64(w.PotentialDecodeBlocks)
			costs[key] = cost
			least = min(least, cost)
		}
		r := &api.SelectRequest{Query: api.Query{Model: "m", Tokens: prompt}, RequestID: id, Book: true}
		s, err := f.service.Select(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		live = append(live, id)
		cost := costs[events.RankKey{Instance: s.Worker, Rank: s.Rank}]
		if diff := s.Cost - cost; diff > 1e-9 || diff < -1e-9 || cost > least+1e-9 {
			t.Fatalf("step %d: chose %s with %v, want %v; the least is %v", step, s.Worker, s.Cost, cost, least)
		}
	}
	if len(live) < 100 {
		t.Errorf("%d requests are under way at the end", len(live))
	}
}

// TestDefaultPolicy: the default policy is kvatlas, and a booking counts the policy's own estimate.
func TestDefaultPolicy(t *testing.T) {
	f := newFleet(t, 3, 1)
	cfg := f.service.cfg
	cfg.Policy = ""
	service, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	f.holds[events.RankKey{Instance: "w01"}] = [4]uint32{2, 5}
	r := &api.SelectRequest{RequestID: "r1", Book: true}
	r.Model, r.Tokens = "m", make([]uint32, 10*block+1)
	choice, err := service.Select(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	// of 41 tokens, 8 are on the device and 20 in host memory, which need the time of 2
	if choice.Policy != "kvatlas" || choice.Worker != "w01" || choice.EffectivePrefillTokens != 3*block+1+2 {
		t.Fatalf("%+v", choice)
	}
	r.RequestID = "r2" // all blocks of r1 are under way
	if choice, err = service.Select(t.Context(), r); err != nil || choice.Worker != "w01" ||
		choice.EffectivePrefillTokens != 1 {
		t.Fatalf("%+v, %v", choice, err)
	}
	r.RequestID, r.CacheSalt = "r3", "another tenant's" // shares no block with r1
	r.Workers = []events.WorkerID{"w01"}
	if choice, err = service.Select(t.Context(), r); err != nil || choice.EffectivePrefillTokens != 3*block+1+2 {
		t.Fatalf("%+v, %v", choice, err)
	}

	// The measured pace of the rank appears after the first token of r1.
	if err := service.PrefillComplete(t.Context(), &api.RequestRef{Model: "m", RequestID: "r1"}); err != nil {
		t.Fatal(err)
	}
	list, err := service.Loads(t.Context(), &api.LoadsRequest{Model: "m"})
	if err != nil || len(list.Models) != 1 || len(list.Models[0].Paces) != 1 {
		t.Fatalf("%+v, %v", list, err)
	}
	if p := list.Models[0].Paces[0]; p.Worker != "w01" || !(p.PrefillTokensPerS > 0) || !(p.Busy >= 0 && p.Busy <= 1) {
		t.Errorf("%+v", p)
	}
}
