package rpc_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/internal/base/rpc"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/pkg/jetstream"
)

// patience is the time limit for an expected event.
const patience = 4 * time.Minute

// TestBudget: the budget permits a tenth of all requests, a hundred at once, and ten per second without any request.
func TestBudget(t *testing.T) {
	now := time.Now()
	b := rpc.Budget{Now: func() time.Time { return now }}
	spend := func() (n int) {
		for b.Spend() {
			n++
		}
		return n
	}
	if n := spend(); n != rpc.HedgeBurst {
		t.Errorf("a full budget has %d", n)
	}
	for range 5*rpc.HedgeRatio + rpc.HedgeRatio - 1 {
		b.Earn()
	}
	if n := spend(); n != 5 {
		t.Errorf("%d more", n)
	}
	for range 3 {
		if now = now.Add(time.Second / 2); spend() != rpc.HedgeRate/2 {
			t.Error("half a second without requests does not earn half the rate")
		}
	}
	if now = now.Add(-time.Hour); spend() != 0 {
		t.Error("a step of the clock into the past earns hedged requests")
	}
	if now = now.Add(time.Hour); spend() != rpc.HedgeBurst {
		t.Error("an hour does not fill the budget")
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(func() {
			for range 10_000 {
				b.Earn()
			}
		})
	}
	all.Wait()
	if n := spend(); n != rpc.HedgeBurst {
		t.Errorf("a full budget has %d", n)
	}
}

type got struct {
	tag int
	r   rpc.Reply
}

type receiver chan got

func (r receiver) Receive(tag int, reply rpc.Reply) { r <- got{tag, reply} }

func (r receiver) next(t *testing.T) got {
	t.Helper()
	select {
	case g := <-r:
		return g
	case <-time.After(patience):
		t.Fatal("nothing came back")
		return got{}
	}
}

// TestPool sends requests to a service, to a subject without a service, and to a service that returns an error. Replies
// arrive in any order.
func TestPool(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	server, err := natsserver.Start(ctx, natsserver.Options{Dir: t.TempDir(), Listen: "127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	defer server.Stop()
	connect := func() *jetstream.Conn {
		c, err := jetstream.Connect(ctx, jetstream.ConnOptions{URLs: []string{server.URL()}})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	hold := make(chan struct{})
	there := connect()
	defer there.Close()
	endpoints := []jetstream.Endpoint{
		{Name: "echo", Subject: "t.echo", Handler: func(ctx context.Context, r jetstream.Request) jetstream.Response {
			deadline, _ := ctx.Deadline()
			if left := time.Until(deadline); left < time.Hour-patience || left > time.Hour {
				return jetstream.Response{Code: 400, Description: fmt.Sprint("the deadline is in ", left)}
			}
			return jetstream.Response{ContentType: r.ContentType, Body: r.Body}
		}},
		{Name: "slow", Subject: "t.slow", Handler: func(context.Context, jetstream.Request) jetstream.Response {
			<-hold
			return jetstream.Response{Body: []byte("late")}
		}},
		{Name: "no", Subject: "t.no", Handler: func(context.Context, jetstream.Request) jetstream.Response {
			return jetstream.Response{Code: 409, Description: "no", Body: []byte("why")}
		}},
	}
	service, err := jetstream.Serve(there, jetstream.ServiceConfig{Name: "test", Version: "1.0.0", Endpoints: endpoints})
	if err != nil {
		t.Fatal(err)
	}
	defer service.Stop(ctx)
	if err := there.NATS().Flush(); err != nil { // the server has all subscriptions before the first request
		t.Fatal(err)
	}
	conn := connect()
	pool, err := rpc.NewPool(conn.NATS())
	if err != nil {
		t.Fatal(err)
	}
	replies := make(receiver, 100)
	send := func(tag int, subject string) uint64 {
		t.Helper()
		id, err := pool.Send(subject, "application/msgpack", time.Hour, "", fmt.Append(nil, "body ", tag), replies, tag)
		if err != nil {
			t.Fatal(err)
		}
		return id
	}
	slow := send(1000, "t.slow")
	dropped := send(1001, "t.slow")
	for tag := range 50 {
		send(tag, "t.echo")
	}
	seen := map[int]bool{}
	for range 50 {
		g := replies.next(t)
		if g.r.Err != nil || string(g.r.Body) != fmt.Sprint("body ", g.tag) || seen[g.tag] ||
			g.r.ContentType != "application/msgpack" {
			t.Fatalf("%+v", g)
		}
		seen[g.tag] = true
	}
	send(60, "t.nobody")
	if g := replies.next(t); g.tag != 60 || !errors.Is(g.r.Err, rpc.ErrNoResponder) {
		t.Errorf("no responder: %+v", g)
	}
	send(61, "t.no")
	var refused *rpc.ServiceError
	g := replies.next(t)
	if g.tag != 61 || !errors.As(g.r.Err, &refused) || refused.Code != 409 || string(g.r.Body) != "why" {
		t.Errorf("refused: %+v", g)
	}
	_, err = pool.Send("t.echo", "", time.Second, "", make([]byte, 2<<20), replies, 62)
	if !errors.Is(err, rpc.ErrTooLarge) {
		t.Errorf("too large: %v", err)
	}
	if n := pool.InFlight(); n != 2 {
		t.Errorf("%d are in flight", n)
	}
	other := make(receiver, 1)
	pool.Redirect(slow, other, 7)
	pool.Drop(dropped)
	pool.Redirect(dropped, other, 8)
	close(hold)
	if g := other.next(t); g.tag != 7 || string(g.r.Body) != "late" {
		t.Errorf("slow request: %+v", g)
	}
	lost := pool.Lost()
	server.Stop()
	<-lost
	for { // until the connection has noticed the loss too
		if _, err := pool.Send("t.echo", "", time.Second, "", nil, replies, 63); errors.Is(err, rpc.ErrDisconnected) {
			break
		}
		time.Sleep(time.Millisecond)
	}
	pool.Close()
	pool.Close()
	conn.Close()
	if _, err := pool.Send("t.echo", "", time.Second, "", nil, replies, 64); !errors.Is(err, rpc.ErrDisconnected) {
		t.Errorf("closed: %v", err)
	}
	if len(replies)+len(other) > 0 {
		t.Error("a receiver got a reply of a dropped request or after Close")
	}
}
