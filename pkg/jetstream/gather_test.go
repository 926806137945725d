package jetstream

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"
)

func TestGather(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	// it does not wait so long
	if replies, err := w.c.Gather(w.ctx, time.Hour, "kv.v1.test.ctl.0", ContentJSON, nil); err != nil ||
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
	for deadline := time.Now().Add(patience); len(got) < 2 && time.Now().Before(deadline); {
		replies, err := w.c.Gather(w.ctx, 500*time.Millisecond, "kv.v1.test.ctl.0", ContentJSON, []byte("hello"))
		if err != nil {
			t.Fatal(err)
		}
		got = got[:0]
		for _, r := range replies {
			got = append(got, string(r.Body))
		}
	}
	slices.Sort(got)
	if !slices.Equal(got, []string{"0 hello", "1 hello"}) {
		t.Fatalf("answers %q", got)
	}
	ended, cancel := context.WithCancel(w.ctx)
	cancel()
	if _, err := w.c.Gather(ended, time.Minute, "kv.v1.test.ctl.0", "", nil); !errors.Is(err, ErrUnavailable) {
		t.Fatalf("with a context that has ended: %v", err)
	}
	if used, limit, err := w.c.Store(w.ctx); err != nil || used <= 0 || limit < 0 {
		t.Fatalf("storage: %d of %d, %v", used, limit, err)
	}
}
