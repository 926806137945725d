package selection

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kvatlas/kvatlas/internal/choose/affinity"
	"github.com/kvatlas/kvatlas/internal/choose/load"
	"github.com/kvatlas/kvatlas/internal/fleet/registry"
	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// withSessions is a fleet with session affinity.
func withSessions(t *testing.T, workers int, mode routing.AffinityMode, most int) *fleet {
	f := newFleet(t, workers, 1)
	f.service.cfg.Sessions = affinity.New(affinity.ServiceConfig{Config: affinity.Config{TTL: time.Hour, Sessions: most}})
	f.configured(t, func(c *routing.Config) {
		c.SessionAffinity = &routing.SessionAffinity{TTLSecs: 3600, Mode: mode}
	})
	return f
}

func inSession(id, session string) *api.SelectRequest {
	r := request(id, 20)
	r.SessionID = session
	return r
}

// binding returns the effect on a session's binding.
func binding(s *api.Selection) string {
	if s == nil || s.Session == nil {
		return ""
	}
	if s.Session.From != nil {
		return s.Session.Binding + " from " + string(s.Session.From.Worker)
	}
	return s.Session.Binding
}

// TestSessionStays: a session stays on the worker of its first booking, although others are cheaper; another session
// does not.
func TestSessionStays(t *testing.T) {
	for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
		f := withSessions(t, 3, mode, 0)
		first, err := f.service.Select(t.Context(), inSession("r0", "s"))
		if err != nil || binding(first) != "made" {
			t.Fatal(first, err)
		}
		for i := range 5 {
			s, err := f.service.Select(t.Context(), inSession(fmt.Sprint("t", i), "s"))
			if err != nil || s.Worker != first.Worker || binding(s) != "kept" {
				t.Fatalf("%s: %+v %v, after %+v", mode, s, err, first)
			}
		}
		if s, err := f.service.Select(t.Context(), inSession("u", "other")); err != nil || s.Worker == first.Worker {
			t.Errorf("%s: another session: %+v %v", mode, s, err)
		}
		if s, err := f.service.Select(t.Context(), inSession("", "s")); err != nil || s.Worker != first.Worker {
			t.Errorf("%s: without a booking: %+v %v", mode, s, err)
		}
	}
}

// TestSessionExpires: a session without use for its time is bound again, to the cheapest worker.
func TestSessionExpires(t *testing.T) {
	for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
		synctest.Test(t, func(t *testing.T) {
			f := withSessions(t, 2, mode, 0)
			f.service.cfg.Sessions = affinity.New(affinity.ServiceConfig{Config: affinity.Config{TTL: time.Minute}})
			first, err := f.service.Select(t.Context(), inSession("r0", "s"))
			if err != nil || binding(first) != "made" {
				t.Fatal(first, err)
			}
			time.Sleep(59 * time.Second)
			if s, err := f.service.Select(t.Context(), inSession("r1", "s")); err != nil || binding(s) != "kept" ||
				s.Worker != first.Worker {
				t.Errorf("%s: in time: %+v %v", mode, s, err)
			}
			time.Sleep(61 * time.Second)
			if s, err := f.service.Select(t.Context(), inSession("r2", "s")); err != nil || binding(s) != "made" ||
				s.Worker == first.Worker {
				t.Errorf("%s: too late: %+v %v", mode, s, err)
			}
		})
	}
}

// TestSessionElsewhere: a request that goes elsewhere moves the session, or is refused.
func TestSessionElsewhere(t *testing.T) {
	for _, c := range []struct {
		name       string
		change     func(f *fleet, r *api.SelectRequest)
		soft, hard string // binding, or the code of the error
	}{
		{"pinned", func(_ *fleet, r *api.SelectRequest) { r.Pinned = &routing.Target{Worker: "w01"} },
			"moved from w00", "conflict"},
		{"its own target", func(_ *fleet, r *api.SelectRequest) { r.Affinity = &routing.Target{Worker: "w01"} },
			"moved from w00", "conflict"},
		{"pinned there", func(_ *fleet, r *api.SelectRequest) { r.Pinned = &routing.Target{Worker: "w00"} }, "kept", "kept"},
		{"draining", func(f *fleet, _ *api.SelectRequest) {
			f.record(0, func(r *api.WorkerRecord) { r.State = api.WorkerDraining })
		}, "moved from w00", "no_workers"},
		{"not allowed", func(_ *fleet, r *api.SelectRequest) { r.Workers = []events.WorkerID{"w01"} }, "moved from w00",
			"malformed"},
		{"gone", func(f *fleet, _ *api.SelectRequest) {
			f.pool = &registry.Pool{Model: "m", Ranks: f.pool.Ranks[1:]}
		}, "moved from w00", "moved from w00"},
	} {
		for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
			f := withSessions(t, 2, mode, 0)
			first := inSession("r0", "s")
			first.Pinned = &routing.Target{Worker: "w00"}
			if _, err := f.service.Select(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			r := inSession("r1", "s")
			c.change(f, r)
			s, err := f.service.Select(t.Context(), r)
			got, want := binding(s), c.soft
			if err != nil {
				got = string(code(err))
			}
			if mode == routing.HardAffinity {
				want = c.hard
			}
			if got != want {
				t.Errorf("%s, %s: %q %v, want %q", c.name, mode, got, err, want)
			}
			if strings.HasPrefix(want, "moved") {
				if s, err := f.service.Select(t.Context(), inSession("r2", "s")); err != nil || s.Worker != "w01" ||
					binding(s) != "kept" {
					t.Errorf("%s, %s: afterwards %+v %v", c.name, mode, s, err)
				}
			}
		}
	}
}

// TestSessionOfBookings: a later booking of a choice, and a booking with a worker, belong to the session too.
func TestSessionOfBookings(t *testing.T) {
	for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
		f := withSessions(t, 2, mode, 0)
		first := inSession("r0", "s")
		first.Book = false
		chosen, err := f.service.Select(t.Context(), first)
		if err != nil {
			t.Fatal(err)
		}
		book := &api.BookRequest{Prompt: api.Prompt{Model: "m"}, RequestID: "r0"}
		if _, err := f.service.Book(t.Context(), book); err != nil {
			t.Fatal(err)
		}
		if s, err := f.service.Select(t.Context(), inSession("r1", "s")); err != nil || s.Worker != chosen.Worker ||
			binding(s) != "kept" {
			t.Errorf("%s: %+v %v", mode, s, err)
		}
		other := events.WorkerID("w00")
		if chosen.Worker == other {
			other = "w01"
		}
		book = &api.BookRequest{Prompt: api.Prompt{Model: "m", Tokens: tokens(8)}, RequestID: "r2", Worker: other,
			SessionID: "s"}
		_, err = f.service.Book(t.Context(), book)
		if hard := mode == routing.HardAffinity; hard != (code(err) == api.CodeConflict) || !hard && err != nil {
			t.Errorf("%s: %v", mode, err)
		}
		// a refused request is not under way
		free := f.service.Free(t.Context(), &api.RequestRef{Model: "m", RequestID: "r2"})
		if (code(free) == api.CodeUnknownRequest) != (err != nil) {
			t.Errorf("%s: booked with %v, freed with %v", mode, err, free)
		}
	}
}

// TestSessionsAreBounded: a further session is not bound, and refused with hard affinity.
func TestSessionsAreBounded(t *testing.T) {
	for mode, want := range map[routing.AffinityMode]string{routing.SoftAffinity: "none", routing.HardAffinity: "busy"} {
		f := withSessions(t, 2, mode, 1)
		if _, err := f.service.Select(t.Context(), inSession("r0", "s")); err != nil {
			t.Fatal(err)
		}
		s, err := f.service.Select(t.Context(), inSession("r1", "t"))
		if got := binding(s); got+string(code(err)) != want {
			t.Errorf("%s: %q %v, want %q", mode, got, err, want)
		}
		if list, err := f.service.Loads(t.Context(), &api.LoadsRequest{Model: "m"}); err != nil ||
			(mode == routing.HardAffinity) != (list.Models[0].Requests == 1) {
			t.Errorf("%s: %+v %v", mode, list, err)
		}
	}
}

// TestFirstOfASession: many first requests at once go to one worker. A request that cannot wait gets an error.
func TestFirstOfASession(t *testing.T) {
	f := withSessions(t, 4, routing.HardAffinity, 0)
	begun, held := make(chan struct{}, 20), make(chan struct{})
	f.service.cfg.Find = func(context.Context, *api.Query) (*api.Answer, error) {
		begun <- struct{}{}
		<-held
		return &api.Answer{Model: "m", BlockSize: block, Complete: true}, nil
	}
	var all sync.WaitGroup
	workers := make(chan events.WorkerID, 10)
	for i := range cap(workers) {
		all.Go(func() {
			s, err := f.service.Select(t.Context(), inSession(fmt.Sprint("r", i), "s"))
			if err != nil {
				t.Error(err)
				return
			}
			workers <- s.Worker
		})
	}
	<-begun
	late, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := f.service.Select(late, inSession("late", "s")); code(err) != api.CodeBehind ||
		!strings.Contains(err.Error(), `session "s"`) {
		t.Errorf("who cannot wait: %v", err)
	}
	if len(begun) > 0 {
		t.Error("two requests initialise one session")
	}
	close(held)
	all.Wait()
	close(workers)
	first := <-workers
	for w := range workers {
		if w != first {
			t.Errorf("one session went to %s and %s", first, w)
		}
	}
}

// TestSessionOfFailedRequest: the next request initialises the session.
func TestSessionOfFailedRequest(t *testing.T) {
	f := withSessions(t, 2, routing.HardAffinity, 0)
	taken := load.Booking{ID: "r0", Rank: f.pool.Ranks[0].RankKey}
	if err := f.loads.Book(t.Context(), table("m"), taken); err != nil {
		t.Fatal(err)
	}
	if _, err := f.service.Select(t.Context(), inSession("r0", "s")); code(err) != api.CodeConflict {
		t.Fatal(err)
	}
	if s, err := f.service.Select(t.Context(), inSession("r1", "s")); err != nil || binding(s) != "made" {
		t.Errorf("%+v %v", s, err)
	}
}
