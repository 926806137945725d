package jetstream

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/internal/base/loop"
	"github.com/kvatlas/kvatlas/internal/edge/natsserver"
	"github.com/kvatlas/kvatlas/internal/testkit"
	"github.com/kvatlas/kvatlas/pkg/events"
	"github.com/kvatlas/kvatlas/tools/loopback"
)

// patience bounds every wait of a test. The machine may stand still for minutes.
const patience = testkit.Patience

// ctxFor returns a context with a generous deadline.
func ctxFor(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// startServer starts an embedded server in dir that ends with the test. It prefers speed to durability.
func startServer(t testing.TB, dir, listen string) *natsserver.Server {
	t.Helper()
	return startServerWith(t, natsserver.Options{Dir: dir, Listen: listen, SyncInterval: time.Minute})
}

func startServerWith(t testing.TB, o natsserver.Options) *natsserver.Server {
	t.Helper()
	var s *natsserver.Server
	freed(t, func() (err error) {
		s, err = natsserver.Start(ctxFor(t), o)
		return err
	})
	t.Cleanup(s.Stop)
	return s
}

// freed starts a server on a port that another has released. A process that another test starts has a copy of the old
// listener between its fork and its exec.
func freed(t testing.TB, start func() error) {
	t.Helper()
	for ctx := ctxFor(t); ; {
		err := start()
		if err == nil {
			return
		}
		if !errors.Is(err, natsserver.ErrInUse) || !loop.Wait(ctx, 10*time.Millisecond) {
			t.Fatal(err)
		}
	}
}

// connect connects without a time limit. By default, a request to the JetStream API is sent once: a repeated request
// could have another answer.
func connect(t testing.TB, o ConnOptions) *Conn {
	t.Helper()
	o.Wait = true
	if o.AttemptTimeout == 0 {
		o.AttemptTimeout = patience
	}
	c, err := Connect(ctxFor(t), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// plainConn is a connection of nats.go alone.
func plainConn(t testing.TB, url string, opts ...nats.Option) *nats.Conn {
	t.Helper()
	for ctx := ctxFor(t); ; {
		nc, err := nats.Connect(url, opts...)
		if err == nil {
			t.Cleanup(nc.Close)
			return nc
		}
		if !loop.Wait(ctx, 10*time.Millisecond) {
			t.Fatal(err)
		}
	}
}

// world is a server, a connection and a namespace with its log.
type world struct {
	t    testing.TB
	ctx  context.Context
	dir  string
	addr string
	srv  *natsserver.Server
	c    *Conn
	ns   *Namespace
}

func newWorld(t testing.TB, partitions uint32) *world {
	t.Helper()
	w := &world{t: t, ctx: ctxFor(t), dir: t.TempDir()}
	w.srv = startServer(t, w.dir, loopback.Reserve(t))
	w.addr = w.srv.Addr()
	w.c = connect(t, ConnOptions{URLs: []string{w.srv.URL()}})
	var err error
	if w.ns, err = JoinNamespace(w.ctx, w.c, NamespaceConfig{Name: "test", Partitions: partitions}); err != nil {
		t.Fatal(err)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{MaxBytes: 256 << 20}); err != nil {
		t.Fatal(err)
	}
	return w
}

// restart stops the server and starts it again on the same folder and port.
func (w *world) restart() {
	w.t.Helper()
	w.srv.Stop()
	w.srv = startServer(w.t, w.dir, w.addr)
}

var w1 = events.RankKey{Instance: "w1", Rank: 0}

func (w *world) publisher(key events.RankKey) *Publisher {
	w.t.Helper()
	p, err := w.ns.OpenPublisher(w.ctx, key, PublisherOptions{})
	if err != nil {
		w.t.Fatal(err)
	}
	return p
}

// numbered returns n messages "from", "from+1", …
func numbered(from, n int) [][]byte {
	msgs := make([][]byte, n)
	for i := range msgs {
		msgs[i] = fmt.Appendf(nil, "%d", from+i)
	}
	return msgs
}

func TestPublishAndRead(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	if _, ok := p.Found(); ok {
		t.Fatal("found a message in an empty log")
	}
	for _, step := range []struct{ from, n, last int }{{1, 1, 1}, {2, 50, 51}, {52, 1, 52}, {53, 1500, 1552}} {
		seq, err := p.Publish(w.ctx, numbered(step.from, step.n))
		if err != nil {
			t.Fatal(err)
		}
		if seq != events.StreamSeq(step.last) {
			t.Fatalf("last sequence %d, want %d", seq, step.last)
		}
	}
	out := make(chan Update, 1)
	r, err := w.ns.StartReader(ReaderConfig{Partition: 0, Deliver: to(out)})
	if err != nil {
		t.Fatal(err)
	}
	next := events.StreamSeq(1)
	for caught := false; !caught; {
		select {
		case u := <-out:
			for _, m := range u.Messages {
				if m.Seq != next || string(m.Data) != fmt.Sprint(next) || m.Subject != p.Subject() || m.Time == 0 {
					t.Fatalf("got %+v, want %d", m, next)
				}
				next++
			}
			if u.Notice != nil {
				if n, ok := u.Notice.(CaughtUp); !ok || n.Seq != 1552 || next != 1553 {
					t.Fatalf("notice %v at %d", u.Notice, next)
				}
				caught = true
			}
		case <-w.ctx.Done():
			t.Fatal("not caught up in time")
		}
	}
	r.Stop()
	r.Stop()
}
