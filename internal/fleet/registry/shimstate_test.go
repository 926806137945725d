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
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// TestShimStates has a shim report states. Every node soon has the state in answers, in the list of workers, in the
// status and in the notes, without a change of the registrations. A connected engine with a current shim has no remark.
func TestShimStates(t *testing.T) {
	s := newSite(t)
	r := record("w", time.Hour) // no renewal during the test
	r.Source, r.Shim = "vllm", &ShimState{CatchingUp: true}
	lease, err := NewLease(s.ns, r, nil)
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
			s.until(fmt.Sprintf("a node has %+v", now), func() bool {
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
			ill := isAway && now.Since.Equal(since) // a gone engine may be starting
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
		t.Error("the state of a shim counts as a change of registrations")
	default:
	}
}

// TestShimStatesOfAnEarlierServer: records from before the start of the bucket's server in this process have no valid
// shim state, until the shims renew or the leases end.
func TestShimStatesOfAnEarlierServer(t *testing.T) {
	s := newSite(t)
	end, endOther := s.shim("before", time.Hour), s.shim("ends", time.Hour)
	s.until("both are known", func() bool { return s.know("before", "ends") })
	end()
	endOther()
	time.Sleep(2 * time.Millisecond) // the server's timestamps use the same clock
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
	s.until("the watch of the node is complete", node.Current)
	marked := func(name events.WorkerID) bool {
		a := &api.Answer{Workers: []api.Overlap{{Instance: name}}}
		node.impaired.mark(a)
		return a.Workers[0].CatchingUp
	}
	if !marked("before") || !marked("ends") {
		t.Error("no remark about a shim without a renewal since the start of the server")
	}
	end = s.shim("before", time.Hour)
	s.until("the shim has renewed", func() bool { return !marked("before") })
	end()
	if !marked("ends") {
		t.Error("the renewal of one shim ends the remark about another")
	}
	key := must(jetstream.WorkerKey(must(s.ns.PartitionOf("ends")), events.RankKey{Instance: "ends"}))
	must(s.bucket.Delete(s.ctx, key, must(s.bucket.Latest(s.ctx, key)).Revision))
	s.until("the lease has ended", func() bool { return !marked("ends") })
}

// TestNotesNameAFew: a note about many ranks names a few and counts the rest.
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

// TestRecordsOfOtherReleases: records without a shim state, and with unknown fields, are valid.
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

// BenchmarkMark measures the marks of an answer with 64 ranks.
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
