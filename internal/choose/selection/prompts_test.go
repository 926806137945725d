package selection

import (
	"fmt"
	"testing"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/pkg/routing"
)

// byPrompt is a fleet that recognises sessions by prompts.
func byPrompt(t *testing.T, workers int, mode routing.AffinityMode) *fleet {
	f := withSessions(t, workers, mode, 0)
	f.configured(t, func(c *routing.Config) {
		c.SessionAffinity = &routing.SessionAffinity{TTLSecs: 3600, Mode: mode, ByPrompt: true}
	})
	return f
}

// turn is a request of a conversation without an id: its own tokens follow common ones.
func turn(id string, conversation uint32, common, own int) *api.SelectRequest {
	r := request(id, common)
	for i := range own {
		r.Tokens = append(r.Tokens, 1000*(conversation+1)+uint32(i))
	}
	r.Explain = true
	return r
}

// TestSessionByPrompt: a prompt that continues an earlier one goes to the same worker, although others are cheaper, and
// the answer has the reason. A prompt with only a common beginning, or of another tenant, does not.
func TestSessionByPrompt(t *testing.T) {
	for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
		f := byPrompt(t, 3, mode)
		sent := 0
		send := func(r *api.SelectRequest) *api.Selection {
			t.Helper()
			if sent++; r.Book {
				r.RequestID = fmt.Sprint("r", sent)
			}
			s, err := f.service.Select(t.Context(), r)
			if err != nil {
				t.Fatal(mode, err)
			}
			return s
		}
		where := map[uint32]events.WorkerID{}
		for c := range uint32(3) {
			s := send(turn("r", c, 40, 20))
			if where[c] = s.Worker; binding(s) != "made" || s.Explanation.Affinity != nil {
				t.Errorf("%s, conversation %d: %q, %+v", mode, c, binding(s), s.Explanation.Affinity)
			}
		}
		if len(where) != 3 || where[0] == where[1] || where[1] == where[2] || where[0] == where[2] {
			t.Fatalf("%s: the common part binds sessions: %v", mode, where)
		}
		for own := 40; own < 100; own += 20 {
			s := send(turn("r", 0, 40, own)) // without a free, the worker fills up
			a := s.Explanation.Affinity
			if s.Worker != where[0] || binding(s) != "kept" || a == nil || a.By != routing.AffinityByPrompt || !a.Decided ||
				a.Worker != where[0] || a.Cheapest == nil {
				t.Errorf("%s, %d tokens: %s %q, %+v", mode, own, s.Worker, binding(s), a)
			} else if own > 40 && a.Cheapest.Worker == where[0] {
				t.Errorf("%s, %d tokens: the full worker is the cheapest: %+v", mode, own, a.Cheapest)
			}
		}
		tenant := turn("", 0, 40, 200)
		tenant.CacheSalt = "tenant-1"
		if s := send(tenant); s.Explanation.Affinity != nil {
			t.Errorf("%s: another tenant: %+v", mode, s.Explanation.Affinity)
		}
		if s := send(turn("", 0, 40, 200)); s.Worker != where[0] || s.Session != nil {
			t.Errorf("%s: only asked: %+v", mode, s)
		}
		if s := send(inSession("r", "s")); binding(s) != "made" || s.Session.ID != "s" {
			t.Errorf("%s: with an id: %q", mode, binding(s))
		}
		if status := f.service.cfg.Sessions.Status(); status.Prompts == 0 || status.Counts.Continued != 3 {
			t.Errorf("%s: %+v", mode, status)
		}
	}
}

// TestPromptElsewhere: a forced move happens in both modes, and the session follows.
func TestPromptElsewhere(t *testing.T) {
	for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
		for name, change := range map[string]func(f *fleet, r *api.SelectRequest){
			"pinned":     func(_ *fleet, r *api.SelectRequest) { r.Pinned = &routing.Target{Worker: "w01"} },
			"its target": func(_ *fleet, r *api.SelectRequest) { r.Affinity = &routing.Target{Worker: "w01"} },
			"draining": func(f *fleet, _ *api.SelectRequest) {
				f.record(0, func(r *api.WorkerRecord) { r.State = api.WorkerDraining })
			},
			"not allowed": func(_ *fleet, r *api.SelectRequest) { r.Workers = []events.WorkerID{"w01"} },
		} {
			f := byPrompt(t, 2, mode)
			first := turn("r0", 0, 8, 20)
			first.Pinned = &routing.Target{Worker: "w00"}
			if _, err := f.service.Select(t.Context(), first); err != nil {
				t.Fatal(err)
			}
			second := turn("r1", 0, 8, 40)
			change(f, second)
			s, err := f.service.Select(t.Context(), second)
			if err != nil || binding(s) != "moved from w00" {
				t.Fatalf("%s, %s: %q %v", mode, name, binding(s), err)
			}
			if a := s.Explanation.Affinity; a != nil && a.By == routing.AffinityByPrompt && a.Decided {
				t.Errorf("%s, %s: %+v", mode, name, a)
			}
			if s, err := f.service.Select(t.Context(), turn("r2", 0, 8, 60)); err != nil || s.Worker != "w01" ||
				binding(s) != "kept" {
				t.Errorf("%s, %s: afterwards %+v %v", mode, name, s, err)
			}
		}
	}
}

// TestPromptOfBookings: a later booking of a choice, and a booking with a worker, bind the prompt too.
func TestPromptOfBookings(t *testing.T) {
	f := byPrompt(t, 3, routing.SoftAffinity)
	chosen := turn("r0", 0, 8, 20)
	chosen.Book = false
	s, err := f.service.Select(t.Context(), chosen)
	if err == nil {
		_, err = f.service.Book(t.Context(), &api.BookRequest{Prompt: api.Prompt{Model: "m"}, RequestID: "r0"})
	}
	if err != nil {
		t.Fatal(err)
	}
	if next, err := f.service.Select(t.Context(), turn("r1", 0, 8, 40)); err != nil || next.Worker != s.Worker ||
		binding(next) != "kept" {
		t.Errorf("after a choice that was booked later: %+v %v", next, err)
	}
	named := turn("", 1, 8, 20).Prompt()
	if _, err := f.service.Book(t.Context(), &api.BookRequest{Prompt: named, RequestID: "r2", Worker: "w02"}); err != nil {
		t.Fatal(err)
	}
	if next, err := f.service.Select(t.Context(), turn("r3", 1, 8, 40)); err != nil || next.Worker != "w02" {
		t.Errorf("after a booking that named its worker: %+v %v", next, err)
	}
}

// TestAffinityOfIDsIsExplained in both modes, and so is a target of the request's own.
func TestAffinityOfIDsIsExplained(t *testing.T) {
	for _, mode := range []routing.AffinityMode{routing.SoftAffinity, routing.HardAffinity} {
		f := withSessions(t, 3, mode, 0)
		for i := range 2 {
			r := inSession(fmt.Sprint("r", i), "s")
			r.Explain = true
			s, err := f.service.Select(t.Context(), r)
			if err != nil {
				t.Fatal(err)
			}
			a := s.Explanation.Affinity
			if i == 0 && a != nil || i == 1 && (a == nil || a.By != routing.AffinityBySession || !a.Decided ||
				a.Worker != s.Worker || (a.Cheapest == nil) != (mode == routing.HardAffinity)) {
				t.Errorf("%s, request %d: %+v", mode, i, a)
			}
		}
		r := request("", 20)
		r.Explain, r.Affinity = true, &routing.Target{Worker: "w02"}
		if s, err := f.service.Select(t.Context(), r); err != nil || s.Explanation.Affinity.By != routing.AffinityByTarget ||
			!s.Explanation.Affinity.Decided {
			t.Errorf("%s: %+v %v", mode, s, err)
		}
		r = request("", 20)
		r.Explain, r.Pinned = true, &routing.Target{Worker: "w02"}
		if s, err := f.service.Select(t.Context(), r); err != nil || s.Explanation.Affinity != nil {
			t.Errorf("%s: a pin is no affinity: %+v %v", mode, s, err)
		}
	}
}
