package selection

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/guess"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// withGuesses lets a fleet's bookings make guesses.
func (f *fleet) withGuesses(t testing.TB, settings guess.Settings) {
	pool := func(string) *registry.Pool { return f.pool }
	g, err := guess.New(guess.Config{Settings: settings, Pool: pool})
	if err != nil {
		t.Fatal(err)
	}
	f.loads = load.New(load.Config{Watch: g.Observe})
	f.service.cfg.Loads, f.service.cfg.Guesses = f.loads, g
}

// TestSelectGuesses sends prompts to a fleet without events, and to one with events: blocks sent to a worker count as
// held unless events contradict, beside confirmed blocks.
func TestSelectGuesses(t *testing.T) {
	f := newFleet(t, 2, 1)
	f.pool.Ranks[0].Record.Events = api.EventsNone
	f.withGuesses(t, guess.Settings{})
	pin := func(id, worker string, n int) *api.SelectRequest {
		r := request(id, n)
		if worker != "" {
			r.Workers = []events.WorkerID{events.WorkerID(worker)}
		}
		return r
	}
	serve := func(id, worker string, n int) *api.Selection {
		t.Helper()
		s, err := f.service.Select(t.Context(), pin(id, worker, n))
		if err != nil {
			t.Fatal(err)
		}
		if err := f.service.Free(t.Context(), &api.RequestRef{Model: "m", RequestID: id}); err != nil {
			t.Fatal(err)
		}
		return s
	}
	if s := serve("r1", "w00", 40); s.Guessed != 0 || s.CachedTokens != 0 {
		t.Errorf("nothing was sent before: %+v", s)
	}
	serve("r2", "w01", 40) // it has events, without predictions
	s := serve("r3", "", 42)
	if s.Worker != "w00" || s.Device != 0 || s.Guessed != 10 || s.CachedTokens != 40 || s.Cost != 42.0/4-10+10 {
		t.Errorf("%+v", s)
	}
	if s := serve("r4", "w01", 42); s.Guessed != 0 || s.CachedTokens != 0 {
		t.Errorf("guessed of a worker with events: %+v", s)
	}
	p, err := f.service.PotentialLoads(t.Context(), &api.PotentialRequest{Prompt: api.Prompt{Model: "m",
		Tokens: tokens(42)}})
	if err != nil || p.Ranks[0].PotentialPrefillTokens != 2 || p.Ranks[1].PotentialPrefillTokens != 42 {
		t.Errorf("%+v, %v", p, err)
	}

	// The greater device depth counts. Blocks covered by the guess count once.
	f.withGuesses(t, guess.Settings{PredictTTL: time.Minute})
	f.holds[events.RankKey{Instance: "w01"}] = [4]uint32{2, 5, 1, 1}
	serve("r5", "w01", 20)
	r := pin("", "w01", 40)
	r.Explain = true
	if s, err = f.service.Select(t.Context(), r); err != nil {
		t.Fatal(err)
	}
	// host from 5 to 7, disk and external to 9
	if s.Device != 2 || s.Host != 5 || s.Guessed != 5 || s.EffectiveOverlap != 5+2*0.75+2*0.25 {
		t.Errorf("%+v", s)
	}
	if terms := s.Explanation.Candidates[0].Terms; terms.GuessedBlocks != 3 || terms.DeviceCredit != 5 {
		t.Errorf("%+v", terms)
	}
	f.holds[events.RankKey{Instance: "w01"}] = [4]uint32{6, 0, 0, 0}
	if s, err = f.service.Select(t.Context(), pin("", "w01", 40)); err != nil || s.Device != 6 || s.Guessed != 0 {
		t.Errorf("events confirm more than is guessed: %+v, %v", s, err)
	}

	// The end of a registration ends its guesses.
	gone := f.pool
	f.pool = &registry.Pool{Model: "m", Ranks: gone.Ranks[:1]}
	serve("r6", "w00", 4)
	f.pool = gone
	f.holds[events.RankKey{Instance: "w01"}] = [4]uint32{}
	if s, err = f.service.Select(t.Context(), pin("", "w01", 40)); err != nil || s.Guessed != 0 {
		t.Errorf("%+v, %v", s, err)
	}
}

// BenchmarkSelectGuesses is BenchmarkSelect with guesses: every worker received 20 prompts of 512 blocks with 64 common
// blocks, and a fifth of the workers also received a part of the prompt.
func BenchmarkSelectGuesses(b *testing.B) {
	const workers, blocks = 256, 512
	for _, on := range []bool{false, true} {
		b.Run(fmt.Sprint("guesses=", on), func(b *testing.B) {
			f := newFleet(b, workers, 1)
			answer := &api.Answer{Model: "m", BlockSize: block, Complete: true}
			f.service.cfg.Find = func(context.Context, *api.Query) (*api.Answer, error) { return answer, nil }
			if on {
				for i := range f.pool.Ranks {
					f.pool.Ranks[i].Record.Events = api.EventsNone
				}
				f.withGuesses(b, guess.Settings{})
			}
			hashes := func(k int) api.Hashes {
				list := make(api.Hashes, blocks)
				for i := range list {
					if list[i] = uint64(i + 1); i >= 64 {
						list[i] += uint64(k+1) << 32
					}
				}
				return list
			}
			ctx := context.Background()
			for i := range workers * 20 {
				own := hashes(i)
				if i%5 == 0 {
					own = hashes(-1)[:64+i%448]
				}
				r := &api.BookRequest{Prompt: api.Prompt{Model: "m", Hashes: own}, RequestID: fmt.Sprint("r", i),
					Worker: f.pool.Ranks[i%workers].Instance}
				if _, err := f.service.Book(ctx, r); err != nil {
					b.Fatal(err)
				}
				if err := f.service.Free(ctx, &api.RequestRef{Model: "m", RequestID: r.RequestID}); err != nil {
					b.Fatal(err)
				}
			}
			r := &api.SelectRequest{Query: api.Query{Model: "m", Hashes: hashes(-1)}}
			s, err := f.service.Select(ctx, r)
			if err != nil || (s.Guessed > 64) != on {
				b.Fatal(s, err)
			}
			b.ReportAllocs()
			for b.Loop() {
				if _, err := f.service.Select(ctx, r); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
