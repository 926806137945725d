package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
)

func TestGather(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	// it returns earlier
	if replies, err := w.c.gather(w.ctx, time.Hour, message("kv.v1.test.ctl.0", ContentJSON, nil), ""); err != nil ||
		replies != nil {
		t.Fatalf("nobody there: %v, %v", replies, err)
	}
	for i := range 3 {
		c := connect(t, ConnOptions{URLs: []string{w.srv.URL()}})
		s, err := Serve(c, ServiceConfig{Name: "shim", Version: "0.0.0", Endpoints: []Endpoint{{
			Name: "ctl", Subject: "kv.v1.test.ctl.0", Handler: func(_ context.Context, r Request) Response {
				if i == 2 {
					return Response{Code: 500, Description: "not now"}
				}
				return Response{Body: fmt.Appendf(nil, "%d %s", i, r.Body)}
			},
		}}})
		if err != nil {
			t.Fatal(err)
		}
		defer s.Stop(w.ctx)
		if err := c.flush(w.ctx); err != nil {
			t.Fatal(err)
		}
	}
	var got []string
	testkit.Eventually(t, "two replies", func() bool {
		replies, err := w.c.gather(w.ctx, 500*time.Millisecond, message("kv.v1.test.ctl.0", ContentJSON, []byte("hello")), "")
		if err != nil {
			t.Fatal(err)
		}
		got = got[:0]
		for _, r := range replies {
			got = append(got, string(r.Body))
		}
		return len(got) >= 2
	})
	slices.Sort(got)
	if !slices.Equal(got, []string{"0 hello", "1 hello"}) {
		t.Fatalf("answers %q", got)
	}
	ended, cancel := context.WithCancel(w.ctx)
	cancel()
	_, err := w.c.gather(ended, time.Minute, message("kv.v1.test.ctl.0", "", nil), "")
	if !errors.Is(err, ErrUnavailable) {
		t.Fatalf("with a context that has ended: %v", err)
	}
	if used, limit, err := w.c.Store(w.ctx); err != nil || used <= 0 || limit < 0 {
		t.Fatalf("storage: %d of %d, %v", used, limit, err)
	}
}

// TestAnswersOfShims: the first answer of each rank counts, with the rank of its subject.
func TestAnswersOfShims(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	stop, err := w.c.Subscribe(Names("test").Control(0), func(Request) {})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	flood, err := w.c.nc.Subscribe(Names("test").Control(0), func(m *nats.Msg) {
		for range 100 {
			for _, rank := range []events.RankKey{{Instance: "w1"}, {Instance: "w1", Rank: 1}} {
				subject, err := Names("test").Answer(0, rank, m.Header.Get(headerAnswer))
				if err == nil {
					err = w.c.nc.Publish(subject, []byte(rank.String()))
				}
				if err != nil {
					t.Error(err)
				}
			}
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = flood.Unsubscribe() }()
	var replies []Reply
	testkit.Eventually(t, "answers of two ranks", func() bool {
		var err error
		if replies, err = w.ns.AskShims(w.ctx, 500*time.Millisecond, 0, nil); err != nil {
			t.Fatal(err)
		}
		return len(replies) >= 2
	})
	if len(replies) != 2 {
		t.Fatalf("%d answers", len(replies))
	}
	for _, r := range replies {
		if r.From == nil || r.From.String() != string(r.Body) {
			t.Errorf("%s came from %v", r.Body, r.From)
		}
	}
	for subject, want := range map[string]bool{
		"kv.v1.a.answer.0.w1.0.id": true, "kv.v1.a.answer.0.w1.5000.id": false, "kv.v1.a.answer.0.w1.x.id": false,
		"kv.v1.a.answer.id": false, "_INBOX.x": false, "kv.v1.a.q.answer.0.w1.0.id": false,
	} {
		if key, ok := parseAnswerSubject(subject); ok != want || ok && key.Instance != "w1" {
			t.Errorf("%s: %v, %v", subject, key, ok)
		}
	}
}
