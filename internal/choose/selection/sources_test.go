package selection

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

var seed = flag.Uint64("seed", 1, "of random tests")

// sourceWorld is a fleet with an answer of the index of the test's own.
type sourceWorld struct {
	*fleet
	answer api.Answer
	marks  map[events.RankKey]*api.Overlap // engine and shim of a rank
}

func newSourceWorld(t testing.TB, workers, ranks int, minTokens uint32) *sourceWorld {
	w := &sourceWorld{fleet: newFleet(t, workers, ranks), marks: map[events.RankKey]*api.Overlap{}}
	w.answer = api.Answer{Model: "m", BlockSize: block, Complete: true}
	for i := range w.pool.Ranks { // records of their own
		record := *w.pool.Ranks[i].Record
		record.Endpoint = fmt.Sprintf("http://10.0.0.%d:%d", i/ranks, 8000+i%ranks)
		w.pool.Ranks[i].Record, w.pool.Ranks[i].Partition = &record, events.Partition(i%4)
	}
	w.service.cfg.Sources = Sources{MinTokens: minTokens, Tiers: "host", Mark: func(a *api.Answer) {
		for i := range a.Workers {
			o := &a.Workers[i]
			if m := w.marks[events.RankKey{Instance: o.Instance, Rank: o.Rank}]; m != nil {
				o.Engine, o.CatchingUp = m.Engine, m.CatchingUp
			}
		}
	}}
	w.service.cfg.Find = func(_ context.Context, q *api.Query) (*api.Answer, error) {
		w.asked = append(w.asked, q)
		a := w.answer
		a.Workers = slices.Clone(a.Workers)
		return &a, nil
	}
	return w
}

// hold sets the depths of a rank: on the device and chained in the host's memory, and within the tiers of sources.
func (w *sourceWorld) hold(at int, device, host, within uint32) {
	r := &w.pool.Ranks[at]
	o := api.Overlap{Instance: r.Instance, Rank: r.Rank, Device: device, Host: host}
	if within > 0 {
		o.Within = []uint32{within}
	}
	w.answer.Workers = append(w.answer.Workers, o)
}

// TestKVSource: the source holds the most in the tiers from which it can send, beyond the chosen worker's blocks in any
// tier, and is another worker in service with a connected engine and present depths.
func TestKVSource(t *testing.T) {
	const most, own = 20, "http://10.0.0.0:8000" // the blocks of w01, and the address of w00
	want := api.KVSource{Worker: "w01", Endpoint: "http://10.0.0.1:8000", Blocks: most, Tokens: (most - 5) * block}
	for name, c := range map[string]struct {
		change func(w *sourceWorld, r *api.SelectRequest)
		want   *api.KVSource
	}{
		"the longest prefix": {func(*sourceWorld, *api.SelectRequest) {}, &want},
		"less than the threshold": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.service.cfg.Sources.MinTokens = (most-5)*block + 1
		}, nil},
		"exactly the threshold": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.service.cfg.Sources.MinTokens = (most - 5) * block
		}, &want},
		"a threshold of part of a block": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.service.cfg.Sources.MinTokens = (most-5)*block - 1
		}, &want},
		"on the device only":    {func(w *sourceWorld, _ *api.SelectRequest) { w.answer.Workers[1].Within = nil }, nil},
		"a draining worker":     {func(w *sourceWorld, _ *api.SelectRequest) { w.record(1).State = api.WorkerDraining }, nil},
		"no address":            {func(w *sourceWorld, _ *api.SelectRequest) { w.record(1).Endpoint = "" }, nil},
		"the same address":      {func(w *sourceWorld, _ *api.SelectRequest) { w.record(1).Endpoint = own }, nil},
		"a silent engine":       {func(w *sourceWorld, _ *api.SelectRequest) { w.mark(1).Engine = api.EngineSilent }, nil},
		"a backlog":             {func(w *sourceWorld, _ *api.SelectRequest) { w.mark(1).CatchingUp = true }, nil},
		"a forbidden worker":    {func(_ *sourceWorld, r *api.SelectRequest) { r.Workers = []events.WorkerID{"w00"} }, nil},
		"a forbidden address":   {func(_ *sourceWorld, r *api.SelectRequest) { r.Endpoints = []string{own} }, nil},
		"an ended registration": {func(w *sourceWorld, _ *api.SelectRequest) { w.answer.Workers[1].Instance = "gone" }, nil},
		"a stale partition": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.answer.Partitions = []api.PartitionStatus{{Partition: 0}, {Partition: 1, StaleMS: 4000}}
		}, nil},
		"a lossy partition": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.answer.Partitions = []api.PartitionStatus{{Partition: 1, ResyncNeeded: true}}
		}, nil},
		"another stale partition": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.answer.Partitions = []api.PartitionStatus{{Partition: 2, StaleMS: 4000}}
		}, &want},
		"blocks that the chosen worker would load": {func(w *sourceWorld, _ *api.SelectRequest) {
			w.answer.Workers[0].L3 = most - 6
		}, &api.KVSource{Worker: "w01", Endpoint: want.Endpoint, Blocks: most, Tokens: block}},
		"turned off": {func(w *sourceWorld, _ *api.SelectRequest) { w.service.cfg.Sources.MinTokens = 0 }, nil},
	} {
		t.Run(name, func(t *testing.T) {
			w := newSourceWorld(t, 3, 1, 1)
			w.hold(0, 3, 2, 2)
			w.hold(1, 0, 0, most)
			r := request("", 42*block)
			r.Pinned = &routing.Target{Worker: "w00"}
			c.change(w, r)
			s, err := w.service.Select(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			if got := s.KVSource; fmt.Sprint(got) != fmt.Sprint(c.want) {
				t.Errorf("%+v, want %+v", got, c.want)
			}
			if asked := w.asked[0].Within; (asked != nil) != (w.service.cfg.Sources.MinTokens > 0) {
				t.Errorf("the query has the tiers %v", asked)
			}
		})
	}
}

func (w *sourceWorld) record(at int) *api.WorkerRecord { return w.pool.Ranks[at].Record }

func (w *sourceWorld) mark(at int) *api.Overlap {
	key := w.pool.Ranks[at].RankKey
	if w.marks[key] == nil {
		w.marks[key] = &api.Overlap{}
	}
	return w.marks[key]
}

// TestKVSourceOfGuesses: a guess is no block to send, and saves the chosen worker a transfer.
func TestKVSourceOfGuesses(t *testing.T) {
	w := newSourceWorld(t, 2, 1, 1)
	w.withGuesses(t, guess.Settings{})
	w.record(1).Events = api.EventsNone
	send := func(id, worker string) *api.Selection {
		t.Helper()
		r := request(id, 10*block)
		r.Pinned = &routing.Target{Worker: events.WorkerID(worker)}
		s, err := w.service.Select(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	send("r1", "w01") // the guess
	if s := send("r2", "w00"); s.KVSource != nil {
		t.Errorf("a guess is the source: %+v", s.KVSource)
	}
	w.hold(0, 0, 0, 10)
	if s := send("r3", "w01"); s.Guessed != 10 || s.KVSource != nil {
		t.Errorf("%d guessed, and the source is %+v", s.Guessed, s.KVSource)
	}
}

// TestKVSourceDisaggregated: the prefill worker computes the prompt, so the source is beside its choice.
func TestKVSourceDisaggregated(t *testing.T) {
	w := newSourceWorld(t, 3, 1, 1)
	w.record(0).Role, w.record(1).Role = api.RoleDecode, api.RolePrefill
	w.hold(0, 0, 0, 9)
	w.hold(1, 2, 0, 2)
	r := request("r1", 42*block)
	r.Disaggregated = true
	s, err := w.service.Select(t.Context(), r)
	if err != nil {
		t.Fatal(err)
	}
	want := api.KVSource{Worker: "w00", Endpoint: "http://10.0.0.0:8000", Blocks: 9, Tokens: 7 * block}
	if s.KVSource != nil || s.Prefill == nil || s.Prefill.KVSource == nil || *s.Prefill.KVSource != want {
		t.Errorf("%+v, prefill %+v", s.KVSource, s.Prefill)
	}
}

// TestKVSourceTies: equal workers share the transfers, and a worker with fewer requests has precedence.
func TestKVSourceTies(t *testing.T) {
	w := newSourceWorld(t, 4, 1, 1)
	for i := 1; i < 4; i++ {
		w.hold(i, 0, 0, 9)
	}
	busy := load.Booking{ID: "r1", Rank: w.pool.Ranks[2].RankKey}
	if err := w.loads.Book(t.Context(), table("m"), busy); err != nil {
		t.Fatal(err)
	}
	chosen := map[events.WorkerID]int{}
	for range 64 {
		r := request("", 16*block)
		r.Pinned = &routing.Target{Worker: "w00"}
		s, err := w.service.Select(t.Context(), r)
		if err != nil {
			t.Fatal(err)
		}
		chosen[s.KVSource.Worker]++
	}
	if chosen["w01"] == 0 || chosen["w02"] > 0 || chosen["w03"] == 0 {
		t.Errorf("the sources are %v", chosen)
	}
}

// TestKVSourceTwin compares the source of random fleets with the definition.
func TestKVSourceTwin(t *testing.T) {
	rng := rand.New(rand.NewPCG(*seed, 0))
	named := 0
	for round := range 400 {
		w := newSourceWorld(t, 1+rng.IntN(12), 1+rng.IntN(2), uint32(rng.IntN(8*block)))
		for i := range w.pool.Ranks {
			if rng.IntN(4) > 0 {
				w.hold(i, uint32(rng.IntN(4)), uint32(rng.IntN(4)), uint32(rng.IntN(8)))
			}
			record := w.record(i)
			switch rng.IntN(12) {
			case 0:
				record.State = api.WorkerUnschedulable
			case 1:
				record.Endpoint = ""
			case 2:
				record.Endpoint = w.record(0).Endpoint
			case 3:
				w.mark(i).Engine = api.EngineGone
			case 4:
				w.mark(i).CatchingUp = true
			}
			for n := range rng.IntN(3) {
				err := w.loads.Book(t.Context(), table("m"), load.Booking{ID: fmt.Sprint(i, n), Rank: w.pool.Ranks[i].RankKey})
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		for p := range events.Partition(4) {
			w.answer.Partitions = append(w.answer.Partitions, api.PartitionStatus{Partition: p,
				StaleMS: uint64(max(0, rng.IntN(20)-18)), ResyncNeeded: rng.IntN(20) == 0})
		}
		r := request("", 16*block)
		if rng.IntN(2) == 0 {
			r.Pinned = &routing.Target{Worker: w.pool.Ranks[rng.IntN(len(w.pool.Ranks))].Instance}
		} else if rng.IntN(4) == 0 {
			r.Workers = []events.WorkerID{"w00", "w01", "w03", "w05"}
		}
		s, err := w.service.Select(t.Context(), r)
		if err != nil {
			continue // no worker may be chosen
		}
		best := w.bestSources(s, r)
		if s.KVSource == nil && len(best) == 0 {
			continue
		}
		named++
		if s.KVSource == nil || !slices.Contains(best, *s.KVSource) {
			t.Fatalf("seed %d, round %d: %+v, want one of %+v", *seed, round, s.KVSource, best)
		}
	}
	if named < 50 {
		t.Errorf("seed %d: only %d choices have a source", *seed, named)
	}
}

// bestSources returns the sources of a choice by the definition.
func (w *sourceWorld) bestSources(s *api.Selection, q *api.SelectRequest) (best []api.KVSource) {
	own, least := uint32(0), uint64(w.service.cfg.Sources.MinTokens)
	for _, o := range w.answer.Workers {
		if o.Instance == s.Worker && o.Rank == s.Rank {
			own = o.Total() + o.L3
		}
	}
	fewest := uint64(0)
	for i, r := range w.pool.Ranks {
		held := uint32(0)
		for _, o := range w.answer.Workers {
			if o.Instance == r.Instance && o.Rank == r.Rank && o.Within != nil {
				held = o.Within[0]
			}
		}
		if least == 0 || held <= own || uint64(held-own)*block < least || r.Record.State != api.WorkerSchedulable ||
			r.Record.Endpoint == "" || r.Record.Endpoint == s.Endpoint || w.marks[r.RankKey] != nil ||
			w.answer.Partitions[i%4].StaleMS > 0 ||
			w.answer.Partitions[i%4].ResyncNeeded || q.Workers != nil && !slices.Contains(q.Workers, r.Instance) {
			continue
		}
		source := api.KVSource{Worker: r.Instance, Rank: r.Rank, Endpoint: r.Record.Endpoint, Blocks: held,
			Tokens: uint64(held-own) * block}
		requests := uint64(0)
		w.loads.Read(table("m"), func(t *load.Table) {
			for _, row := range t.Rows() {
				if row.Rank == r.RankKey {
					requests = uint64(row.Requests)
				}
			}
		})
		if len(best) > 0 && (held < best[0].Blocks || held == best[0].Blocks && requests > fewest) {
			continue
		}
		if len(best) > 0 && (held > best[0].Blocks || requests < fewest) {
			best = nil
		}
		best, fewest = append(best, source), requests
	}
	return best
}
