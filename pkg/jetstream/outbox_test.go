package jetstream

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"
)

// TestOutbox sends requests to a service, to nobody, and to one who refuses, and takes what comes back by their ids, in
// whatever order.
func TestOutbox(t *testing.T) {
	t.Parallel()
	server, c := pair(t)
	hold := make(chan struct{})
	serve(t, server, ServiceConfig{Endpoints: []Endpoint{
		{Name: "echo", Subject: "t.echo", Handler: func(ctx context.Context, r Request) Response {
			deadline, _ := ctx.Deadline()
			if left := time.Until(deadline); left < time.Hour-patience || left > time.Hour {
				return Response{Code: 400, Description: fmt.Sprint("the deadline is in ", left)}
			}
			return Response{ContentType: r.ContentType, Body: r.Body}
		}},
		{Name: "slow", Subject: "t.slow",
			Handler: func(context.Context, Request) Response { <-hold; return Response{Body: []byte("late")} }},
		{Name: "no", Subject: "t.no", Handler: func(context.Context, Request) Response {
			return Response{Code: 409, Description: "no", Body: []byte("why")}
		}},
	}})
	type got struct {
		id  uint64
		r   Reply
		err error
	}
	replies := make(chan got, 100)
	o, err := c.OpenOutbox(func(id uint64, r Reply, err error) { replies <- got{id, r, err} })
	if err != nil {
		t.Fatal(err)
	}
	send := func(id uint64, subject string) {
		t.Helper()
		if err := o.Send(id, subject, ContentMsgpack, time.Hour, []byte(fmt.Sprint("body ", id))); err != nil {
			t.Fatal(err)
		}
	}
	next := func() got {
		t.Helper()
		select {
		case g := <-replies:
			return g
		case <-time.After(patience):
			t.Fatal("nothing came back")
			return got{}
		}
	}
	send(1<<63+1, "t.slow")
	for id := range uint64(50) {
		send(id, "t.echo")
	}
	seen := map[uint64]bool{}
	for range 50 {
		g := next()
		if g.err != nil || string(g.r.Body) != fmt.Sprint("body ", g.id) || g.r.ContentType != ContentMsgpack ||
			seen[g.id] {
			t.Fatalf("%+v", g)
		}
		seen[g.id] = true
	}
	send(60, "t.nobody")
	if g := next(); g.id != 60 || !errors.Is(g.err, ErrNoResponder) {
		t.Errorf("nobody there: %+v", g)
	}
	send(61, "t.no")
	var refused *ServiceError
	if g := next(); g.id != 61 || !errors.As(g.err, &refused) || refused.Code != 409 || string(g.r.Body) != "why" {
		t.Errorf("refused: %+v", g)
	}
	if err := o.Send(62, "t.echo", "", time.Second, make([]byte, 2<<20)); !errors.Is(err, ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if err := c.Send(o.inbox+"!", "", nil); err != nil { // from somebody who was not asked
		t.Fatal(err)
	}
	close(hold)
	if g := next(); g.id != 1<<63+1 || string(g.r.Body) != "late" {
		t.Errorf("the slow one: %+v", g)
	}
	o.Close()
	if err := o.Send(63, "t.echo", "", 20*time.Second, nil); err != nil {
		t.Fatal(err)
	}
	c.Close()
	if err := o.Send(64, "t.echo", "", time.Second, nil); !errors.Is(err, ErrUnavailable) {
		t.Errorf("without a connection: %v", err)
	}
	if len(replies) > 0 {
		t.Errorf("told after the end: %+v", <-replies)
	}
}
