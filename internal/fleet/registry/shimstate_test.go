package registry

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/api"
	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestStanding has a shim say how it stands: soon every node has it in answers, in the list of workers, in the status
// and in its notes, without a change of who is registered; and nothing of it once the engine is connected and the shim
// is level.
func TestStanding(t *testing.T) {
	s := newSite(t)
	r := record("w", time.Hour) // renewed long after the test
	r.Source, r.Shim = "vllm", &ShimState{CatchingUp: true}
	lease, err := NewLease(s.ns, r, LeaseHooks{})
	s.must(err)
	running, end := context.WithCancel(s.ctx)
	done := make(chan error, 1)
	go func() { done <- lease.Keep(running, func() {}) }()
	defer func() {
		end()
		s.must(<-done)
	}()
	s.shim("silent-about-itself", time.Hour)
	s.until("both are known", func() bool { return s.know("silent-about-itself", "w") })
	overlaps := []api.Overlap{{Instance: "other", Device: 3}, {Instance: "silent-about-itself"},
		{Instance: "w", Device: 2}, {Instance: "w", Rank: 1}}
	since := time.Now().Add(-goneLong).Truncate(time.Millisecond).UTC()
	changed := s.nodes[0].Changed()
	for _, now := range []ShimState{
		{CatchingUp: true},
		{Engine: api.EngineConnected, Since: since, CatchingUp: true},
		{Engine: api.EngineConnected, Since: since},
		{Engine: api.EngineSilent, Since: since, Why: "it hangs"},
		{Engine: api.EngineGone, Since: since, Why: "its ports refuse"},
		{Engine: api.EngineConnected, Since: since},
		{Engine: api.EngineGone, Since: time.Now().UTC().Truncate(time.Millisecond), Why: "its ports refuse"},
	} {
		lease.SetState(now)
		for _, node := range s.nodes {
			s.until(fmt.Sprintf("a node knows %+v", now), func() bool {
				w, ok := node.Worker(events.RankKey{Instance: "w"})
				return ok && w.Record.Shim != nil && *w.Record.Shim == now
			})
			answer, want := &api.Answer{Workers: slices.Clone(overlaps)}, slices.Clone(overlaps)
			node.MarkAnswer(answer)
			want[2].CatchingUp = now.CatchingUp
			if now.Engine != api.EngineConnected {
				want[2].Engine = now.Engine
			}
			if !reflect.DeepEqual(answer.Workers, want) {
				t.Errorf("%+v: the answer has %+v", now, answer.Workers)
			}
			list := &api.WorkerList{}
			for _, o := range overlaps {
				list.Workers = append(list.Workers, api.WorkerInfo{Instance: o.Instance, Rank: o.Rank})
			}
			node.MarkWorkers(list, api.WorkersRequest{})
			if w := list.Workers[2]; w.Engine != now.Engine || w.EngineWhy != now.Why ||
				w.CatchingUp != now.CatchingUp ||
				(w.EngineSince == nil) != now.Since.IsZero() || w.EngineSince != nil &&
				!w.EngineSince.Equal(now.Since) {
				t.Errorf("%+v: the list has %+v", now, w)
			}
			status := &api.Status{}
			node.MarkStatus(status)
			counts := api.EngineCounts{Unknown: 1}
			switch now.Engine {
			case api.EngineConnected:
				counts.Connected++
			case api.EngineSilent:
				counts.Silent++
			case api.EngineGone:
				counts.Gone++
			default:
				counts.Unknown++
			}
			if now.CatchingUp {
				counts.CatchingUp++
			}
			if *status.Engines != counts {
				t.Errorf("%+v: the status counts %+v", now, *status.Engines)
			}
			problems, notes := strings.Join(status.Problems, "\n"), strings.Join(node.Warnings(), "\n")
			isAway := now.Engine == api.EngineSilent || now.Engine == api.EngineGone
			ill := isAway && now.Since.Equal(since) // one that is gone may be starting
			if ill != strings.Contains(problems, "what to do: ") || ill != strings.Contains(problems, "w/0") ||
				ill && !strings.Contains(problems, now.Why) {
				t.Errorf("%+v: problems %q", now, problems)
			}
			noted := strings.Contains(notes, "silent: 1 ranks") || strings.Contains(notes, "gone: 1 ranks")
			if now.CatchingUp != strings.Contains(notes, "catching_up: 1 ranks") || isAway != noted ||
				isAway && !strings.Contains(notes, string(now.Engine)) {
				t.Errorf("%+v: notes %q", now, notes)
			}
		}
	}
	select {
	case <-changed:
		t.Error("how it stands counts as a change of who is registered")
	default:
	}
}

// TestStandingOfAnEarlierServer: what was written before the bucket's server began in this process says nothing of how
// shims stand now, until they renew.
func TestStandingOfAnEarlierServer(t *testing.T) {
	s := newSite(t)
	end := s.shim("before", time.Hour)
	s.until("it is known", func() bool { return s.know("before") })
	end()
	time.Sleep(2 * time.Millisecond) // the server's stamps and our clock are the same
	node := New(Config{Namespace: s.ns, Bucket: s.bucket, Began: time.Now(), Clear: s.nodes[0].cfg.Clear})
	running, stop := context.WithCancel(s.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		node.Run(running)
	}()
	defer func() {
		stop()
		<-done
	}()
	s.until("the node has seen all", node.Current)
	marked := func() bool {
		a := &api.Answer{Workers: []api.Overlap{{Instance: "before"}}}
		node.impaired.mark(a)
		return a.Workers[0].CatchingUp
	}
	if !marked() {
		t.Error("nothing is said of a shim that was not heard since the server began")
	}
	end = s.shim("before", time.Hour)
	s.until("it is heard again", func() bool { return !marked() })
	end()
}

// TestNotesNameAFew: a note about many ranks names some and counts the others.
func TestNotesNameAFew(t *testing.T) {
	r := New(Config{})
	for i := range 40 {
		r.impaired.note(events.RankKey{Instance: events.WorkerID(fmt.Sprintf("w%02d", i))}, ShimState{CatchingUp: true})
	}
	if notes := r.Warnings(); len(notes) != 1 || !strings.Contains(notes[0], "40 ranks") ||
		!strings.HasSuffix(notes[0], "w00/0, w01/0, w02/0, w03/0, w04/0 and 35 more") {
		t.Errorf("%q", notes)
	}
	for i := range 40 {
		r.impaired.forget(events.RankKey{Instance: events.WorkerID(fmt.Sprintf("w%02d", i))})
	}
	if notes := r.Warnings(); notes != nil {
		t.Errorf("%q", notes)
	}
}

// TestRecordsOfOtherReleases: a record without a standing is good, and one with fields that are not known here too.
func TestRecordsOfOtherReleases(t *testing.T) {
	key := events.RankKey{Instance: "w"}
	for _, standing := range []string{``, `,"standing":{"engine":"asleep","dreams":true}`} {
		text := fmt.Sprintf(
			`{"version":1,"instance":"w","rank":0,"model":"m","block_size":16,"source":"vllm","holder":{"id":"x"},"lease_ms":30000,"state":"held"%s}`, standing)
		if r, err := decode(key, []byte(text)); err != nil || (r.Shim != nil) != (standing != "") {
			t.Errorf("%s: %+v, %v", text, r, err)
		}
	}
}

// BenchmarkMark is what a query with 64 ranks in its answer pays for how it stands with them.
func BenchmarkMark(b *testing.B) {
	a := &api.Answer{}
	for i := range 64 {
		a.Workers = append(a.Workers, api.Overlap{Instance: events.WorkerID(fmt.Sprintf("worker-%d", i))})
	}
	for _, n := range []int{0, 1, 10_000} {
		b.Run(fmt.Sprintf("%d impaired", n), func(b *testing.B) {
			r := New(Config{})
			for i := range n {
				r.impaired.note(events.RankKey{Instance: events.WorkerID(fmt.Sprintf("worker-%d", i))},
					ShimState{CatchingUp: true})
			}
			b.ReportAllocs()
			for b.Loop() {
				r.impaired.mark(a)
			}
		})
	}
}
