package tokenize

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// announcing is a worker w with blocks of 4 tokens, and the progress of its requests.
type announcing struct {
	*Announced

	mu     sync.Mutex // guards the following fields
	answer api.Answer
	failed error
	worker *api.WorkerInfo

	checks   []Check
	warnings []string
}

// newAnnouncing runs an Announced in a synctest bubble.
func newAnnouncing(t *testing.T) *announcing {
	w := &announcing{worker: &api.WorkerInfo{Stored: 5, Engine: api.EngineConnected},
		answer: api.Answer{Blocks: 3, Complete: true}}
	w.Announced = NewAnnounced(AnnouncedConfig{
		Find: func(_ context.Context, q *api.Query) (*api.Answer, error) {
			if q.Model != "m" || q.LoRA != "adapter" || q.CacheSalt != "salt" || q.BlockSize != 4 || len(q.Tokens) != 13 ||
				!slices.Equal(q.Workers, []events.WorkerID{"w"}) {
				t.Errorf("asked %+v", q)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			answer := w.answer
			return &answer, w.failed
		},
		Worker: func(_ context.Context, rank api.RankPlace) *api.WorkerInfo {
			if rank != (api.RankPlace{Instance: "w", Rank: 1}) {
				t.Errorf("asked for %+v", rank)
			}
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.worker == nil {
				return nil
			}
			info := *w.worker
			return &info
		},
		Observe: func(_ string, c Check) { w.checks = append(w.checks, c) },
		Warn:    func(problem string) { w.warnings = append(w.warnings, problem) },
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() { defer close(ended); w.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return w
}

var sentTokens = api.Tokens{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}

// set changes the state of the worker.
func (w *announcing) set(change func(*announcing)) {
	w.mu.Lock()
	defer w.mu.Unlock()
	change(w)
}

// wait advances the time until all goroutines are blocked.
func wait(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// send sends a request of three blocks and one token to the worker.
func (w *announcing) send() {
	w.Begin(&api.Query{Model: "m", LoRA: "adapter", CacheSalt: "salt", Tokens: sentTokens}, true,
		&api.Selection{Booked: true, BlockSize: 4, Worker: "w", Rank: 1})
	synctest.Wait()
}

// say reports progress of the request.
func (w *announcing) say(t *testing.T, prefilled, ended bool) {
	hasher, err := events.NewHasher(4, events.Space{LoRA: "adapter", Salt: "salt"})
	if err != nil {
		t.Fatal(err)
	}
	rank := events.RankKey{Instance: "w", Rank: 1}
	seq := events.SeqHashes(nil, hasher.Hash(nil, sentTokens))
	w.Observe("m", rank, seq[:2], true, true) // a request of another model
	w.Observe("x", rank, seq, true, true)
	w.Observe("m", events.RankKey{Instance: "w"}, seq, true, true)
	w.Observe("m", rank, seq, prefilled, ended)
	synctest.Wait()
}

// holds returns an answer in which the worker's ranks hold the given numbers of leading blocks.
func holds(blocks ...uint32) api.Answer {
	a := api.Answer{Blocks: 3, Complete: true}
	for i, n := range blocks {
		a.Workers = append(a.Workers, api.Overlap{Instance: "w", Rank: events.Rank(i), Device: n})
	}
	return a
}

// TestAnnounced follows one request for each possible result.
func TestAnnounced(t *testing.T) {
	stores := func(w *announcing) { w.worker.Stored += 3 }
	hybrid := func(runs ...api.HeldRun) api.Answer {
		a := holds(0)
		a.Workers[0].Path = &api.Path{Held: runs}
		return a
	}
	for name, c := range map[string]struct {
		before int                 // blocks without a parent from earlier
		after  func(w *announcing) // changes of the worker since the booking
		late   bool                // the change happens just before the last look-up
		ended  bool                // the request ends with its first output token
		want   Check
	}{
		"held":            {after: func(w *announcing) { stores(w); w.answer = holds(3) }, want: Match},
		"held, ended":     {after: func(w *announcing) { stores(w); w.answer = holds(3) }, ended: true, want: Match},
		"held late":       {after: func(w *announcing) { stores(w); w.answer = holds(3) }, late: true, want: Match},
		"on another rank": {after: func(w *announcing) { stores(w); w.answer = holds(0, 3) }, want: Match},
		"on the host":     {after: func(w *announcing) { w.answer = holds(1); w.answer.Workers[0].Host = 2 }, want: Match},
		"held in a hybrid": {after: func(w *announcing) {
			w.answer = hybrid(api.HeldRun{To: 2}, api.HeldRun{From: 2, To: 3})
		}, want: Match},
		"a hole": {after: func(w *announcing) {
			stores(w)
			w.answer = hybrid(api.HeldRun{To: 1}, api.HeldRun{From: 2, To: 3})
		}, want: Partial},
		"the first of them": {after: func(w *announcing) { stores(w); w.answer = holds(2) }, want: Partial},
		"others":            {after: stores, want: Mismatch},
		"others, late":      {after: stores, late: true, want: Mismatch},
		"others, ended":     {after: stores, ended: true, want: Mismatch},
		"evicted at once":   {after: func(w *announcing) { stores(w); w.worker.Removed += 3 }, ended: true, want: Unknown},
		"others evicted":    {after: func(w *announcing) { stores(w); w.worker.Removed += 3 }, want: Mismatch},
		"cleared":           {after: func(w *announcing) { stores(w); w.worker.Cleared++ }, ended: true, want: Unknown},
		"cleared by a gap":  {after: func(w *announcing) { stores(w); w.worker.Cleared++ }, want: Unknown},
		"nothing":           {after: func(*announcing) {}, want: Unknown},
		"restarted":         {after: func(w *announcing) { stores(w); w.worker.Incarnation++ }, want: Unknown},
		"silent":            {after: func(w *announcing) { stores(w); w.worker.Engine = api.EngineSilent }, want: Unknown},
		"catching up":       {after: func(w *announcing) { stores(w); w.worker.CatchingUp = true }, want: Unknown},
		"without parents":   {after: func(w *announcing) { stores(w); w.worker.Pending = 2 }, want: Unknown},
		"older orphans":     {before: 2, after: stores, want: Mismatch},
		"newer orphans":     {before: 2, after: func(w *announcing) { stores(w); w.worker.Pending = 3 }, want: Unknown},
		"gone":              {after: func(w *announcing) { w.worker = nil }, want: Unknown},
		"incomplete":        {after: func(w *announcing) { stores(w); w.answer.Complete = false }, want: Unknown},
		"far lookahead":     {after: func(w *announcing) { stores(w); w.answer.Blocks = 0 }, want: Unknown},
		"near lookahead":    {after: func(w *announcing) { w.answer = holds(2); w.answer.Blocks = 2 }, want: Match},
		"not answered":      {after: func(w *announcing) { w.failed = errors.New("no") }, want: Unknown},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newAnnouncing(t)
			w.worker.Pending = c.before
			w.send()
			if w.say(t, false, false); !c.late {
				w.set(c.after)
			}
			if w.say(t, true, false); c.ended {
				w.say(t, false, true)
			}
			if c.late {
				time.Sleep(settling[0] + settling[1] - time.Millisecond)
				w.set(c.after)
			}
			wait(time.Minute)
			if !slices.Equal(w.checks, []Check{c.want}) {
				t.Errorf("%s: %q, want %s", name, w.checks, c.want)
			}
		})
	}
}

// TestNoResultWithoutEvents covers requests without a result.
func TestNoResultWithoutEvents(t *testing.T) {
	for name, after := range map[string]func(*testing.T, *announcing){
		"ended without a token": func(t *testing.T, w *announcing) { w.send(); w.say(t, false, true) },
		"forgotten":             func(_ *testing.T, w *announcing) { w.send() },
		"without events": func(t *testing.T, w *announcing) {
			w.worker.Record = &api.WorkerRecord{}
			w.worker.Record.Events = api.EventsNone
			w.send()
			w.say(t, true, false)
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			w := newAnnouncing(t)
			after(t, w)
			wait(time.Hour)
			if len(w.checks) > 0 || len(w.followed) > 0 {
				t.Errorf("%s: %q; %d are followed", name, w.checks, len(w.followed))
			}
		})
	}
	a := NewAnnounced(AnnouncedConfig{})
	booked := api.Selection{Booked: true, BlockSize: 4, Worker: "w"}
	for name, change := range map[string]func(q *api.Query, s *api.Selection){
		"not booked":     func(_ *api.Query, s *api.Selection) { s.Booked = false },
		"no block size":  func(_ *api.Query, s *api.Selection) { s.BlockSize = 0 },
		"disaggregated":  func(_ *api.Query, s *api.Selection) { s.Prefill = &api.Selection{} },
		"held":           func(_ *api.Query, s *api.Selection) { s.Device = 3 },
		"a short prompt": func(q *api.Query, _ *api.Selection) { q.Tokens = sentTokens[:4] },
	} {
		q, s := api.Query{Model: "m", Tokens: sentTokens}, booked
		if change(&q, &s); len(a.followed) > 0 {
			t.Fatal(name)
		}
		if a.Begin(&q, false, &s); len(a.followed) > 0 {
			t.Errorf("%s: the request is followed", name)
		}
	}
	for i := range 2 * checkedAtOnce {
		a.Begin(&api.Query{Model: strings.Repeat("m", i/2+1), Tokens: make(api.Tokens, 1000)}, false, &booked)
	}
	if s := <-a.begun; len(a.followed) != checkedAtOnce || s.blocks != checkedBlocks ||
		len(s.query.Tokens) != 4*checkedBlocks+1 {
		t.Errorf("%d are followed; of the first %d blocks and %d tokens", len(a.followed), s.blocks, len(s.query.Tokens))
	}
}

// TestKeepText: the engine receives the text of a followed request, and every text of a model while a recent comparison
// differs.
func TestKeepText(t *testing.T) {
	a := NewAnnounced(AnnouncedConfig{Observe: func(string, Check) {}, Warn: func(string) {}})
	booked := api.Selection{Booked: true, BlockSize: 4, Worker: "w"}
	held := api.Selection{Booked: true, BlockSize: 4, Worker: "w", Device: 3} // is not followed
	begin := func(s api.Selection) bool { return a.Begin(&api.Query{Model: "m", Tokens: sentTokens}, false, &s) }
	if begin(held) || !begin(booked) || begin(booked) {
		t.Error("not exactly the followed request keeps its text")
	}
	a.end(<-a.begun, Match)
	if begin(held) {
		t.Error("a request keeps its text after a match")
	}
	for n := range recentChecks + 1 {
		if n > 0 && !begin(held) {
			t.Errorf("a request loses its text %d comparisons after a difference", n-1)
		}
		if !begin(booked) {
			t.Fatal("a request is not followed")
		}
		a.end(<-a.begun, []Check{Partial, Match}[min(n, 1)])
	}
	if begin(held) {
		t.Errorf("a request keeps its text after %d matches", recentChecks)
	}
	synctest.Test(t, func(t *testing.T) {
		a = NewAnnounced(AnnouncedConfig{Observe: a.cfg.Observe, Warn: a.cfg.Warn, Pause: time.Minute})
		begin(booked)
		a.end(<-a.begun, Match)
		if begin(booked) {
			t.Error("a request is followed in the pause after a match")
		}
		time.Sleep(time.Minute)
		if !begin(booked) {
			t.Error("no request is followed after the pause")
		}
	})
}

// TestAnnouncedProblem: most checks of a model fail, and later most succeed.
func TestAnnouncedProblem(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newAnnouncing(t)
		check := func(a api.Answer) int {
			w.set(func(w *announcing) { w.answer = a })
			w.send()
			w.set(func(w *announcing) { w.worker.Stored++ })
			w.say(t, true, false)
			wait(time.Minute)
			return len(w.Problems())
		}
		for i, want := range []int{0, 0, 1, 1} {
			if n := check(holds()); n != want {
				t.Errorf("%d problems after %d mismatches", n, i+1)
			}
		}
		for i, want := range []int{1, 1, 1, 0, 0} {
			if n := check(holds(3)); n != want {
				t.Errorf("%d problems after %d matches", n, i+1)
			}
		}
		check(holds(1))
		if n := check(holds(1)); n != 1 || len(w.warnings) != 2 {
			t.Errorf("%d problems; warnings %q", n, w.warnings)
		}
		for _, want := range []string{"of the last 3 compared texts for model m", "3 have other tokens",
			"messages for worker w",
			"indexer tokenizer check"} {
			if !strings.Contains(w.warnings[0], want) {
				t.Errorf("%q lacks %q", w.warnings[0], want)
			}
		}
		for range 2 * recentChecks {
			check(holds(3))
		}
		if n := len(w.recent["m"]); n != recentChecks {
			t.Errorf("%d checks are kept", n)
		}
	})
}
