package jetstream

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/kvatlas/kvatlas/pkg/events"
)

// TestOwnLastMessage reads the last message on a subject by a refused message, and compares it with the leader's
// message. The refused message is not stored.
func TestOwnLastMessage(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	p := w.publisher(w1)
	same := func() {
		t.Helper()
		want, wantErr := w.c.lastOnce(w.ctx, p.stream, p.subject)
		before := w.info()
		got, err := w.c.lastOwnOnce(w.ctx, p.stream, p.subject)
		if after := w.info(); after != before {
			t.Fatalf("asking changed the stream: %+v, then %+v", before, after)
		}
		if wantErr != nil {
			if classOf(wantErr) != ErrNotFound || classOf(err) != ErrNotFound {
				t.Fatalf("%v and %v", wantErr, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		wantID, wantFlush, wantPos := want.writer()
		id, flush, pos := got.writer()
		if got.Seq != want.Seq || got.Time != want.Time || got.Subject != want.Subject ||
			string(got.Data) != string(want.Data) || id != wantID || flush != wantFlush || pos != wantPos {
			t.Fatalf("%+v, the leader has %+v", got, want)
		}
	}
	same()
	other := w.publisher(events.RankKey{Instance: "w2"})
	w.publish(other, 1, 3) // the stream has further messages, the subject has none
	same()
	rng := rand.New(rand.NewPCG(1, 2))
	next := 1
	for range 40 {
		n := 1 + rng.IntN(20)
		w.publish(p, next, n)
		next += n
		same()
		if rng.IntN(4) == 0 {
			w.publish(other, 100, 1)
			w.purge(w.info().Last + 1 - events.StreamSeq(rng.IntN(2)))
			same()
		}
	}
}

// TestOwnWithoutDirectGets: the error for a foreign stream without direct gets names the missing setting, and a node
// corrects it.
func TestOwnWithoutDirectGets(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	a, err := w.c.streamInfo(w.ctx, Names("test").Stream(0))
	if err != nil {
		t.Fatal(err)
	}
	a.Config.AllowDirect = false
	if err := w.c.call(w.ctx, "forbid direct gets", "STREAM.UPDATE."+a.Config.Name, a.Config, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := w.ns.OpenPublisher(w.ctx, w1, PublisherOptions{}); !errors.Is(err, ErrMismatch) ||
		!strings.Contains(err.Error(), "allow_direct") {
		t.Fatalf("opened: %v", err)
	}
	if err := w.ns.EnsureStreams(w.ctx, LogConfig{}); err != nil {
		t.Fatal(err)
	}
	w.publish(w.publisher(w1), 1, 1)
}

// ownIsNeverOld publishes, and reads the last message through each server at once: it must be the message of the last
// acknowledgement, while leaders change. It returns the times of the reads.
func (w *world) ownIsNeverOld(cl *cluster, rounds int) (took []time.Duration) {
	w.t.Helper()
	p := w.publisher(w1)
	var readers []*Conn
	for _, s := range cl.servers {
		readers = append(readers, connect(w.t, ConnOptions{URLs: []string{s.url()},
			AttemptTimeout: attemptOfCluster}))
	}
	for i := range rounds {
		if i%10 == 9 {
			w.stepDown()
		}
		seq, err := p.Publish(w.ctx, numbered(i, 1+i%3))
		if err != nil {
			w.t.Fatal(err)
		}
		type read struct {
			m    *lastMessage
			err  error
			took time.Duration
		}
		reads := make(chan read)
		for _, c := range readers {
			go func() {
				begun := time.Now()
				m, err := c.lastOwn(w.ctx, p.stream, p.subject)
				reads <- read{m, err, time.Since(begun)}
			}()
		}
		for range readers {
			r := <-reads
			if r.err != nil {
				w.t.Fatal(r.err)
			}
			if r.m.Seq != seq || string(r.m.Data) != fmt.Sprint(i+i%3) {
				w.t.Fatalf("round %d: acknowledged at %d, read %d %q", i, seq, r.m.Seq, r.m.Data)
			}
			took = append(took, r.took)
		}
	}
	return took
}
