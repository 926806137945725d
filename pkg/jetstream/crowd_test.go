package jetstream

import (
	"errors"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// openBatches opens atomic batches on a subject of a partition's stream and leaves them open, as the user of a worker's
// key can. The returned function commits the accepted batches.
func (w *world) openBatches(nc *nats.Conn, subject string, n int) (commit func()) {
	w.t.Helper()
	send := func(id, seq int, commit bool) *nats.Msg {
		m := &nats.Msg{Subject: subject, Data: []byte("x"), Header: nats.Header{
			headerBatchID: {"open" + strconv.Itoa(id)}, headerBatchSeq: {strconv.Itoa(seq)}}}
		if commit {
			m.Header[headerBatchCommit] = []string{"1"}
		}
		reply, err := nc.RequestMsgWithContext(w.ctx, m)
		if err != nil {
			w.t.Fatal(err)
		}
		return reply
	}
	for i := range n {
		send(i, 1, false)
	}
	return func() {
		for i := range n {
			send(i, 2, true)
		}
	}
}

// TestCrowded: one client leaves as many batches open as the server allows. Another publisher of the partition stores
// its messages one by one, reports the cause, and returns to batches. The server closes batches after 10 s without a
// message, so no other test runs at the same time.
func TestCrowded(t *testing.T) {
	srv := plainServer(t, &server.Options{JetStream: true, StoreDir: t.TempDir()}) // with nats-server's own limits
	w := &world{t: t, ctx: ctxFor(t), c: connect(t, ConnOptions{URLs: []string{srv.ClientURL()}})}
	w.join()
	type report struct {
		crowded int
		last    error
	}
	var got report
	p, err := w.ns.OpenPublisher(w.ctx, w1, PublisherOptions{
		Retry: func(err error) { t.Errorf("a refused batch was reported as a failure: %v", err) },
		Crowded: func(err error) {
			if got.last = err; err != nil {
				got.crowded++
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w.publish(p, 1, 20)
	if got.crowded != 0 {
		t.Fatalf("before: %+v", got)
	}
	bad, err := Names("test").Event(0, events.RankKey{Instance: "bad", Rank: 7})
	if err != nil {
		t.Fatal(err)
	}
	commit := w.openBatches(plainConn(t, srv.ClientURL()), bad, 60)
	next := 21
	w.publish(p, next, 20)
	next += 20
	if got.crowded == 0 || !errors.Is(got.last, ErrCrowded) || !strings.Contains(got.last.Error(), p.stream) {
		t.Fatalf("crowded: %+v", got)
	}
	m, err := w.c.lastOnce(w.ctx, p.stream, p.subject)
	if err != nil || m.header.Get(headerBatchID) != "" {
		t.Fatalf("the last message is of a batch: %v, %v", m, err)
	}
	commit()
	for got.last != nil {
		w.publish(p, next, 20)
		next += 20
	}
	w.publish(p, next, 20)
	if m, err = w.c.lastOnce(w.ctx, p.stream, p.subject); err != nil || m.header.Get(headerBatchSeq) != "20" {
		t.Fatalf("after: %v, %v", m.header, err)
	}
}

// TestSomeOpenBatches: on the embedded server, sixty open batches of one client cause no refusals.
func TestSomeOpenBatches(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p, err := w.ns.OpenPublisher(w.ctx, w1, PublisherOptions{Crowded: func(err error) { t.Error(err) }})
	if err != nil {
		t.Fatal(err)
	}
	w.openBatches(plainConn(t, w.srv.URL()), strings.Replace(p.subject, ".w1.0", ".bad.7", 1), 60)
	w.publish(p, 1, 20)
	if m, err := w.c.lastOnce(w.ctx, p.stream, p.subject); err != nil || m.header.Get(headerBatchSeq) != "20" {
		t.Fatalf("%v, %v", m, err)
	}
}

// TestCrowdWaits: while the server refuses batches, a publisher's attempts become rarer.
func TestCrowdWaits(t *testing.T) {
	t.Parallel()
	var c crowd
	now := time.Now()
	if c.waits(now) || c.probes(now) || c.accepted() {
		t.Fatalf("new: %+v", c)
	}
	if c.note(codeAtomicIncomplete, now) || !c.probes(now) || c.waits(now) {
		t.Fatalf("incomplete: %+v", c)
	}
	tried := 0
	for at := time.Duration(0); at < time.Minute; at += 10 * time.Millisecond {
		if c.probes(now.Add(at)) {
			tried++
			if !c.note(codeAtomicTooMany, now.Add(at)) {
				t.Fatal("the cause is not seen")
			}
		}
		if !c.waits(now.Add(at)) {
			t.Fatalf("does not wait at %v", at)
		}
	}
	if tried < 30 || tried > 40 {
		t.Errorf("%d tries in a minute", tried)
	}
	if !c.accepted() || c.accepted() || c.waits(now) || c.probes(now) {
		t.Errorf("accepted: %+v", c)
	}
	// An incomplete batch of one message has another cause: it is not repeated.
	c.note(codeAtomicIncomplete, now)
	if c.note(codeAtomicIncomplete, now); c.probes(now) {
		t.Errorf("incomplete twice: %+v", c)
	}
}
